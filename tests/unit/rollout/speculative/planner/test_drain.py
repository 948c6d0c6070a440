"""What accepted tokens save batches that drain, against batches counted step by step; and modes on such batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.draining import Batch, beside_off, profile_of
from numpy.typing import NDArray

from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile, Curve
from miles_k3.rollout.speculative.planner.drain import Costs, Drain, Gains, draining
from miles_k3.rollout.speculative.planner.history import Ease, History

PLAIN = np.array([0.0, *(6.0 + 0.25 * np.arange(1, 65))])  # seconds of a step of so many


def seconds_of(steps_R: NDArray[np.float64]) -> float:
    """Of a batch whose requests take so many steps."""
    times = np.sort(steps_R)
    return float((np.diff(times, prepend=0.0) * PLAIN[len(times) : 0 : -1]).sum())


@pytest.mark.parametrize("seed", range(10))
def test_savings_add_up(seed: int) -> None:
    """Of all tokens that drafts give, they are what the batch takes less: equal speeds, so that all weigh alike."""
    rng = np.random.default_rng(seed)
    tokens_R, faster = rng.integers(5, 200, 40), float(rng.uniform(0.5, 4))
    gained_R = tokens_R * faster / (1 + faster)
    worth_R = draining(tokens_R, np.full(40, faster), PLAIN[:41])
    assert worth_R[-1] == pytest.approx(1.0)  # any order of ends costs one plain step of each load
    exact = seconds_of(tokens_R.astype(float)) - seconds_of(tokens_R - gained_R)
    assert exact == pytest.approx(seconds_of(tokens_R.astype(float)) * faster / (1 + faster))


def test_what_is_easy_and_ends_early_is_worth_little() -> None:
    """Half of a batch is never accepted: the others' tokens save what a row costs, and nothing of the last step."""
    faster_R = np.repeat([3.0, 0.0], 32)
    worth_R = draining(np.full(64, 100), faster_R, PLAIN)
    assert worth_R[-1] == pytest.approx(0.25 / (PLAIN[64] / 64), rel=1e-6)
    total = seconds_of(np.full(64, 100.0)) - seconds_of(np.repeat([25.0, 100.0], 32))
    assert worth_R[-1] * PLAIN[64] / 64 * 32 * 75 == pytest.approx(total)


def test_where_all_are_alike_a_token_is_worth_a_plain_one() -> None:
    assert draining(np.full(32, 50), np.full(32, 2.0), PLAIN[:33])[-1] == pytest.approx(1.0)


def test_luck_is_no_ease() -> None:
    """Requests that differ by luck are believed to be alike, others aren't."""
    rng = np.random.default_rng(0)
    for chances, spread in ((np.full(64, 0.7), 0.15), (np.repeat([0.9, 0.1], 32), 0.6)):
        ease, found = Ease(), np.zeros(64)
        for _ in range(6):
            histories = [History() for _ in range(64)]
            for history, chance in zip(histories, chances, strict=True):
                for _ in range(6):
                    accepted = int(np.cumprod(rng.random(7) < chance).sum())
                    history.observe(accepted, 2.2)
            found = ease.of(histories)
        gap = found.std() / found.mean()
        assert gap < spread if spread < 0.5 else gap > spread


def ended(drain: Drain, tokens: list[int], left: int, *, waiting: bool = False):
    costs = Costs(plain=lambda n: float(PLAIN[n]), alone=lambda n: 1.0, usual=2.0)
    histories = [History(accepted_in_all=4.0, usual_in_all=4.0, usual=1.0) for _ in tokens]
    return drain.ended(list(zip(histories, tokens, strict=True)), left, waiting, costs)


def test_who_ends_while_others_wait_saves_a_plain_token() -> None:
    """And who ends alone what a step of one costs."""
    drain = Drain()
    assert ended(drain, [5, 5], 6, waiting=True) == []
    [first, second] = drain.refilled()
    assert (first.load, first.seconds) == (8, 1.0) == (second.load, second.seconds)
    assert ended(drain, [9], 7) == []
    assert drain.refilled()[0].seconds == pytest.approx((PLAIN[8] - PLAIN[7]) / (PLAIN[8] / 8))


def test_two_batches_are_needed_and_more_of_few_requests() -> None:
    for requests, least in ((64, 2), (256, 2), (8, 8), (1, 64)):
        gains = Gains.of(requests)
        gains.found.extend([0.9] * (least - 1))
        assert not gains.lost
        gains.found.append(0.9)
        assert gains.lost
    gains = Gains.of(64)
    gains.found.extend([0.8, 1.15])
    assert not gains.lost


@pytest.mark.parametrize("aborted", [False, True])
def test_a_batch_of_which_somebody_was_aborted_says_nothing(aborted: bool) -> None:
    drain, costs = Drain(), Costs(plain=lambda n: float(PLAIN[n]), alone=lambda n: 1.0, usual=2.0)
    for _ in range(3):
        histories = [History() for _ in range(64)]
        drain.observe(histories, [1] * 64, 99.0, followed=True, known=True)
        drain.ended([(h, 1) for h in histories[aborted:]], 0, False, costs)
    assert drain.lost(64) is not aborted


