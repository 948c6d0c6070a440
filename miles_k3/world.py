"""The processes of one run: who this one is, and the few words they exchange on the host.

`torchrun` starts them and says who is who in environment variables; without it there is one. Device tensors travel
through megatron's groups, not here.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from miles_k3.errors import LaunchError

T = TypeVar("T")
_TIMEOUT = timedelta(hours=2)  # a rank may grade or checkpoint for long while the others wait


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Rank `rank` of `size` processes; `local_rank` counts within the host. All methods are collective."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process writes the run's files and speaks to the terminal."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank. Values are pickled: keep them on the host."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[T] = [value] * self.size
        dist.all_gather_object(found, value)
        return found

    def broadcast(self, value: T, source: int = 0) -> T:
        """Rank `source`'s value on every rank."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        return any(self.gather(bool(flag)))

    def share(self, count: int) -> range:
        """This rank's part of `count` things: contiguous, sizes differ by one at most."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)


def world_of(environ: Mapping[str, str] = os.environ) -> World:
    """What the launcher's variables say. Raises LaunchError when they are incomplete or contradict one another."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = {name: environ[name] for name in names if name in environ}
    if not given or given.get("WORLD_SIZE") == "1":
        return World()
    try:
        rank, size, local = (int(given[name]) for name in names)
    except (KeyError, ValueError):
        raise LaunchError(
            f"the launcher set {given}; expected whole numbers in all of {', '.join(names)}: start with "
            "torchrun --nproc-per-node N -m miles_k3 train RECIPE"
        ) from None
    if not 0 <= rank < size:
        raise LaunchError(f"RANK is {rank} of WORLD_SIZE {size}; start with torchrun, which numbers the processes")
    return World(rank=rank, size=size, local_rank=local)


def join_world(environ: Mapping[str, str] = os.environ) -> World:
    """`world_of`, and the processes' common group where there are several: gloo for the host, NCCL for CUDA tensors."""
    world = world_of(environ)
    if world.size == 1:
        return world
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)
        atexit.register(leave_world)
    return world


def leave_world() -> None:
    """End the group; NCCL warns of leaked resources when a process ends without it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
