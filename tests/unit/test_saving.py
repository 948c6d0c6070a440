"""Checkpoints that are written while the run goes on: published when whole, at the latest at the next or the end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest

from miles_k3 import world
from miles_k3.checkpoints import latest_checkpoint
from miles_k3.errors import CheckpointError
from miles_k3.recipe import load_recipe
from miles_k3.run_folder import RunFolder
from miles_k3.saving import Publication, Saver
from miles_k3.world import Board


class Writing:
    """Writes when it may."""

    def __init__(self, folder: Path, error: Exception | None, name: str) -> None:
        self.folder, self.error, self.files, self.may = folder, error, [folder / name], Event()

    def done(self) -> bool:
        return self.files[0].exists()

    def wait(self) -> None:
        self.may.wait()
        if self.error:
            raise self.error
        self.files[0].write_bytes(b"w" * 1000)


class Trainer:
    def __init__(self, name: str = "weights") -> None:
        self.version, self.later, self.hold, self.writings, self.name = 0, True, False, [], name
        self.error: Exception | None = None

    def save(self, folder: Path) -> Writing | None:
        self.writings.append(Writing(folder, self.error, self.name))
        if not self.hold:
            self.writings[-1].may.set()
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


def eventually(parts: SimpleNamespace, names: list[str]) -> None:
    end = time.monotonic() + 20
    while published(parts) != names and time.monotonic() < end:
        time.sleep(0.01)
    assert published(parts) == names


def test_a_checkpoint_under_way_is_none_until_it_is_whole(parts: SimpleNamespace) -> None:
    """And published then, though the run is busy with something else: no verb is called."""
    parts.trainer.hold = True
    parts.saver.save(1)
    parts.task.cursor = 8
    parts.saver.poll()
    assert published(parts) == []
    assert latest_checkpoint(parts.run.path) is None, "whoever resumes now finds none"
    parts.trainer.writings[0].may.set()
    eventually(parts, ["step-000001"])
    assert parts.run.latest_checkpoint()[0] == 1
    state = json.loads((parts.run.checkpoints / "step-000001" / "loop.json").read_text())
    assert state == {"step": 1, "task": {"cursor": 3}}, "the cursor of that step, not of the one it was published in"
    parts.saver.poll()
    parts.saver.finish()


def test_the_next_checkpoint_and_the_end_wait_for_the_one_before(parts: SimpleNamespace) -> None:
    parts.trainer.hold = True
    for step in (1, 2, 3):
        if parts.trainer.writings:
            Timer(0.1, parts.trainer.writings[-1].may.set).start()
        parts.saver.save(step)
        assert published(parts) == [f"step-{done:06d}" for done in range(1, step)]
    parts.trainer.writings[-1].may.set()
    parts.saver.finish()
    assert published(parts) == ["step-000002", "step-000003"], "two are kept"
    parts.saver.save(3)
    assert len(parts.trainer.writings) == 3, "a good one of the same step is kept"


class Store(dict):
    """What a board needs of the launcher's store."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def boards(monkeypatch: pytest.MonkeyPatch) -> list[Board]:
    """Those of two ranks, as if each were alone in its process."""
    monkeypatch.setattr(world, "_store", Store())
    made = []
    for rank in range(2):
        monkeypatch.setattr(world, "_boards", {})
        made.append(Board("checkpoint-4", rank, 2))
    return made


@pytest.mark.parametrize("later", [0, 1])
def test_rank_0_publishes_when_every_rank_has_written(
    parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    draft = parts.run.begin_checkpoint(4)
    writings = [Writing(draft.folder, None, f"weights-{rank}") for rank in range(2)]
    pending = [
        Publication(draft, writing, [], board)  # type: ignore[arg-type]
        for writing, board in zip(writings, boards(monkeypatch), strict=True)
    ]
    writings[1 - later].may.set()
    pending[1 - later].wait_for_own()
    time.sleep(0.2)
    assert published(parts) == []
    writings[later].may.set()
    eventually(parts, ["step-000004"])
    for publication in pending:
        publication.wait()
    assert parts.run.latest_checkpoint()[0] == 4, "with the hashes of both ranks' files"


def test_rank_0_gives_up_when_another_rank_failed(parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = parts.run.begin_checkpoint(4)
    writings = [Writing(draft.folder, OSError("full") if rank else None, f"weights-{rank}") for rank in range(2)]
    first, second = (
        Publication(draft, writing, [], board)  # type: ignore[arg-type]
        for writing, board in zip(writings, boards(monkeypatch), strict=True)
    )
    for writing in writings:
        writing.may.set()
    first.wait_for_own()
    with pytest.raises(OSError, match="full"):
        second.wait_for_own()
    assert not first.done()
    first.give_up()
    assert first.done()
    assert published(parts) == []


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
