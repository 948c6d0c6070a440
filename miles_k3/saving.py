"""A run's checkpoints in time: begun after a step, published once every rank's files are on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_k3.checkpoints import Draft
from miles_k3.errors import CheckpointError
from miles_k3.protocols import Task, Trainer, Writing
from miles_k3.run_folder import RunFolder

STATE_FILE = "loop.json"
TRAINER = "trainer"


class Saver:
    """Writes and reads the checkpoints of trainer and data cursor. All verbs are collective."""

    def __init__(self, run: RunFolder, trainer: Trainer, task: Task, *, keep: int) -> None:
        self._run, self._trainer, self._task, self._keep = run, trainer, task, keep
        self._pending: tuple[Draft, Writing] | None = None

    def save(self, step: int) -> None:
        """Begin the checkpoint of `step`; where the trainer writes it at once, publish it too."""
        self.finish()
        draft = self._run.begin_checkpoint(step)
        if draft is None:
            return
        try:
            self._run.world.once(lambda: self._write_state(draft.folder, step))
            writing = self._trainer.save(draft.folder / TRAINER)
        except BaseException:
            self._run.drop_checkpoint(draft)
            raise
        if writing is None:
            self._publish(draft)
        else:
            self._pending = draft, writing

    def poll(self) -> None:
        """Publish the checkpoint under way if every rank has written its part."""
        if self._pending and not self._run.world.any(not self._pending[1].done()):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint under way and publish it."""
        if self._pending is None:
            return
        (draft, writing), self._pending = self._pending, None
        try:
            self._run.world.everywhere(writing.wait)
        except BaseException:
            self._run.drop_checkpoint(draft)  # a half-written file would keep what a full disk lacks
            raise
        self._publish(draft)

    def restore(self, step: int, folder: Path) -> None:
        """Put trainer and data cursor where the checkpoint of `step` in `folder` has them."""
        self._trainer.load(folder / TRAINER)
        state = self._run.world.once(lambda: _read_state(folder / STATE_FILE))
        if self._trainer.version != step or state["step"] != step:
            raise CheckpointError(
                f"{folder}: trainer is at version {self._trainer.version}, data at step {state['step']}, expected "
                f"{step}"
            )
        self._task.load_state_dict(state["task"])

    def _write_state(self, folder: Path, step: int) -> None:
        (folder / TRAINER).mkdir()
        (folder / STATE_FILE).write_text(json.dumps({"step": step, "task": self._task.state_dict()}))

    def _publish(self, draft: Draft) -> None:
        self._run.commit_checkpoint(draft)
        self._run.prune(self._keep)


def _read_state(file: Path) -> Mapping[str, Any]:
    try:
        state = json.loads(file.read_text())
        return {"step": state["step"], "task": state["task"]}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{file}: no data cursor ({e!r}); resume from another checkpoint") from e
