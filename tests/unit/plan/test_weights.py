"""Bytes of base and adapter: equal to what the loader and the trainer hold, and to the published totals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.tiny import tiny_base, tiny_config, tiny_weights

from miles_k3.adapters.layout import adapter_layout, parameter_count
from miles_k3.config import ParallelSection
from miles_k3.k3.base_shard import BaseShard
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import text_params
from miles_k3.k3.weights import build_base
from miles_k3.parallel import rank_stages
from miles_k3.plan.weights import Share, adapter_numbers, base_bytes
from miles_k3.trainer.distributed import Axis, Ranks
from miles_k3.trainer.lora import DenseLora, ExpertLora, Factory, GateUpLora
from miles_k3.trainer.lora_rules import Site
from miles_k3.types import AdapterConfig

TINY = tiny_config()
KIMI = K3Config.from_folder(Path(__file__).parents[3] / "assets" / "kimi-k3")
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 4), (4, 3, 8)]  # tp, pp, ep


def share_of(config: K3Config, tp: int, pp: int, ep: int, pp_rank: int) -> Share:
    (layers,) = rank_stages(ParallelSection(tp=tp, pp=pp), config.num_hidden_layers, pp_rank)
    return Share(
        layers=layers, experts=config.num_experts // ep, tp=tp, embedding=layers.start == 0,
        head=layers.stop == config.num_hidden_layers,
    )  # fmt: skip


@pytest.mark.parametrize("base_dtype", ["bf16", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_base(dtype: torch.dtype, base_dtype: str) -> None:
    held = tiny_base(TINY, tiny_weights(TINY), dtype, base_dtype).num_bytes()
    planned = base_bytes(TINY, Share.whole(TINY), itemsize=dtype.itemsize, packed=base_dtype == "mxfp4")
    assert planned.total == held


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_shard_of_each_stage(layout: tuple[int, int, int]) -> None:
    tp, pp, ep = layout
    weights = tiny_weights(TINY)
    for pp_rank in range(pp):
        share = share_of(TINY, tp, pp, ep, pp_rank)
        shard = BaseShard(layers=tuple(share.layers), experts=range(share.experts), tp_size=tp)
        base = build_base(
            TINY, text_params(TINY), lambda p: weights[p.name], dtype=torch.bfloat16, base_dtype="mxfp4", shard=shard
        )
        assert base_bytes(TINY, share, itemsize=2, packed=True).total == base.num_bytes()


def trained(config: K3Config, adapter: AdapterConfig, tp: int, ep: int, layers: range) -> tuple[int, int]:
    """(dense, per-expert) numbers of the factors that the trainer makes, without any process group."""
    ranks = Ranks(tp=Axis(size=tp), ep=Axis(size=ep))
    factory = Factory(config, adapter, seed=0, dtype=torch.float32, device=torch.device("cpu"), ranks=ranks)
    modules = []
    for i in layers:
        attention, layer = f"language_model.model.layers.{i}.self_attn.", f"language_model.model.layers.{i}."
        modules.append(DenseLora(factory, attention + "o_proj", Site.O_PROJ))
        if config.is_mla(i):
            modules += [DenseLora(factory, attention + n, Site.LATENT) for n in ("q_a_proj", "kv_a_proj_with_mqa")]
        prefix = layer + ("block_sparse_moe.shared_experts." if config.is_moe(i) else "mlp.")
        modules += [GateUpLora(factory, prefix), DenseLora(factory, prefix + "down_proj", Site.FC2)]
        if config.is_moe(i):
            modules.append(ExpertLora(factory, layer + "block_sparse_moe.experts."))
    parameters = [p for module in modules for p in module.parameters()]
    expert = sum(p.numel() for p in parameters if vars(p)["factor_rule"].per_expert)
    return sum(p.numel() for p in parameters) - expert, expert


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_adapter_of_each_stage(layout: tuple[int, int, int], shared: bool) -> None:
    tp, pp, ep = layout
    adapter = AdapterConfig(rank=6, alpha=12.0, share_gate_up_a=shared)
    for pp_rank in range(pp):
        share = share_of(TINY, tp, pp, ep, pp_rank)
        planned = adapter_numbers(TINY, share, 6, one_gate_up_a=shared)
        assert (planned.dense, planned.expert) == trained(TINY, adapter, tp, ep, range(TINY.num_hidden_layers)[
            share.layers[0] : share.layers[-1] + 1])  # fmt: skip


@pytest.mark.parametrize("config", [TINY, KIMI], ids=["tiny", "kimi-k3"])
def test_the_exported_adapter(config: K3Config) -> None:
    layout = adapter_layout(config, AdapterConfig(rank=16, alpha=32.0))
    assert adapter_numbers(config, Share.whole(config), 16, one_gate_up_a=False).total == parameter_count(layout)
