"""Traps 1, 16, 17, 18, 23 of spec 7.3: what a file says and where a loader or a sync puts it.

Each check must reject each planted mistake. No tolerances: everything here is exact.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mutants import assert_rejects, mutants, mutate
from helpers.ops_model import MODELS
from helpers.reference import Reference
from helpers.tiny import tiny_adapter, tiny_config, tiny_weights, write_tiny_checkpoint
from k3_cases import published_json
from torch import Tensor

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.update import make_update, verify_update
from miles_k3.errors import AdapterError, CheckpointError
from miles_k3.k3 import weights as weights_module
from miles_k3.k3.config import K3Config
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.ops import mxfp4
from miles_k3.k3.params import attn_prefix, expert_prefix, mlp_prefix, moe_prefix, text_params
from miles_k3.k3.safetensors_io import Checkpoint
from miles_k3.k3.weights import load_base
from miles_k3.types import AdapterConfig, AdapterUpdate

CONFIG = tiny_config()
WEIGHTS = tiny_weights(CONFIG)


# --- 1: layer lists count from 1 ------------------------------------------------------------------------------------
def check_01(read: Callable[[dict[str, Any]], K3Config]) -> None:
    config = read(published_json())
    assert (len(config.kda_layers), len(config.mla_layers)) == (69, 24)
    assert [config.is_mla(i) for i in (0, 3, 90, 91, 92)] == [False, True, False, True, True]
    full, kda = (f"{kind}_layers" for kind in ("full_attn", "kda"))
    for name, change in ((full, [90, *range(4, 93, 4), 93]), (kda, list(range(1, 91)))):  # overlapping; 91 missing
        raw = copy.deepcopy(published_json())
        raw["text_config"]["linear_attn_config"][name] = change
        with pytest.raises(CheckpointError, match="layers"):
            read(raw)
    raw = published_json()
    linear = raw["text_config"]["linear_attn_config"]
    linear.update({name: [i - 1 for i in linear[name]] for name in (full, kda)})
    with pytest.raises(CheckpointError, match="count from 1"):
        read(raw)


def test_trap_01_layer_lists():
    check_01(K3Config.from_json)


def read_unchecked(raw: dict[str, Any]) -> K3Config:
    layers = tuple(i - 1 for i in raw["text_config"]["linear_attn_config"]["full_attn_layers"])
    return dataclasses.replace(K3Config.from_json(published_json()), mla_layers=tuple(sorted(set(layers) - {-1})))


def read_from_zero(raw: dict[str, Any]) -> K3Config:
    config = K3Config.from_json(raw)
    return dataclasses.replace(config, mla_layers=tuple(i + 1 for i in config.mla_layers if i + 1 < 93))


@mutants({"lists not compared": lambda: read_unchecked, "read as 0-based": lambda: read_from_zero})
def test_trap_01_rejects(plant):
    assert_rejects(check_01, plant())


# --- 16: what is F32 stays F32 ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny_checkpoint(path, CONFIG, WEIGHTS)
    return path


F32_LEAVES = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def check_16(builder: Any, folder: Path) -> None:
    """After export (the file's headers) and after load, in a bf16 model too, and to the last bit."""
    with Checkpoint(folder) as checkpoint:
        for name, header in checkpoint.headers.items():
            expected = "F32" if name.endswith(F32_LEAVES) else "U8" if ".weight_" in name else "BF16"
            assert header.dtype == expected, name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_module, "_Builder", builder)
        base = load_base(folder, CONFIG, dtype=torch.bfloat16)
    audited = 0
    for name, tensor in base.tensors.items():
        is_f32 = name.endswith(F32_LEAVES)
        assert tensor.dtype == (torch.float32 if is_f32 else torch.bfloat16), name
        if is_f32:
            stored = WEIGHTS[name][: CONFIG.kda_num_heads] if name.endswith("A_log") else WEIGHTS[name]
            assert torch.equal(tensor, stored)
            assert not torch.equal(tensor, tensor.bfloat16().float())
            audited += 1
    assert audited == 5 * 6 + 7  # per KDA layer three convolutions and three others; a bias per MoE layer


