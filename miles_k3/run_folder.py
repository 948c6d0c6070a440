"""A run's folder: what is in it, who may write it, and how it survives being killed at any moment.

    recipe.yaml                 the resolved recipe
    metrics.jsonl               one line a step
    checkpoints/step-000010/    whole or absent: written elsewhere, flushed to disk, renamed
        COMPLETE                manifest with size and sha256 of every file; no manifest, no checkpoint
    adapter/                    the exported adapter, replaced as a whole
    plots/

Which checkpoint is the newest is read from the folders themselves, so no pointer can be torn. Names that begin with
`.tmp-` are unfinished work of a killed process and are removed by the next writer.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import TracebackType
from typing import Self

from miles_k3.checkpoints import (
    TEMPORARY,
    Draft,
    discard,
    fingerprints,
    latest_checkpoint,
    list_checkpoints,
    make_draft,
    publish_draft,
)
from miles_k3.config import Recipe
from miles_k3.errors import CheckpointError, ConfigError
from miles_k3.files import LOCK, FolderLock, remove_tree, write_text
from miles_k3.recipe import dump_resolved, flatten, load_recipe
from miles_k3.world import ALONE, World

log = logging.getLogger(__name__)

# What a killed process may leave: unfinished files and checkpoints, and an adapter on its way in or out (`save_peft`).
LEFTOVERS = (f"{TEMPORARY}*", f"checkpoints/{TEMPORARY}*", ".adapter.*.tmp", ".adapter.*.old")
# A resumed run may change these: they leave the numbers of the steps to come as they would have been; layout and memory
# do so to within rounding, run.steps while the learning rate doesn't decay towards it.
_RUN = ("name", "folder", "steps", "save_every", "keep_checkpoints", "wandb", "wandb_project", "threads")
_TRAINER = ("recompute", "recompute_sublayers", "distributed_optimizer", "sleep_while_rollout", "async_checkpoint")
RESUMABLE_KEYS = frozenset(
    (*(f"run.{name}" for name in _RUN), *(f"trainer.{name}" for name in _TRAINER), "rollout.sleep_while_training")
)
RESUMABLE_SECTIONS = ("eval.", "trainer.parallel.", "cluster.")


class RunFolder:
    """The folder of one run, held by this process until `close`. Use as a context manager.

    In a run of several ranks each has such an object and calls the same verbs; rank 0 holds the folder and does what is
    to be done in it, and what it meets is every rank's outcome.
    """

    def __init__(self, path: Path, recipe: Recipe, lock: FolderLock | None, world: World = ALONE) -> None:
        self.path, self.recipe, self._lock, self.world = path, recipe, lock, world

    @classmethod
    def create(cls, recipe: Recipe, *, resume: bool = False, world: World = ALONE) -> Self:
        """Take the folder `run.folder/run.name`: a new one, or with `resume` the one of an earlier process.

        Raises ConfigError when the folder is in use, when it holds a run that has begun and `resume` is off, when there
        is nothing to resume, or when the recipe differs from the run's in more than its length, saving, logging,
        evaluation, layout and use of memory.
        """
        locks: list[FolderLock] = []
        path = world.once(lambda: _take(recipe, resume, locks))
        return cls(path, recipe, locks[0] if locks else None, world)

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def keep_recipe(self) -> None:
        """Store the recipe that a resumed run goes on with, once it works. Collective."""
        self.world.once(lambda: write_text(self.path / "recipe.yaml", dump_resolved(self.recipe)))

    def begin_checkpoint(self, step: int) -> Draft | None:
        """An empty folder for every rank to write into. Collective.

        None where a good checkpoint of `step` is there, since a run that comes by again has the same one to write.
        """
        return self.world.once(lambda: make_draft(self._checkpoint_path(step), step))

    def commit_checkpoint(self, draft: Draft) -> Path:
        """Publish what the ranks have written into the draft. Collective: nothing is published before all have come."""
        files = fingerprints(draft.folder, self.world)
        self.world.once(lambda: publish_draft(draft, files))
        return draft.target

    def drop_checkpoint(self, draft: Draft) -> None:
        """Remove what was written so far, where writing failed. Not collective."""
        if self.world.first:
            remove_tree(draft.folder)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The newest checkpoint whose files all have the hashes they were written with; None before the first.

        Collective. Raises CheckpointError when there are checkpoints but all are damaged: starting over would lose the
        run.
        """

        def find() -> tuple[int, Path] | None:
            newest = latest_checkpoint(self.path)
            for step, path in list_checkpoints(self.path):
                if newest and step > newest[0]:  # damaged: out of the way of the one that will be written in its place
                    path.rename(path.with_name(f"damaged-{path.name}"))
            return newest

        return self.world.once(find)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints. Collective."""

        def remove() -> None:
            for _, path in list_checkpoints(self.path)[:-keep] if keep > 0 else []:
                discard(path)

        self.world.once(remove)

    def truncate_metrics(self, step: int) -> int:
        """Drop the lines of steps after `step`, and a torn last line, before a resumed run writes them again.

        Returns the number of lines dropped; -1 for `step` drops all. Raises CheckpointError on a line that isn't ours.
        """
        if not self.metrics_path.exists():
            return 0
        whole, _, torn = self.metrics_path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        lines = whole.splitlines()
        kept = [line for number, line in enumerate(lines, 1) if _step_of(line, self.metrics_path, number) <= step]
        write_text(self.metrics_path, "".join(f"{line}\n" for line in kept))
        return len(lines) - len(kept) + bool(torn)

    def close(self) -> None:
        """Let others write the folder."""
        if self._lock is not None:
            self._lock.release()

    def _checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _take(recipe: Recipe, resume: bool, locks: list[FolderLock]) -> Path:
    """The run's folder, locked; the lock goes into `locks`, since only this process can hold it."""
    path = Path(recipe.run.folder).expanduser().absolute() / recipe.run.name
    stored = path / "recipe.yaml"
    if resume and not stored.is_file():
        raise ConfigError(f"{path} holds no run to resume; start it without --resume, or check run.folder and run.name")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; choose another run.name or run.folder")
    if not stored.is_file() and (found := _foreign_files(path)):
        raise ConfigError(f"{path} holds other files ({', '.join(found[:3])}); choose another run.name or run.folder")
    lock = FolderLock.take(path)
    try:
        if resume:
            _refuse_differences(load_recipe(stored).recipe, recipe, stored)
        elif stored.is_file() and _has_begun(path):
            raise ConfigError(f"{path} already holds a run; go on with it by --resume, or choose another run.name")
        for leftover in [found for pattern in LEFTOVERS for found in path.glob(pattern)]:
            log.info("removing %s, left behind by a killed process", leftover)
            remove_tree(leftover)
        if not resume:  # else `keep_recipe` does, so that a refused layout or a missing file leaves the run's own
            write_text(stored, dump_resolved(recipe))
    except BaseException:
        lock.release()
        raise
    locks.append(lock)
    return path


