"""Calibration: what confidences are worth, learnt from rounds whose true chances are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from miles_k3.errors import EngineError
from miles_k3.rollout.speculative.planner.calibration import GOOD, Calibration

SIZE = 4


def play(calibration: Calibration, rounds: int, seed: int = 0, *, trimmed: bool = False) -> None:
    """A draft that is too sure of itself: chance = confidence ** (2 + position)."""
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        confidence = rng.random((64, SIZE))
        chance = confidence ** (2 + np.arange(SIZE))
        hit = np.cumprod(rng.random(chance.shape) < chance, axis=1).sum(1)
        verified = (np.cumprod(confidence, axis=1) > 0.1).sum(1) if trimmed else np.full(64, SIZE)
        calibration.observe(confidence, verified, np.minimum(hit, verified))


def test_nothing_seen_means_what_is_said() -> None:
    confidence = np.array([[0.1, 0.3, 0.5, 0.9]])
    np.testing.assert_allclose(Calibration(block_size=SIZE)(confidence), confidence, atol=1e-12)
    assert Calibration(block_size=SIZE).rates().tolist() == [GOOD] * SIZE


@pytest.mark.parametrize("trimmed", [False, True])
def test_overconfidence_is_learnt(trimmed: bool) -> None:
    calibration = Calibration(block_size=SIZE)
    play(calibration, 400, trimmed=trimmed)
    confidence = np.repeat(np.linspace(0.05, 0.95, 19)[:, None], SIZE, axis=1)
    got = calibration(confidence)
    assert (np.diff(got, axis=0) >= 0).all()
    expected = confidence ** (2 + np.arange(SIZE))
    seen = confidence > 0.4 if trimmed else confidence > 0
    assert np.abs(got - expected)[:, :3][seen[:, :3]].max() < 0.08
    assert np.abs(got - confidence)[:, 1].max() > 0.3


def test_a_modest_draft_is_soon_believed() -> None:
    """One request, 40 blocks cut after three tokens: confidences say nothing, and four of five tokens are accepted.
    What is expected of a whole block, untried positions among it, is twice what the confidences say."""
    calibration, rng = Calibration(block_size=7), np.random.default_rng(0)
    for _ in range(40):
        accepted = min(3, int(np.cumprod(rng.random(7) < 0.8).sum()))
        calibration.observe(rng.random((1, 7)), np.array([3]), np.array([accepted]))
    confidence = rng.random((200, 7))
    expected = np.cumprod(calibration(confidence), axis=1).sum(1).mean()
    true = np.cumprod(np.full(7, 0.8)).sum()
    assert 0.6 * true < expected < 1.1 * true
    said = np.cumprod(confidence, axis=1).sum(1).mean()
    assert said < 0.35 * true


def test_one_refused_block_says_little() -> None:
    """The first position's confidences keep 8 of 9 parts; the others, of which nothing was seen, are moved half as
    much."""
    calibration, half = Calibration(block_size=SIZE), np.full((1, SIZE), 0.525)
    calibration.observe(half, np.array([SIZE]), np.array([0]))
    found = calibration(np.full((1, SIZE), 0.325))[0]
    moved = 0.325 * 8 / np.array([9, 8.5, 8.25, 8.125])
    assert found[1:].tolist() == pytest.approx(moved[1:].tolist())
    assert 0.85 * moved[0] < found[0] <= moved[0]  # pooled with the bin that was refused


def test_what_is_believed_is_made_anew_when_enough_is_new() -> None:
    calibration, confidence = Calibration(block_size=SIZE), np.random.default_rng(1).random((9, SIZE))
    play(calibration, 2)
    believed, seen = calibration(confidence), calibration.reached_GE.sum()
    while calibration.reached_GE.sum() <= 1.02 * seen:
        assert (calibration(confidence) == believed).all()
        calibration.observe(np.full((1, SIZE), 0.5), np.array([1]), np.array([0]))
    assert (calibration(confidence) == Calibration.from_json(calibration.to_json())(confidence)).all()
    assert (calibration(confidence) != believed).any()


def test_counts_are_of_reached_positions() -> None:
    calibration = Calibration(block_size=SIZE)
    confidence = np.full((3, SIZE), 0.5)
    calibration.observe(confidence, np.array([4, 2, 0]), np.array([1, 2, 0]))
    assert calibration.reached_GE.sum(1).tolist() == [2, 2, 0, 0]
    assert calibration.accepted_GE.sum(1).tolist() == [2, 1, 0, 0]
    # as if 8 mostly good ones came before any observation
    assert calibration.rates().tolist() == pytest.approx([(2 + 8 * GOOD) / 10, (1 + 8 * GOOD) / 10, GOOD, GOOD])


def test_between_bins_it_is_linear() -> None:
    """As numpy has it, with the bins' centres as places and what is believed of them as values."""
    calibration = Calibration(block_size=SIZE)
    play(calibration, 60)
    centres_E = (np.arange(20) + 0.5) / 20
    believed_EG = calibration(np.tile(centres_E[:, None], SIZE))
    ends_RG = np.repeat([[0.0], [1.0]], SIZE, axis=1)
    asked_RG = np.concatenate([np.random.default_rng(0).random((200, SIZE)), ends_RG])
    wanted_RG = np.stack([np.interp(asked_RG[:, k], centres_E, believed_EG[:, k]) for k in range(SIZE)], axis=1)
    np.testing.assert_allclose(calibration(asked_RG), wanted_RG, rtol=0, atol=1e-12)


