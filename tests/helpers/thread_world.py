"""Ranks as threads of one process, for what they only tell one another through `World.gather`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from miles_k3.world import PEER_LOST, PeerLostError, World

WAIT_S = 60.0


def on_threads(size: int, work: Callable[[World], Any]) -> list[Any]:
    """What `work` gives on each rank, or the error that it ends with; the others lose a rank that ends early."""
    barrier, told = threading.Barrier(size), [None] * size

    class Joined(World):
        def gather(self, value: Any) -> list[Any]:
            told[self.rank] = value
            try:
                barrier.wait(WAIT_S)
                found = list(told)
                barrier.wait(WAIT_S)
            except threading.BrokenBarrierError:
                raise PeerLostError(PEER_LOST) from None
            return found

    def run(rank: int) -> Any:
        try:
            return work(Joined(rank=rank, size=size))
        except BaseException as error:  # noqa: BLE001  (it is what the test looks at)
            barrier.abort()
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
