"""Disks, the files of a model folder and the files of a run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles_k3.checkpoints import TEMPORARY, find_damage, list_checkpoints
from miles_k3.findings import Findings
from miles_k3.k3.safetensors_io import INDEX, SINGLE

TRIED_BYTES = 64 << 20
SLOW_BYTES_S = 100e6
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = (".incomplete", ".part", ".tmp", ".partial", ".download", ".aria2", ".crdownload")
_AGAIN = "copy it again from the checkpoint's source"


def check_disk_speed(found: Findings, folder: Path, size: int = TRIED_BYTES) -> None:
    """Write, flush and read back a file in `folder`, or in the nearest folder above it that exists."""
    while not folder.exists():
        folder = folder.parent
    path = folder / f"{TEMPORARY}doctor-{os.getpid()}"
    block = os.urandom(1 << 20)
    try:
        start = time.perf_counter()
        with path.open("xb", buffering=0) as file:
            for _ in range(size >> 20):
                file.write(block)
            os.fsync(file.fileno())
            written = size / (time.perf_counter() - start)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
        read = size / (time.perf_counter() - start)
    except OSError as error:
        found.fail("disk speed", f"{folder} can't be written ({error.strerror})",
                   "free some space, change its permissions, or choose another run.folder")  # fmt: skip
        return
    finally:
        path.unlink(missing_ok=True)
    text = f"{folder}: {written / 1e6:.0f} MB/s written and flushed, {read / 1e6:.0f} MB/s read"
    if written < SLOW_BYTES_S:
        found.warn("disk speed", text, "checkpoints will take long; choose a faster run.folder")
    else:
        found.add("disk speed", True, f"{text}, {shutil.disk_usage(folder).free / 1e9:.0f} GB free")


def check_model_files(found: Findings, folder: Path, *, hashes: bool) -> None:
    """What the tensors' headers don't show: leftovers, shards that no index names, and contents by known hashes.

    Hashes come from export.json, SHA256SUMS, and what Hugging Face's downloads keep; they are compared with `hashes`.
    """
    if not folder.is_dir():
        return  # the question after the model has said so
    for path in sorted(folder.iterdir()):
        if path.suffix in _UNFINISHED or path.name.startswith(TEMPORARY):
            found.fail("model files", f"{path.name} is an unfinished copy", f"remove it, and {_AGAIN}")
        elif path.is_symlink() and not path.exists():
            found.fail("model files", f"{path.name} is a link to nothing ({path.readlink()})", _AGAIN)
    if stray := _stray_shards(folder):
        found.fail("model files", f"{', '.join(stray[:5])}: no entry of {INDEX} names them",
                   "copy the index again, or remove them")  # fmt: skip
    known = dict(_known_hashes(folder))
    size = sum((folder / name).stat().st_size for name in known)
    if not known:
        found.add("hashes", True, "none known (no export.json, SHA256SUMS or Hugging Face download notes)")
    elif not hashes:
        found.add("hashes", True, f"known of {len(known)} files; --hashes compares them ({size / 1e9:.1f} GB to read)")
    else:
        wrong = [name for name, sha256 in sorted(known.items()) if _sha256(folder / name) != sha256]
        for name in wrong:
            found.fail("hashes", f"{folder / name} has other content than its source", _AGAIN)
        if not wrong:
            found.add("hashes", True, f"{len(known)} files have the content of their source")


def check_run_files(found: Findings, run: Path) -> None:
    """Checkpoints by their hashes, metrics by their lines, what a killed process left."""
    checkpoints = list_checkpoints(run)
    damaged = {path.name: damage for _, path in checkpoints if (damage := find_damage(path))}
    for name, damage in damaged.items():
        newest = name == checkpoints[-1][1].name
        way = "--resume goes on from an older one" if len(damaged) < len(checkpoints) else "bring one back from a copy"
        judge = found.fail if newest or len(damaged) == len(checkpoints) else found.warn
        judge("checkpoints", f"{name}: {damage}", way)
    if checkpoints and not damaged:
        steps = ", ".join(str(step) for step, _ in checkpoints)
        found.add("checkpoints", True, f"steps {steps}: all files as they were written")
    elif not checkpoints:
        found.add("checkpoints", True, "none yet")
    _check_metrics(found, run / "metrics.jsonl")
    if left := sorted(p.name for folder in (run, run / "checkpoints") for p in folder.glob(f"{TEMPORARY}*")):
        found.warn(
            "leftovers", f"{', '.join(left[:5])} of a killed process", "the next `miles-k3 train --resume` removes them"
        )


def check_adapter(found: Findings, folder: Path, model: Any) -> None:
    """A PEFT folder against the model's config: names, shapes, values, hash."""
    from miles_k3.adapters.peft_read import PeftReader

    with found.asking("adapter"), PeftReader(folder, model) as adapter:
        sha256 = adapter.verify()
        shape = adapter.config
        found.add("adapter", True, f"{folder}: rank {shape.rank}, alpha {shape.alpha:g}, sha256 {sha256[:12]}, whole")


def _check_metrics(found: Findings, path: Path) -> None:
    if not path.is_file():
        return
    lines = path.read_bytes().split(b"\n")
    bad = [number for number, line in enumerate(lines[:-1], 1) if not _is_metrics(line)]
    if bad:
        found.fail("metrics", f"{path}:{bad[0]} is no line of metrics ({len(bad)} such lines)", "remove it to resume")
    elif lines[-1]:
        found.warn("metrics", f"the last line of {path} is torn", "--resume drops it")
    else:
        found.add("metrics", True, f"{len(lines) - 1} lines")


def _is_metrics(line: bytes) -> bool:
    try:
        return type(json.loads(line)["step"]) is int
    except (ValueError, KeyError, TypeError):
        return False


def _stray_shards(folder: Path) -> list[str]:
    """Shards of the checkpoint's own naming that the index doesn't mention."""
    try:
        named = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # the weights' question has said so
    return sorted(p.name for p in folder.glob("model*.safetensors") if p.name not in named and p.name != SINGLE)


def _known_hashes(folder: Path) -> Iterator[tuple[str, str]]:
    """(file, sha256) as far as somebody wrote them down; later ones win."""
    for path in folder.iterdir():
        if path.is_symlink() and _SHA256.fullmatch(path.readlink().name) and path.exists():
            yield path.name, path.readlink().name  # Hugging Face's cache names blobs so
    for note in (folder / ".cache" / "huggingface" / "download").glob("*.metadata"):
        words = note.read_text(errors="replace").split()
        name = note.name.removesuffix(".metadata")
        if len(words) > 1 and _SHA256.fullmatch(words[1]) and (folder / name).is_file():
            yield name, words[1]
    yield from _listed_hashes(folder)


def _listed_hashes(folder: Path) -> Iterator[tuple[str, str]]:
    if (sums := folder / "SHA256SUMS").is_file():
        for line in sums.read_text(errors="replace").splitlines():
            sha256, _, name = line.partition(" ")
            name = name.strip().removeprefix("*").removeprefix("./")
            if _SHA256.fullmatch(sha256) and (folder / name).is_file():
                yield name, sha256
    try:
        files = json.loads((folder / "export.json").read_text())["files"]
        yield from ((name, note["sha256"]) for name, note in files.items() if (folder / name).is_file())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
