"""What recorded steps read: tensors that stay where they are, views of one buffer that one copy fills.

Shapes: B requests, T the tier, P pages a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = Mapping[str, NDArray[Any]]


def tiers_of(most: int) -> list[int]:
    """Numbers of rows that are recorded, up to `most`: padding is at most half of what runs."""
    steps = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256]
    steps += range(320, most, 64)
    return [t for t in steps if t < most] + [most]


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """Numbers of the device on their way to the host, in one copy."""

    _host: Tensor
    _event: torch.cuda.Event | None

    @classmethod
    def of(cls, numbers: Tensor) -> Fetched:
        event, host = None, numbers.to("cpu", non_blocking=True)
        if numbers.is_cuda:
            event = torch.cuda.Event()
            event.record()
        return cls(host, event)

    def wait(self) -> NDArray[Any]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


@dataclass(frozen=True, slots=True)
class Field:
    """`padding`: what stands where nothing was given, a number or a whole array."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    padding: int | NDArray[np.int64] = 0


class StaticInputs:
    """A tier's inputs by name, `on_device` for its graphs and filled from the host."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        self._fields, places, size = dict(fields), dict[str, slice](), 0
        for name, field in fields.items():
            num_bytes = int(np.prod(field.shape)) * field.dtype.itemsize
            places[name] = slice(size, size + num_bytes)
            size += -(-num_bytes // 16) * 16  # kernels read 16 bytes at a time
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

        def views(buffer: Tensor) -> dict[str, Tensor]:
            return {n: buffer[places[n]].view(f.dtype).view(f.shape) for n, f in fields.items()}

        self.on_device = views(self._device)
        self._on_host = [{n: v.numpy() for n, v in views(h).items()} for h in self._hosts]

    def fill(self, values: Values) -> None:
        """The first rows, and of a table's rows the first columns; the others become padding. Raises KeyError for a
        value that has no place. The host buffer in flight is left alone."""
        if unknown := values.keys() - self._fields.keys():
            raise KeyError(f"no recorded step reads {sorted(unknown)}")
        self._turn = 1 - self._turn
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        for name, view in self._on_host[self._turn].items():
            view[...] = self._fields[name].padding
            given = values.get(name)
            if given is not None:
                view[tuple(slice(n) for n in given.shape)] = given
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        if self._device.is_cuda:
            event = self._copied[self._turn] = torch.cuda.Event()
            event.record()
