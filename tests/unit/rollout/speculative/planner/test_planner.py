"""For whom a step drafts, and whether requests that come are followed, by what steps and whole batches brought."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.planner.calibration import Calibration
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.rollout.speculative.planner.experience import RETRY, SELDOM, TRIALS, Steps
from miles_k3.rollout.speculative.planner.history import History
from miles_k3.rollout.speculative.planner.planner import WARM, WAVE, Planner
from miles_k3.rollout.speculative.planner.spent import Kind

PROFILE = CostProfile.of([(8, 8, 1.0), (8, 64, 1.5), (64, 64, 1.0), (64, 512, 1.5)], {8: 0.2, 64: 0.2})


def trimming(mode: PlanMode = PlanMode.TRIM, accept: AcceptMode = AcceptMode.COUPLED) -> Planner:
    """One that expects every drafted token to be accepted."""
    calibration = Calibration(block_size=7)
    calibration.observe(np.ones((200, 7)), np.full(200, 7), np.full(200, 7))
    calibration.observe_room(np.full(200, 7))
    return Planner(mode, accept, calibration, PROFILE)


def follows_at(planner: Planner, load: int) -> bool:
    return planner.should_follow(load, History())


def go(
    planner: Planner, steps: int, gain: float, requests: int = 64, followed: int | None = None, came: int = -1
) -> list[int]:
    """Steps in which drafting gives `gain` times the tokens in half of a second more; those that drafted."""
    histories, drafting = [History(came=came) for _ in range(requests)], []
    followed = requests if followed is None else followed
    for i in range(steps):
        drafted = bool(planner.members(requests, histories[:followed]).any())
        drafting += [i] if drafted else []
        total, seconds = (round(1.5 * gain * requests), 1.5) if drafted else (requests, 1.0)
        tokens = [total // requests + (n < total % requests) for n in range(requests)]
        planner.observe(histories, tokens, followed, seconds, drafted=drafted)
    return drafting


def drafts(planner: Planner, requests: int, followed: int | None = None) -> bool:
    return bool(planner.members(requests, [History()] * (requests if followed is None else followed)).any())


@pytest.mark.parametrize(("whole_s", "whole", "longer"), [(1.6, True, 1.6), (1.75, False, 1.7)])
def test_whole_blocks_are_verified_unseen_where_looking_costs_more(whole_s: float, whole: bool, longer: float) -> None:
    """A block and its verify take 0.2 and 1.5 beside a plain step's 1; both in one take `whole_s`."""
    planner = trimming()
    planner.profile = replace(PROFILE, curves=tuple(replace(c, whole_s=whole_s) for c in PROFILE.curves))
    assert drafts(planner, 8)
    assert planner.verifies_whole is whole
    assert planner._promised is not None
    assert planner._promised.longer == pytest.approx(longer)
    for _ in range(2 * TRIALS):  # a step that drafts nothing verifies nothing
        drafted = drafts(planner, 8)
        planner.observe([History()] * 8, [1] * 8, 8, 2.0 if drafted else 1.0, drafted=drafted)
    assert not drafts(planner, 8)
    assert not planner.verifies_whole


def often_refused(planner: Planner) -> None:
    """Three of five drafted tokens are accepted, wherever they stand."""
    planner.calibration = calibration = Calibration(block_size=7)
    calibration.reached_GE[:], calibration.accepted_GE[:] = 1e5, 0.6e5
    calibration.observe_room(np.full(1000, 7))


@pytest.mark.parametrize(("whole_s", "whole"), [(1.6, True), (2.0, True), (2.3, False)])
def test_whole_blocks_are_everybodys(whole_s: float, whole: bool) -> None:
    """Four of eight are somewhat harder. Chosen one by one only first tokens of the others would pay, 10.4 tokens in
    1.24 s; whole blocks of these bring 13.8, of all 17.7 in the same time."""
    planner = trimming()
    often_refused(planner)
    planner.profile = CostProfile.of([(8, 8, 1.0), (8, 64, 4.36)], {8: 0.0}, whole_s={8: whole_s})
    hard = [History() for _ in range(4)]
    for history in hard:
        history.observe(0.0, 1.5)
    ease, block = hard[0].ease, sum(0.6**k for k in range(1, 8))
    assert planner.members(8, [*hard, *(History() for _ in range(4))]).tolist() == [whole] * 4 + [True] * 4
    assert planner.verifies_whole is whole
    assert planner._promised is not None
    assert planner._promised.accepted == pytest.approx(4 * (1 + ease) * block if whole else 4 * 0.6, rel=0.01)


