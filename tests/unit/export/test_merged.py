"""What a merged export holds, beside numpy, ml-dtypes, compressed-tensors and peft, and beside base + adapter."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import peft
import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy, QuantizationType
from helpers.exports import SHARD_BYTES, contents
from helpers.live_bytes import LiveBytes
from safetensors import safe_open

from miles_k3.adapters.layout import split_expert, tensor_name
from miles_k3.adapters.merge import MERGE_MARKER
from miles_k3.adapters.peft_read import PeftReader
from miles_k3.export import merging
from miles_k3.export.merging import Merger
from miles_k3.k3.config import K3Config
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.ops import mxfp4
from miles_k3.k3.params import iter_params
from miles_k3.k3.safetensors_io import INDEX, Checkpoint
from miles_k3.k3.weights import load_base

TARGETS = ("bf16", "mxfp4")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Read by safetensors itself, by the index."""
    files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    out = {}
    for name in sorted(files):
        with safe_open(folder / name, "pt") as file:
            out |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 not a dict
    return out


def dense(case, module):
    """A base weight in float64, decoded by ml-dtypes where it is packed."""
    if (weight := case.weights.get(f"{module}.weight")) is not None:
        return weight.double().numpy()
    packed, scale = (case.weights[f"{module}.weight_{kind}"].numpy() for kind in ("packed", "scale"))
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1).view(ml_dtypes.float4_e2m1fn)
    return codes.astype(np.float64) * scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, -1)


def with_delta(case, module):
    """W + (alpha / r) B A in float64; None where the adapter doesn't target the module."""
    name, expert = split_expert(module)
    if tensor_name(name, "A") not in case.update.tensors:
        return None
    a, b = (case.update.tensors[tensor_name(name, f)].double().numpy() for f in ("A", "B"))
    if expert is not None:
        a, b = (f[expert if len(f) > 1 else 0] for f in (a, b))
    return dense(case, module) + 1.5 * (b @ a)


@pytest.mark.parametrize("target", TARGETS)
def test_every_tensor_is_there_and_untargeted_ones_are_the_bases(case, merged, target):
    found = tensors_of(merged(target))
    assert set(found) == {p.name for p in iter_params(case.config, packed=target == "mxfp4")}
    untouched = [n for n in found if with_delta(case, n.rpartition(".")[0]) is None]
    assert len(untouched) > 100
    for name in untouched:
        assert found[name].dtype == case.weights[name].dtype
        assert torch.equal(found[name].view(torch.uint8), case.weights[name].view(torch.uint8)), name


@pytest.mark.parametrize("target", TARGETS)
def test_plain_weights_are_the_sum_rounded_once(case, merged, target):
    names = [n for n in tensors_of(merged(target)) if n.endswith(".weight")]
    found, seen = tensors_of(merged(target)), 0
    for name in names:
        if (wanted := with_delta(case, name.removesuffix(".weight"))) is None:
            continue
        nearest = torch.from_numpy(wanted.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32))
        apart = found[name].float() != nearest  # a float32 sum may fall on the other side of a border
        assert apart.float().mean() < 1e-3, name
        torch.testing.assert_close(found[name].double(), torch.from_numpy(wanted), rtol=2**-8, atol=1e-6)
        seen += 1
    assert seen == {"bf16": 8 + 3 * 2 + 8 * 3 + 7 * 4 * 3, "mxfp4": 8 + 3 * 2 + 8 * 3}[target]


def test_packed_weights_are_no_farther_from_the_sum_than_either_scale_allows(case, merged):
    found = tensors_of(merged("mxfp4"))
    modules = [n.removesuffix(".weight_packed") for n in found if n.endswith("_packed")]
    for module in modules:
        packed, scale = (found[f"{module}.weight_{kind}"] for kind in ("packed", "scale"))
        wanted = torch.from_numpy(with_delta(case, module))
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).numpy().view(ml_dtypes.float4_e2m1fn)
        factor = scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, -1)
        error = (torch.from_numpy(codes.astype(np.float64) * factor) - wanted).square().unflatten(-1, (-1, 32)).sum(-1)
        least = torch.full_like(error, torch.inf)
        for shift in (-2, -1, 0, 1, 2):  # what ml-dtypes' nearest codes would lose at each scale around
            scaled = (wanted.numpy() / (factor * 2.0**shift)).clip(-6, 6)
            nearest = scaled.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * factor * 2.0**shift
            least = least.minimum((torch.from_numpy(nearest) - wanted).square().unflatten(-1, (-1, 32)).sum(-1))
        assert (error <= least * (1 + 1e-6) + 1e-12).all(), module


def test_compressed_tensors_reads_the_packed_ones_the_same(merged):
    found = tensors_of(merged("mxfp4"))
    args = QuantizationArgs(
        num_bits=4, type=QuantizationType.FLOAT, strategy=QuantizationStrategy.GROUP, symmetric=True, dynamic=False,
        group_size=32, scale_dtype=torch.uint8,
    )  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    for module in [n.removesuffix(".weight_packed") for n in found if n.endswith("_packed")][::7]:
        state = {kind: found[f"{module}.{kind}"].clone() for kind in ("weight_packed", "weight_scale")}
        theirs = MXFP4PackedCompressor.decompress(dict(state), scheme)["weight"]
        assert torch.equal(theirs.float(), mxfp4.dequantize(state["weight_packed"], state["weight_scale"]))


