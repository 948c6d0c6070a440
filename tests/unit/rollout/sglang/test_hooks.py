"""The hooks' own arithmetic, without SGLang: against the adapter's layout and the plain operations."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_k3.adapters.layout import adapter_layout
from miles_k3.k3.config import K3Config
from miles_k3.k3.ops.situ import situ
from miles_k3.rollout.sglang.hooks.direct_swap import fill_a, fill_b, rank_columns, split_names
from miles_k3.rollout.sglang.hooks.expert_lora import refuse_padding, runs_base_only
from miles_k3.rollout.sglang.hooks.graph_buffers import plain_shapes
from miles_k3.rollout.sglang.hooks.hidden_dims import module_dims
from miles_k3.rollout.sglang.hooks.marlin_experts import Experts, rows_per_block, run_experts
from miles_k3.rollout.sglang.hooks.moe_front import lora_on_front
from miles_k3.rollout.sglang.hooks.output_gate import gated, take_gate
from miles_k3.rollout.sglang.hooks.reduce_fusion import lora_on_o_proj
from miles_k3.types import AdapterConfig

K3 = Path("assets/kimi-k3")


def test_widths_are_those_of_the_adapters_own_layout() -> None:
    """Every exported tensor of every layer fits what SGLang is told, gate with up and q_a with kv_a together."""
    config = K3Config.from_folder(K3)
    text = SimpleNamespace(**json.loads((K3 / "config.json").read_text())["text_config"])
    fused = {
        "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj_moe", "w3": "gate_up_proj_moe",
        "w2": "down_proj_moe", "q_a_proj": "fused_qkv_a_proj_with_mqa",
        "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
    }  # fmt: skip
    outputs: dict[tuple[int, str], int] = {}
    for tensor in adapter_layout(config, AdapterConfig(rank=16, alpha=32.0)).values():
        module = fused.get(leaf := tensor.module.rpartition(".")[2], leaf)
        inputs, whole = module_dims(text, module, tensor.layer)
        if tensor.factor == "A":
            assert tensor.shape[-1] == inputs, tensor
        else:
            outputs[tensor.layer, module] = outputs.get((tensor.layer, module), 0) + tensor.shape[-2]
            assert outputs[tensor.layer, module] <= whole
    for (layer, module), found in outputs.items():
        assert found == module_dims(text, module, layer)[1], (layer, module)


def test_a_module_without_lora_is_named() -> None:
    text = SimpleNamespace(**json.loads((K3 / "config.json").read_text())["text_config"])
    with pytest.raises(ValueError, match="K3 has no LoRA on 'f_a_proj' in SGLang"):
        module_dims(text, "f_a_proj", 0)


@pytest.mark.parametrize(
    ("enabled", "targets", "expected"),
    [
        (False, ["gate_proj"], False),
        (True, ["q_a_proj", "kv_a_proj_with_mqa"], False),
        (True, {"o_proj", "gate_up_proj"}, True),
        (True, ["all"], True),
        (True, ["routed_expert_down_proj"], True),
        (True, None, True),
    ],
)
def test_when_the_front_must_stay_apart(enabled: bool, targets: Any, expected: bool) -> None:
    assert lora_on_front(enabled, targets) is expected


@pytest.mark.parametrize(
    ("enabled", "targets", "expected"),
    [(False, ["o_proj"], False), (True, ["gate_proj"], False), (True, {"self_attn.o_proj"}, True), (True, None, True)],
)
def test_when_o_proj_reduces_itself(enabled: bool, targets: Any, expected: bool) -> None:
    assert lora_on_o_proj(enabled, targets) is expected


def test_the_gate_is_taken_once() -> None:
    x = torch.randn(3, 8)
    owner = SimpleNamespace(_gate_hidden_states=x, _gate_precomputed=None, g_proj=lambda h: (2 * h, None))
    gate = take_gate(owner)
    assert torch.equal(gate, 2 * x)
    assert torch.equal(gated(x, gate), x * torch.sigmoid(2 * x))
    with pytest.raises(RuntimeError, match="nothing to gate it with"):
        take_gate(owner)


def test_padding_is_refused() -> None:
    fits = SimpleNamespace(hidden_size=3584, intermediate_size_per_partition=384, quant_method=SimpleNamespace())
    refuse_padding(fits)
    for changed in (
        {"hidden_size": 3456},
        {"intermediate_size_per_partition": 192},
        {"quant_method": SimpleNamespace(hidden_pad=128)},
    ):
        with pytest.raises(ValueError, match="multiple of 256 and the columns of 128"):
            refuse_padding(SimpleNamespace(**{**vars(fits), **changed}))


def test_batches_without_an_adapter_go_to_the_base() -> None:
    assert runs_base_only(None, capturing=False)
    assert runs_base_only(SimpleNamespace(has_active_lora=False), capturing=False)
    assert not runs_base_only(SimpleNamespace(has_active_lora=True), capturing=False)
    assert not runs_base_only(SimpleNamespace(has_active_lora=False), capturing=True), "its kernels go into the graph"


def test_graph_buffers_get_the_plain_shapes() -> None:
    packed = SimpleNamespace(w13_qweight=torch.empty(6, 32, 512), w2_qweight=torch.empty(6, 8, 1024))
    shapes = plain_shapes(SimpleNamespace(intermediate_size_per_partition=128, hidden_size=512), packed)
    assert shapes.w13_weight.shape == (6, 256, 512)
    assert shapes.w2_weight.shape == (6, 512, 128)
    assert shapes.w13_weight.device == torch.device("cpu")
    assert not hasattr(packed, "w13_weight"), "which is what stock code reads, and ends with"


def _plain_experts(w13_EOZ: Tensor, w2_EZI: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Experts:
    """Products by torch, in the contract of Marlin's."""
    expert, weight = chosen_TK.reshape(-1), weights_TK.reshape(-1, 1)

    def first(rows: Tensor, out: Tensor, top_k: int, weighted: bool) -> Tensor:
        assert (top_k, weighted) == (chosen_TK.shape[1], False)
        return out.copy_(torch.einsum("roz,rz->ro", w13_EOZ[expert], rows.repeat_interleave(top_k, 0)))

    def second(rows: Tensor, out: Tensor, top_k: int, weighted: bool) -> Tensor:
        assert (top_k, weighted) == (1, True)
        return out.copy_(torch.einsum("rzi,ri->rz", w2_EZI[expert], rows) * weight)

    def activate(gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        out.copy_(situ(gate, up, 4.0, 25.0))

    return Experts(
        first=first, second=second, activate=activate, total=lambda rows: rows.sum(dim=1), width=w2_EZI.shape[2]
    )


def test_experts_with_hooks_are_the_formula() -> None:
    """LoRA of w1, w3 before SiTU and of w2 before the weighted sum, as spec 5.4 has it."""
    torch.manual_seed(0)
    tokens, k, latent, width, rank, experts = 5, 2, 16, 8, 3, 4
    z, w13, w2 = (
        torch.randn(tokens, latent),
        torch.randn(experts, 2 * width, latent),
        torch.randn(experts, latent, width),
    )
    a13, b13 = torch.randn(rank, latent), torch.randn(experts, 2 * width, rank)
    a2, b2 = torch.randn(experts, rank, width), torch.randn(latent, rank)
    chosen = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    weights = torch.rand(tokens, k)

    def after_gate_up(rows: Tensor, out: Tensor, _: Tensor, ids: Tensor) -> None:
        out += torch.einsum("tkor,tr->tko", b13[ids], rows @ a13.T)

    def after_down(rows: Tensor, out: Tensor, w: Tensor, ids: Tensor) -> None:
        low = torch.einsum("tkri,tki->tkr", a2[ids], rows.view(tokens, k, width))
        out += w[..., None] * (low @ b2.T)

    hooks = SimpleNamespace(after_gate_up=after_gate_up, after_down=after_down)
    found = run_experts(z, weights, chosen, _plain_experts(w13, w2, chosen, weights), hooks)
    merged13, merged2 = w13 + b13 @ a13, w2 + b2 @ a2
    expected = torch.zeros(tokens, latent)
    for t in range(tokens):
        for j in range(k):
            gate, up = (merged13[chosen[t, j]] @ z[t]).chunk(2)
            expected[t] += weights[t, j] * (merged2[chosen[t, j]] @ situ(gate, up, 4.0, 25.0))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    none = SimpleNamespace(after_gate_up=None, after_down=None)
    assert not torch.allclose(run_experts(z, weights, chosen, _plain_experts(w13, w2, chosen, weights), none), expected)


def test_tiles_are_as_low_as_they_can_be() -> None:
    assert [rows_per_block(rows, 896) for rows in (16, 128, 1024, 12_000, 40_000, 200_000)] == [8, 8, 8, 16, 64, 64]


# --- swaps ------------------------------------------------------------------------------------------------------------
def test_factors_lie_where_the_kernels_look() -> None:
    """Gate and up begin at multiples of the slots' rank; what was there before is gone."""
    a, b = torch.randn(1, 4, 5), torch.randn(3, 6, 2)
    slot_a, slot_b = torch.full((1, 8, 5), torch.nan), torch.full((3, 6, 4), torch.nan)
    fill_a(slot_a, a, parts=2)
    fill_b(slot_b, b, scaling=2.0)
    assert torch.equal(slot_a[0, :2], a[0, :2])
    assert torch.equal(slot_a[0, 4:6], a[0, 2:])
    assert not slot_a[0, 2:4].any()
    assert not slot_a[0, 6:].any()
    assert torch.equal(slot_b[:, :, :2], 2 * b)
    assert not slot_b[:, :, 2:].any()


@pytest.mark.parametrize("shape", [(1, 4, 6), (2, 4, 5), (1, 12, 5)])
def test_a_factor_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="came for a slot of"):
        fill_a(torch.zeros(1, 8, 5), torch.zeros(shape), parts=2)


