"""What steps really brought, by the clock: drafted ones beside plain ones of the same load.

A profile is measured once, on an idle engine, and an expectation that was chosen for being the best is too high on
average. So where both kinds of steps are known, they decide.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

TRIALS = 4  # steps of a kind before they count as known
RECENT = 8  # of each kind are remembered
BLOCKS = 32, 128  # drafted blocks, at least, for the same: a few requests may be easy or hard to draft
MARGIN = 1.2  # drafting has to be better by so much: a batch that drains ends with what is hard to draft, alone
RETRY = 0.01  # of the time at a load may be lost by trying again what is worse there
LIFETIME = 4096  # steps after which what was spent before counts half
SELDOM, OFTEN = 256, 8  # steps until something is tried again of which nothing is known, and at least


@dataclass(slots=True)
class Steps:
    """The last steps of one kind: tokens, and seconds, both beside what a plain step of the profile has."""

    trials: int = TRIALS
    recent: int = RECENT
    tokens: deque[float] = field(init=False)
    times: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.times = deque(maxlen=self.recent), deque(maxlen=self.recent)

    def observe(self, tokens: float, seconds: float) -> None:
        self.tokens.append(tokens)
        self.times.append(seconds)

    @property
    def known(self) -> bool:
        return len(self.tokens) >= self.trials

    @property
    def seconds(self) -> float:
        """Of a step, without the longest: something else may have held it up."""
        return statistics.fmean(sorted(self.times)[:-1])

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return statistics.fmean(self.tokens) / self.seconds


@dataclass(slots=True)
class Load:
    """Steps of about so many requests, of which about so many are followed."""

    drafted: Steps
    plain: Steps = field(default_factory=Steps)
    since: int = 0  # steps since the last trial of the worse kind

    @classmethod
    def of(cls, followed: int) -> Load:
        """Blocks are as many as requests are followed."""
        least, most = BLOCKS
        return cls(drafted=Steps(trials=max(TRIALS, least // followed), recent=max(RECENT, most // followed)))

    def observe(self, drafted: bool, tokens: float, seconds: float) -> None:
        (self.drafted if drafted else self.plain).observe(tokens, seconds)

    @property
    def gain(self) -> float | None:
        """Tokens a second of drafted steps beside plain ones; None until both are known."""
        return self.drafted.rate / self.plain.rate if self.plain.known and self.drafted.known else None

    def again(self) -> bool:
        """Asked at every step: whether the worse kind should have another trial, for things change."""
        self.since += 1
        gain, due = self.gain, self.since >= SELDOM
        if gain is not None:
            worse, better = (self.plain, self.drafted) if gain > MARGIN else (self.drafted, self.plain)
            lost = worse.seconds - statistics.fmean(worse.tokens) / better.rate
            due = self.since >= max(OFTEN, lost / (RETRY * better.seconds))
        if due:
            self.since = 0
        return due


@dataclass(slots=True)
class Spent:
    """Seconds of decoding by the logarithm of the load, the older ones counting less."""

    by_load: dict[int, float] = field(default_factory=dict)
    steps: int = 0

    def observe(self, log_load: int, seconds: float) -> None:
        self.by_load[log_load] = self.by_load.get(log_load, 0.0) + seconds
        self.steps += 1
        if self.steps % LIFETIME == 0:
            self.by_load = {load: time / 2 for load, time in self.by_load.items()}

    def saved(self, gain: Callable[[int, int], float], up_to: int) -> float:
        """Share of the time at loads up to this one that drafting would have saved where it pays."""
        times = {load: time for load, time in self.by_load.items() if load <= up_to}
        total, less = sum(times.values()), 0.0
        for load, time in times.items():
            faster = gain(1 << load, 1 << load)
            less += time * (1 - 1 / faster) if faster > MARGIN else 0.0
        return less / total if total else 0.0