def test_peft_merges_the_same(case, merged):
    """A module of each plain kind through peft's own merge_and_unload."""
    found = tensors_of(merged("bf16"))
    names = [n for n in found if n.endswith(("0.mlp.down_proj.weight", "3.self_attn.q_a_proj.weight", "3.w2.weight"))]
    assert len(names) == 2 + 7
    for name in names:
        module, expert = split_expert(name.removesuffix(".weight"))
        a, b = (case.update.tensors[tensor_name(module, f)].float() for f in ("A", "B"))
        if expert is not None:
            a, b = (f[expert if len(f) > 1 else 0] for f in (a, b))
        base = torch.from_numpy(dense(case, name.removesuffix(".weight"))).float()
        layer = torch.nn.Sequential(torch.nn.Linear(base.shape[1], base.shape[0], bias=False))
        layer[0].weight.data = base
        model = peft.get_peft_model(layer, peft.LoraConfig(r=4, lora_alpha=6, target_modules=["0"]))
        lora: Any = model.base_model.model[0]  # type: ignore[index]
        lora.lora_A["default"].weight.data, lora.lora_B["default"].weight.data = a, b
        unloaded: Any = model.merge_and_unload()
        theirs = unloaded[0].weight.to(torch.bfloat16)
        assert (found[name] != theirs).float().mean() < 1e-3, name
        torch.testing.assert_close(found[name], theirs, rtol=2**-7, atol=0)


@pytest.mark.parametrize("target", TARGETS)
def test_files_around_the_tensors(case, merged, target):
    folder = merged(target)
    raw, base = (json.loads((f / "config.json").read_text()) for f in (folder, case.base))
    assert K3Config.from_folder(folder) == case.config
    quantised = base["text_config"].pop("quantization_config")
    assert raw["text_config"].pop("quantization_config", None) == (quantised if target == "mxfp4" else None)
    assert raw == base
    assert (folder / "LICENSE").read_text() == "text"
    assert (folder / "generation_config.json").is_file()
    report = json.loads((folder / "export.json").read_text())
    assert set(report["files"]) == {p.name for p in folder.glob("*.safetensors")}
    assert len(report["files"]) > 5
    for name in report["files"]:
        assert (folder / name).stat().st_size < 2 * SHARD_BYTES
        with safe_open(folder / name, "pt") as file:
            assert file.metadata()[MERGE_MARKER].endswith(report["adapter"]["sha256"])
    assert not [p.name for p in folder.iterdir() if p.name.startswith((".", "note-", "plan"))]


def test_the_export_computes_what_base_and_adapter_do(case, merged):
    """Logits: without rounding the same; bf16 as near as rounding 8 layers to 8 bits leaves it, mxfp4 less."""
    tokens = torch.arange(40).view(2, 20) * 5 % 256
    pair = NaiveK3(case.config, case.weights, case.update.tensors, case.update.config.scaling)(tokens)
    moved = (pair - NaiveK3(case.config, case.weights)(tokens)).abs().median()
    unrounded = {n: t for n, t in case.weights.items() if not n.endswith(("_packed", "_scale"))}
    for p in iter_params(case.config, packed=False):
        if (weight := with_delta(case, p.module)) is not None:
            unrounded[p.name] = torch.from_numpy(weight).float()
    exact = NaiveK3(case.config, unrounded)(tokens)
    assert (exact - pair).abs().median() < 1e-5 * moved
    apart = [(NaiveK3(case.config, tensors_of(merged(t)))(tokens) - pair).abs().median() / moved for t in TARGETS]
    assert apart[0] < 0.1, apart
    assert apart[0] < apart[1] < 0.6, apart


def test_a_bf16_export_is_a_base_of_its_own(merged, case):
    base = load_base(merged("bf16"), case.config, dtype=torch.bfloat16)
    found = tensors_of(merged("bf16"))
    for layer, bank in base.experts.items():
        assert not bank.packed
        w13, w2 = bank.dense(torch.bfloat16)
        for expert in range(case.config.num_experts):
            prefix = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}."
            assert torch.equal(w13[expert], torch.cat([found[f"{prefix}{w}.weight"] for w in ("w1", "w3")]))
            assert torch.equal(w2[expert], found[f"{prefix}w2.weight"])


@pytest.mark.parametrize("target", TARGETS)
def test_memory_is_bounded_by_a_chunk_not_by_the_model(case, monkeypatch, target):
    """Everything that is alive at once is a few chunks of rows and one tensor of the adapter."""
    monkeypatch.setattr(merging, "ROWS_NUMBERS", 1024)
    with Checkpoint(case.base) as base, PeftReader(case.peft, case.config) as adapter:
        merger = Merger(base, case.config, adapter, target)
        written = 0
        with LiveBytes() as live:
            for p in merger.params():
                for piece in merger.pieces(p):
                    written += piece.nbytes
        factor = max(t.numel() * 4 for t in (adapter.read(n) for n in adapter.layout))
    assert written > 1_000_000
    assert live.peak < 24 * 4 * 1024 + 2 * factor, live.peak


def test_the_same_export_has_the_same_bytes(export, merged, tmp_path):
    export(tmp_path / "again", "mxfp4", verify=True)
    assert contents(tmp_path / "again") == contents(merged("mxfp4"))
