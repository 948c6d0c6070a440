"""Activations of each sublayer against what is allocated: on a CPU here, and on an H200 at K3's widths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.allocations import allocations
from helpers.tiny import tiny_base, tiny_config, tiny_weights
from torch import Tensor

from miles_k3.config import TrainerSection
from miles_k3.k3.config import K3Config
from miles_k3.plan.activations import Batch, Cost, Numbers, attention_cost, mlp_cost, prefix_bytes
from miles_k3.trainer import distributed
from miles_k3.trainer.build import transformer_config
from miles_k3.trainer.lora import Factory
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.layer import K3Layer
from miles_k3.trainer.model.stream import Stream
from miles_k3.types import AdapterConfig

ROOT = Path(__file__).parents[3]
RANK = 8
# Wider than tiny-A, so that what a formula leaves out (index maps, scales) stays small beside what it counts.
WIDE = {
    "hidden_size": 384, "kda_num_heads": 8, "kda_head_dim": 32, "num_attention_heads": 8, "intermediate_size": 640,
    "q_lora_rank": 160, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48,
    "num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 96, "routed_expert_hidden_size": 192,
}  # fmt: skip
CASES = [
    pytest.param({}, torch.float32, marks=pytest.mark.slow),
    pytest.param({}, torch.bfloat16, marks=pytest.mark.slow),
    ({"v_head_dim": 40, "routed_expert_hidden_size": 96}, torch.float32),  # attention without a fused kernel
    ({"kda_head_dim": 16, "moe_intermediate_size": 160}, torch.bfloat16),
]


def measured(config: K3Config, dtype: torch.dtype, lengths: tuple[int, ...]) -> dict[tuple[int, str], Cost]:
    """(layer, sublayer) -> what it keeps, and the most it takes beside that, forward or backward."""
    section = TrainerSection()
    base = tiny_base(config, tiny_weights(config), dtype, "bf16")
    ranks = distributed.initialize(config, section, device=torch.device("cpu"), seed=0)
    frozen = FrozenWeights(base, config, transformer_config(config, section, dtype), ranks)
    factory = Factory(
        config, AdapterConfig(rank=RANK, alpha=16.0), seed=0, dtype=dtype, device=torch.device("cpu"), ranks=ranks
    )
    tokens = sum(lengths)
    stream = Stream.of(torch.zeros(tokens, dtype=torch.int64), lengths, config, "cpu", ranks=ranks)

    def rows(count: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(tokens, config.hidden_size, dtype=dtype).requires_grad_() for _ in range(count))

    found = {}
    for index in (0, 1, 3):
        layer, (prefix,) = K3Layer(frozen, factory, index), rows(1)
        bank = {"attention": rows(config.bank_rows(index)), "mlp": rows(index // config.attn_res_block_size + 1)}
        for name, run in (("attention", layer._attend), ("mlp", layer._expand)):
            if (index, name) == (0, "attention"):
                prefix.requires_grad_(False)
            with allocations() as forward:
                out = run(prefix, bank[name], stream)
            kept, grad = forward.kept - out.nbytes, torch.randn_like(out)
            with allocations() as backward:
                out.backward(grad)
            found[index, name] = Cost(kept, max(forward.peak - kept, backward.peak))
            del out, grad  # not while the next block counts
            prefix.requires_grad_()
            for leaf in (*layer.parameters(), prefix, *bank[name]):
                leaf.grad = None
    return found


@pytest.mark.parametrize(("changes", "dtype"), CASES)
def test_each_sublayer_takes_what_is_planned(changes: dict[str, Any], dtype: torch.dtype) -> None:
    config, lengths = tiny_config(**{**WIDE, **changes}), (50,) * 12
    batch = Batch(lengths=lengths, cp=1, split=1, wanted=0)
    numbers = Numbers(itemsize=dtype.itemsize, lora_rank=RANK)
    for (layer, name), found in measured(config, dtype, lengths).items():
        planned = (attention_cost if name == "attention" else mlp_cost)(config, layer, batch, numbers)
        assert planned.kept == pytest.approx(found.kept, rel=0.02), (layer, name)
        if (layer, name) == (0, "attention"):
            continue  # has no backward pass; planned as if, since the peak is never there
        assert planned.kept + planned.work == pytest.approx(found.kept + found.work, rel=0.1), (layer, name)


@pytest.mark.parametrize("tokens", [8192])
def test_true_widths_on_an_h200(tokens: int) -> None:
    """docs/data/trainer_layers_h200.json: peaks of whole layers, bfloat16, fla's kernels, four rows in the bank, whose
    rows need no gradient there."""
    runs = json.loads((ROOT / "docs" / "data" / "trainer_layers_h200.json").read_text())["runs"]
    peaks = runs[str(tokens)]["miles-k3 (fla)"]
    config = replace(K3Config.from_folder(ROOT / "assets" / "k3-4layer"), num_experts=112)
    batch = Batch(lengths=(1024,) * (tokens // 1024), cp=1, split=1, wanted=tokens)
    numbers = Numbers(itemsize=2, lora_rank=16, cuda=True, fla=True)
    for kind, layer in (("MoE KDA", 1), ("MoE MLA", 3)):
        attention, mlp = (cost(config, layer, batch, numbers) for cost in (attention_cost, mlp_cost))
        planned = attention.kept + prefix_bytes(config, batch, numbers) + mlp.kept + mlp.work
        assert planned == pytest.approx(peaks[kind]["layer"]["peak_gib"] * 2**30, rel=0.05), kind
