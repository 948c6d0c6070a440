"""Which drafted tokens to verify, over all requests together (spec 6.5).

A token is worth the chance that it is committed: the product of the acceptances up to it. A verify of R requests with m
drafted tokens commits R + (the m largest worths) in expectation; the best m has the most tokens a second. Worths fall
along a block, so the largest are always the beginnings of blocks. Shapes: R requests, G positions of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from miles_k3.rollout.speculative.planner.cost import CostProfile

# Verifying everything costs at most this much more than nothing: no sorting, no risk by a wrong confidence.
FLAT = 0.02


class PlanMode(StrEnum):
    """No speculation; every drafted token is verified; those that pay."""

    OFF = "off"
    VERIFY_ALL = "verify_all"
    TRIM = "trim"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """`drafted_R` drafted tokens of each request to verify, and what is expected of it, draft included."""

    drafted_R: NDArray[np.int64]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def choose(worth_RG: NDArray[np.float64], profile: CostProfile) -> Choice:
    """The choice with the most expected tokens a second. Worths must not rise along a block; 0 where nothing may go."""
    requests, possible = len(worth_RG), int((worth_RG > 0).sum())
    drafting = profile.draft_seconds(int((worth_RG > 0).any(axis=1).sum())) if possible else 0.0
    seconds_M = profile.table(requests, possible)
    nothing, everything = float(seconds_M[0]), float(seconds_M[-1])
    total = requests + float(worth_RG.sum())
    if everything <= (1 + FLAT) * nothing and total * nothing >= requests * everything:
        return Choice(drafted_R=(worth_RG > 0).sum(1), tokens=total, seconds=drafting + everything)
    best = np.sort(worth_RG, axis=None)[::-1][:possible]
    tokens_M = requests + np.concatenate([[0.0], np.cumsum(best)])
    seconds_M = drafting + seconds_M
    m = int(np.argmax(tokens_M / seconds_M))
    return Choice(drafted_R=take(worth_RG, m), tokens=float(tokens_M[m]), seconds=float(seconds_M[m]))


def take(worth_RG: NDArray[np.float64], budget: int) -> NDArray[np.int64]:
    """How many tokens of each request are among the `budget` worthiest; ties go by position, then request: [R]."""
    by_position = worth_RG.T.reshape(-1)
    order = np.argsort(-by_position, kind="stable")[:budget]
    order = order[by_position[order] > 0]
    return np.bincount(order % len(worth_RG), minlength=len(worth_RG))
