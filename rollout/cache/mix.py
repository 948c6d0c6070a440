"""Unified against split memory at one byte budget, on requests whose mix drifts from many short to few long ones.

Bookkeeping only, in bytes of a real model. Time is in steps: a request holds its slots and the pages of its whole
length for 20 to 60 steps from its admission. Requests are admitted in order of arrival, and a phase offers more than
fits; what still waits when it ends has gone elsewhere, while what runs goes on. So the memory of one mix must be freed
by its own requests before the next mix can have it, and a split that suits one doesn't suit the other.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_k3.rollout.cache.blocks import Kind
from miles_k3.rollout.cache.places import Places

SLOTS_PER_REQUEST = 4  # a working state, the pair that snapshots go to in turn, and head-room


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`arrivals` requests a step, over `steps` steps, of `low` to `high` tokens each."""

    name: str
    steps: int
    arrivals: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """`admitted`: requests let in; `running`, `tokens`: held on average; `moved_bytes`: copied to close holes."""

    name: str
    admitted: int
    running: float
    tokens: float
    moved_bytes: int


DRIFT = (
    Phase(name="short", steps=200, arrivals=20, low=500, high=2_000),
    Phase(name="medium", steps=200, arrivals=10, low=4_000, high=16_000),
    Phase(name="long", steps=200, arrivals=4, low=30_000, high=100_000),
    Phase(name="longest", steps=200, arrivals=2, low=200_000, high=1_000_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The bytes of one rank's cache and of its blocks. The defaults are Kimi K3's at TP8, in BF16, on 60 GB."""

    num_bytes: int = 60 * 10**9
    slot_bytes: int = 69 * (12 * 128 * 128 * 4 + 3 * 3 * 12 * 128 * 2)
    page_bytes: int = 64 * 24 * 576 * 2
    page_size: int = 64


def unified(sizes: Sizes) -> Places:
    return Places(sizes.num_bytes, sizes.slot_bytes, sizes.page_bytes)


class SplitPlaces:
    """Counts of a split pool, of the same bytes in all."""

    def __init__(self, sizes: Sizes, slot_share: float) -> None:
        slots = int(sizes.num_bytes * slot_share) // sizes.slot_bytes
        pages = (sizes.num_bytes - slots * sizes.slot_bytes) // sizes.page_bytes
        self._free = {Kind.SLOT: slots - 1, Kind.PAGE: pages - 1}

    def fits(self, *, slots: int = 0, pages: int = 0) -> bool:
        return slots <= self._free[Kind.SLOT] and pages <= self._free[Kind.PAGE]

    def take(self, kind: Kind, count: int) -> list[int]:
        self._free[kind] -= count
        return [0] * count

    def give(self, kind: Kind, block: int) -> None:
        self._free[kind] += 1

    def flush(self) -> None:
        pass


def run(
    places: Places | SplitPlaces, sizes: Sizes, phases: Sequence[Phase] = DRIFT, seed: int = 0
) -> list[PhaseResult]:
    """Offer the phases' requests, the same for the same seed, and count what the memory lets in."""
    draw, results, step = random.Random(seed), [], 0
    ends: dict[int, list[tuple[int, list[int], list[int]]]] = {}
    num_running = num_tokens = 0
    for phase in phases:
        waiting: deque[tuple[int, int]] = deque()
        admitted = running_sum = token_sum = 0
        moved = _moved(places)
        for _ in range(phase.steps):
            for tokens, slots, pages in ends.pop(step, ()):
                for kind, blocks in ((Kind.SLOT, slots), (Kind.PAGE, pages)):
                    for block in blocks:
                        places.give(kind, block)
                num_running, num_tokens = num_running - 1, num_tokens - tokens
            waiting.extend((draw.randint(phase.low, phase.high), draw.randint(20, 60)) for _ in range(phase.arrivals))
            while waiting and places.fits(slots=SLOTS_PER_REQUEST, pages=-(-waiting[0][0] // sizes.page_size)):
                tokens, length = waiting.popleft()
                slots = places.take(Kind.SLOT, SLOTS_PER_REQUEST)
                pages = places.take(Kind.PAGE, -(-tokens // sizes.page_size))
                ends.setdefault(step + length, []).append((tokens, slots, pages))
                admitted, num_running, num_tokens = admitted + 1, num_running + 1, num_tokens + tokens
            places.flush()
            running_sum, token_sum, step = running_sum + num_running, token_sum + num_tokens, step + 1
        results.append(
            PhaseResult(
                name=phase.name, admitted=admitted, running=running_sum / phase.steps, tokens=token_sum / phase.steps,
                moved_bytes=_moved(places) - moved,
            )
        )  # fmt: skip
    return results


def compare(
    sizes: Sizes | None = None, shares: Sequence[float] = (0.2, 0.5, 0.8), phases: Sequence[Phase] = DRIFT
) -> dict[str, list[PhaseResult]]:
    """Each pool's results by phase: the unified one's, and those of split ones with these shares for slots."""
    sizes = sizes or Sizes()
    makers: dict[str, Callable[[], Places | SplitPlaces]] = {"unified": lambda: unified(sizes)}
    for share in shares:
        makers[f"split, {share:.0%} states"] = lambda share=share: SplitPlaces(sizes, share)
    return {name: run(make(), sizes, phases) for name, make in makers.items()}


def table(results: dict[str, list[PhaseResult]]) -> str:
    """Plain text: one line a pool and phase."""
    lines = [f"{'pool':<20}{'phase':<10}{'admitted':>9}{'running':>9}{'tokens held':>13}{'GB moved':>10}"]
    lines += [
        f"{pool:<20}{r.name:<10}{r.admitted:>9}{r.running:>9.1f}{r.tokens:>13,.0f}{r.moved_bytes / 1e9:>10.2f}"
        for pool, phases in results.items()
        for r in phases
    ]
    return "\n".join(lines)


def _moved(places: Places | SplitPlaces) -> int:
    ends = places.ends.values() if isinstance(places, Places) else ()
    return sum(end.num_moved * end.block_bytes for end in ends)
