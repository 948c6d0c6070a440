"""What requests live through from when they come to their ends, and how much of it a draft saves or costs.

A request that comes where 64 run lives among fewer soon, and its prompt is computed in steps of their own, which the
draft makes dearer: it reads the prompt too. Both count for the load at which it came.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from miles_k3.rollout.speculative.planner.experience import Steps, about
from miles_k3.rollout.speculative.planner.history import History

FOLLOWING = 0.04  # of a step's time, about, is what following costs on a CPU: the draft's keys and values
LIFETIME = 4096  # steps after which what was spent before counts half


def dearer(followed: Steps, alone: Steps) -> float:
    """How much more of the time a step takes that a draft follows, as far as both kinds are known."""
    if not (followed.known and alone.known):
        return FOLLOWING
    return (FOLLOWING + max(0.0, followed.seconds / alone.seconds - 1.0)) / 2


class Kind(NamedTuple):
    """Steps that compute about so many tokens of prompts beside about so many decoding requests; by logarithms."""

    tokens: int
    decodes: int

    @classmethod
    def of(cls, tokens: int, decodes: int) -> Kind:
        return cls(about(tokens), about(decodes) if decodes else -1)


@dataclass(slots=True)
class Prompts:
    """Seconds a token of the last steps that computed prompts, with a draft that reads them and without."""

    followed: dict[Kind, Steps] = field(default_factory=lambda: defaultdict(Steps))
    alone: dict[Kind, Steps] = field(default_factory=lambda: defaultdict(Steps))

    def dearer(self, kind: Kind) -> float:
        return dearer(self.followed[kind], self.alone[kind])


@dataclass(slots=True)
class Spent:
    """By the logarithm of the load at which requests came, their shares of steps' seconds, the older ones counting
    less: of `decoding` by the load of the step, as plain steps would have taken them, of `reading` by its kind."""

    decoding: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    reading: dict[int, dict[Kind, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    steps: int = 0

    def decoded(self, histories: Iterable[History], load: int, seconds: float) -> None:
        shares = Counter(load if h.came < 0 else h.came for h in histories)
        for came, count in shares.items():
            self.decoding[came][load] += seconds * count / shares.total()
        self._passes()

    def read(self, prompts: Iterable[tuple[History, int]], kind: Kind, seconds: float) -> None:
        """A step that computed so many tokens of each of these prompts."""
        shares: Counter[int] = Counter()
        for history, tokens in prompts:
            shares[history.came] += tokens
        for came, tokens in shares.items():
            self.reading[came][kind] += seconds * tokens / shares.total()
        self._passes()

    def _passes(self) -> None:
        self.steps += 1
        if self.steps % LIFETIME:
            return
        for decoding in self.decoding.values():
            decoding.update({load: seconds / 2 for load, seconds in decoding.items()})
        for reading in self.reading.values():
            reading.update({kind: seconds / 2 for kind, seconds in reading.items()})

    def saved(self, came: int, saving: Callable[[int], float], dearer: Callable[[Kind], float]) -> float:
        """Share of the time of requests that come there which following them would have saved: `saving` of decoding at
        each load, less what makes steps of each kind dearer."""
        decoding = self.decoding.get(came) or {came: 1.0}
        reading = self.reading.get(came, {})
        saved = sum(time * saving(load) for load, time in decoding.items())
        saved -= sum(time * dearer(kind) for kind, time in reading.items())
        return saved / (sum(decoding.values()) + sum(reading.values()))
