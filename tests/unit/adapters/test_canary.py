from dataclasses import replace

import pytest
import torch

from miles_k3.adapters.canary import canary_limit, canary_tokens, check_canary
from miles_k3.errors import ConfigError, SyncError


def logprobs(seed=0, num=63):
    return -torch.rand(num, generator=torch.Generator().manual_seed(seed)) * 5


def test_tokens_are_fixed_and_plain(config):
    tokens = canary_tokens(config, 64, seed=3)
    assert tokens == canary_tokens(config, 64, seed=3)
    assert tokens[:4] == [60, 137, 93, 152]  # the same in every Python
    assert tokens != canary_tokens(config, 64, seed=4)
    assert len(tokens) == 64
    assert len(set(tokens)) > 32
    assert all(0 <= t < 253 for t in canary_tokens(config, 500, seed=0))


def test_a_block_of_special_tokens_is_avoided_whole(config):
    block = replace(config, bos_token_id=10, eos_token_id=12, pad_token_id=30, raw={"media_placeholder_token_id": 20})
    assert not set(canary_tokens(block, 500, seed=0)) & set(range(10, 31))
    spread = replace(config, bos_token_id=0, eos_token_id=100, pad_token_id=255, raw={"media_placeholder_token_id": 7})
    tokens = set(canary_tokens(spread, 512, seed=0))
    assert not tokens & {0, 7, 100, 255}
    assert len(tokens) > 200


@pytest.mark.parametrize("length", [0, 1, 513])
def test_lengths_that_score_nothing_or_do_not_fit(config, length):
    with pytest.raises(ConfigError, match=rf"sync\.canary_tokens is {length}"):
        canary_tokens(config, length, seed=0)


def test_limits():
    assert canary_limit("float32", None) == 1e-3
    assert canary_limit("bfloat16", None) == 0.15
    assert canary_limit("bfloat16", 0.2) == 0.2


def test_agreement_is_measured():
    trainer = logprobs()
    engine = trainer.clone()
    engine[5] += 0.063
    report = check_canary(trainer, engine, max_diff=0.01, version=4)
    assert (report.version, report.num_tokens) == (4, 63)
    assert report.mean_diff == pytest.approx(0.001, rel=1e-3)
    assert report.max_diff == pytest.approx(0.063, rel=1e-3)
    assert report.trainer_moved is None


def test_difference_above_the_limit():
    with pytest.raises(SyncError, match=r"adapter v4: trainer and engine differ by 0\.2 nats.*limit 0\.05"):
        check_canary(logprobs(), logprobs() + 0.2, max_diff=0.05, version=4)


def test_a_router_tie_is_forgiven_and_a_fault_is_not():
    far = logprobs() + 0.2
    report = check_canary(logprobs(), far, max_diff=0.05, version=4, elsewhere=lambda: 0.001)
    assert report.mean_diff == pytest.approx(0.2, rel=1e-3)
    for elsewhere in (0.2, float("nan")):
        with pytest.raises(SyncError, match="differ by"):
            check_canary(logprobs(), far, max_diff=0.05, version=4, elsewhere=lambda value=elsewhere: value)
    with pytest.raises(SyncError, match="still answers with the old adapter"):
        check_canary(
            far, logprobs(), max_diff=0.05, version=4, previous_engine=logprobs(), previous_trainer=logprobs(),
            elsewhere=lambda: 0.001,
        )  # fmt: skip


def test_other_trajectories_are_left_alone_while_the_first_agrees():
    check_canary(logprobs(), logprobs(), max_diff=0.05, version=4, elsewhere=lambda: pytest.fail("called"))


def test_differences_do_not_cancel():
    sign = torch.ones(64)
    sign[::2] = -1
    with pytest.raises(SyncError, match="differ by"):
        check_canary(torch.zeros(64), 0.2 * sign, max_diff=0.05, version=4)


@pytest.mark.parametrize("with_trainer", [True, False])
def test_an_engine_that_stood_still(with_trainer):
    old, new = logprobs(0), logprobs(0) + 0.3
    previous = {"previous_engine": old, "previous_trainer": old if with_trainer else None}
    with pytest.raises(SyncError, match=r"the trainer moved by 0\.3 .* since v3, the engine by 0: it still answers"):
        check_canary(new, old, max_diff=0.05, version=4, **previous)


def test_an_engine_that_stood_still_below_the_limit():
    old, new = logprobs(0), logprobs(0) + 0.01
    check_canary(new, old, max_diff=0.05, version=4, previous_engine=old)  # can't be told from noise
    with pytest.raises(SyncError, match="still answers with the old adapter"):
        check_canary(new, old, max_diff=0.05, version=4, previous_engine=old, previous_trainer=old)


def test_an_engine_that_followed():
    noise = 0.004 * torch.randn(63, generator=torch.Generator().manual_seed(9))
    old, new = logprobs(0), logprobs(0) + 0.3
    report = check_canary(new, new + noise, max_diff=0.05, version=4, previous_engine=old + noise, previous_trainer=old)
    assert report.trainer_moved == pytest.approx(0.3, rel=1e-3)
    assert report.engine_moved == pytest.approx(0.3, rel=1e-3)


def test_a_trainer_that_stood_still():
    old = logprobs(0)
    noisy = old + 0.01
    for previous_trainer in (old, None):
        report = check_canary(
            old, noisy, max_diff=0.05, version=4, previous_engine=noisy, previous_trainer=previous_trainer
        )
        assert report.engine_moved == 0.0


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_non_finite_answers(side, value):
    bad = logprobs()
    bad[3] = value
    pair = (bad, logprobs()) if side == "trainer" else (logprobs(), bad)
    with pytest.raises(SyncError, match=f"1 of 63 canary log-probabilities of the {side} are not finite"):
        check_canary(*pair, max_diff=1e9, version=1)


@pytest.mark.parametrize(("trainer", "engine"), [((3,), (4,)), ((0,), (0,)), ((2, 2), (2, 2))])
def test_answers_of_other_lengths(trainer, engine):
    with pytest.raises(SyncError, match="expected the same number"):
        check_canary(torch.zeros(trainer), torch.zeros(engine), max_diff=1.0, version=1)