def test_a_round_is_counted_as_its_requests_one_by_one() -> None:
    rng = np.random.default_rng(3)
    confidence_RG, verified_R = rng.random((40, SIZE)), rng.integers(0, SIZE + 1, 40)
    accepted_R = np.minimum(rng.integers(0, SIZE + 1, 40), verified_R)
    calibration = Calibration(block_size=SIZE)
    calibration.observe(confidence_RG, verified_R, accepted_R)
    reached_GE, accepted_GE = np.zeros((SIZE, 20)), np.zeros((SIZE, 20))
    for confidence_G, verified, accepted in zip(confidence_RG, verified_R, accepted_R, strict=True):
        for k in range(min(accepted + 1, verified)):
            reached_GE[k, int(confidence_G[k] * 20)] += 1
            accepted_GE[k, int(confidence_G[k] * 20)] += k < accepted
    np.testing.assert_array_equal(calibration.reached_GE, reached_GE)
    np.testing.assert_array_equal(calibration.accepted_GE, accepted_GE)


def test_json_round_trip() -> None:
    calibration = Calibration(block_size=SIZE)
    play(calibration, 3)
    again = Calibration.from_json(json.loads(json.dumps(calibration.to_json())))
    confidence = np.random.default_rng(0).random((9, SIZE))
    assert (again(confidence) == calibration(confidence)).all()
    with pytest.raises(EngineError, match="no calibration"):
        Calibration.from_json({"reached": [[1.0]], "accepted": [[1.0]]})


def test_bad_rounds_are_refused() -> None:
    calibration = Calibration(block_size=SIZE)
    with pytest.raises(EngineError, match="1 tokens more accepted"):
        calibration.observe(np.zeros((1, SIZE)), np.array([1]), np.array([2]))
    with pytest.raises(EngineError, match="blocks of 3"):
        calibration.observe(np.zeros((1, 3)), np.array([1]), np.array([1]))


def test_room_is_the_share_of_blocks_that_reach_a_position() -> None:
    calibration = Calibration(block_size=3)
    assert calibration.room().tolist() == [1.0, 1.0, 1.0]
    calibration.observe_room(np.array([1] * 500 + [2] * 500))
    assert np.allclose(calibration.room(), [1.0, 0.5, 0.0], atol=0.01)
