"""What a safetensors shard says of itself, checked against the file's size without reading the data."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from miles_k3.errors import CheckpointError

HEADER_LIMIT = 100_000_000  # bytes; a longer header is a torn or foreign file
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
          "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}  # fmt: skip
_AGAIN = "copy the file again"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a shard's header says of one tensor; `file` is the shard's name within the folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Names, dtypes and shapes of one shard. Raises CheckpointError when it is missing, torn or truncated."""
    try:
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(HEADER_LIMIT, size - 8):
                raise CheckpointError(_bad_length(path, size, length))
            text = f.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: shard is missing; copy it from the checkpoint's source") from None
    except OSError as e:
        raise CheckpointError(f"{path}: can't be read ({e.strerror}); check the path and its permissions") from None
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: torn safetensors header ({e}); {_AGAIN}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: its header is no table of tensors; {_AGAIN}")
    raw.pop("__metadata__", None)
    problems = [p for name, entry in raw.items() if (p := _entry_problem(entry, name))]
    problems = problems or _layout_problems(raw, size - 8 - length)
    if problems:
        raise CheckpointError(shown([f"{path}: {p}; {_AGAIN}" for p in problems]))
    return {n: TensorHeader(path.name, sys.intern(t["dtype"]), tuple(t["shape"])) for n, t in raw.items()}


def shown(problems: Sequence[str], most: int = 20) -> str:
    """One problem a line: the first ones, then how many more there are."""
    more = [f"... and {len(problems) - most:,} more problems like these"] if len(problems) > most else []
    return "\n".join([*problems[:most], *more])


def _bad_length(path: Path, size: int, length: int) -> str:
    if size < 8:
        return f"{path}: {size} bytes, too short for a safetensors file; the copy broke off, {_AGAIN}"
    if length > HEADER_LIMIT:
        return f"{path}: no safetensors file (perhaps a Git LFS pointer or an error page); {_AGAIN}"
    return f"{path}: its header has {length} bytes, the file only {size}; the file is truncated, {_AGAIN}"


def _entry_problem(entry: Any, name: str) -> str | None:
    """Judge one tensor's entry: its form, and whether its bytes are as many as its shape needs."""
    torn = f"tensor {name} has a torn entry in the header"
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        return torn
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers):
        return torn
    needed = prod(shape) * _BYTES.get(dtype, 0)
    if dtype in _BYTES and end - begin != needed:
        return f"tensor {name} has {end - begin} bytes, but {dtype} {shape} needs {needed}"
    return None


def _layout_problems(raw: dict[str, Any], available: int) -> list[str]:
    """The tensors must follow each other without holes or overlaps and end where the file ends.

    A name that the header has twice shows as a hole: JSON keeps the last of the two.
    """
    ranges = sorted((*t["data_offsets"], name) for name, t in raw.items())
    out, reached = [], 0
    for begin, end, name in ranges:
        if begin != reached:
            out.append(f"tensor {name} begins at byte {begin} of the data, not at {reached}")
        if end > available:
            return [*out, f"the file is truncated: {available} of {ranges[-1][1]} bytes of data, cut in tensor {name}"]
        reached = end
    if not out and available > reached:
        out.append(f"{available} bytes of data, its header speaks of {reached}")
    return out


def read_metadata(path: Path) -> dict[str, str]:
    """The free text fields of a shard that `read_header` found whole."""
    with path.open("rb") as f:
        return json.loads(f.read(int.from_bytes(f.read(8), "little"))).get("__metadata__", {})


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes before the data: `tensors` gives (name, dtype, shape, bytes) in the order in which the data follows."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, dtype, shape, num_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
