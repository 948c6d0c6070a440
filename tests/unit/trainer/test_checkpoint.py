"""Saving and resuming: bit-equal later steps, and no half-loaded state."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.batches import micro_batch, mini_batch, random_tokens, train_batch
from helpers.trainers import tiny_trainer
from safetensors.torch import load_file, save_file

from miles_k3.errors import CheckpointError
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.types import AdapterConfig, TrainBatch

SECTION = {"lr": 1e-2, "lr_warmup_steps": 2, "lr_decay": "linear"}


def harvest(seed: int) -> TrainBatch:
    return train_batch(mini_batch(micro_batch(random_tokens((9, 17, 5), seed=seed), seed=seed)))


def make(dtype: torch.dtype, seed: int = 0) -> MegatronTrainer:
    return tiny_trainer(dtype=dtype, section=SECTION, total_steps=6, seed=seed)


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [0, 2])
def test_resumed_steps_are_bit_equal(tmp_path: Path, dtype: torch.dtype, steps: int) -> None:
    trainer = make(dtype)
    for i in range(steps):
        trainer.step(harvest(i))
    trainer.save(tmp_path)
    stats, drawn = [trainer.step(harvest(i)) for i in range(steps, steps + 2)], draws()
    resumed = make(dtype, seed=9)
    resumed.step(harvest(7))  # state of its own, all of which must go
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
    masters = {n: t for n, t in load_file(tmp_path / "trainer.safetensors").items() if n.endswith("/master")}
    assert all(t.dtype == torch.float32 for t in masters.values())
    assert any(not torch.equal(t, t.bfloat16().float()) for t in masters.values())


def _drop(folder: Path, name: str) -> None:
    tensors = load_file(folder / "trainer.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.endswith(name)}, folder / "trainer.safetensors")


def _edit(folder: Path, **changes: object) -> None:
    facts = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps({k: v for k, v in {**facts, **changes}.items() if v is not None}))


def test_anything_missing_or_foreign_is_refused_whole(tmp_path: Path) -> None:
    trainer = make(torch.float32)
    trainer.step(harvest(0))
    state = trainer.export_adapter().sha256
    for number, (damage, words) in enumerate(
        [
            (lambda f: (f / "trainer.json").unlink(), "is missing"),
            (lambda f: (f / "trainer.safetensors").unlink(), "is missing"),
            (lambda f: (f / "trainer.json").write_text("{"), "torn"),
            (lambda f: (f / "trainer.safetensors").write_bytes(b"\0" * 40), "torn"),
            (lambda f: _drop(f, "o_lora.a/master"), "o_lora.a/master is missing"),
            (lambda f: _drop(f, "o_lora.a/exp_avg"), "exp_avg is missing"),
            (lambda f: _drop(f, "rng/torch"), "rng/torch is missing"),
            (lambda f: _edit(f, format=99), "has format 99"),
            (lambda f: _edit(f, version=None), "lacks version"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        trainer.save(folder)
        damage(folder)
        with pytest.raises(CheckpointError, match=words):
            trainer.load(folder)
    assert (trainer.version, trainer.export_adapter().sha256) == (1, state)


def test_another_adapter_shape_is_refused(tmp_path: Path) -> None:
    make(torch.float32).save(tmp_path)
    with pytest.raises(CheckpointError, match="was trained with the adapter"):
        tiny_trainer(adapter=AdapterConfig(rank=4, alpha=12.0)).load(tmp_path)


def test_a_write_that_the_system_refuses_is_one_sentence(tmp_path: Path) -> None:
    """safetensors reports a full or missing place in a form of its own, which is no OSError."""
    with pytest.raises(CheckpointError, match=r"trainer\.safetensors can't be written .*go on with --resume"):
        tiny_trainer().save(tmp_path / "not there")
