"""Checkpoints that are written while the run goes on: published when whole, at the latest at the next or the end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_k3.checkpoints import latest_checkpoint
from miles_k3.errors import CheckpointError
from miles_k3.recipe import load_recipe
from miles_k3.run_folder import RunFolder
from miles_k3.saving import Saver


class Writing:
    """Writes when it is waited for, or told to."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder, self.error, self.written = folder, error, False

    def done(self) -> bool:
        return self.written

    def write(self) -> None:
        (self.folder / "weights").write_bytes(b"w" * 1000)
        self.written = True

    def wait(self) -> None:
        if self.error:
            raise self.error
        if not self.written:
            self.write()


class Trainer:
    def __init__(self) -> None:
        self.version, self.later, self.writings = 0, True, []
        self.error: Exception | None = None

    def save(self, folder: Path) -> Writing | None:
        self.writings.append(Writing(folder, self.error))
        if self.later:
            return self.writings[-1]
        self.writings[-1].wait()
        return None

    def load(self, folder: Path) -> None:
        assert (folder / "weights").read_bytes() == b"w" * 1000


class Task:
    cursor = 3

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]


@pytest.fixture
def parts(tmp_path: Path):
    with RunFolder.create(load_recipe("tiny-cpu", [f"run.folder={tmp_path}"]).recipe) as run:
        trainer, task = Trainer(), Task()
        saver = Saver(run, trainer, task, keep=2)  # type: ignore[arg-type]
        yield SimpleNamespace(run=run, trainer=trainer, task=task, saver=saver)


def published(parts: SimpleNamespace) -> list[str]:
    return sorted(p.name for p in parts.run.checkpoints.iterdir() if not p.name.startswith("."))


def test_a_trainer_that_writes_at_once_has_its_checkpoint_published(parts: SimpleNamespace) -> None:
    parts.trainer.later = False
    parts.saver.save(1)
    assert published(parts) == ["step-000001"]


def test_a_checkpoint_under_way_is_none_until_it_is_whole(parts: SimpleNamespace) -> None:
    parts.saver.save(1)
    parts.task.cursor = 8
    parts.saver.poll()
    assert published(parts) == []
    assert latest_checkpoint(parts.run.path) is None, "whoever resumes now finds none"
    parts.trainer.writings[0].write()
    parts.saver.poll()
    assert published(parts) == ["step-000001"]
    state = json.loads((parts.run.checkpoints / "step-000001" / "loop.json").read_text())
    assert state == {"step": 1, "task": {"cursor": 3}}, "the cursor of that step, not of the one it was published in"
    parts.saver.poll()
    parts.saver.finish()


def test_the_next_checkpoint_and_the_end_wait_for_the_one_before(parts: SimpleNamespace) -> None:
    for step in (1, 2, 3):
        parts.saver.save(step)
        assert published(parts) == [f"step-{done:06d}" for done in range(1, step)]
    parts.saver.finish()
    assert published(parts) == ["step-000002", "step-000003"], "two are kept"
    parts.saver.save(3)
    assert len(parts.trainer.writings) == 3, "a good one of the same step is kept"


def test_a_writing_that_fails_is_told_and_publishes_nothing(parts: SimpleNamespace) -> None:
    parts.saver.save(1)
    parts.trainer.error = OSError(28, "No space left on device")
    parts.saver.save(2)
    with pytest.raises(OSError, match="No space left"):
        parts.saver.finish()
    assert published(parts) == ["step-000001"]
    assert [p.name for p in parts.run.checkpoints.iterdir()] == ["step-000001"], "a half file keeps no disk"
    parts.trainer.later = False
    with pytest.raises(OSError, match="No space left"):
        parts.saver.save(3)
    assert [p.name for p in parts.run.checkpoints.iterdir() if "3" in p.name] == []


def test_restoring_brings_back_trainer_and_cursor(parts: SimpleNamespace) -> None:
    parts.trainer.later = False
    parts.saver.save(5)
    parts.task.cursor, parts.trainer.version = 0, 5
    parts.saver.restore(*parts.run.latest_checkpoint())
    assert parts.task.cursor == 3
    parts.trainer.version = 4
    with pytest.raises(CheckpointError, match="trainer is at version 4, data at step 5, expected 5"):
        parts.saver.restore(*parts.run.latest_checkpoint())
    (parts.run.checkpoints / "step-000005" / "loop.json").write_text("{")
    with pytest.raises(CheckpointError, match="no data cursor"):
        parts.saver.restore(5, parts.run.checkpoints / "step-000005")
