"""A shard in memory that other processes of the host read by a handle; no byte of it is sent.

The memory is a GPU's, by CUDA IPC, or the host's: anonymous, found under the lender's own entry in /proc by processes
of the same user, and gone with the lender.
"""

from __future__ import annotations

import functools
import os
import weakref

import torch

from miles_k3.adapters.transport.slots import anonymous_memory, mapped
from miles_k3.types import Handle, LentShard


class Loan:
    """A shard's flat memory, lent to `readers` processes in BF16. They may open it until `close`, and go on reading."""

    def __init__(self, flat: torch.Tensor, experts: range, *, readers: int, keep: bool) -> None:
        """`keep`: whether there is a copy on the host to read again, beside the GPU's memory."""
        on_gpu = flat.is_cuda and flat.dtype is torch.bfloat16
        kept = self._copied(flat) if keep or not on_gpu else None
        once = [_device_handle(flat) for _ in range(readers)] if on_gpu else [kept] * readers
        self._flat = flat if on_gpu else None  # it must live until it has been read
        self.lent = LentShard(experts=experts, once=tuple(h for h in once if h is not None), kept=kept)

    def _copied(self, flat: torch.Tensor) -> Handle:
        num_bytes = flat.numel() * torch.bfloat16.itemsize
        descriptor = anonymous_memory(num_bytes)
        self._close = weakref.finalize(self, os.close, descriptor)
        mapped(descriptor, num_bytes).view(torch.bfloat16).copy_(flat)
        opener = functools.partial(torch.from_file, dtype=torch.uint8)
        return opener, (f"/proc/{os.getpid()}/fd/{descriptor}", True, num_bytes)

    def read(self) -> None:
        """All readers have it: this end's hold on a GPU's memory ends."""
        self._flat = None

    def close(self) -> None:
        """Take the host's copy back. Nothing where there is none."""
        if hasattr(self, "_close"):
            self._close()


def _device_handle(flat: torch.Tensor) -> Handle:
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(flat.view(torch.uint8))


def collect_lent() -> None:
    """After the readers of a GPU's memory have let go of it: it stays allocated until then."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