def test_a_ranks_part_of_a_factor() -> None:
    """Of two tensor-parallel ranks; what is shared by experts stays whole."""
    width, experts = 4, 6
    up_b, down_a = torch.randn(experts, 2 * width, 3), torch.randn(experts, 3, width)
    for tp in range(2):
        columns = slice(2 * tp, 2 * tp + 2)
        at = {"columns": columns, "width": width}
        part = rank_columns(up_b, "gate_up_proj", "B", **at)
        assert torch.equal(part[:, :2], up_b[:, columns])
        assert torch.equal(part[:, 2:], up_b[:, width + 2 * tp : width + 2 * tp + 2])
        assert torch.equal(rank_columns(down_a, "down_proj", "A", **at), down_a[:, :, columns])
        for target, which in (("gate_up_proj", "A"), ("down_proj", "B")):
            shared = torch.randn(1, 3, 5)
            assert torch.equal(rank_columns(shared, target, which, **at), shared)


def test_only_packed_routed_experts_are_taken() -> None:
    names = {
        "model.layers.1.mlp.experts.gate_up_proj.lora_A.weight": torch.zeros(1, 2, 2),
        "model.layers.1.mlp.experts.down_proj.lora_B.weight": torch.zeros(1, 2, 2),
        "model.layers.1.mlp.shared_experts.down_proj.lora_B.weight": torch.zeros(2, 2),
        "model.layers.1.self_attn.o_proj.lora_A.weight": torch.zeros(2, 2),
    }
    assert set(split_names(names)) == {("gate_up_proj", "A"), ("down_proj", "B")}
