"""What the tests of `helpers.ranks` run on its workers."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def sum_of_ranks(rank: int, size: int, extra: int) -> tuple[int, int, int, str, int]:
    """(rank, size, the sum over ranks of rank + extra, what the launcher's variables say, this process)."""
    total = torch.tensor(rank + extra)
    if size > 1:
        dist.all_reduce(total)
    return rank, size, int(total), os.environ["WORLD_SIZE"], os.getpid()


def fail(rank: int, size: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"nothing good on {rank}")
    dist.barrier()


def hang(rank: int, size: int, culprit: int) -> None:
    if rank == culprit:
        time.sleep(1000)
    dist.barrier()


def die(rank: int, size: int, culprit: int) -> None:
    if rank == culprit:
        os._exit(3)
    time.sleep(1000)
