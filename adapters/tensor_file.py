"""A safetensors writer that needs one tensor at a time and gives the same bytes for the same tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from miles_k3.k3.safetensors_header import encode_header

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_PIECE_BYTES = 64 << 20  # host memory that writing a device tensor takes at most


class Entry(NamedTuple):
    """A tensor of the file; `make` gives it when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> None:
    """Write and fsync a new safetensors file: wider types first, then by name, so every tensor is aligned."""
    ordered = sorted(entries, key=lambda e: (-e.dtype.itemsize, e.name))
    header = encode_header(((e.name, _NAMES[e.dtype], e.shape, e.num_bytes) for e in ordered), metadata)
    with path.open("xb") as file:
        file.write(header)
        for e in ordered:
            for chunk in _pieces(e.make()):
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, without a second copy of a CPU tensor."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _PIECE_BYTES):
        yield memoryview(flat[start : start + _PIECE_BYTES].cpu().numpy())
