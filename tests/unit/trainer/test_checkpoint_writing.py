"""Writing a checkpoint beside the steps: what is written, who waits, and who is told when it fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.batches import micro_batch, mini_batch, random_tokens, train_batch
from helpers.trainers import tiny_trainer

from miles_k3.errors import CheckpointError
from miles_k3.trainer import checkpoint, checkpoint_files
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.types import TrainBatch

FILE = "trainer-00000-of-00001.safetensors"


def harvest(seed: int) -> TrainBatch:
    return train_batch(mini_batch(micro_batch(random_tokens((9, 17, 5), seed=seed), seed=seed)))


@pytest.mark.parametrize("background", [False, True])
def test_a_write_that_the_system_refuses_is_one_sentence(tmp_path: Path, background: bool) -> None:
    trainer = tiny_trainer(section={"async_checkpoint": background})

    def save(folder: Path) -> None:
        if writing := trainer.save(folder):
            writing.wait()

    with pytest.raises(CheckpointError, match=rf"{FILE} can't be written \(No such file.*go on with --resume"):
        save(tmp_path / "not there")
    save(tmp_path)  # the trainer is as good as before
    trainer.load(tmp_path)


def test_a_full_disk_is_told_by_whoever_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing has no reader of its own error: `wait` raises it, or else the next save or load."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    trainer = tiny_trainer()
    for number, verb in enumerate((trainer.save, trainer.load)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_files.os, "fsync", full)
            writing = trainer.save(folder)
            assert writing is not None
            while not writing.done():
                time.sleep(0.001)
        with pytest.raises(CheckpointError, match=rf"{FILE} can't be written \(No space left on device\)"):
            verb(tmp_path)
        assert not (folder / "trainer.json").exists()


def test_the_state_of_the_call_is_written_while_steps_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(section={"lr": 1e-2})
    trainer.step(harvest(0))
    wanted, gate, write = trainer.export_adapter().sha256, threading.Event(), checkpoint.write_rank_file

    def write_late(*args: Any) -> None:
        assert gate.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoint, "write_rank_file", write_late)
    writing = trainer.save(tmp_path)
    assert writing is not None
    trainer.step(harvest(1))
    assert not writing.done()
    assert trainer.export_adapter().sha256 != wanted
    gate.set()
    writing.wait()
    trainer.load(tmp_path)
    assert (trainer.version, trainer.export_adapter().sha256) == (1, wanted)


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, gate, order = tiny_trainer(), threading.Event(), []
    write = checkpoint.write_rank_file

    def write_late(path: Path, *args: Any) -> None:
        assert gate.wait(60)
        order.append(path.parent.name)
        write(path, *args)

    monkeypatch.setattr(checkpoint, "write_rank_file", write_late)
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    first = trainer.save(tmp_path / "1")
    assert first is not None
    threading.Timer(0.3, gate.set).start()
    second = trainer.save(tmp_path / "2")
    assert second is not None
    assert first.done()
    second.wait()
    assert order == ["1", "2"]


def save_and_leave(trainer: MegatronTrainer, folder: Path, kill: bool) -> None:
    """What a child does: nobody waits for its writing. `kill`: it dies with half of the file on disk."""

    def die(descriptor: int) -> None:
        os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    if kill:
        checkpoint_files.os.fsync = die
    trainer.save(folder)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kill", [True, False])
def test_a_process_that_ends_while_it_writes(tmp_path: Path, kill: bool) -> None:
    """Killed, it leaves what is refused; by itself, it ends only when the file is there."""
    trainer = tiny_trainer()
    child = multiprocessing.get_context("fork").Process(target=save_and_leave, args=(trainer, tmp_path, kill))
    child.start()
    child.join()
    other = tiny_trainer(seed=5)
    if kill:
        assert child.exitcode == -signal.SIGKILL
        assert (tmp_path / FILE).stat().st_size > 0
        with pytest.raises(CheckpointError, match=r"trainer\.json is missing"):
            other.load(tmp_path)
    else:
        assert child.exitcode == 0
        other.load(tmp_path)
        assert other.export_adapter().sha256 == trainer.export_adapter().sha256
