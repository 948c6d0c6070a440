"""The choice against every other choice, each mode on synthetic curves, and a plan that would bend the distribution."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.speculation import BLOCK as CHAIN_BLOCK
from helpers.speculation import Chains, chi_square, joint_counts
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.planner.calibration import Calibration
from miles_k3.rollout.speculative.planner.choice import PlanMode, choose, take
from miles_k3.rollout.speculative.planner.cost import CostProfile, Tiers
from miles_k3.rollout.speculative.planner.history import History
from miles_k3.rollout.speculative.planner.planner import Planner
from miles_k3.rollout.speculative.planner.simulation import CURVES, rates, synthetic_profile
from miles_k3.types import SamplingParams

MEASURED = Path(__file__).parents[5] / "docs" / "data" / "speculative_h200_costs.json"


def random_profile(rng: np.random.Generator, requests: int, size: int) -> CostProfile:
    """Steps of any height and width."""
    steps = np.where(rng.random(requests * size + 1) < 0.4, rng.random(requests * size + 1), 0.0)
    seconds = 1.0 + np.cumsum(steps)
    points = [(requests, requests + i, float(s)) for i, s in enumerate(seconds)]
    return CostProfile.of(points, {requests: float(rng.random())})


def drafts(planner: Planner, requests: int) -> bool:
    return bool(planner.members(requests, [History()] * requests).any())


def test_what_is_padded_anyway_is_verified() -> None:
    """A choice fills its tier of rows: what is left of it is free."""
    tiers = Tiers(requests=(4,), positions=(4, 8, 12, 16))
    profile = CostProfile.of([(4, 4, 1.0), (4, 8, 1.3), (4, 12, 2.0), (4, 16, 3.0)], {4: 0.1}, tiers)
    for seed in range(20):
        worth = np.cumprod(np.random.default_rng(seed).random((3, 4)) * 0.5 + 0.5, axis=1)
        chosen = choose(worth, profile)
        assert 3 + int(chosen.drafted_R.sum()) in (8, 12, 15), seed


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_is_better(seed: int) -> None:
    """Every combination of lengths, two to four requests; and what is promised is what the lengths give."""
    rng = np.random.default_rng(seed)
    requests, size = int(rng.integers(2, 5)), 3
    worth = np.cumprod(rng.random((requests, size)), axis=1)
    profile = random_profile(rng, requests, size)
    found = choose(worth, profile)

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = requests + sum(worth[r, :n].sum() for r, n in enumerate(lengths))
        return tokens / (profile.draft_seconds(requests) + float(profile.seconds(requests, requests + sum(lengths))))

    best = max(rate(lengths) for lengths in itertools.product(range(size + 1), repeat=requests))
    assert rate(tuple(found.drafted_R.tolist())) == pytest.approx(found.rate)
    assert found.rate == pytest.approx(best)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_taken_are_beginnings(seed: int) -> None:
    """Worths with many ties: the sum taken is the largest of that many tokens."""
    rng = np.random.default_rng(seed)
    worth = np.cumprod(rng.choice([1.0, 0.5], (40, 7)), axis=1)
    for budget in range(0, 281, 7):
        lengths = take(worth, budget)
        got = sum(worth[r, :n].sum() for r, n in enumerate(lengths))
        assert lengths.sum() == budget
        assert got == pytest.approx(np.sort(worth, axis=None)[::-1][:budget].sum())


@pytest.mark.parametrize("accept", list(AcceptMode))
@pytest.mark.parametrize("curve", CURVES)
def test_trimming_never_loses(curve: str, accept: AcceptMode) -> None:
    """Tokens a second, against verifying all and against no speculation, at each load and quality of the draft."""
    profile = synthetic_profile(CURVES[curve])
    for requests, quality in itertools.product((1, 2, 8, 16, 64, 256), (0.2, 0.5, 0.8)):
        found = rates(profile, requests, quality, count=25, accept=accept)
        best = max(found[PlanMode.OFF], found[PlanMode.VERIFY_ALL])
        # What little may be lost is the calibration's: 25 rounds of one request.
        assert found[PlanMode.TRIM] >= best * (1 - 1e-9), (requests, quality, found)


@pytest.mark.parametrize("accept", list(AcceptMode))
def test_trimming_never_loses_by_what_an_h200_takes(accept: AcceptMode) -> None:
    """Whole blocks at once among it. Of one request 100 rounds are few: where the two others are nearly as fast, the
    faster one of the rounds before may be the slower one of these."""
    profile = CostProfile.load(MEASURED)
    for requests, quality in itertools.product((1, 2, 8, 16, 64, 128, 256), (0.2, 0.5, 0.8)):
        found = rates(profile, requests, quality, accept=accept)
        best = max(found[PlanMode.OFF], found[PlanMode.VERIFY_ALL])
        assert found[PlanMode.TRIM] >= best * (1 - 1e-9 if requests > 1 else 0.96), (requests, quality, found)


def test_trimming_gains_where_positions_cost() -> None:
    found = rates(synthetic_profile(CURVES["steep stairs of 32"]), 8, 0.5, count=25)
    assert found[PlanMode.TRIM] > 1.3 * max(found[PlanMode.OFF], found[PlanMode.VERIFY_ALL])


def test_a_flat_curve_verifies_everything() -> None:
    profile = CostProfile.of([(4, n, 1.0 + 0.0005 * n) for n in range(4, 33)])
    worth = np.cumprod(np.full((4, 7), 0.3), axis=1)
    assert choose(worth, profile).drafted_R.tolist() == [7] * 4


def test_a_nearly_flat_curve_takes_nothing_that_is_worth_less_than_it_costs() -> None:
    profile = CostProfile.of([(4, 4, 1.0), (4, 32, 1.01)])
    assert choose(np.full((4, 7), 1e-4), profile).drafted_R.tolist() == [0] * 4


def test_modes_and_limits() -> None:
    confidence, limits = np.full((3, 7), 0.9), np.array([0, 3, 9])
    profile = synthetic_profile(CURVES["stairs of 64"])

    def plan(mode: PlanMode, profile: CostProfile | None = profile) -> list[int]:
        return Planner(mode, AcceptMode.COUPLED, Calibration(block_size=7), profile).plan(confidence, limits).tolist()

    assert plan(PlanMode.OFF) == [0, 0, 0]
    assert plan(PlanMode.VERIFY_ALL) == plan(PlanMode.TRIM) == plan(PlanMode.TRIM, None) == [0, 3, 7]
    planner = Planner(PlanMode.TRIM, AcceptMode.COUPLED, Calibration(block_size=7), profile)
    for bad in (confidence[:, :5], confidence + 0.2, confidence * np.nan):
        with pytest.raises(EngineError, match="numbers from 0 to 1"):
            planner.plan(bad)


def test_a_draft_that_never_hits_is_not_asked() -> None:
    """Where a block costs and nothing of it is accepted; where it costs nothing more it may as well be drafted."""
    calibration = Calibration(block_size=7)
    calibration.observe(np.full((500, 7), 0.5), np.full(500, 7), np.zeros(500, dtype=np.int64))
    profile = synthetic_profile(CURVES["smooth"])
    planner = Planner(PlanMode.TRIM, AcceptMode.COUPLED, calibration, profile)
    assert not drafts(planner, 32)
    assert drafts(Planner(PlanMode.VERIFY_ALL, AcceptMode.COUPLED, calibration, profile), 32)
    assert not drafts(Planner(PlanMode.OFF, AcceptMode.COUPLED, calibration, profile), 32)
    assert drafts(Planner(PlanMode.TRIM, AcceptMode.COUPLED, Calibration(block_size=7), profile), 32)


# --- a plan that knows too much -------------------------------------------------------------------------------------
def planned(chains: Chains, accept: AcceptMode) -> Tensor:
    """Tokens to verify of a block alone, by [anchor, first, second drafted token]; a verify costs as much for 3 drafted
    tokens as for one, so whether the first pays depends on the confidence behind it, and that on the token itself."""
    vocab = len(chains.target)
    chance = torch.minimum(chains.policy(), chains.draft).sum(1)
    profile = CostProfile.of([(1, 1, 1.0), (1, 2, 1.9), (1, 3, 1.9), (1, 4, 1.9)])
    planner = Planner(PlanMode.TRIM, accept, Calibration(block_size=CHAIN_BLOCK), profile)
    planner.calibration.observe(np.full((1000, 3), 0.5), np.full(1000, 3), np.repeat([0, 1, 2, 3], 250))
    planner.calibration = _Trusting(planner.calibration)
    blocks = list(itertools.product(range(vocab), repeat=3))
    lengths = [int(planner.plan(chance[list(block)][None].double().numpy())[0]) for block in blocks]
    return torch.tensor(lengths).view(vocab, vocab, vocab)


class _Trusting(Calibration):
    """Past rates of another one, confidences as they are."""

    def __init__(self, past: Calibration) -> None:
        super().__init__(block_size=past.block_size)
        self.reached_GE, self.accepted_GE = past.reached_GE, past.accepted_GE

    def __call__(self, confidence_RG: np.ndarray) -> np.ndarray:
        return confidence_RG


@pytest.mark.parametrize(
    ("accept", "planned_for", "exact"),
    [
        (AcceptMode.COUPLED, AcceptMode.COUPLED, True),
        (AcceptMode.REJECTION, AcceptMode.REJECTION, True),
        (AcceptMode.REJECTION, AcceptMode.COUPLED, False),
    ],
)
def test_only_coupled_answers_may_be_planned_with_all_confidences(
    accept: AcceptMode, planned_for: AcceptMode, exact: bool
) -> None:
    chains = Chains.draw(5, SamplingParams(), seed=3, noise=2.0)
    lengths = planned(chains, planned_for)
    if planned_for is AcceptMode.COUPLED:
        assert len(lengths.unique()) > 1
    counts = joint_counts(
        chains, accept, 30_000, drawn=True, lengths_of=lambda fed: lengths[fed[:, 0], fed[:, 1], fed[:, 2]]
    )
    away = chi_square(counts, chains.joint())
    assert away < 4.5 if exact else away > 6


def test_blocks_that_answers_have_no_room_for_are_not_drafted() -> None:
    """Good drafts of answers that end after a token: whole blocks would pay, what is left of them doesn't."""
    calibration = Calibration(block_size=7)
    ones = np.ones((100, 7))
    calibration.observe(0.95 * ones, np.full(100, 7), np.full(100, 7))
    profile = CostProfile.of([(4, 4, 1.0), (4, 32, 2.0)], {4: 0.9})
    planner = Planner(PlanMode.TRIM, AcceptMode.COUPLED, calibration, profile)
    assert drafts(planner, 4)
    calibration.observe_room(np.full(1000, 0))
    assert not drafts(planner, 4)
