"""What is known of one request that a draft follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PRIOR = 3.0  # accepted tokens that a request is believed to be as others are
LUCK = 2.0  # variance of a block's accepted tokens beside their mean
MEMORY = 0.9  # of what batches before said counts
FADES = 0.6  # of what was seen before a block counts behind it: what is hard is so for a few blocks
PASSES = 0.85  # the same, of any step


@dataclass(slots=True)
class History:
    """How easily a request is drafted beside the usual one: of late, and in all."""

    accepted: float = 0.0
    usual: float = 0.0
    accepted_in_all: float = 0.0
    usual_in_all: float = 0.0
    timed: int = 0  # tokens of steps whose time is known
    came: int = -1  # logarithm of the load at which it came; -1: not known

    def observe(self, accepted: float, usual: float) -> None:
        """A block of which so many tokens were, or would have been, accepted, and usually are."""
        self.accepted, self.usual = FADES * self.accepted + accepted, FADES * self.usual + usual
        self.accepted_in_all += accepted
        self.usual_in_all += usual

    def passes(self) -> None:
        """A step, drafted or plain."""
        self.accepted, self.usual = PASSES * self.accepted, PASSES * self.usual

    @property
    def ease(self) -> float:
        return (self.accepted + PRIOR) / (self.usual + PRIOR)


@dataclass(slots=True)
class Ease:
    """How different requests are, each with too few blocks to tell: what is more than luck (empirical Bayes)."""

    beyond_luck: float = 0.0
    weight: float = 1.0

    def of(self, histories: Sequence[History]) -> NDArray[np.float64]:
        """Of requests that have ended, each one's ease as it should be believed; 0 where nothing was drafted: [R]."""
        accepted_R = np.array([h.accepted_in_all for h in histories])
        usual_R = np.array([h.usual_in_all for h in histories])
        if not usual_R.any():
            return np.zeros(len(histories))
        mean = accepted_R.sum() / usual_R.sum()
        beyond = float(((accepted_R - mean * usual_R) ** 2).sum() - LUCK * accepted_R.sum())
        self.beyond_luck = MEMORY * self.beyond_luck + beyond
        self.weight = MEMORY * self.weight + float((usual_R**2).sum())
        variance = max(1e-6, self.beyond_luck / self.weight)
        believed = max(1e-3, LUCK * mean / variance)
        return (accepted_R + believed * mean) / (usual_R + believed)
