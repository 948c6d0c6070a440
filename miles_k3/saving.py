"""A run's checkpoints in time: begun after a step, published as soon as every rank's files are on disk."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_k3.checkpoints import Draft, Fingerprint, fingerprint, publish_draft
from miles_k3.cotraining import DraftFollower
from miles_k3.errors import CheckpointError
from miles_k3.protocols import Task, Trainer, Writing
from miles_k3.run_folder import RunFolder
from miles_k3.world import Board

STATE_FILE = "loop.json"
TRAINER, DRAFT = "trainer", "draft"
_LOOK_S = 0.05  # between two looks at the board
LINGER_S = 10.0  # that a run which fails waits for a checkpoint under way


class Saver:
    """Writes and reads the checkpoints of trainer, data cursor and, where it is trained, draft. All verbs are
    collective."""

    def __init__(
        self, run: RunFolder, trainer: Trainer, task: Task, *, keep: int, follower: DraftFollower | None = None
    ) -> None:
        self._run, self._trainer, self._task, self._keep = run, trainer, task, keep
        self._follower = follower
        self._pending: Publication | None = None

    def save(self, step: int) -> None:
        """Begin the checkpoint of `step`; where the trainer writes it at once, publish it too."""
        self.finish()
        draft = self._run.begin_checkpoint(step)
        if draft is None:
            return
        try:
            files = self._run.world.once(lambda: self._write_state(draft.folder, step))
            writing = self._trainer.save(draft.folder / TRAINER)
        except BaseException:
            self._run.drop_checkpoint(draft)
            raise
        if writing is None:
            self._run.commit_checkpoint(draft)
            self._run.prune(self._keep)
        else:
            common = files if self._run.world.first else []
            self._pending = Publication(draft, writing, common, self._run.world.board(f"checkpoint-{step}"))

    def poll(self) -> None:
        """Settle the checkpoint under way if it is published."""
        if self._pending and not self._run.world.any(not self._pending.done()):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint under way, and make room for it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            self._run.world.everywhere(pending.wait_for_own)
        except BaseException:
            pending.give_up()
            self._run.drop_checkpoint(pending.draft)  # a half-written file would keep what a full disk lacks
            raise
        self._run.world.everywhere(pending.wait)
        self._run.prune(self._keep)

    @contextmanager
    def outlives(self) -> Iterator[None]:
        """When what is in here fails, a checkpoint under way may still be published. No collective call."""
        try:
            yield
        except BaseException:
            if self._pending is not None:
                self._pending.linger(LINGER_S)
            raise

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
        if self._follower is not None:
            self._follower.load(folder / DRAFT, step)

    def _write_state(self, folder: Path, step: int) -> list[Path]:
        (folder / TRAINER).mkdir()
        (folder / STATE_FILE).write_text(json.dumps({"step": step, "task": self._task.state_dict()}))
        return [folder / STATE_FILE, *([] if self._follower is None else self._follower.save(folder / DRAFT))]


class Publication:
    """One checkpoint on its way: a thread on each rank waits for its own files and says what they are; rank 0's waits
    for all of them and publishes.

    It needs no collective call, so nothing that the ranks do in the meantime, a long rollout above all, delays it: a
    run that is killed then goes on from it.
    """

    def __init__(self, draft: Draft, writing: Writing, common: list[Path], board: Board) -> None:
        self.draft, self._writing, self._common, self._board = draft, writing, common, board
        self._own, self._given_up, self._error = threading.Event(), threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="checkpoint-publication", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether nothing is left to do here."""
        return not self._thread.is_alive()

    def wait_for_own(self) -> None:
        """Until this rank's files are on disk and told of. Raises what writing them raised."""
        self._own.wait()
        self._raise()

    def wait(self) -> None:
        """Until it is published, once every rank's `wait_for_own` has come through."""
        self._thread.join()
        self._raise()

    def linger(self, seconds: float) -> None:
        """Wait for at most so long, whatever the other ranks do."""
        self._thread.join(seconds)

    def give_up(self) -> None:
        """Stop waiting for other ranks."""
        self._given_up.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._writing.wait()
            own = {str(f.relative_to(self.draft.folder)): fingerprint(f) for f in (*self._writing.files, *self._common)}
            self._board.tell(own)
            self._own.set()
            if self._board.first:
                files = self._everyones()
                if files is not None:
                    publish_draft(self.draft, files)
        except BaseException as error:  # noqa: BLE001  (raised by the waits)
            self._error = error
        finally:
            self._own.set()

    def _everyones(self) -> dict[str, Fingerprint] | None:
        while (found := self._board.told()) is None:
            if self._given_up.is_set():
                return None
            time.sleep(_LOOK_S)
        merged = {name: print_ for files in found for name, print_ in files.items()}
        return {name: merged[name] for name in sorted(merged)}

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _read_state(file: Path) -> Mapping[str, Any]:
    try:
        state = json.loads(file.read_text())
        return {"step": state["step"], "task": state["task"]}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{file}: no data cursor ({e!r}); resume from another checkpoint") from e