def test_trap_16_fp32_parameters(folder):
    check_16(weights_module._Builder, folder)


F32_RULE = "torch.float32 if p.dtype is DType.F32 else base.dtype"


@mutants(
    {
        "all cast": lambda: mutate(weights_module._Builder, (F32_RULE, "base.dtype")),
        "o_norm cast": lambda: mutate(
            weights_module._Builder, (F32_RULE, F32_RULE.replace(" else", ' and "o_norm" not in p.name else'))
        ),
        "through bf16": lambda: mutate(
            weights_module._Builder, ("tensor.to(device", "tensor.to(base.dtype).to(device")
        ),
    }
)
def test_trap_16_rejects(plant, folder):
    assert_rejects(partial(check_16, folder=folder), plant())


# --- 17: MXFP4 -----------------------------------------------------------------------------------------------------
Decode = Callable[[Tensor, Tensor], Tensor]


@cache
def hand_made() -> tuple[Tensor, Tensor, Tensor]:
    """(packed, scale, values) of one row of two groups: every code, low nibble first, one scale a group."""
    codes = [1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15, 8] * 4
    levels = [0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, 0]
    packed = torch.tensor([[codes[i] + 16 * codes[i + 1] for i in range(0, 64, 2)]], dtype=torch.uint8)
    assert packed[0, 0] == 0x21
    scale = torch.tensor([[128, 126]], dtype=torch.uint8)
    return packed, scale, torch.tensor([[v * (2 if i < 32 else 0.5) for i, v in enumerate(levels * 4)]])


def check_17(decode: Decode) -> None:
    packed, scale, values = hand_made()
    assert torch.equal(decode(packed, scale), values)
    tiny = decode(packed, torch.zeros_like(scale))
    assert torch.equal(tiny.double(), values.double() * 2.0**-127 / torch.tensor([2.0] * 32 + [0.5] * 32))


def naive_decode(model: type[NaiveK3]) -> Decode:
    """The model's own reading of w1 of one expert."""
    name = expert_prefix(5, 3) + "w1.weight_"

    def decode(packed: Tensor, scale: Tensor) -> Tensor:
        return model(CONFIG, {name + "packed": packed, name + "scale": scale}).expert_weight(5, 3, "w1")

    return decode


@pytest.mark.parametrize("model", MODELS)
def test_trap_17_mxfp4(model):
    check_17(naive_decode(model))


def test_trap_17_the_packed_tensor_decides():
    """A plain weight is read as it is, whatever the config's ignore list says of its neighbours."""
    plain = torch.randn(32, 64)
    for model in MODELS:
        assert torch.equal(model(CONFIG, {expert_prefix(5, 3) + "w1.weight": plain}).expert_weight(5, 3, "w1"), plain)


def test_trap_17_round_trip_keeps_values_not_bytes():
    rng = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (16, 64), generator=rng, dtype=torch.uint8)
    packed[:, :16] &= 0x33  # a group whose largest magnitude is 1.5 is written with a smaller scale
    packed[:, 16:32] = 0
    scale = torch.randint(100, 140, (16, 4), generator=rng, dtype=torch.uint8)
    values = mxfp4.dequantize(packed, scale)
    again_packed, again_scale = mxfp4.quantize(values)
    assert torch.equal(mxfp4.dequantize(again_packed, again_scale), values)
    assert not torch.equal(again_scale, scale)
    twice = mxfp4.quantize(mxfp4.dequantize(again_packed, again_scale))
    assert torch.equal(twice[0], again_packed)
    assert torch.equal(twice[1], again_scale)


CODES = "torch.stack([packed & 15, packed >> 4], dim=-1)"
GROUPS = ".repeat_interleave(32, dim=-1)"


def edited(*edits: tuple[str, str]) -> Callable[[], Decode]:
    return lambda: naive_decode(mutate(NaiveK3, *edits))


