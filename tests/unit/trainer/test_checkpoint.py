"""Saving and resuming: bit-equal later steps, and no half-loaded state."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.batches import micro_batch, mini_batch, random_tokens, train_batch
from helpers.trainers import tiny_trainer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_k3.errors import CheckpointError
from miles_k3.trainer.boxes import Box
from miles_k3.trainer.checkpoint_files import Reader
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.types import AdapterConfig, TrainBatch

FILE = "trainer-00000-of-00001.safetensors"
O_A = "language_model.model.layers.0.self_attn.o_proj.lora_A.weight"
SECTION = {"lr": 1e-2, "lr_warmup_steps": 2, "lr_decay": "linear"}


def harvest(seed: int) -> TrainBatch:
    return train_batch(mini_batch(micro_batch(random_tokens((9, 17, 5), seed=seed), seed=seed)))


def make(dtype: torch.dtype, seed: int = 0) -> MegatronTrainer:
    return tiny_trainer(dtype=dtype, section=SECTION, total_steps=6, seed=seed)


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("steps", "background"), [(0, True), (2, True), (2, False)])
def test_resumed_steps_are_bit_equal(tmp_path: Path, dtype: torch.dtype, steps: int, background: bool) -> None:
    trainer = tiny_trainer(dtype=dtype, section={**SECTION, "async_checkpoint": background}, total_steps=6)
    for i in range(steps):
        trainer.step(harvest(i))
    writing = trainer.save(tmp_path)
    assert (writing is None) == (not background)
    stats, drawn = [trainer.step(harvest(i)) for i in range(steps, steps + 2)], draws()
    resumed = make(dtype, seed=9)
    resumed.step(harvest(7))  # state of its own, all of which must go
    if writing is not None:
        writing.wait()
    resumed.load(tmp_path)
    assert resumed.version == steps
    assert [resumed.step(harvest(i)) for i in range(steps, steps + 2)] == stats
    assert draws() == drawn
    wanted, found = trainer.export_adapter(), resumed.export_adapter()
    assert found.sha256 == wanted.sha256


def test_masters_are_saved_in_fp32(tmp_path: Path) -> None:
    trainer = make(torch.bfloat16)
    trainer.step(harvest(0))
    trainer.save(tmp_path)
    trainer.load(tmp_path)  # waits for the file
    masters = {n: t for n, t in load_file(tmp_path / FILE).items() if "/master@" in n}
    assert all(t.dtype == torch.float32 for t in masters.values())
    assert any(not torch.equal(t, t.bfloat16().float()) for t in masters.values())


def _rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(change(load_file(path)), path, metadata)


def _drop(folder: Path, word: str) -> None:
    _rewrite(folder / FILE, lambda tensors: {n: t for n, t in tensors.items() if word not in n})


def _edit(folder: Path, **changes: object) -> None:
    facts = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps({k: v for k, v in {**facts, **changes}.items() if v is not None}))


def _cut(folder: Path) -> None:
    """The last row of one tensor is lost, the file is whole."""
    _rewrite(folder / FILE, lambda tensors: {n: t[:-1].clone() if O_A in n else t for n, t in tensors.items()})


def _grow(folder: Path) -> None:
    def grow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: torch.cat([t, t]) if O_A in n else t for n, t in tensors.items()}

    _rewrite(folder / FILE, grow)


def _overlap(folder: Path) -> None:
    """A second box over the last rows of a tensor."""

    def add(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, f"{O_A}/exp_avg@4,0": tensors[f"{O_A}/exp_avg@0,0"][4:].clone()}

    _rewrite(folder / FILE, add)


def _narrow(folder: Path) -> None:
    _rewrite(folder / FILE, lambda tensors: {n: t.bfloat16() if O_A in n else t for n, t in tensors.items()})


def _of_another_run(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    trainer = make(torch.float32)
    trainer.step(harvest(0))
    trainer.save(other)
    trainer.load(other)  # waits
    (other / FILE).replace(folder / FILE)


def _shape(folder: Path) -> None:
    shapes = json.loads((folder / "trainer.json").read_text())["shapes"]
    _edit(folder, shapes={**shapes, O_A: [6, 2]})


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "trainer.json").unlink(), r"trainer\.json is missing"),
    (lambda f: (f / "trainer.json").write_text("{"), r"trainer\.json is torn"),
    (lambda f: (f / "trainer.json").write_text("[]"), "has format None"),
    (lambda f: _edit(f, format=99), "has format 99, expected 2"),
    (lambda f: _edit(f, format=1), r"has format 1, expected 2.*lora\.init_from"),
    (lambda f: _edit(f, version=None), "lacks version"),
    (_shape, rf"trainer\.json: tensor {O_A} is \[6, 2\], this model needs \[6, 64\]"),
    (lambda f: _edit(f, world=2), r"trainer-00000-of-00001\.safetensors is not of this checkpoint, which has 2 ranks"),
    (lambda f: (f / FILE).unlink(), rf"{FILE}: shard is missing"),
    (lambda f: (f / FILE).write_bytes(b"\0" * 40), rf"{FILE}: torn"),
    (lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:-7]), rf"{FILE}: the file is truncated"),
    (_of_another_run, rf"{FILE} belongs to checkpoint \w+ \(rank 0, version 1\), expected"),
    (lambda f: _drop(f, O_A + "/master"), rf"{O_A}/master is missing 384 of its 384 elements"),
    (lambda f: _drop(f, O_A + "/exp_avg@"), rf"{O_A}/exp_avg is missing"),
    (lambda f: _drop(f, "rng/torch"), "rng/torch is missing"),
    (_cut, rf"{O_A}/master is missing 64 of its 384 elements \(the others are in {FILE}\)"),
    (_grow, rf"{FILE}: tensor {O_A}/master@0,0 of shape \[12, 64\] goes beyond"),
    (_overlap, rf"{O_A}/exp_avg has elements twice: \[0:6, 0:64\] in {FILE} and \[4:6, 0:64\] in {FILE}"),
    (_narrow, rf"{FILE}: tensor {O_A}/exp_avg@0,0 is BF16, expected F32"),
    (lambda f: _edit(f, steps=0), rf"{FILE}: tensor .*exp_avg.* is unknown to this model"),
]


def test_anything_missing_or_foreign_is_refused_whole(tmp_path: Path) -> None:
    trainer = make(torch.float32)
    trainer.step(harvest(0))
    state = trainer.export_adapter().sha256
    (tmp_path / "good").mkdir()
    writing = trainer.save(tmp_path / "good")
    assert writing is not None
    writing.wait()
    other = make(torch.float32, seed=3)
    before, drawn = other.export_adapter().sha256, torch.get_rng_state()
    for number, (damage, words) in enumerate(DAMAGE):
        folder = Path(shutil.copytree(tmp_path / "good", tmp_path / str(number)))
        damage(folder)
        with pytest.raises(CheckpointError, match=words):
            other.load(folder)
        assert (other.version, other.export_adapter().sha256) == (0, before), words
    torch.set_rng_state(drawn)
    other.load(tmp_path / "good")
    assert (other.version, other.export_adapter().sha256) == (1, state)


def test_a_file_that_breaks_while_it_is_read_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(torch.float32)
    trainer.step(harvest(0))
    trainer.save(tmp_path)
    state = trainer.export_adapter().sha256
    reads, read = [], Reader.read

    def break_late(self: Reader, name: str, kind: str, box: Box) -> Tensor:
        reads.append(name)
        if len(reads) == 60:
            (path,) = self.folder.glob("*.safetensors")
            path.write_bytes(b"")
            self._stack.close()
            self._open.clear()
        return read(self, name, kind, box)

    other = make(torch.float32, seed=3)
    before = other.export_adapter().sha256
    assert before != state
    monkeypatch.setattr(Reader, "read", break_late)
    trainer._checkpoints.finish()
    with pytest.raises(CheckpointError, match=rf"{FILE}: tensor .* can't be read .*; resume from another"):
        other.load(tmp_path)
    assert (other.version, other.export_adapter().sha256) == (0, before)


def test_another_adapter_shape_is_refused(tmp_path: Path) -> None:
    trainer = make(torch.float32)
    trainer.save(tmp_path)
    trainer._checkpoints.finish()
    with pytest.raises(CheckpointError, match="was trained with the adapter"):
        tiny_trainer(adapter=AdapterConfig(rank=4, alpha=12.0)).load(tmp_path)
