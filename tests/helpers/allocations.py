"""Bytes that tensors on the CPU hold, counted allocation by allocation, temporaries inside operators included."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(slots=True)
class Allocations:
    """What a block allocated beyond what was there before it: at its end, and at most."""

    kept: int = 0
    peak: int = 0


@contextmanager
def allocations() -> Iterator[Allocations]:
    """The result is filled in when the block ends. Blocks must not be nested."""
    found = Allocations()
    for _ in range(3):  # what others left behind must not be freed inside the block, nor what its finalizers let go
        gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about events of earlier profiles, which nobody asked for
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                yield found
    finally:
        gc.enable()
    kineto: Any = profiler.profiler
    events = [e for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    held = list(accumulate((e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())), initial=0))
    found.kept, found.peak = held[-1], max(held)