def _foreign_files(path: Path) -> list[str]:
    """Names in a folder that no unstarted run would have left there."""
    return (
        sorted(p.name for p in path.iterdir() if p.name != LOCK and not p.name.startswith(TEMPORARY))
        if path.is_dir()
        else []
    )


def _has_begun(path: Path) -> bool:
    """Whether there is anything to lose: a run that failed at its start, say on a missing shard, leaves its place."""
    metrics = path / "metrics.jsonl"
    measured = metrics.exists() and metrics.stat().st_size > 0
    return measured or (path / "adapter").exists() or any((path / "checkpoints").glob("*"))


def _refuse_differences(stored: Recipe, given: Recipe, file: Path) -> None:
    old, new = dict(flatten(stored.model_dump())), dict(flatten(given.model_dump()))
    problems = [
        f"{key}: the run in {file.parent} has {old.get(key)!r}, the recipe {new.get(key)!r}; a run keeps its own"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in RESUMABLE_KEYS and not key.startswith(RESUMABLE_SECTIONS)
    ]
    if given.trainer.lr_decay != "constant" and given.run.steps != stored.run.steps:
        problems.append(
            f"run.steps: the run in {file.parent} has {stored.run.steps}, the recipe {given.run.steps}; with "
            f"trainer.lr_decay {given.trainer.lr_decay} it decides every learning rate, so a run keeps it"
        )
    if problems:
        raise ConfigError([*problems, f"to go on with other values all the same, change them in {file} too"])


def _step_of(line: str, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}:{number}: not a line of metrics ({line[:60]!r}); remove it to resume") from None
