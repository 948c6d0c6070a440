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
from miles_k3.rollout.speculative.planner.experience import MARGIN, Load, Spent

# Verifying everything costs at most this much more than nothing: no sorting, no risk by a wrong confidence.
FLAT = 0.02
CLEARLY = 0.9  # where drafted steps have less than this of plain ones' tokens a second, it isn't chance
FOLLOWING = 0.04  # of the time, about, is what following costs on a CPU: the draft's keys and values
WAVE = 16  # of so many loads' worth of requests that come there, one is followed all the same


class PlanMode(StrEnum):
    """No speculation; every drafted token is verified; those that pay."""

    OFF = "off"
    VERIFY_ALL = "verify_all"
    TRIM = "trim"


_NOTHING = None, 0, 0.0


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
        self._loads: dict[tuple[int, int], Load] = {}
        self._expected: dict[tuple[int, int], tuple[Calibration | None, int, float]] = {}
        self._spent = Spent()
        self._worth_following: dict[int, bool] = {}  # by load, until more is known: hundreds may come at once
        self._unpaid = 0  # requests that came at loads where drafting clearly doesn't pay

    def should_draft(self, requests: int, followed: int | None = None) -> bool:
        """Whether a block pays for each of the requests that a draft follows (None: all), with what drafting costs.

        By past steps of about this load, once there are drafted and plain ones, and by mean acceptance before. What
        doesn't pay is tried again now and then, and so is plain decoding where drafting pays.
        """
        followed = requests if followed is None else followed
        if self.mode is not PlanMode.TRIM or self.profile is None:
            return self.mode is not PlanMode.OFF and followed > 0
        if not followed:
            if requests:
                self._load(requests, requests).since += 1
            return False
        load = self._load(requests, followed)
        if load.drafted.known and not load.plain.known:
            return False  # as many plain steps first
        return (self._gain(requests, followed) > MARGIN) != load.again()

    def should_follow(self, load: int) -> bool:
        """Whether the draft should follow a request that comes when so many run.

        Not where drafting clearly doesn't pay, unless it would at the lower loads that its answer lives to see; save
        for a small share, in a row, that tells when this changes.
        """
        if self.mode is not PlanMode.TRIM or self.profile is None:
            return self.mode is not PlanMode.OFF
        if load not in self._worth_following:
            pays = self._gain(load, load) >= CLEARLY
            self._worth_following[load] = pays or self._spent.saved(self._gain, _about(load)) > FOLLOWING
        if self._worth_following[load]:
            return True
        self._unpaid += 1
        return self._unpaid // load % WAVE == WAVE - 1

    def observe(self, requests: int, followed: int, *, drafted: bool, tokens: int, seconds: float) -> None:
        """A step of decoding requests alone: what it committed, and how long it took."""
        if self.mode is not PlanMode.TRIM or self.profile is None:
            return
        self._worth_following.clear()
        self._spent.observe(_about(requests), seconds)
        if followed:
            plain = float(self.profile.seconds(requests, requests))
            self._load(requests, followed).observe(drafted, tokens / requests, seconds / plain)

    def _gain(self, requests: int, followed: int) -> float:
        """Tokens a second of drafted steps beside plain ones: counted, or else expected."""
        counted = self._load(requests, followed).gain
        if counted is not None:
            return counted
        believed, (calibration, rounds, gain) = self.calibration, self._expected.get((requests, followed), _NOTHING)
        if calibration is not believed or rounds != believed.rounds:
            gain = self._expect(requests, followed)
            self._expected[requests, followed] = believed, believed.rounds, gain
        return gain

    def _expect(self, requests: int, followed: int) -> float:
        assert self.profile is not None
        worth_RG = self._usual(requests) * self.calibration.room()
        worth_RG[followed:] = 0.0
        return choose(worth_RG, self.profile).rate * float(self.profile.seconds(requests, requests)) / requests

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
        if self.accept is AcceptMode.COUPLED:
            return choose(worth_RG, self.profile).drafted_R
        budget = int(choose(self._usual(requests) * allowed_RG, self.profile).drafted_R.sum())
        return take(worth_RG, budget)

    def _load(self, requests: int, followed: int) -> Load:
        return self._loads.setdefault((_about(requests), _about(followed)), Load.of(followed))

    def _usual(self, requests: int) -> NDArray[np.float64]:
        return np.tile(np.cumprod(self.calibration.rates()), (requests, 1))


def _about(requests: int) -> int:
    """Loads within a factor of two are alike: 65 to 128, say, since whoever comes at 128 runs among fewer soon."""
    return (requests - 1).bit_length()
