"""The resident base: what is loaded is what the file holds, in the right dtype, once; unfit content is refused."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from k3_cases import OneAtATime, large, random_tensors, tiny
from torch import Tensor

from miles_k3.errors import CheckpointError
from miles_k3.k3.ops import mxfp4
from miles_k3.k3.params import (
    DType,
    Part,
    attn_prefix,
    expert_prefix,
    iter_params,
    layer_params,
    mlp_prefix,
    text_params,
)
from miles_k3.k3.safetensors_io import SINGLE, write_checkpoint
from miles_k3.k3.weights import ExpertBank, ResidentBase, build_base, load_base, strip_a_log

TESTS = Path(__file__).parents[2]
CONFIG = tiny()
TENSORS = random_tensors(CONFIG)
A_LOG = attn_prefix(0) + "A_log"
SCALE = expert_prefix(2, 0) + "w3.weight_scale"


def build(dtype: torch.dtype = torch.bfloat16, **options) -> ResidentBase:
    return build_base(CONFIG, text_params(CONFIG), lambda p: TENSORS[p.name], dtype=dtype, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("base") / "k3"
    write_checkpoint(made, list(iter_params(CONFIG)), lambda p: TENSORS[p.name], shard_bytes=200_000)
    return made


def decoded(name: str) -> Tensor:
    """An expert's matrix by the sentence of spec 3.1, one number at a time."""
    packed, scale = TENSORS[name + ".weight_packed"], TENSORS[name + ".weight_scale"]
    rows = []
    for codes, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        nibbles = [n for byte in codes for n in (byte & 15, byte >> 4)]
        rows.append(
            [(-1) ** (n >> 3) * mxfp4.LEVELS[n & 7] * 2.0 ** (scales[i // 32] - 127) for i, n in enumerate(nibbles)]
        )
    return torch.tensor(rows)


def banks_equal(a: ExpertBank, b: ExpertBank) -> bool:
    return len(a.tensors) == len(b.tensors) and all(map(torch.equal, a.tensors, b.tensors))


class TestWhatIsHeld:
    def test_every_plain_tensor(self, folder):
        base = load_base(folder, CONFIG, dtype=torch.bfloat16)
        plain = [p for p in text_params(CONFIG) if p.part is not Part.EXPERT]
        assert base.tensors.keys() == {p.name for p in plain}
        for p in plain:
            expected = TENSORS[p.name][:4] if p.name.endswith("A_log") else TENSORS[p.name]
            assert torch.equal(base[p.name], expected), p.name
            assert base[p.name].dtype == expected.dtype

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_dtypes(self, folder, dtype):
        """Trap 16: the F32 tensors stay float32 whatever the base's dtype is."""
        base = load_base(folder, CONFIG, dtype=dtype)
        for p in text_params(CONFIG):
            if p.part is not Part.EXPERT:
                assert base[p.name].dtype == (torch.float32 if p.dtype is DType.F32 else dtype), p.name
        counts = Counter(t.dtype for t in base.tensors.values())
        assert counts[torch.float32] == len(base.tensors) if dtype == torch.float32 else 5 * 6 + 7

    def test_a_log_loses_its_padding(self):
        """Trap 2: each layer's own four numbers, and not a view of 128."""
        base = build()
        for layer in CONFIG.kda_layers:
            a_log = base[attn_prefix(layer) + "A_log"]
            assert torch.equal(a_log, TENSORS[attn_prefix(layer) + "A_log"][:4])
            assert a_log.untyped_storage().nbytes() == 4 * 4

    def test_gate_and_up_share_the_fused_weight(self):
        base = build()
        assert len(base.gate_up) == CONFIG.num_hidden_layers
        for layer in range(CONFIG.num_hidden_layers):
            prefix = mlp_prefix(CONFIG, layer)
            fused, gate, up = base.gate_up[prefix], base[prefix + "gate_proj.weight"], base[prefix + "up_proj.weight"]
            assert torch.equal(fused, torch.cat([TENSORS[prefix + f"{n}_proj.weight"] for n in ("gate", "up")]))
            assert gate.data_ptr() == fused.data_ptr()
            assert up.data_ptr() == fused[len(gate) :].data_ptr()
            fused[len(gate)] = 7.0
            assert bool((up[0] == 7.0).all())

    def test_the_base_owns_its_memory(self):
        """A source may reuse its buffers: nothing of the base may alias what `read` gave."""
        mine = {name: t.clone() for name, t in TENSORS.items()}
        base = build_base(CONFIG, text_params(CONFIG), lambda p: mine[p.name], dtype=torch.bfloat16)
        for t in mine.values():
            t.zero_()
        again = build()
        assert all(torch.equal(base[n], t) for n, t in again.tensors.items())
        assert all(banks_equal(base.experts[i], again.experts[i]) for i in CONFIG.moe_layers)

    def test_vision_is_not_held(self, folder):
        names = load_base(folder, CONFIG, dtype=torch.bfloat16).tensors
        assert not [n for n in names if n.startswith(("vision_tower", "mm_projector"))]


class TestExperts:
    @pytest.mark.parametrize("base_dtype", ["bf16", "mxfp4"])
    def test_every_expert_has_its_own_numbers(self, folder, base_dtype):
        """Failure 68: expert 0 too; and w1 lies above w3."""
        base = load_base(folder, CONFIG, dtype=torch.float32, base_dtype=base_dtype)
        assert tuple(base.experts) == CONFIG.moe_layers
        for layer, bank in base.experts.items():
            w13, w2 = bank.dense(torch.float32)
            assert w13.shape == (8, 64, 64)
            assert w2.shape == (8, 64, 32)
            for expert in range(8):
                prefix = expert_prefix(layer, expert)
                assert torch.equal(w13[expert], torch.cat([decoded(prefix + "w1"), decoded(prefix + "w3")]))
                assert torch.equal(w2[expert], decoded(prefix + "w2"))

    def test_packed_stays_packed(self):
        """Trap 17: the bytes of the file, and no dense copy."""
        for layer, bank in build(base_dtype="mxfp4").experts.items():
            assert bank.w13 is bank.w2 is None
            assert all(t.dtype == torch.uint8 for t in bank.tensors)
            for expert in range(8):
                w1, w2, w3 = (expert_prefix(layer, expert) + f"w{i}.weight_" for i in (1, 2, 3))
                for kind, w13, own2 in (
                    ("packed", bank.w13_packed, bank.w2_packed),
                    ("scale", bank.w13_scale, bank.w2_scale),
                ):
                    assert w13 is not None
                    assert own2 is not None
                    assert torch.equal(w13[expert], torch.cat([TENSORS[w1 + kind], TENSORS[w3 + kind]]))
                    assert torch.equal(own2[expert], TENSORS[w2 + kind])

    def test_bf16_holds_the_same_numbers_as_mxfp4(self):
        dense, packed = build(base_dtype="bf16"), build(base_dtype="mxfp4")
        for layer in CONFIG.moe_layers:
            assert len(dense.experts[layer].tensors) == 2
            for a, b in zip(dense.experts[layer].dense(torch.bfloat16), packed.experts[layer].dense(torch.bfloat16),
                            strict=True):  # fmt: skip
                assert a.dtype == torch.bfloat16
                assert torch.equal(a, b)

    def test_dense_is_the_held_tensor_or_a_fresh_one(self):
        dense, packed = build(base_dtype="bf16").experts[1], build(base_dtype="mxfp4").experts[1]
        assert dense.dense(torch.bfloat16)[0] is dense.w13
        first, second = packed.dense(torch.float32)[0], packed.dense(torch.float32)[0]
        assert first.data_ptr() != second.data_ptr()

    def test_bytes_held(self):
        text = list(text_params(CONFIG))
        others = sum(p.num_bytes for p in text if p.part is not Part.EXPERT) - 5 * 124 * 4  # A_log's padding
        experts = sum(p.num_bytes for p in text if p.part is Part.EXPERT)
        weights = sum(p.num_params for p in text if p.part is Part.EXPERT)
        assert build(base_dtype="mxfp4").num_bytes() == others + experts
        assert build(base_dtype="bf16").num_bytes() == others + 2 * weights

    def test_another_base_dtype_is_refused(self):
        with pytest.raises(ValueError, match="'fp8'; expected one of bf16, mxfp4"):
            build(base_dtype="fp8")


class TestSources:
    def test_file_and_generator_give_the_same(self, folder):
        a, b = load_base(folder, CONFIG, dtype=torch.bfloat16), build()
        assert a.tensors.keys() == b.tensors.keys()
        assert all(torch.equal(a[n], t) for n, t in b.tensors.items())
        assert all(banks_equal(a.experts[i], b.experts[i]) for i in CONFIG.moe_layers)

    def test_a_checkpoint_without_vision(self, tmp_path):
        write_checkpoint(tmp_path / "k3", list(text_params(CONFIG)), lambda p: TENSORS[p.name])
        assert load_base(tmp_path / "k3", CONFIG, dtype=torch.bfloat16).tensors.keys() == build().tensors.keys()

    @pytest.mark.parametrize("base_dtype", ["bf16", "mxfp4"])
    def test_any_order(self, base_dtype):
        """Shards list tensors alphabetically, so layers interleave; a layer is done when its last expert came."""
        shuffled = sorted(text_params(CONFIG), key=lambda p: p.name[::-1])
        base = build_base(CONFIG, shuffled, lambda p: TENSORS[p.name], dtype=torch.bfloat16, base_dtype=base_dtype)
        straight = build(base_dtype=base_dtype)
        assert all(torch.equal(base[n], t) for n, t in straight.tensors.items())
        assert all(banks_equal(base.experts[i], straight.experts[i]) for i in CONFIG.moe_layers)

    def test_some_layers_only(self):
        """A pipeline stage."""
        stage = [p for layer in (3, 4) for p in layer_params(CONFIG, layer)]
        base = build_base(CONFIG, stage, lambda p: TENSORS[p.name], dtype=torch.bfloat16)
        assert tuple(base.experts) == (3, 4)
        assert banks_equal(base.experts[4], build().experts[4])

    def test_progress(self, folder):
        seen: list[int] = []
        load_base(folder, CONFIG, dtype=torch.bfloat16, progress=seen.append)
        text = list(text_params(CONFIG))
        assert len(seen) == len(text)
        assert seen == sorted(seen)
        assert seen[-1] == sum(p.num_bytes for p in text)


class TestRefusals:
    def load_with(self, tmp_path: Path, name: str, tensor: Tensor) -> str:
        changed = {**TENSORS, name: tensor}
        write_checkpoint(tmp_path / "k3", list(iter_params(CONFIG)), lambda p: changed[p.name])
        with pytest.raises(CheckpointError) as caught:
            load_base(tmp_path / "k3", CONFIG, dtype=torch.bfloat16)
        assert f"{tmp_path / 'k3' / SINGLE}: tensor {name}" in str(caught.value)
        assert str(caught.value).count("\n") == 0
        return str(caught.value)

    @pytest.mark.parametrize("at", [4, 127])
    def test_a_log_padding(self, tmp_path, at):
        """Failure 71, trap 2."""
        a_log = TENSORS[A_LOG].clone()
        a_log[at] = 1e-30
        message = self.load_with(tmp_path, A_LOG, a_log)
        assert "entries from 4 on must be zero padding but are not" in message
        assert "num_heads 4" in message

    def test_a_log_padding_that_is_nan(self, tmp_path):
        a_log = TENSORS[A_LOG].clone()
        a_log[5] = torch.nan
        assert "must be zero padding" in self.load_with(tmp_path, A_LOG, a_log)

    def test_strip_a_log(self):
        assert strip_a_log(torch.tensor([1.0, 2.0, -0.0, 0.0]), 2, "here").tolist() == [1.0, 2.0]
        with pytest.raises(CheckpointError, match="here: entries from 1 on"):
            strip_a_log(torch.tensor([1.0, 2.0, 0.0]), 1, "here")

    def test_scales_that_were_never_written(self, tmp_path):
        """Failure 68: zero bytes mean 2^-127 everywhere, a fluent model with dead experts."""
        assert "never written" in self.load_with(tmp_path, SCALE, torch.zeros_like(TENSORS[SCALE]))

    def test_a_scale_that_is_no_number(self, tmp_path):
        scale = TENSORS[SCALE].clone()
        scale[-1, -1] = 255
        assert "means NaN" in self.load_with(tmp_path, SCALE, scale)

    def test_some_zero_scales_are_fine(self, tmp_path):
        """Other writers store 0 for an all-zero group (failure 69); ours stores 127 and reads both as zeros."""
        scale, packed = TENSORS[SCALE].clone(), TENSORS[SCALE.replace("scale", "packed")].clone()
        scale[0], packed[0] = 0, 0
        changed = {**TENSORS, SCALE: scale, SCALE.replace("scale", "packed"): packed}
        base = build_base(CONFIG, text_params(CONFIG), lambda p: changed[p.name], dtype=torch.bfloat16)
        w13, _ = base.experts[2].dense(torch.bfloat16)
        assert torch.equal(w13[0, 32], torch.zeros(64, dtype=torch.bfloat16))

    def test_an_unused_expert_that_we_wrote(self):
        """Failure 72: all-zero experts are finite, and our scale bytes for them are no holes."""
        packed, scale = mxfp4.quantize(torch.zeros(32, 64))
        changed = {**TENSORS, SCALE: scale, SCALE.replace("scale", "packed"): packed}
        base = build_base(CONFIG, text_params(CONFIG), lambda p: changed[p.name], dtype=torch.bfloat16)
        assert not base.experts[2].dense(torch.bfloat16)[0][0, 32:].any()

    def test_headers_are_judged_before_anything_is_read(self, tmp_path, monkeypatch):
        params = [p for p in iter_params(CONFIG) if p.name != SCALE]
        params = [dataclasses.replace(p, shape=(4,)) if p.name == A_LOG else p for p in params]
        write_checkpoint(tmp_path / "k3", params, lambda p: TENSORS[p.name][:4] if p.name == A_LOG else TENSORS[p.name])
        read = []
        monkeypatch.setattr("miles_k3.k3.safetensors_io.Checkpoint.read", lambda self, p: read.append(p))
        with pytest.raises(CheckpointError) as caught:
            load_base(tmp_path / "k3", CONFIG, dtype=torch.bfloat16)
        assert len(str(caught.value).splitlines()) == 2
        assert f"tensor {SCALE} is missing" in str(caught.value)
        assert f"tensor {A_LOG} has shape [4]" in str(caught.value)
        assert read == []

    @pytest.mark.parametrize("lost", [SCALE, expert_prefix(7, 7) + "w2.weight_packed",
                                      mlp_prefix(CONFIG, 0) + "up_proj.weight"])  # fmt: skip
    @pytest.mark.parametrize("base_dtype", ["bf16", "mxfp4"])
    def test_a_source_that_leaves_a_part_out(self, lost, base_dtype):
        """A fused tensor's memory is not initialised, so a part that never came would be anything."""
        params = [p for p in text_params(CONFIG) if p.name != lost]
        with pytest.raises(CheckpointError, match=f"tensor {lost} never came"):
            build_base(CONFIG, params, lambda p: TENSORS[p.name], dtype=torch.bfloat16, base_dtype=base_dtype)


class TestCost:
    def test_each_tensor_is_copied_once(self, folder, monkeypatch):
        """From the memory map to its place."""
        calls: Counter[str] = Counter()

        def counted(name: str):
            original = getattr(torch.Tensor, name)

            def call(self: Tensor, *args, **kwargs):
                calls[name] += 1
                return original(self, *args, **kwargs)

            return call

        for name in ("to", "copy_", "clone", "contiguous", "float", "bfloat16", "type"):
            monkeypatch.setattr(torch.Tensor, name, counted(name))
        load_base(folder, CONFIG, dtype=torch.bfloat16, base_dtype="mxfp4")
        assert calls.keys() == {"to", "copy_"}
        assert calls.total() == sum(1 for _ in text_params(CONFIG))

    def test_no_source_tensor_outlives_its_turn(self):
        source = OneAtATime(TENSORS)
        build_base(CONFIG, text_params(CONFIG), source.get, dtype=torch.bfloat16)
        assert source.given == sum(1 for _ in text_params(CONFIG))

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
    @pytest.mark.parametrize("base_dtype", ["bf16", "mxfp4"])
    def test_loading_holds_the_base_and_little_else(self, tmp_path, base_dtype):
        """Beside what stays: one layer's codes while they are dequantised, in pieces."""
        params = list(text_params(large()))
        write_checkpoint(tmp_path / "k3", params, lambda p: torch.full(
            p.shape, 0 if p.name.endswith("A_log") else 100,
            dtype={DType.BF16: torch.bfloat16, DType.F32: torch.float32, DType.U8: torch.uint8}[p.dtype],
        ))  # fmt: skip
        # In a process of its own: what other tests freed would hide what is taken here, or be given back in between.
        command = [sys.executable, "-m", "helpers.loading_memory", str(tmp_path / "k3"), base_dtype]
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "PYTHONPATH": path})
        held, peak = json.loads(done.stdout)
        codes = sum(p.num_bytes for p in params if p.layer == 1 and p.part is Part.EXPERT)
        allowed = held + (codes if base_dtype == "bf16" else 0) + (8 << 20)
        assert held > 24 << 20
        assert 0.9 * held < peak < allowed

    def test_many_experts_cost_in_proportion(self):
        """896 experts are 5,376 small tensors a layer; eight times as many must not cost much more than eight times."""

        def seconds(experts: int) -> float:
            config = tiny(num_experts=experts)
            layer = list(layer_params(config, 1))
            fill = {p.name: torch.ones(p.shape, dtype=torch.uint8) for p in layer if p.part is Part.EXPERT}
            start = time.process_time()
            build_base(config, [p for p in layer if p.part is Part.EXPERT], lambda p: fill[p.name],
                       dtype=torch.bfloat16, base_dtype="mxfp4")  # fmt: skip
            return time.process_time() - start

        few, many = (min(seconds(n) for _ in range(2)) for n in (112, 896))
        assert many < 8 * 4 * few
        assert many < 5
