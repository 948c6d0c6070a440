"""A run's checkpoints on disk: which are whole, how one is published, how one is removed.

A checkpoint is a folder `step-000010` with a manifest of its files' sizes and hashes; without one it isn't there. It is
filled under a name that begins with `.tmp-`, which nobody takes for a checkpoint, flushed and renamed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_k3.errors import CheckpointError
from miles_k3.files import remove_tree, sync_folder, sync_tree
from miles_k3.world import World

log = logging.getLogger(__name__)

MANIFEST = "COMPLETE"
TEMPORARY = ".tmp-"
Fingerprint = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being filled: every rank writes into `folder`, then it becomes `target`."""

    step: int
    folder: Path
    target: Path


def make_draft(target: Path, step: int) -> Draft | None:
    """An empty folder to fill; None where a good checkpoint is there already. A damaged one gives way."""
    if target.exists():
        if not (damage := find_damage(target)):
            log.info("%s is there already", target)
            return None
        log.warning("%s is damaged (%s) and is written anew", target, damage)
        discard(target)
    target.parent.mkdir(exist_ok=True)
    draft = Draft(step, target.parent / f"{TEMPORARY}{target.name}", target)
    remove_tree(draft.folder)
    draft.folder.mkdir()
    return draft


def publish_draft(draft: Draft, files: Mapping[str, Fingerprint]) -> None:
    """Flush what is there, with its manifest, and give it its name. Removes the draft when the system refuses."""
    try:
        content = {"step": draft.step, "files": files}
        (draft.folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
        sync_tree(draft.folder)
    except BaseException:
        remove_tree(draft.folder)
        raise
    draft.folder.rename(draft.target)
    sync_folder(draft.target.parent)


def fingerprints(folder: Path, world: World) -> dict[str, Fingerprint]:
    """Size and hash of each file that any rank sees below `folder`, by name; the ranks share the work.

    A rank sees its own files at once; a network file system may show it those of another host only later.
    """
    seen = world.everywhere(lambda: [str(path.relative_to(folder)) for path in _files_below(folder)])
    mine = []
    for number, name in enumerate(sorted(set().union(*seen))):
        ranks = [rank for rank, names in enumerate(seen) if name in names]
        if ranks[number % len(ranks)] == world.rank:
            mine.append(name)
    parts = world.everywhere(lambda: {name: fingerprint(folder / name) for name in mine})
    merged = {name: print_ for part in parts for name, print_ in part.items()}
    return {name: merged[name] for name in sorted(merged)}


def discard(path: Path) -> None:
    """Remove a folder such that a kill half-way leaves a name that nobody takes for a whole one."""
    doomed = path.parent / f"{TEMPORARY}old-{path.name}"
    remove_tree(doomed)
    path.rename(doomed)
    remove_tree(doomed)


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    named = [(re.fullmatch(r"step-(\d+)", p.name), p) for p in (run / "checkpoints").glob("step-*")]
    return sorted((int(match[1]), path) for match, path in named if match and path.is_dir())


def latest_checkpoint(run: Path) -> tuple[int, Path] | None:
    """The newest checkpoint of the run folder `run` whose files all have the hashes they were written with.

    None before the first. Raises CheckpointError when there are checkpoints but all are damaged.
    """
    found = list_checkpoints(run)
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


def fingerprint(path: Path) -> Fingerprint:
    """Size and hash of one file."""
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
