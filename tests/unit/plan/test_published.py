"""Kimi K3's published figures from first principles, each with the assumptions that give it."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from miles_k3.k3.config import K3Config
from miles_k3.plan.engine import kda_state_numbers, kv_bytes_per_token, state_bytes
from miles_k3.plan.phases import rank_facts
from miles_k3.plan.planner import Machine, plan, read_config
from miles_k3.plan.shapes import Phase
from miles_k3.plan.weights import Share, adapter_numbers, base_bytes
from miles_k3.recipe import load_recipe

KIMI = K3Config.from_folder(Path(__file__).parents[3] / "assets" / "kimi-k3")
GIB = 2**30


def test_the_checkpoint_has_1560_gb_of_text() -> None:
    """Packed experts, everything else as it is stored (spec section 0: 1,559.94 GB)."""
    assert base_bytes(KIMI, Share.whole(KIMI), itemsize=2, packed=True).total == pytest.approx(1559.94e9, rel=1e-4)


def test_a_rank_16_adapter_has_24_gb_of_expert_factors() -> None:
    """Spec 5.1: 92 layers of 132.3 M numbers, 12.2 B in all, 24.3 GB in BF16."""
    numbers = adapter_numbers(KIMI, Share.whole(KIMI), 16, one_gate_up_a=False)
    outer = 92 * 3 * 16 * KIMI.routed_expert_hidden_size
    assert 2 * (numbers.expert + outer) == pytest.approx(24.3e9, rel=0.003)


def test_a_request_has_54_mb_of_state_and_27_kb_of_kv_a_token_at_tp_8() -> None:
    """fp32 states of 69 KDA layers, 12 of 96 heads of 128 x 128 each; the convolution windows are 1.9 MB more. BF16
    latents of 24 MLA layers, 576 numbers, whole on each GPU: 27,648 bytes."""
    assert 69 * kda_state_numbers(KIMI, tp=8) * 4 == pytest.approx(54e6, rel=0.01)
    assert state_bytes(KIMI, 2, tp=8) == pytest.approx((54.3 + 1.9) * 1e6, rel=0.01)
    assert kv_bytes_per_token(KIMI, 2) == 27 * 1024


def test_the_trainer_of_the_published_run_holds_about_91_gb_a_gpu() -> None:
    """Allocated after a weight sync, with nothing put to sleep: BF16 base (PP 8, dense parts over TP 4, experts over
    EP 8), BF16 factors of rank 32, fp32 gradients, fp32 masters and moments (dense ones shared by the two
    data-parallel copies, CP 2, experts' own by nobody). In GiB, as PyTorch's figures are usually printed. The source
    does not say whose rank it is: the mean is 90.1, the first stage has 87.1, a middle one 93.8.
    """
    recipe = load_recipe("k3-64xgb300").recipe
    stages = [rank_facts(recipe, KIMI, 64, rank, cuda=True, fla=True) for rank in range(8)]
    resident = [(f.base + f.adapter + f.gradients + f.optimizer) / GIB for f in stages]
    assert statistics.mean(resident) == pytest.approx(91, rel=0.02)
    assert resident[0] == pytest.approx(91, rel=0.05)
    assert max(resident) == pytest.approx(91, rel=0.05)
    assert resident[7] < 75, "the last stage has 9 layers instead of 12"


def test_the_published_run_fits_its_gpus() -> None:
    recipe = load_recipe("k3-64xgb300").recipe
    found = plan(recipe, read_config(recipe), Machine())
    gpu, host = found.verdicts
    assert found.world == 64
    assert (gpu.fits, host.fits) == (True, True)
    assert gpu.items["engine base"] == pytest.approx(1560e9 / 16, rel=0.13), "a sixteenth, and what isn't split"
    assert gpu.needed == max(rank.device_bytes(phase) for rank in found.ranks for phase in Phase)


def test_a_quarter_of_the_gpus_fits_with_packed_experts_only() -> None:
    recipe = load_recipe("k3-16xgb300").recipe
    assert plan(recipe, KIMI, Machine()).fits
    unpacked = load_recipe("k3-16xgb300", ["model.base_dtype=bf16"]).recipe
    gpu = plan(unpacked, KIMI, Machine()).verdicts[0]
    assert not gpu.fits
    assert gpu.items["base"] > 288e9, "the base alone is more than a GPU has"
