"""Batches that come at once and drain, through a planner, by a clock that is told: what a mode is worth to rollouts.

Requests differ in length and in how easily they are drafted; a profile says what steps take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.planner.calibration import Calibration
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.rollout.speculative.planner.history import History
from miles_k3.rollout.speculative.planner.planner import Planner
from miles_k3.rollout.speculative.planner.simulation import BLOCK, LOADS

FOLLOWING = 0.04  # of a plain step
READING = 0.1  # of a step that computes prompts
NOISE = 0.05  # of a step's time, and of a confidence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Tokens of each request, and the chance that a drafted one of it is accepted; `prompts`, those of each prompt, are
    computed all at once, in as many seconds as so many positions take."""

    lengths_R: NDArray[np.int64]
    chances_R: NDArray[np.float64]
    prompts: int = 0


def profile_of(milliseconds: Callable[[int], float], block: float, each: float) -> CostProfile:
    """A forward by its positions; drafting takes `block` and so much for each request."""
    points = [(r, n, milliseconds(n) / 1e3) for r in LOADS for n in range(r, r * (BLOCK + 1) + 1)]
    return CostProfile.of(points, {r: (block + each * r) / 1e3 for r in LOADS})


@dataclass(slots=True, eq=False, kw_only=True)
class _Request:
    tokens: int
    chance: float
    left: int
    followed: bool = False
    history: History = field(default_factory=History)


class Draining:
    """One engine under one mode."""

    def __init__(self, mode: PlanMode, profile: CostProfile, *, seats: int = 256, seed: int = 0) -> None:
        self.profile, self.seats, self.rng = profile, seats, np.random.default_rng(seed)
        self.planner = Planner(mode, AcceptMode.COUPLED, Calibration(block_size=BLOCK), profile)

    def run(self, batch: Batch) -> float:
        """Seconds of a batch."""
        pairs = zip(batch.lengths_R.tolist(), batch.chances_R.tolist(), strict=True)
        waiting = [_Request(tokens=n, chance=c, left=n) for n, c in pairs]
        running: list[_Request] = []
        seconds = 0.0
        while running or waiting:
            came = len(running)
            while waiting and len(running) < self.seats:
                load, first = min(len(running) + len(waiting), self.seats), waiting[0]
                first.followed = self.planner.should_follow(load, first.history)
                running.append(waiting.pop(0))
            seconds += self._read(running[came:], came, batch.prompts) if batch.prompts and running[came:] else 0.0
            seconds += self._step(running)
            ended = [(r.history, r.tokens) for r in running if not r.left]
            running = [r for r in running if r.left]
            self.planner.ended(ended, len(running), bool(waiting))
        return seconds

    def _read(self, came: list[_Request], decodes: int, tokens: int) -> float:
        followed = sum(r.followed for r in came)
        seconds = float(self.profile.seconds(len(came), len(came) * tokens)) * (1 + READING * followed / len(came))
        seconds *= float(np.exp(NOISE * self.rng.standard_normal()))
        uniform = followed in (0, len(came))
        self.planner.observe_prompts(
            [(r.history, tokens) for r in came], decodes, seconds, followed=followed > 0 if uniform else None
        )
        return seconds

    def _step(self, running: list[_Request]) -> float:
        planner, count = self.planner, len(running)
        followed = [r for r in running if r.followed]
        chosen = planner.members(count, [r.history for r in followed]).tolist()
        members = {id(r) for r, drafts in zip(followed, chosen, strict=True) if drafts and r.left > 1}
        accepted_R, verified = np.zeros(count, dtype=np.int64), 0
        if members:
            limits_R = np.array([min(BLOCK, r.left - 1) if id(r) in members else 0 for r in running])
            accepted_R, verified = self._verify(running, limits_R)
        at_once = self.profile.whole_seconds(count) if members and planner.verifies_whole else None
        plain = float(self.profile.seconds(count, count))
        seconds = float(self.profile.seconds(count, count + verified)) + FOLLOWING * plain * bool(followed)
        seconds += self.profile.draft_seconds(len(members)) if members else 0.0
        seconds = seconds if at_once is None else at_once + FOLLOWING * plain
        seconds *= float(np.exp(NOISE * self.rng.standard_normal()))
        tokens = (1 + accepted_R).tolist()
        for request, more in zip(running, tokens, strict=True):
            request.left -= more
        histories = [r.history for r in running]
        planner.observe(histories, tokens, len(followed), seconds, drafted=bool(members))
        return seconds

    def _verify(self, running: list[_Request], limits_R: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Accepted tokens of each, and how many were verified."""
        drafts_R = limits_R > 0
        chances_RG = np.array([[r.chance] * BLOCK for r in running]) * drafts_R[:, None]
        confidence_RG = np.clip(chances_RG + NOISE * self.rng.standard_normal(chances_RG.shape), 0, 1)
        self.planner.calibration.observe_room(limits_R[drafts_R])
        verified_R = limits_R if self.planner.verifies_whole else self.planner.plan(confidence_RG, limits_R)
        right_RG = self.rng.random(chances_RG.shape) < chances_RG
        accepted_R = np.minimum(np.cumprod(right_RG, axis=1).sum(1), verified_R)
        self.planner.judged([r.history for r in running], confidence_RG, limits_R, verified_R, accepted_R)
        return accepted_R, int(verified_R.sum())


def beside_off(
    profile: CostProfile, draw: Callable[[np.random.Generator], Batch], *, learning: int, rounds: int
) -> dict[PlanMode, float]:
    """Plain decoding's seconds beside each mode's, over the same batches, after some that don't count."""
    seconds = {}
    for mode in PlanMode:
        rng, engine = np.random.default_rng(7), Draining(mode, profile)
        seconds[mode] = sum([engine.run(draw(rng)) for _ in range(learning + rounds)][learning:])
    return {mode: seconds[PlanMode.OFF] / found for mode, found in seconds.items()}
