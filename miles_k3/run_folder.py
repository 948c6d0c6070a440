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

import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from miles_k3.config import Recipe
from miles_k3.errors import CheckpointError, ConfigError
from miles_k3.files import LOCK, FolderLock, remove_tree, sync_folder, sync_tree, write_text
from miles_k3.recipe import dump_resolved, flatten, load_recipe

log = logging.getLogger(__name__)

MANIFEST = "COMPLETE"
TEMPORARY = ".tmp-"
# What a killed process may leave: unfinished files and checkpoints, and an adapter on its way in or out (`save_peft`).
LEFTOVERS = (f"{TEMPORARY}*", f"checkpoints/{TEMPORARY}*", ".adapter.*.tmp", ".adapter.*.old")
# A resumed run may change these: they leave the numbers of the steps to come as they would have been (run.steps does so
# while the learning rate doesn't decay towards it).
RESUMABLE_KEYS = frozenset(
    f"run.{name}"
    for name in ("name", "folder", "steps", "save_every", "keep_checkpoints", "wandb", "wandb_project", "threads")
)
RESUMABLE_SECTIONS = ("eval.",)


class RunFolder:
    """The folder of one run, held by this process until `close`. Use as a context manager."""

    def __init__(self, path: Path, recipe: Recipe, lock: FolderLock) -> None:
        self.path, self.recipe, self._lock = path, recipe, lock

    @classmethod
    def create(cls, recipe: Recipe, *, resume: bool = False) -> Self:
        """Take the folder `run.folder/run.name`: a new one, or with `resume` the one of an earlier process.

        Raises ConfigError when the folder is in use, when it holds a run that has begun and `resume` is off, when there
        is nothing to resume, or when the recipe differs from the run's in more than its length, saving, logging and
        evaluation.
        """
        path = Path(recipe.run.folder).expanduser().absolute() / recipe.run.name
        stored = path / "recipe.yaml"
        if resume and not stored.is_file():
            raise ConfigError(
                f"{path} holds no run to resume; start it without --resume, or check run.folder and run.name"
            )
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; choose another run.name or run.folder")
        if not stored.is_file() and (found := _foreign_files(path)):
            raise ConfigError(
                f"{path} holds other files ({', '.join(found[:3])}); choose another run.name or run.folder"
            )
        lock = FolderLock.take(path)
        try:
            if resume:
                _refuse_differences(load_recipe(stored).recipe, recipe, stored)
            elif stored.is_file() and _has_begun(path):
                raise ConfigError(f"{path} already holds a run; go on with it by --resume, or choose another run.name")
            for leftover in [found for pattern in LEFTOVERS for found in path.glob(pattern)]:
                log.info("removing %s, left behind by a killed process", leftover)
                remove_tree(leftover)
            write_text(stored, dump_resolved(recipe))
        except BaseException:
            lock.release()
            raise
        return cls(path, recipe, lock)

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

    def write_checkpoint(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill an empty folder and publish it as the checkpoint of `step`: whole, or not at all.

        A good checkpoint of the same step is kept as it is, since a run that comes by again has the same one to write.
        """
        target = self.checkpoints / f"step-{step:06d}"
        if target.exists():
            if not (damage := find_damage(target)):
                log.info("%s is there already", target)
                return target
            log.warning("%s is damaged (%s) and is written anew", target, damage)
            self._discard(target)
        return self._publish(target, write, step)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The newest checkpoint whose files all have the hashes they were written with; None before the first.

        Raises CheckpointError when there are checkpoints but all are damaged: starting over would lose the run.
        """
        newest = latest_checkpoint(self.path)
        for step, path in _list_checkpoints(self.path):
            if newest and step > newest[0]:  # damaged: out of the way of the one that will be written in its place
                path.rename(path.with_name(f"damaged-{path.name}"))
        return newest

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints."""
        for _, path in _list_checkpoints(self.path)[:-keep] if keep > 0 else []:
            self._discard(path)

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
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _publish(self, target: Path, write: Callable[[Path], None], step: int) -> Path:
        target.parent.mkdir(exist_ok=True)
        temporary = target.parent / f"{TEMPORARY}{target.name}"
        remove_tree(temporary)
        temporary.mkdir()
        try:
            write(temporary)
            content = {"step": step, "files": _fingerprints(temporary)}
            (temporary / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
            sync_tree(temporary)
        except BaseException:
            remove_tree(temporary)
            raise
        temporary.rename(target)
        sync_folder(target.parent)
        return target

    def _discard(self, path: Path) -> None:
        """Remove a folder such that a kill half-way leaves a name that nobody takes for a whole one."""
        doomed = path.parent / f"{TEMPORARY}old-{path.name}"
        remove_tree(doomed)
        path.rename(doomed)
        remove_tree(doomed)


def latest_checkpoint(run: Path) -> tuple[int, Path] | None:
    """`RunFolder.latest_checkpoint` for readers that don't hold the run."""
    found = _list_checkpoints(run)
    for step, path in reversed(found):
        if not (damage := find_damage(path)):
            return step, path
        log.warning("%s is ignored: %s", path, damage)
    if found:
        raise CheckpointError(
            f"{run / 'checkpoints'}: all {len(found)} checkpoints are damaged, so the run can't go on from any; "
            "bring one back from a copy, or start again under another run.name"
        )
    return None


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder; None when every file is as it was written."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST} file, so it was never finished"
    except (ValueError, KeyError, TypeError):
        return f"its {MANIFEST} file can't be read"
    try:
        return _compare(files, checkpoint)
    except OSError as error:
        return f"it can't be read ({error})"


def _compare(files: dict, checkpoint: Path) -> str | None:
    present = {
        name: path for path in _files_below(checkpoint) if (name := str(path.relative_to(checkpoint))) != MANIFEST
    }
    for name in sorted(files.keys() | present.keys()):
        if name not in present:
            return f"{name} is missing"
        if name not in files:
            return f"{name} was not there when it was written"
        if (size := present[name].stat().st_size) != files[name]["size"]:
            return f"{name} has {size} bytes instead of {files[name]['size']}"
    for name, path in present.items():
        if _sha256(path) != files[name]["sha256"]:
            return f"{name} has other content than was written"
    return None


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


def _list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    named = [(re.fullmatch(r"step-(\d+)", p.name), p) for p in (run / "checkpoints").glob("step-*")]
    return sorted((int(match[1]), path) for match, path in named if match and path.is_dir())


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


def _fingerprints(folder: Path) -> dict[str, dict[str, int | str]]:
    return {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in _files_below(folder)
    }


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
