"""A checkpoint written shard by shard, which a killed or refused process leaves in a state to go on from.

The work lies in `<folder>.partial`: the plan, whole shards (written aside, flushed, renamed), and a note beside each
with its size, its hash and what the maker wants kept. It gets its name when everything is there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from miles_k3.checkpoints import fingerprint
from miles_k3.errors import CheckpointError, ConfigError
from miles_k3.files import LOCK, FolderLock, remove_tree, sync_folder, write_text
from miles_k3.k3.params import Param
from miles_k3.k3.safetensors_header import encode_header
from miles_k3.k3.safetensors_io import INDEX, TORCH_DTYPE, NewFile, disk_errors, plan_shards, shard_names

log = logging.getLogger(__name__)

PLAN = "plan.json"
_NOTE = "note-{}.json"
_AGAIN = "go on with --resume once there is room; what is written stays"
Pieces = Callable[[Param], Iterator[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file and the tensors in it."""

    name: str
    params: Sequence[Param]

    @property
    def num_bytes(self) -> int:
        return sum(p.num_bytes for p in self.params)


class ShardedFolder:
    """The folder that is being written, held by this process. Use as a context manager.

    `plan` says what is written; going on is refused where it was another one. Raises ConfigError when `folder` exists,
    when unfinished work is there and `resume` is off, and when another process is at it.
    """

    def __init__(
        self, folder: Path, params: Iterable[Param], plan: Mapping[str, Any], *, shard_bytes: int, resume: bool
    ) -> None:
        self.folder, self.partial = folder, folder.with_name(folder.name + ".partial")
        groups = list(plan_shards(params, shard_bytes))
        names = shard_names(len(groups))
        self.shards = [Shard(name=n, params=g) for n, g in zip(names, groups, strict=True)]
        if os.path.lexists(folder):
            raise ConfigError(f"{folder} exists already; name a new folder, or remove it")
        if self.partial.exists() and not resume:
            raise ConfigError(
                f"{self.partial} holds an export that was interrupted; go on with --resume, or remove it to start anew"
            )
        with disk_errors(str(self.partial)):
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock.take(self.partial, "another folder")
        try:
            self._keep_plan({**plan, "shards": {s.name: s.num_bytes for s in self.shards}})
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def write(self, pieces: Pieces, kept: Callable[[], Any], metadata: Mapping[str, str],
              told: Callable[[Shard], None]) -> Iterator[Any]:  # fmt: skip
        """Write the shards that aren't there; for each the note, in order: what `kept` gave after it, then or now.

        `pieces` gives a tensor's rows, some at a time; they are written and dropped. Raises CheckpointError when the
        disk refuses; whole shards stay.
        """
        notes = {shard.name: self._note(shard) for shard in self.shards}
        self._refuse_full_disk(sum(shard.num_bytes for shard in self.shards if notes[shard.name] is None))
        for shard in self.shards:
            note = notes[shard.name]
            if note is None:
                print_ = self._write_shard(shard, pieces, metadata)
                note = {"file": print_, "kept": kept()}
                with disk_errors(str(self.partial)):
                    write_text(self._note_path(shard), json.dumps(note))
            told(shard)
            yield note["kept"]

    def write_file(self, name: str, text: str) -> None:
        """A small file beside the shards."""
        with disk_errors(str(self.partial / name)):
            write_text(self.partial / name, text)

    def write_index(self) -> None:
        """The index of Hugging Face checkpoints."""
        total = sum(shard.num_bytes for shard in self.shards)
        weight_map = {p.name: shard.name for shard in self.shards for p in shard.params}
        self.write_file(INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))

    def copy_file(self, source: Path) -> None:
        """A file of the base, as it is."""
        target = self.partial / source.name
        with disk_errors(str(target)):
            temporary = target.with_name(f".tmp-{source.name}")
            shutil.copyfile(source, temporary)
            descriptor = os.open(temporary, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            temporary.replace(target)

    def fingerprints(self) -> dict[str, Any]:
        """Size and hash of each shard, as noted when it was written."""
        return {shard.name: json.loads(self._note_path(shard).read_text())["file"] for shard in self.shards}

    def publish(self) -> None:
        """Everything is there: drop the notes and give the folder its name."""
        with disk_errors(str(self.folder)):
            for path in [self._note_path(shard) for shard in self.shards] + [self.partial / PLAN, self.partial / LOCK]:
                path.unlink(missing_ok=True)
            for path in self.partial.glob(".tmp-*"):
                remove_tree(path)
            sync_folder(self.partial)
            self.partial.rename(self.folder)
            sync_folder(self.folder.parent)

    # --- inside -------------------------------------------------------------------------------------------------
    def _keep_plan(self, plan: Mapping[str, Any]) -> None:
        path = self.partial / PLAN
        if path.exists():
            try:
                found = json.loads(path.read_text())
            except ValueError:
                found = {}
            if other := [key for key in plan if found.get(key) != json.loads(json.dumps(plan[key]))]:
                raise ConfigError(
                    f"{self.partial} was begun with another {', '.join(other)}; export the same as then, or remove it"
                )
            return
        if foreign := sorted(
            p.name for p in self.partial.iterdir() if p.name != LOCK and not p.name.startswith(".tmp-")
        ):
            raise ConfigError(f"{self.partial} holds other files ({', '.join(foreign[:3])}); choose another folder")
        with disk_errors(str(path)):
            write_text(path, json.dumps(plan, indent=1))

    def _note_path(self, shard: Shard) -> Path:
        return self.partial / _NOTE.format(shard.name)

    def _note(self, shard: Shard) -> Mapping[str, Any] | None:
        """What was noted of a shard that is there as it was written."""
        try:
            note = json.loads(self._note_path(shard).read_text())
            if fingerprint(self.partial / shard.name) == note["file"]:
                log.info("%s is there already", shard.name)
                return note
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            pass
        log.warning("%s is not as it was written and is made again", self.partial / shard.name)
        return None

    def _refuse_full_disk(self, needed: int) -> None:
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise CheckpointError(f"{self.partial}: needs {needed:,} more bytes, its disk has {free:,} free; {_AGAIN}")

    def _write_shard(self, shard: Shard, pieces: Pieces, metadata: Mapping[str, str]) -> dict[str, Any]:
        temporary = self.partial / f".tmp-{shard.name}"
        temporary.unlink(missing_ok=True)
        digest, size = hashlib.sha256(), 0
        try:
            with NewFile(temporary) as file:
                header = encode_header(((p.name, p.dtype.value, p.shape, p.num_bytes) for p in shard.params), metadata)
                for data, what in _chunks(header, shard, pieces):
                    digest.update(data)
                    size += len(data)
                    file.write(data, what)
            with disk_errors(str(temporary)):
                temporary.rename(self.partial / shard.name)
                sync_folder(self.partial)
        except CheckpointError as error:
            temporary.unlink(missing_ok=True)  # it would keep what a full disk lacks
            if isinstance(error.__cause__, OSError):
                raise CheckpointError(f"{error}; {_AGAIN}") from error.__cause__
            raise
        return {"size": size, "sha256": digest.hexdigest()}


def _chunks(header: bytes, shard: Shard, pieces: Pieces) -> Iterator[tuple[bytes | memoryview, str]]:
    yield header, ""
    for p in shard.params:
        written = 0
        for piece in pieces(p):
            assert piece.dtype == TORCH_DTYPE[p.dtype], f"{p.name} came in {piece.dtype}"
            data = memoryview(piece.detach().contiguous().view(-1).view(torch.uint8).numpy())
            written += len(data)
            yield data, f": tensor {p.name}"
        assert written == p.num_bytes, f"{p.name} came with {written} bytes, expected {p.num_bytes}"
