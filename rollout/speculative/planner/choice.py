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

from miles_k3.errors import EngineError
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.planner.calibration import Calibration
from miles_k3.rollout.speculative.planner.cost import CostProfile

# Verifying everything costs at most this much more than nothing: no sorting, no risk by a wrong confidence.
FLAT = 0.02
TRIALS = 4  # drafted steps of a load before its own experience says whether drafting pays
MEMORY = 0.1  # weight of the newest one, when there are many
RETRY = 64  # steps of a load that doesn't pay, until it is tried again


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
    requests = len(worth_RG)
    drafting, possible = profile.draft_seconds(requests), int((worth_RG > 0).sum())
    nothing, everything = profile.seconds(requests, [requests, requests + possible])
    total = requests + float(worth_RG.sum())
    if everything <= (1 + FLAT) * nothing and total * nothing >= requests * everything:
        return Choice(drafted_R=(worth_RG > 0).sum(1), tokens=total, seconds=drafting + float(everything))
    best = np.sort(worth_RG, axis=None)[::-1][:possible]
    tokens_M = requests + np.concatenate([[0.0], np.cumsum(best)])
    seconds_M = drafting + profile.seconds(requests, requests + np.arange(possible + 1))
    m = int(np.argmax(tokens_M / seconds_M))
    return Choice(drafted_R=take(worth_RG, m), tokens=float(tokens_M[m]), seconds=float(seconds_M[m]))


def take(worth_RG: NDArray[np.float64], budget: int) -> NDArray[np.int64]:
    """How many tokens of each request are among the `budget` worthiest; ties go by position, then request: [R]."""
    by_position = worth_RG.T.reshape(-1)
    order = np.argsort(-by_position, kind="stable")[:budget]
    order = order[by_position[order] > 0]
    return np.bincount(order % len(worth_RG), minlength=len(worth_RG))


@dataclass(slots=True)
class _Gain:
    """Expected tokens a second of drafted steps, beside plain ones; `skipped` in a row."""

    mean: float = 0.0
    count: int = 0
    skipped: int = 0

    def observe(self, gain: float) -> None:
        self.count += 1
        self.mean += (gain - self.mean) * max(1.0 / self.count, MEMORY)

    def again(self) -> bool:
        """True every so often, for acceptance may have changed."""
        self.skipped = (self.skipped + 1) % RETRY
        return self.skipped == 0


class Planner:
    """One engine's plan, round by round. Without a profile `trim` verifies everything.

    With `AcceptMode.REJECTION` how many tokens are verified is fixed before the draft's tokens are known, from past
    acceptance; only whose they are goes by confidence. A budget that looks at confidences behind a token depends on the
    token, and then what is committed is no longer the policy's distribution. Coupled acceptance commits the same tokens
    under any plan, so there the budget may look at everything.
    """

    def __init__(
        self, mode: PlanMode, accept: AcceptMode, calibration: Calibration, profile: CostProfile | None = None
    ) -> None:
        self.mode, self.accept, self.calibration, self.profile = mode, accept, calibration, profile
        self._gains: dict[int, _Gain] = {}

    def should_draft(self, requests: int) -> bool:
        """Whether a block for each of so many requests pays, with what drafting costs.

        By what past blocks at about this load were expected to bring, once there are some, and by mean acceptance
        before. A load that doesn't pay is tried again now and then.
        """
        if self.mode is not PlanMode.TRIM or self.profile is None:
            return self.mode is not PlanMode.OFF
        gain = self._gain(requests)
        if gain.count >= TRIALS:
            return gain.mean > 1.0 or gain.again()
        plain = requests / float(self.profile.seconds(requests, requests))
        return choose(self._usual(requests) * self.calibration.room(), self.profile).rate > plain

    @property
    def verifies_all(self) -> bool:
        """Whether `plan` gives the limits, whatever was drafted."""
        return self.mode is PlanMode.VERIFY_ALL or (self.mode is PlanMode.TRIM and self.profile is None)

    def plan(self, confidence_RG: NDArray[np.float64], limits_R: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Drafted tokens of each request to verify, 0 to G, at most `limits_R` (what is left of it, say): [R].

        Raises EngineError for confidences outside of [0, 1] or of another block size.
        """
        size = self.calibration.block_size
        shape = confidence_RG.shape
        if len(shape) != 2 or shape[1] != size or not ((confidence_RG >= 0) & (confidence_RG <= 1)).all():
            raise EngineError(f"confidences have to be [requests, {size}] numbers from 0 to 1, got shape {shape}")
        requests = len(confidence_RG)
        most_R = np.full(requests, size) if limits_R is None else np.clip(limits_R, 0, size)
        if self.mode is PlanMode.OFF or not requests:
            return np.zeros(requests, dtype=np.int64)
        if self.verifies_all or self.profile is None:
            return most_R
        allowed_RG = np.arange(size) < most_R[:, None]
        worth_RG = np.cumprod(self.calibration(confidence_RG), axis=1) * allowed_RG
        chosen = choose(worth_RG, self.profile)
        self._gain(requests).observe(chosen.rate * float(self.profile.seconds(requests, requests)) / requests)
        if self.accept is AcceptMode.COUPLED:
            return chosen.drafted_R
        budget = int(choose(self._usual(requests) * allowed_RG, self.profile).drafted_R.sum())
        return take(worth_RG, budget)

    def _gain(self, requests: int) -> _Gain:
        """Of loads within a factor of two."""
        return self._gains.setdefault(requests.bit_length(), _Gain())

    def _usual(self, requests: int) -> NDArray[np.float64]:
        return np.tile(np.cumprod(self.calibration.rates()), (requests, 1))
