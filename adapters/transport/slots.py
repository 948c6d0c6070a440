"""The memory that buckets pass through on one host: of the host where a tensor is there, of a GPU where it is there.

No name in the file system stands for it: the system takes it back when the last process that holds it has ended, in
whatever way.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Protocol

import torch

from miles_k3.adapters.transport.stream import BUCKETS_ALIVE
from miles_k3.errors import TransportError


class Slots(Protocol):
    """Memory of BUCKETS_ALIVE buckets that two processes share."""

    buckets: list[torch.Tensor]  # uint8 [slot_bytes] each

    def give(self, connection: Connection, pid: int) -> None:
        """Let the process at the other end, which calls `take_slots`, use them too."""
        ...

    def close(self) -> None:
        """Give the memory back; the other process keeps its own hold on it."""
        ...


def make_slots(device: torch.device, num_bytes: int) -> Slots:
    """Slots of `num_bytes` each, in the memory of `device`."""
    return DeviceSlots.make(device, num_bytes) if device.type == "cuda" else HostSlots.make(num_bytes)


def take_slots(connection: Connection) -> Slots:
    """The slots that the other end gives. Raises TransportError when they can't be had here."""
    kind, details = connection.recv()
    if kind == "host":
        return HostSlots(recv_handle(connection), details)
    return DeviceSlots.rebuild(details)


def anonymous_memory(num_bytes: int) -> int:
    """A file descriptor of memory that processes can share."""
    descriptor = os.memfd_create("miles-k3-adapter", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def mapped(descriptor: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] over it. It stays mapped as long as the tensor lives, also when the descriptor is closed."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


class HostSlots:
    """Anonymous shared memory, handed over as a file descriptor."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor, self._num_bytes = descriptor, num_bytes
        self.buckets = list(mapped(descriptor, BUCKETS_ALIVE * num_bytes).split(num_bytes))

    @classmethod
    def make(cls, num_bytes: int) -> HostSlots:
        return cls(anonymous_memory(BUCKETS_ALIVE * num_bytes), num_bytes)

    def give(self, connection: Connection, pid: int) -> None:
        connection.send(("host", self._num_bytes))
        send_handle(connection, self._descriptor, pid)

    def close(self) -> None:
        self.buckets = []  # the mapping goes with them
        os.close(self._descriptor)


class DeviceSlots:
    """Memory of one GPU, handed over as CUDA IPC handles. Both processes must see that GPU under the same number."""

    def __init__(self, buckets: list[torch.Tensor], *, owned: bool) -> None:
        self.buckets, self._owned = buckets, owned

    @classmethod
    def make(cls, device: torch.device, num_bytes: int) -> DeviceSlots:
        buckets = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(BUCKETS_ALIVE)]
        return cls(buckets, owned=True)

    @classmethod
    def rebuild(cls, details: list[tuple[Any, tuple[Any, ...]]]) -> DeviceSlots:
        try:
            return cls([make(*arguments) for make, arguments in details], owned=False)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise TransportError(
                f"the sender's GPU memory can't be opened here ({reason}); both processes must run on one host and see "
                "the same CUDA_VISIBLE_DEVICES"
            ) from error

    def give(self, connection: Connection, pid: int) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        connection.send(("device", [reduce_tensor(bucket) for bucket in self.buckets]))

    def close(self) -> None:
        self.buckets = []
        if self._owned:
            torch.cuda.ipc_collect()  # memory that was lent stays allocated until then
