"""Whether steps of a load should draft, and whether requests that come at it are followed, by what steps brought."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.planner.calibration import Calibration
from miles_k3.rollout.speculative.planner.choice import WAVE, PlanMode, Planner
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.rollout.speculative.planner.experience import SELDOM, TRIALS, Steps

PROFILE = CostProfile.of([(8, 8, 1.0), (8, 64, 1.5), (64, 64, 1.0), (64, 512, 1.5)], {8: 0.2, 64: 0.2})


def trimming(mode: PlanMode = PlanMode.TRIM) -> Planner:
    """One that expects every drafted token to be accepted."""
    calibration = Calibration(block_size=7)
    calibration.observe(np.ones((200, 7)), np.full(200, 7), np.full(200, 7))
    return Planner(mode, AcceptMode.COUPLED, calibration, PROFILE)


def go(planner: Planner, steps: int, gain: float, requests: int = 64, followed: int | None = None) -> list[int]:
    """Steps in which drafting gives `gain` times the tokens in half of a second more; those that drafted."""
    followed, drafting = requests if followed is None else followed, []
    for i in range(steps):
        drafted = planner.should_draft(requests, followed)
        drafting += [i] if drafted else []
        tokens, seconds = (round(1.5 * gain * requests), 1.5) if drafted else (requests, 1.0)
        planner.observe(requests, followed, drafted=drafted, tokens=tokens, seconds=seconds)
    return drafting


def test_the_clock_overrules_what_was_expected() -> None:
    """A load is tried both ways first; then the worse way as often as it may cost 1 % of the time."""
    planner = trimming()
    drafting = go(planner, 400, gain=0.8)
    assert drafting[:TRIALS] == list(range(TRIALS))
    assert np.diff(drafting[TRIALS:]).tolist() == [pytest.approx((1.5 - 1.2) / 0.01, abs=1)] * (len(drafting) - 5)
    plain = set(range(400)) - set(go(planner, 400, gain=4 / 3, requests=8))  # of another load nothing is known yet
    assert sorted(plain)[:TRIALS] == list(range(TRIALS, 2 * TRIALS))
    assert np.diff(sorted(plain)[TRIALS:]).tolist() == [pytest.approx((1 - 3 / 4) / (0.01 * 1.5), abs=1)] * (
        len(plain) - 5
    )


def test_it_changes_its_mind() -> None:
    planner = trimming()
    go(planner, 100, gain=0.8)
    assert len(go(planner, 1000, gain=1.3)) > 600
    assert len(go(planner, 1000, gain=0.7)) < 400


def test_one_step_that_was_held_up_says_nothing() -> None:
    steps = Steps()
    for seconds in (1.0, 1.1, 0.9, 50.0, 1.0):
        steps.observe(2.0, seconds)
    assert steps.rate == pytest.approx(2.0)


def test_one_answer_says_little() -> None:
    """A request alone drafts 32 blocks before anything is believed, and 128 are remembered."""
    planner = trimming()
    assert go(planner, 40, gain=0.5, requests=1) == list(range(32))
    assert not planner.should_follow(1)
    planner = trimming()
    go(planner, 400, gain=2, requests=1)
    go(planner, 20, gain=0.5, requests=1)  # one that is hard to draft
    assert planner.should_follow(1)
    assert planner.should_draft(1)


@pytest.mark.parametrize("unfollowed", [0, 100])
def test_steps_that_follow_nobody_bring_the_next_trial_nearer(unfollowed: int) -> None:
    planner = trimming()
    go(planner, 2 * TRIALS, gain=0.8)
    for _ in range(unfollowed):
        assert not planner.should_draft(64, 0)
    assert planner.should_draft(64) is (unfollowed > 0)


def test_what_hardly_gains_is_not_drafted_but_followed() -> None:
    planner = trimming()
    assert len(go(planner, 400, gain=1.1)) < 60
    assert all(planner.should_follow(64) for _ in range(2000))


def test_what_is_expected_to_lose_is_tried_seldom() -> None:
    planner = trimming()
    planner.calibration.observe(np.ones((20000, 7)), np.full(20000, 7), np.zeros(20000, dtype=np.int64))
    drafting = go(planner, 3 * SELDOM, gain=0.8)
    assert drafting == [SELDOM - 1, 2 * SELDOM - 1, 3 * SELDOM - 1]
    assert not planner.should_follow(64)


def test_requests_are_followed_where_it_pays() -> None:
    """Before anything is known; where drafting pays; elsewhere a share, as many in a row as run there."""
    planner = trimming()
    assert all(planner.should_follow(64) for _ in range(200))
    go(planner, 20, gain=4 / 3, requests=8)
    go(planner, 2000, gain=0.8, requests=64)
    assert planner.should_follow(8)
    found = [planner.should_follow(64) for _ in range(2 * WAVE * 64)]
    assert sum(found) == 2 * 64
    assert sum(a != b for a, b in itertools.pairwise(found)) <= 4
    assert not found[0]
    go(planner, 3000, gain=1.5)
    assert planner.should_follow(64)


def test_they_are_followed_for_the_sake_of_a_long_tail() -> None:
    """Half of the time at a load where drafting gains a third saves an eighth; a twentieth of it hardly anything."""
    for tail, follows in ((400, True), (20, False)):
        planner = trimming()
        go(planner, 400, gain=0.5)
        go(planner, tail, gain=4 / 3, requests=8)
        assert planner.should_follow(64) is follows
        assert planner.should_follow(8)


def test_a_few_followed_among_many_say_nothing_of_all() -> None:
    planner = trimming()
    go(planner, 20, gain=0.8, requests=64, followed=3)
    assert planner.should_follow(64)
    assert planner.should_draft(64)
    assert not planner.should_draft(64, 0)
    assert not planner.should_draft(64, 3)
    assert not planner.should_draft(0)


@pytest.mark.parametrize("mode", [PlanMode.OFF, PlanMode.VERIFY_ALL])
def test_other_modes_learn_nothing(mode: PlanMode) -> None:
    planner = trimming(mode)
    on = mode is PlanMode.VERIFY_ALL
    assert len(go(planner, 100, gain=0.5)) == 100 * on
    assert planner.should_follow(64) is on
