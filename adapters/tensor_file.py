"""A safetensors writer that needs one tensor at a time and gives the same bytes for the same tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from miles_k3.adapters.update import tensor_bytes

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class Entry(NamedTuple):
    """A tensor of the file; `make` gives it when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, entries: Iterable[Entry]) -> None:
    """Write and fsync a new safetensors file: wider types first, then by name, so every tensor is aligned."""
    ordered = sorted(entries, key=lambda e: (-e.dtype.itemsize, e.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for e in ordered:
        end = offset + e.num_bytes
        header[e.name] = {"dtype": _NAMES[e.dtype], "shape": list(e.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for e in ordered:
            for chunk in tensor_bytes(e.make()):
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
