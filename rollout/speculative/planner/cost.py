"""What a verify costs: seconds by the number of requests and of positions fed, measured once.

On a GPU this is a staircase: tiles fill up for free, the next one costs. Shapes: M counts of positions.
"""

from __future__ import annotations

import json
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from miles_k3.errors import EngineError
from miles_k3.files import write_text
from miles_k3.rollout.speculative.planner.isotonic import isotonic

KEPT = 256  # loads whose seconds are kept: 2 MB up to 256 requests of 8 positions, 60 MB around 4,096


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """At one load. `positions` ascend from `requests`, where only the anchors are fed, which is plain decoding;
    `seconds` never fall. `draft_s` is what drafting a block for all of them takes, `whole_s` a step that verifies whole
    blocks without looking at them first (None: there is no cheaper way than to draft and to verify)."""

    requests: int
    draft_s: float
    positions: tuple[int, ...]
    seconds: tuple[float, ...]
    whole_s: float | None = None

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in zip(self.positions, self.positions[1:], strict=False))
        if not self.positions or self.positions[0] != self.requests or not rises:
            raise EngineError(
                f"a cost curve of {self.requests} requests has to begin at as many positions and ascend, got "
                f"{list(self.positions)[:8]}: measure plain decoding too"
            )
        if len(self.seconds) != len(self.positions) or not all(0 < s < float("inf") for s in self.seconds):
            raise EngineError(f"a cost curve needs positive seconds for each of its positions, got {self.seconds[:8]}")
        if not 0 <= self.draft_s < float("inf"):
            raise EngineError(f"drafting can't take {self.draft_s} seconds")
        if self.whole_s is not None and not 0 < self.whole_s < float("inf"):
            raise EngineError(f"a step of whole blocks can't take {self.whole_s} seconds")

    def at(self, positions_M: ArrayLike) -> NDArray[np.float64]:
        """Linear between points; before the first its value; behind the last by the curve's mean slope."""
        x = np.asarray(positions_M, dtype=np.float64)
        first, last = self.positions[0], self.positions[-1]
        slope = (self.seconds[-1] - self.seconds[0]) / (last - first) if last > first else 0.0
        return np.interp(x, self.positions, self.seconds) + slope * np.maximum(x - last, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Numbers of requests and of positions, ascending, up to which an engine pads: all that is padded alike costs the
    same. None of them: nothing is padded. Beyond the last one neither."""

    requests: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()

    def load(self, requests: int) -> int:
        at = bisect_left(self.requests, requests)
        return self.requests[at] if at < len(self.requests) else requests

    def padded(self, requests: int, positions_M: ArrayLike) -> NDArray[np.int64]:
        """Where only the anchors are fed, a load is padded as one of requests."""
        x = np.asarray(positions_M, dtype=np.int64)
        if not (self.requests or self.positions):
            return x
        return np.where(x > requests, np.maximum(_padded(x, self.positions), self.load(requests)), self.load(requests))


UNPADDED = Tiers()


def _padded(x: NDArray[np.int64], tiers: tuple[int, ...]) -> NDArray[np.int64]:
    if not tiers:
        return x
    at = np.searchsorted(np.array(tiers, dtype=np.int64), x)
    return np.append(np.array(tiers, dtype=np.int64), 0)[at] + np.where(at == len(tiers), x, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Curves by load, ascending. `engine`: in words, what was measured.

    What was worked out is kept: an engine asks for the same at every step, while its device waits.
    """

    curves: tuple[Curve, ...]
    tiers: Tiers = UNPADDED
    engine: str = ""
    _around: dict[int, tuple[Curve, Curve, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _tables: dict[int, NDArray[np.float64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        loads = [c.requests for c in self.curves]
        if not loads or loads != sorted(set(loads)) or loads[0] < 1:
            raise EngineError(f"a cost profile needs curves of ascending loads, got {loads}")

    @classmethod
    def of(
        cls,
        points: Iterable[tuple[int, int, float]],
        draft_s: Mapping[int, float] | None = None,
        tiers: Tiers = UNPADDED,
        whole_s: Mapping[int, float] | None = None,
    ) -> CostProfile:
        """From measured (requests, positions, seconds): points measured twice, those of one tier too, are averaged, and
        a curve that falls, which is noise, is replaced by the nearest one that doesn't."""
        found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for requests, positions, seconds in points:
            found[tiers.load(requests)][int(tiers.padded(requests, positions))].append(seconds)
        drafts, whole = (
            {tiers.load(requests): seconds for requests, seconds in (given or {}).items()}
            for given in (draft_s, whole_s)
        )
        curves = []
        for requests, by_positions in sorted(found.items()):
            places = sorted(by_positions)
            means = [statistics.fmean(by_positions[p]) for p in places]
            fit = isotonic(means, [len(by_positions[p]) for p in places])
            curves.append(Curve(
                requests=requests, draft_s=drafts.get(requests, 0.0), positions=tuple(places), seconds=tuple(fit),
                whole_s=whole.get(requests),
            ))  # fmt: skip
        return cls(curves=tuple(curves), tiers=tiers)

    def seconds(self, requests: int, positions_M: ArrayLike) -> NDArray[np.float64]:
        """Of so many positions, anchors included; linear between loads, the nearest load's outside of them."""
        low, high, share = self._between(requests)
        positions_M = self.tiers.padded(requests, positions_M)
        if share == 0.0:
            return low.at(positions_M)
        return (1 - share) * low.at(positions_M) + share * high.at(positions_M)

    def table(self, requests: int, most: int) -> NDArray[np.float64]:
        """`seconds` of 0 to `most` positions more than the anchors: [most + 1]. Not to be written to."""
        found = self._tables.get(requests)
        if found is None or len(found) <= most:
            if len(self._tables) >= KEPT:
                self._tables.clear()
            found = self._tables[requests] = self.seconds(requests, requests + np.arange(most + 1))
        return found[: most + 1]

    def draft_seconds(self, requests: int) -> float:
        low, high, share = self._between(requests)
        return (1 - share) * low.draft_s + share * high.draft_s

    def whole_seconds(self, requests: int) -> float | None:
        """Of a step that verifies whole blocks of all of them without looking at them first; None where there is no
        such."""
        low, high, share = self._between(requests)
        if low.whole_s is None or high.whole_s is None:
            return None
        return (1 - share) * low.whole_s + share * high.whole_s

    def _between(self, requests: int) -> tuple[Curve, Curve, float]:
        """The curves around a load, and how far it is from the first to the second."""
        if requests not in self._around:
            self._around[requests] = self._found_between(self.tiers.load(requests))
        return self._around[requests]

    def _found_between(self, requests: int) -> tuple[Curve, Curve, float]:
        below = [c for c in self.curves if c.requests <= requests]
        above = [c for c in self.curves if c.requests > requests]
        if not below or not above:
            nearest = below[-1] if below else above[0]
            return nearest, nearest, 0.0
        low, high = below[-1], above[0]
        return low, high, (requests - low.requests) / (high.requests - low.requests)

    def save(self, path: Path) -> None:
        content = {"curves": [asdict(c) for c in self.curves], "tiers": asdict(self.tiers), "engine": self.engine}
        write_text(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> CostProfile:
        """Raises EngineError for a file that is no profile."""
        otherwise = "name the costs.json of `miles-k3 bench speculative`, or none: they are measured at the start then"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise EngineError(f"{path} can't be read ({error.strerror}); {otherwise}") from error
        except ValueError as error:
            raise EngineError(f"{path} is no JSON; {otherwise}") from error
        try:
            curves = [
                Curve(
                    requests=int(c["requests"]), draft_s=float(c["draft_s"]),
                    positions=tuple(int(p) for p in c["positions"]), seconds=tuple(float(s) for s in c["seconds"]),
                    whole_s=None if c.get("whole_s") is None else float(c["whole_s"]),
                )
                for c in content["curves"]
            ]  # fmt: skip
            padded = content.get("tiers", {})
            tiers = Tiers(**{name: tuple(int(n) for n in padded.get(name, ())) for name in ("requests", "positions")})
            return cls(curves=tuple(curves), tiers=tiers, engine=str(content.get("engine", "")))
        except EngineError as error:
            raise EngineError(f"{path}: {error}") from error
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"{path} is no cost profile; {otherwise}") from error


def measure_costs(
    verify: Callable[[int, int], object],
    draft: Callable[[int], object] | None,
    loads: Sequence[int],
    block_size: int,
    *,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    tiers: Tiers = UNPADDED,
    whole: Callable[[int], object] | None = None,
) -> CostProfile:
    """Time `verify(requests, positions of each)` for 1 to block_size + 1 positions, `draft(requests)`, and
    `whole(requests)`, which does both for whole blocks.

    Medians of `repeats` calls after one that isn't counted. On a GPU the callables have to wait for the device.
    """

    def seconds(call: Callable[[], object]) -> float:
        call()
        taken = []
        for _ in range(repeats):
            start = clock()
            call()
            taken.append(clock() - start)
        return statistics.median(taken)

    points = [
        (load, load * each, seconds(partial(verify, load, each))) for load in loads for each in range(1, block_size + 2)
    ]
    drafting, at_once = (
        {load: seconds(partial(call, load)) for load in loads} if call else None for call in (draft, whole)
    )
    return CostProfile.of(points, drafting, tiers, at_once)