@pytest.mark.parametrize(("blocks", "judged"), [(WARM - 8, False), (WARM, True)])
def test_first_promises_are_not_held_against_drafting(blocks: int, judged: bool) -> None:
    planner = trimming()
    planner.calibration = Calibration(block_size=7)
    planner.calibration.observe_room(np.full(blocks, 7))
    assert drafts(planner, 8)
    planner.observe([History()] * 8, [2] * 8, 8, 1.5, drafted=True)
    (load,) = planner._loads.values()
    assert (load.hits.value < 1.0) is judged


# --- steps ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("gain", "requests"), [(0.8, 64), (4 / 3, 8)])
def test_the_clock_overrules_what_was_promised(gain: float, requests: int) -> None:
    """A load is tried both ways first; then the worse way as often as it may cost of the time."""
    drafting = go(trimming(), 1200, gain=gain, requests=requests)
    assert drafting[:TRIALS] == list(range(TRIALS))
    plain = sorted(set(range(1200)) - set(drafting))
    assert plain[:TRIALS] == list(range(TRIALS, 2 * TRIALS))
    seldom, lost = (drafting, 1.5 - 1.2) if gain < 1 else (plain, 1 - 3 / 4)
    behind = [i for i in seldom if i > 300]
    per_step = lost * len(behind) / (900 * (1.0 if gain < 1 else 1.5))
    assert behind
    assert per_step == pytest.approx(RETRY, rel=0.5)


def test_it_changes_its_mind() -> None:
    planner = trimming()
    go(planner, 100, gain=0.8)
    assert len(go(planner, 1000, gain=1.3)) > 500
    assert len(go(planner, 1000, gain=0.7)) < 300


def test_one_step_that_was_held_up_says_nothing() -> None:
    steps = Steps()
    steps.times.extend((1.0, 1.1, 0.9, 50.0, 1.0))
    assert steps.seconds == pytest.approx(1.0)


@pytest.mark.parametrize("unfollowed", [0, 300])
def test_steps_that_follow_nobody_bring_the_next_trial_nearer(unfollowed: int) -> None:
    planner = trimming()
    go(planner, 2 * TRIALS, gain=0.8)
    for _ in range(unfollowed):
        assert not drafts(planner, 64, 0)
    assert drafts(planner, 64) is (unfollowed > 0)


def test_what_is_expected_to_lose_is_tried_seldom() -> None:
    planner = trimming()
    planner.calibration.observe(np.ones((20000, 7)), np.full(20000, 7), np.zeros(20000, dtype=np.int64))
    assert go(planner, 3 * SELDOM, gain=0.8) == [SELDOM - 1, 2 * SELDOM - 1, 3 * SELDOM - 1]
    assert not follows_at(planner, 64)


def test_a_few_followed_among_many_say_nothing_of_all() -> None:
    planner = trimming()
    go(planner, 20, gain=0.8, requests=64, followed=3)
    assert follows_at(planner, 64)
    assert drafts(planner, 64)
    assert not drafts(planner, 64, 0)
    assert not drafts(planner, 64, 3)
    assert not drafts(planner, 0)


# --- requests -------------------------------------------------------------------------------------------------------
def test_hard_requests_are_not_drafted_for_beside_easy_ones() -> None:
    """Until enough steps have passed: what is hard stays so for a few blocks."""
    planner = trimming()
    histories = [History() for _ in range(64)]
    planner.judged(histories, np.ones((64, 7)), np.full(64, 7), np.full(64, 7), np.repeat([7, 0], 32))
    planner.judged(histories, np.ones((64, 7)), np.full(64, 7), np.full(64, 7), np.repeat([7, 0], 32))
    profile = CostProfile.of([(64, 64, 1.0), (64, 512, 3.0)], {1: 0.0, 64: 0.2})
    planner.profile = profile
    assert planner.members(64, histories).tolist() == [True] * 32 + [False] * 32
    for history in histories[32:]:
        for _ in range(30):
            history.passes()
    assert planner.members(64, histories).all()


