"""What accepted tokens save a batch of requests that came at once and drains, and whether following it paid.

Tokens a second of a step don't say: what is easy to draft ends early, and the rest goes on in an emptier batch, where a
token is dearer. Shapes: R requests.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from miles_k3.rollout.speculative.planner.experience import about
from miles_k3.rollout.speculative.planner.history import Ease, History

WAY = (0.1, 0.3, 0.5, 0.7, 0.9)  # between plain decoding and drafting for all
UNSURE = 0.02  # of a batch's gain, at least


class Costs(NamedTuple):
    """Seconds of a plain step by the profile; those of one that follows nobody beside it; accepted tokens of the usual
    block."""

    plain: Callable[[int], float]
    alone: Callable[[int], float]
    usual: float  # 0 where nothing was drafted


class Worth(NamedTuple):
    """Seconds that an accepted token saves at a load, beside those of a plain one there."""

    load: int
    seconds: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that ended among `load`: its tokens, how many more a step drafts give, and what a token more had cost
    then beside a plain one."""

    load: int
    tokens: int
    history: History
    costs: Costs
    beside: float


@dataclass(slots=True)
class Gains:
    """Plain decoding's seconds beside those of the last batches that were followed.

    Of few requests more batches are needed, for one answer may be easy or hard to draft.
    """

    least: int
    found: deque[float]

    @classmethod
    def of(cls, requests: int) -> Gains:
        return cls(least=max(2, 64 // requests), found=deque(maxlen=max(4, 128 // requests)))

    @property
    def lost(self) -> bool:
        """Whether it isn't chance that they took longer."""
        if len(self.found) < self.least:
            return False
        unsure = max(UNSURE, statistics.stdev(self.found)) / len(self.found) ** 0.5
        return statistics.fmean(self.found) + unsure < 1.0


@dataclass(slots=True)
class Drain:
    """Requests that have ended since nothing ran."""

    _ended: list[Ended] = field(default_factory=list)
    _refilled: bool = False  # whether others came when some had ended
    _seconds: float = 0.0
    _reading: float = 0.0  # of them, what prompts would have taken that nobody follows
    _tokens: int = 0  # in them
    _followed: bool = False  # whether a draft followed any of them
    _tries: bool = False  # whether it began at a load of which too little was known, which takes trials
    _ease: Ease = field(default_factory=Ease)
    _gains: dict[int, Gains] = field(default_factory=dict)  # by load

    def observe(
        self, histories: Sequence[History], tokens_R: Sequence[int], seconds: float, *, followed: bool, known: bool
    ) -> None:
        """A step that did nothing but decode, at a load that is known or not."""
        if not self._tokens:
            self._tries = not known
        self._seconds += seconds
        self._tokens += sum(tokens_R)
        self._followed |= followed
        for history, tokens in zip(histories, tokens_R, strict=True):
            history.timed += tokens
            history.passes()

    def read(self, seconds: float, alone: float) -> None:
        """A step that computed prompts, and what it would have taken without a draft that reads them."""
        self._seconds += seconds
        self._reading += alone

    def lost(self, load: int) -> bool:
        """Whether batches of about so many clearly took longer for being followed."""
        gains = self._gains.get(about(load))
        return gains is not None and gains.lost

    def drafted(self, requests: Sequence[tuple[History, int]]) -> bool:
        """Whether anything was drafted for these, or for others that have ended."""
        return any(h.usual_in_all for h, _ in requests) or any(e.history.usual_in_all for e in self._ended)

    def ended(self, requests: Sequence[tuple[History, int]], left: int, waiting: bool, costs: Costs) -> list[Worth]:
        """These ended in one step, with so many tokens each; what is known of accepted tokens' worth now.

        With a token more a request would have been there for a plain step more, which costs what it adds to those that
        are left; all that a plain token costs where somebody waits for its place.
        """
        before, beside = left + len(requests), 1.0
        if not waiting:
            beside = (1.0 - costs.plain(left) / costs.plain(before)) * before / len(requests)
        self._ended += [
            Ended(load=before, tokens=tokens, history=history, costs=costs, beside=beside)
            for history, tokens in requests
        ]
        self._refilled |= waiting
        if left or waiting:
            return []
        found = self.refilled() if self._refilled else self._drained()
        self._refilled, self._followed, self._tokens, self._seconds, self._reading = False, False, 0, 0.0, 0.0
        return found

    def refilled(self) -> list[Worth]:
        """Somebody comes: what has ended was no batch that drains, and is judged one by one."""
        ended, self._ended = self._ended, []
        if not ended:
            return []
        self._refilled = True
        faster_R = self._ease.of([e.history for e in ended]) * ended[-1].costs.usual
        return [Worth(e.load, e.beside, f / e.load) for e, f in zip(ended, faster_R.tolist(), strict=True) if f]

    def _drained(self) -> list[Worth]:
        if not (self._followed or self.drafted(())):
            self._ended = []
            return []
        ended, self._ended = self._ended, []
        count, costs = len(ended), ended[-1].costs
        plain_R1 = np.array([costs.plain(n) for n in range(count + 1)])
        timed_R = np.sort([e.history.timed for e in ended])
        whole = timed_R.sum() == self._tokens  # nobody left in another way
        if self._followed and self._seconds and whole and not self._tries:
            alone_R = plain_R1[1:] * [costs.alone(n) for n in range(1, count + 1)]
            plainly = float((np.diff(timed_R, prepend=0) * alone_R[::-1]).sum())
            gain = (plainly + self._reading) / self._seconds
            self._gains.setdefault(about(count), Gains.of(count)).found.append(gain)
        faster_R = self._ease.of([e.history for e in ended]) * costs.usual
        if not faster_R.any():
            return []
        worth_R = draining(np.array([e.tokens for e in ended]), faster_R, plain_R1)
        loads = sorted({min(1 << n, count) for n in range(about(count) + 1)})
        return [Worth(load, float(worth_R[load - 1]), 1.0) for load in loads]


def draining(
    tokens_R: NDArray[np.int64], faster_R: NDArray[np.float64], plain_R1: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What an accepted token saves a batch that came at once, beside a plain one's cost, where 1 to R are left: [R].

    A request's last token costs what a step of those that are still there costs more than one without it: `plain_R1` of
    0 to R requests. On the way from plain decoding to drafting for all, `faster_R` tokens a step more, the order of the
    ends changes; this is the mean of that way, so that the tokens' savings add up to all that drafting saves.
    """
    saved_R, gained_R = np.zeros(len(tokens_R)), tokens_R * faster_R / (1 + faster_R)
    for share in WAY:
        _, at_R, counts = np.unique(share * gained_R - tokens_R, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        saved_R += ((plain_R1[ends] - plain_R1[ends - counts]) / counts)[at_R] / len(WAY)
    longest_first = np.argsort(gained_R - tokens_R, kind="stable")
    saved, gained = np.cumsum((saved_R * faster_R)[longest_first]), np.cumsum(faster_R[longest_first])
    of_one_R = plain_R1[1:] / np.arange(1, len(plain_R1))
    return saved / np.maximum(gained, 1e-9) / of_one_R