@mutants(
    {
        "high nibble first": edited((CODES, CODES.replace("packed & 15, packed >> 4", "packed >> 4, packed & 15"))),
        "halves instead of pairs": edited((CODES + ".flatten(-2)", CODES.replace("dim=-1", "dim=-2") + ".flatten(-2)")),
        "scales interleaved": edited((GROUPS, ".repeat(1, 32)")),
        "bias 128": edited(("scale.float() - 127", "scale.float() - 128")),
        "no sign": edited(("torch.where(codes >= 8, -1.0, 1.0)", "1.0")),
        "two's complement": edited(
            ("[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)", "[torch.where(codes < 8, codes, 15 - codes)] * 1.0")
        ),
    }
)
def test_trap_17_rejects(plant):
    assert_rejects(check_17, plant())


# --- 18: where the halves lie -----------------------------------------------------------------------------------------
def check_18(folder: Path) -> None:
    """Fused [gate; up] rows: w1 and gate_proj above, w3 and up_proj below, expert by expert."""
    base, oracle = load_base(folder, CONFIG, dtype=torch.float32), Reference(CONFIG, WEIGHTS)
    for layer in range(CONFIG.num_hidden_layers):
        prefix = mlp_prefix(CONFIG, layer)
        halves = [WEIGHTS[f"{prefix}{half}_proj.weight"].float() for half in ("gate", "up")]
        assert torch.equal(base.gate_up[prefix], torch.cat(halves))
    w13, w2 = base.experts[5].dense(torch.float32)
    for e in range(CONFIG.num_experts):
        assert torch.equal(w13[e].double(), torch.cat([oracle.expert_weight(5, e, w) for w in ("w1", "w3")]))
        assert torch.equal(w2[e].double(), oracle.expert_weight(5, e, "w2"))


def test_trap_18_order_of_the_halves(folder):
    check_18(folder)


@mutants(
    {
        "w3 above": lambda: ("_slot", mutate(weights_module._slot, ('if weight == "w3"', 'if weight == "w1"'))),
        "up above": lambda: (
            "_Builder",
            mutate(weights_module._Builder, ('p.module.endswith("gate_proj")', 'p.module.endswith("up_proj")')),
        ),
    }
)
def test_trap_18_rejects(plant, folder, monkeypatch):
    monkeypatch.setattr(weights_module, *plant())
    assert_rejects(check_18, folder)


# --- 23: q_a and kv_a travel together ---------------------------------------------------------------------------------
ADAPTER = AdapterConfig(rank=4, alpha=8.0)
WIDER = tiny_config(q_lora_rank=48)  # in tiny-A both have 40 rows


def check_23(verify: Callable[[AdapterUpdate], None]) -> None:
    """An update with one of the two, or with B rows of the other, is refused whole; so nothing is half loaded."""
    whole = tiny_adapter(WIDER, ADAPTER)
    verify(make_update(1, ADAPTER, whole))
    names = [f"{attn_prefix(3)}{m}.lora_B.weight" for m in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert whole[names[0]].shape != whole[names[1]].shape
    swapped = whole | {names[0]: whole[names[1]], names[1]: whole[names[0]]}
    for wrong in (*({n: t for n, t in whole.items() if n != name} for name in names), swapped):
        with pytest.raises(AdapterError, match=r"q_a_proj|kv_a_proj"):
            verify(make_update(1, ADAPTER, wrong))


def verify_whole(update: AdapterUpdate) -> None:
    verify_update(update, adapter_layout(WIDER, ADAPTER), max_rank=4, expected_version=1)


def verify_what_came(update: AdapterUpdate) -> None:
    """Looks at the tensors that are there, not at those that should be."""
    layout = adapter_layout(WIDER, ADAPTER)
    verify_update(update, {n: layout[n] for n in update.tensors}, max_rank=4, expected_version=1)


def test_trap_23_fused_down_projections():
    check_23(verify_whole)


@mutants({"only what came": lambda: verify_what_came, "nothing": lambda: lambda update: None})
def test_trap_23_rejects(plant):
    assert_rejects(check_23, plant())


def test_every_tensor_of_the_table_is_there():
    """The helpers' weights are a whole checkpoint; these traps look at all of it."""
    assert list(WEIGHTS) == [p.name for p in text_params(CONFIG)]
    assert WEIGHTS[moe_prefix(1) + "gate.e_score_correction_bias"].dtype == torch.float32