# --- modes on batches -----------------------------------------------------------------------------------------------
CPU = profile_of(lambda n: 6.5 + 0.125 * n, 3.0, 0.06)
GPU = profile_of(lambda n: 10 + 1.0 * -(-n // 64), 1.0, 0.004)
LENGTHS = {
    "equal": lambda rng, r: np.full(r, 40),
    "uniform": lambda rng, r: rng.integers(15, 48, r),
    "tail": lambda rng, r: np.minimum(200, 4 + rng.geometric(0.04, r)),
    "short": lambda rng, r: rng.integers(2, 5, r),
}
CHANCES = {
    "good": lambda rng, n: np.full(len(n), 0.8),
    "useless": lambda rng, n: np.full(len(n), 0.05),
    "two kinds": lambda rng, n: np.where(rng.random(len(n)) < 0.6, 0.9, 0.05),
    "long ones are hard": lambda rng, n: np.where(n > np.median(n), 0.2, 0.85),
    "long ones are easy": lambda rng, n: np.where(n > np.median(n), 0.85, 0.2),
}
LOST = 0.04  # of plain decoding's rate, and of verifying all's, at most, once learned
LOST_TO_ALL = 0.1


def check(profile, lengths: str, chances: str, requests: int, *, learning: int, rounds: int, prompts: int = 0) -> None:
    def draw(rng: np.random.Generator) -> Batch:
        lengths_R = LENGTHS[lengths](rng, requests)
        return Batch(lengths_R=lengths_R, chances_R=CHANCES[chances](rng, lengths_R), prompts=prompts)

    found = beside_off(profile, draw, learning=learning, rounds=rounds)
    assert found[PlanMode.TRIM] > 1.0 - LOST, found
    assert found[PlanMode.TRIM] > found[PlanMode.VERIFY_ALL] * (1.0 - LOST_TO_ALL), found


@pytest.mark.parametrize(
    ("profile", "lengths", "chances", "requests"),
    [
        (CPU, "uniform", "two kinds", 64),
        (CPU, "equal", "good", 8),
        (GPU, "uniform", "long ones are hard", 16),
    ],
)
def test_batches_that_drain_lose_nothing(profile, lengths: str, chances: str, requests: int) -> None:
    check(profile, lengths, chances, requests, learning=8, rounds=16)


@pytest.mark.parametrize(("chances", "requests"), [("good", 1), ("good", 8), ("two kinds", 8)])
def test_short_answers_behind_long_prompts_lose_nothing(chances: str, requests: int) -> None:
    many = 64 // requests
    check(CPU, "short", chances, requests, learning=4 * many, rounds=4 * many, prompts=60)


@pytest.mark.slow
@pytest.mark.parametrize("profile", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("requests", [8, 64, 256])
@pytest.mark.parametrize("chances", CHANCES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_no_batch_loses(profile, requests: int, chances: str, lengths: str) -> None:
    many = 64 // requests + 1
    check(profile, lengths, chances, requests, learning=8 * many, rounds=16 * many)


@pytest.mark.slow
@pytest.mark.parametrize("profile", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("chances", CHANCES)
@pytest.mark.parametrize("lengths", ["short", "uniform"])
def test_no_small_batch_with_prompts_loses(profile, requests: int, chances: str, lengths: str) -> None:
    many = 24 // requests
    check(profile, lengths, chances, requests, learning=8 * many, rounds=16 * many, prompts=30)


MEASURED = Path(__file__).parents[5] / "docs" / "data" / "speculative_h200_costs.json"


# A step of whole blocks: as measured, for less than a draft and a verify, or not to be had.
AT_ONCE: dict[str, Callable[[Curve], float | None]] = {
    "measured": lambda curve: curve.whole_s,
    "cheap": lambda curve: 0.85 * (curve.draft_s + curve.seconds[-1]),
    "none": lambda curve: None,
}


@pytest.mark.parametrize(
    ("requests", "chance", "at_once"),
    [
        (256, 0.8, "measured"),
        *(
            pytest.param(n, chance, at_once, marks=pytest.mark.slow)
            for n in (1, 8, 64, 256) for chance in (0.8, 0.5, 0.1) for at_once in AT_ONCE
        ),
    ],
)  # fmt: skip
def test_what_an_h200_takes(requests: int, chance: float, at_once: str) -> None:
    """At K3's widths; 64 tokens behind prompts of 32, all as easy to draft: what was accepted of late is luck."""
    profile = CostProfile.load(MEASURED)
    whole = tuple(replace(curve, whole_s=AT_ONCE[at_once](curve)) for curve in profile.curves)
    profile = replace(profile, curves=whole)

    def draw(rng: np.random.Generator) -> Batch:
        return Batch(lengths_R=np.full(requests, 64), chances_R=np.full(requests, chance), prompts=32)

    few = max(1, 32 // requests)
    found = beside_off(profile, draw, learning=4 * few, rounds=4 * few)
    assert found[PlanMode.TRIM] > 0.96
    assert found[PlanMode.TRIM] > 0.93 * found[PlanMode.VERIFY_ALL]
