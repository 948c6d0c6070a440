"""What steps really brought, by the clock and in accepted tokens, beside what was promised of them.

A profile is measured once, on an idle engine, and a promise that was chosen for being the best is too high on average.
So both are corrected, for each load, by what the last steps of it were.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

TRIALS = 4  # steps of a kind before they count as known
RECENT = 8  # of each kind are remembered
MARGIN = 1.03  # drafting has to be better by so much
RETRY = 0.005  # of the time at a load may be lost by trying again what is worse there
SELDOM, OFTEN = 256, 8  # steps until something is tried again of which nothing is known, and at least
SMOOTH, ANSWERS = 32, 256  # steps over which a load's saving is taken, and of one request alone so many more
PROMISED = 8.0  # tokens that promises are believed for


@dataclass(slots=True)
class Steps:
    """Seconds of the last steps of one kind, beside what the profile says of them."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def known(self) -> bool:
        return len(self.times) >= TRIALS

    @property
    def seconds(self) -> float:
        """Of a step, without the longest: something else may have held it up. 1 where too little is known."""
        return statistics.fmean(sorted(self.times)[:-1]) if self.known else 1.0


@dataclass(slots=True)
class Share:
    """Of what was counted, what came of it; `prior` is what is believed beforehand, `memory` what is remembered."""

    prior: float
    memory: float
    came: float = 0.0
    counted: float = 0.0

    def observe(self, came: float, counted: float) -> None:
        kept = max(0.0, 1.0 - counted / self.memory)
        self.came, self.counted = kept * self.came + came, kept * self.counted + counted

    @property
    def value(self) -> float:
        return (self.came + self.prior) / (self.counted + self.prior)


@dataclass(slots=True)
class Load:
    """Steps of about so many requests, of which about so many are followed.

    `hits`: accepted tokens beside those promised. `worth`: seconds that an accepted token saves in the end beside those
    of a plain one at this load. `saving`: share of the time that drafting saves here.
    """

    hits: Share
    worth: Share
    drafted: Steps = field(default_factory=Steps)
    plain: Steps = field(default_factory=Steps)
    since: int = 0  # steps since the last trial of the worse kind
    saving: float = 0.0
    seen: int = 0  # steps in which it was taken
    smooth: float = SMOOTH  # over how many it is, at most

    @classmethod
    def of(cls, followed: int) -> Load:
        return cls(
            hits=Share(PROMISED, max(32.0 * followed, 512.0)), worth=Share(0.5, 4.0), smooth=SMOOTH + ANSWERS / followed
        )

    @property
    def known(self) -> bool:
        return self.plain.known and self.drafted.known

    @property
    def slower(self) -> float:
        """A drafted step's seconds beside a plain one's, both beside what the profile says; 1 until both are known."""
        return self.drafted.seconds / self.plain.seconds if self.known else 1.0

    def saves(self, gain: float) -> None:
        """What a step of it could be, drafted beside plain. The first ones, of which too little was known, are soon
        forgotten."""
        self.seen += 1
        self.saving += (share_saved(gain) - self.saving) * max(1.0 / self.smooth, min(1.0, 2.0 / self.seen))

    def again(self, gain: float, longer: float) -> bool:
        """Asked at every step: whether the worse kind should have another trial, for things change. `longer`: a drafted
        step's seconds beside a plain one's."""
        self.since += 1
        due = self.since >= SELDOM
        if self.known:
            lost = (1.0 - 1.0 / gain) / longer if gain > MARGIN else longer * (1.0 - gain)
            due = self.since >= max(OFTEN, lost / RETRY)
        if due:
            self.since = 0
        return due


def share_saved(gain: float) -> float:
    """Of the time, where drafting is so many times as fast and only done where it is faster."""
    return 1.0 - 1.0 / gain if gain > MARGIN else 0.0


def about(requests: int) -> int:
    """Loads within a factor of two are alike: 65 to 128, say, since whoever comes at 128 runs among fewer soon."""
    return (requests - 1).bit_length()
