"""What each mode is worth on a cost curve: rounds of made-up confidences, expected tokens, the curve's seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.planner.calibration import Calibration
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.rollout.speculative.planner.history import History
from miles_k3.rollout.speculative.planner.planner import Planner

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BLOCK = 7

# Milliseconds of a forward by the positions in it.
CURVES: dict[str, Callable[[int], float]] = {
    "stairs of 8": lambda n: 10 + 1.0 * -(-n // 8),
    "stairs of 64": lambda n: 10 + 4.0 * -(-n // 64),
    "steep stairs of 32": lambda n: 2 + 6.0 * -(-n // 32),
    "flat to 128, then a slope": lambda n: 10 + 0.08 * max(0, n - 128),
    "smooth": lambda n: 10 + 0.03 * n,
}


def synthetic_profile(curve: Callable[[int], float]) -> CostProfile:
    """Every position count at every load; drafting takes a tenth of an empty forward and a little for each request."""
    points = [(r, n, curve(n) / 1e3) for r in LOADS for n in range(r, r * (BLOCK + 1) + 1)]
    return CostProfile.of(points, {r: (0.1 * curve(1) + 0.005 * r) / 1e3 for r in LOADS})


def rounds_of(requests: int, count: int, quality: float, seed: int = 0) -> Iterator[NDArray[np.float64]]:
    """Chances of acceptance [R, G]: some requests are easy to draft, some are not, and later positions less so."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        easy_R1 = rng.beta(4 * quality, 4 * (1 - quality), size=(requests, 1))
        yield np.clip(easy_R1 * 0.98 ** np.arange(BLOCK) + 0.05 * rng.standard_normal((requests, BLOCK)), 0, 1)


def rates(
    profile: CostProfile, requests: int, quality: float, *, count: int = 100, accept: AcceptMode = AcceptMode.COUPLED
) -> dict[PlanMode, float]:
    """Expected tokens a second of each mode over all rounds. `trim` has seen as many rounds before, nothing else."""
    calibration = Calibration(block_size=BLOCK)
    rng = np.random.default_rng(1)
    for chances_RG in rounds_of(requests, count, quality, seed=1):
        accepted_R = np.cumprod(rng.random(chances_RG.shape) < chances_RG, axis=1).sum(1)
        calibration.observe(chances_RG, np.full(requests, BLOCK), accepted_R)
    out = {}
    for mode in PlanMode:
        planner, tokens, seconds = Planner(mode, accept, calibration, profile), 0.0, 0.0
        drafts = bool(planner.members(requests, [History()] * requests).any())
        at_once = profile.whole_seconds(requests) if drafts and planner.verifies_whole else None
        for chances_RG in rounds_of(requests, count, quality):
            drafted_R = planner.plan(chances_RG) if drafts else np.zeros(requests, dtype=np.int64)
            drafted_R = drafted_R if at_once is None else np.full(requests, BLOCK)
            verified_RG = np.arange(BLOCK) < drafted_R[:, None]
            tokens += requests + float((np.cumprod(chances_RG, axis=1) * verified_RG).sum())
            apart = float(profile.seconds(requests, requests + int(drafted_R.sum())))
            apart += profile.draft_seconds(requests) if drafts else 0.0
            seconds += apart if at_once is None else at_once
        out[mode] = tokens / seconds
    return out