def test_tokens_that_were_not_verified_count_as_expected_but_under_rejection() -> None:
    """One accepted of one verified, with six sure ones behind it: nothing is known of those under rejection, whose
    uniforms are used again."""
    found = {}
    for accept in AcceptMode:
        planner, history = trimming(accept=accept), History()
        planner.judged([history], np.ones((1, 7)), np.array([7]), np.array([1]), np.array([1]))
        found[accept] = history.accepted
    assert found[AcceptMode.COUPLED] > 5
    assert found[AcceptMode.REJECTION] == 1


# --- whom to follow -------------------------------------------------------------------------------------------------
def test_requests_are_followed_where_it_pays() -> None:
    """Before anything is known; where drafting pays; elsewhere a share, as many in a row as run there."""
    planner = trimming()
    assert all(follows_at(planner, 64) for _ in range(200))
    go(planner, 40, gain=4 / 3, requests=8)
    go(planner, 1500, gain=0.8, requests=64)
    assert follows_at(planner, 8)
    found = [follows_at(planner, 64) for _ in range(2 * WAVE * 64)]
    assert sum(found) == 2 * 64
    assert sum(a != b for a, b in itertools.pairwise(found)) <= 4
    assert not found[0]
    go(planner, 1500, gain=1.5)
    assert follows_at(planner, 64)


@pytest.mark.parametrize(("tail", "follows"), [(400, True), (20, False)])
def test_they_are_followed_for_the_sake_of_a_long_tail(tail: int, follows: bool) -> None:
    """A half of the time at a load where drafting gains a third saves an eighth; a twentieth of it hardly anything."""
    planner = trimming()
    go(planner, 400, gain=0.5)
    go(planner, tail, gain=4 / 3, requests=8, came=6)
    assert follows_at(planner, 64) is follows
    assert follows_at(planner, 8)


@pytest.mark.parametrize(("dearer", "follows"), [(1.02, True), (1.6, False)])
def test_what_following_costs_prompts_counts(dearer: float, follows: bool) -> None:
    """Short answers behind long prompts: what drafting saves of the former is less than what the draft reads."""
    planner = trimming()
    go(planner, 40, gain=4 / 3, requests=8, came=3)
    prompts = [(History(came=3), 10)] * 8
    for _ in range(TRIALS):
        for followed in (True, False):
            planner.observe_prompts(prompts, 0, 10.0 * (dearer if followed else 1.0), followed=followed)
    assert follows_at(planner, 8) is follows
    planner.observe_prompts(prompts, 0, 1e9, followed=None)  # of whom both come from
    assert planner._prompts.dearer(Kind.of(80, 0)) == pytest.approx((0.04 + dearer - 1) / 2)
    assert follows_at(planner, 64)


@pytest.mark.parametrize("slower", [False, True])
def test_batches_that_took_longer_are_followed_no_more(slower: bool) -> None:
    """Whatever their steps promised: easy requests end early, and the rest takes as long as ever."""
    planner = trimming()
    go(planner, 8, gain=1.0, followed=0)
    go(planner, 40, gain=2.0)  # its steps look fine
    assert follows_at(planner, 64)
    for _ in range(4):
        histories = [History() for _ in range(64)]
        planner.observe(histories, [1] * 64, 64, 1.0, drafted=False)
        planner.observe(histories, [1] * 64, 64, 1.5 if slower else 0.9, drafted=False)
        planner.ended([(h, 2) for h in histories], 0, waiting=False)
    assert follows_at(planner, 64) is not slower


@pytest.mark.parametrize("mode", [PlanMode.OFF, PlanMode.VERIFY_ALL])
def test_other_modes_learn_nothing(mode: PlanMode) -> None:
    planner = trimming(mode)
    on = mode is PlanMode.VERIFY_ALL
    assert len(go(planner, 100, gain=0.5)) == 100 * on
    assert follows_at(planner, 64) is on
