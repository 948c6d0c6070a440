"""Safetensors shards in and out, one tensor in memory at a time; every error names the file and the tensor."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles_k3.errors import CheckpointError
from miles_k3.k3.params import DType, Param

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TORCH_DTYPE = {DType.BF16: torch.bfloat16, DType.F32: torch.float32, DType.U8: torch.uint8}
HEADER_LIMIT = 100_000_000  # bytes; a longer header is a torn or foreign file


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a shard's header says of one tensor; `file` is the shard's name within the folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Names, dtypes and shapes of one shard, without its data. Raises CheckpointError on a missing or torn file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > HEADER_LIMIT:
                raise CheckpointError(f"{path}: header of {length} bytes; not a safetensors file, copy it again")
            raw = json.loads(f.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: shard is missing; copy it from the checkpoint's source") from None
    except (struct.error, ValueError) as e:
        raise CheckpointError(f"{path}: torn safetensors header ({e}); copy the file again") from None
    raw.pop("__metadata__", None)
    end = 8 + length + max((t["data_offsets"][1] for t in raw.values()), default=0)
    if end != size:
        raise CheckpointError(
            f"{path}: {size} bytes on disk, its header speaks of {end}; the file is truncated, copy it again"
        )
    return {name: TensorHeader(path.name, t["dtype"], tuple(t["shape"])) for name, t in raw.items()}


class Checkpoint:
    """A folder of safetensors shards, opened lazily; `headers` lists every tensor."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.headers: dict[str, TensorHeader] = {}
        for file in self._shards():
            self.headers.update(read_header(self.folder / file))
        self._check_index()
        self._stack, self._open = ExitStack(), {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._open.clear()

    def _weight_map(self) -> Mapping[str, str] | None:
        path = self.folder / INDEX
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text())["weight_map"]
        except (ValueError, KeyError) as e:
            raise CheckpointError(f"{path}: not a safetensors index ({e}); copy the file again") from None

    def _shards(self) -> list[str]:
        weight_map = self._weight_map()
        if weight_map is not None:
            return sorted(set(weight_map.values()))
        if (self.folder / SINGLE).exists():
            return [SINGLE]
        raise CheckpointError(f"{self.folder}: neither {INDEX} nor {SINGLE}; expected a Hugging Face checkpoint folder")

    def _check_index(self) -> None:
        lost = [n for n in self._weight_map() or () if n not in self.headers]
        if lost:
            raise CheckpointError(
                f"{self.folder / INDEX}: names {_some(lost)}, which no shard holds; copy the shards again"
            )

    def check(self, params: Iterable[Param]) -> list[str]:
        """Every disagreement with the parameter table, as sentences; vision tensors may be absent altogether."""
        known, problems, missing_vision = set(), [], []
        for p in params:
            known.add(p.name)
            if p.name in self.headers:
                problems += self._mismatch(p)
            elif p.name.startswith(("vision_tower.", "mm_projector.")):
                missing_vision.append(p.name)
            else:
                problems.append(f"{self.folder}: tensor {p.name} is missing")
        if missing_vision and any(n.startswith(("vision_tower.", "mm_projector.")) for n in self.headers):
            problems.append(f"{self.folder}: some vision tensors are there but {_some(missing_vision)} missing")
        foreign = [n for n in self.headers if n not in known]
        if foreign:
            problems.append(f"{self.folder}: unknown tensors {_some(foreign)}; the model has no place for them")
        return problems

    def _mismatch(self, p: Param) -> list[str]:
        h = self.headers[p.name]
        out = []
        if h.dtype != p.dtype:
            out.append(f"{self.folder / h.file}: tensor {p.name} is {h.dtype}, expected {p.dtype}")
        if h.shape != p.shape:
            out.append(f"{self.folder / h.file}: tensor {p.name} has shape {list(h.shape)}, expected {list(p.shape)}")
        return out

    def read(self, p: Param) -> Tensor:
        """One tensor, memory-mapped. Raises CheckpointError when it isn't what the parameter table says."""
        header = self.headers.get(p.name)
        if header is None:
            raise CheckpointError(f"{self.folder}: tensor {p.name} is missing")
        if problems := self._mismatch(p):
            raise CheckpointError("; ".join(problems))
        path = self.folder / header.file
        try:
            if header.file not in self._open:
                self._open[header.file] = self._stack.enter_context(safe_open(path, framework="pt"))
            return self._open[header.file].get_tensor(p.name)
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{path}: tensor {p.name} can't be read ({e}); copy the file again") from None


def write_checkpoint(folder: str | Path, params: Sequence[Param], get: Callable[[Param], Tensor], *,
                     shard_bytes: int = 16 * 10**9, extra_files: Mapping[str, str] | None = None) -> None:  # fmt: skip
    """Stream tensors into shards with an index; the folder appears whole or not at all.

    `get` makes one tensor at a time, written and dropped before the next is asked for. `extra_files` (config.json,
    tokenizer, ...) maps names to texts. Raises CheckpointError when the folder exists or a tensor is not as tabled.
    """
    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; name a new folder or remove it")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards = list(_plan(params, shard_bytes))
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(partial / name, shard, get)
        weight_map.update({p.name: name for p in shard})
    total = sum(p.num_bytes for p in params)
    files = {INDEX: json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)}
    for name, text in {**files, **(extra_files or {})}.items():
        _write_durably(partial / name, [text.encode()])
    os.rename(partial, folder)


def _plan(params: Sequence[Param], shard_bytes: int) -> Iterator[list[Param]]:
    shard: list[Param] = []
    size = 0
    for p in params:
        if shard and size + p.num_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(p)
        size += p.num_bytes
    if shard:
        yield shard


def _write_shard(path: Path, shard: Sequence[Param], get: Callable[[Param], Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for p in shard:
        header[p.name] = {"dtype": p.dtype.value, "shape": list(p.shape), "data_offsets": [at, at + p.num_bytes]}
        at += p.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(text))
        yield text
        for p in shard:
            yield _bytes_of(p, get(p), path)

    _write_durably(path, pieces())


def _bytes_of(p: Param, tensor: Tensor, path: Path) -> memoryview:
    if tuple(tensor.shape) != p.shape or tensor.dtype != TORCH_DTYPE[p.dtype]:
        raise CheckpointError(
            f"{path}: tensor {p.name} would be written as {tensor.dtype} {list(tensor.shape)}, expected {p.dtype} {list(p.shape)}"
        )
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    with path.open("wb") as f:
        for piece in pieces:
            f.write(piece)
        f.flush()
        os.fsync(f.fileno())


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
