"""A harvest becomes optimizer steps: advantages, dropping with reasons, the packed layout, and what is refused."""

import math

import pytest
import torch
from batch_cases import batch_of, make_group, make_sample, swap

from miles_k3.batch import DropReason, group_advantages
from miles_k3.errors import ConfigError, DataError
from miles_k3.types import FinishReason

KINDS = ("grpo", "group_mean", "rloo", "none")


def advantage_by_sample(batch):
    found = {}
    for mini in batch.mini_batches:
        for micro in mini.micro_batches:
            ends = micro.cu_seqlens.tolist()
            for index, begin, end in zip(micro.sequence_ids.tolist(), ends, ends[1:], strict=False):
                (found[index],) = set(micro.advantages[begin:end][micro.loss_mask[begin:end] > 0].tolist())
    return found


def test_grpo_advantages_equal_trl():
    """The lines of TRL's GRPO trainer, in fp64: its own nanstd, its own epsilon."""
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    generator = torch.Generator().manual_seed(0)
    for n in (2, 3, 8, 16):
        rewards = torch.rand(n, generator=generator, dtype=torch.float64)
        actual = torch.tensor(group_advantages(rewards.tolist(), "grpo"), dtype=torch.float64)
        deviation = rewards - rewards.nanmean()
        # nanstd computes n / (n - 1) in fp32, whatever the rewards are.
        torch.testing.assert_close(actual, deviation / (nanstd(rewards) + 1e-4), rtol=1e-7, atol=0)
        torch.testing.assert_close(actual, deviation / (rewards.std() + 1e-4), rtol=1e-12, atol=1e-13)


def test_advantages_by_hand():
    rewards = [0.0, 1.0, 2.0, 5.0]
    assert group_advantages(rewards, "group_mean") == [-2.0, -1.0, 0.0, 3.0]
    assert group_advantages(rewards, "rloo") == pytest.approx([0 - 8 / 3, 1 - 7 / 3, 2 - 6 / 3, 5 - 3 / 3])
    assert group_advantages(rewards, "none") == rewards
    std = math.sqrt((4 + 1 + 0 + 9) / 3)
    assert group_advantages(rewards, "grpo") == pytest.approx([d / (std + 1e-4) for d in (-2, -1, 0, 3)])


@pytest.mark.parametrize("kind", ["grpo", "group_mean", "rloo"])
@pytest.mark.parametrize("reward", [0.35, 0.1, 1 / 3, 1e-9, 12345.678, 0.0])
def test_equal_rewards_give_exactly_zero(kind, reward):
    for n in range(2, 33):
        assert group_advantages([reward] * n, kind) == [0.0] * n
    dropped = batch_of(make_group([reward] * 8), advantage=kind)
    assert dropped.mini_batches == ()
    assert dropped.ledger.dropped == {"equal_rewards": 8}
    kept = batch_of(make_group([reward] * 8), advantage=kind, drop_equal_groups=False)
    assert advantage_by_sample(kept) == dict.fromkeys(range(8), 0.0)


@pytest.mark.parametrize("kind", ["grpo", "group_mean", "rloo"])
@pytest.mark.parametrize(("common", "single"), [(0.35, 0.1), (0.1, 0.7), (1 / 3, 0.0), (0.0, 1.0)])
def test_seven_against_one_stays_of_order_one(kind, common, single):
    advantages = group_advantages([common] * 7 + [single], kind)
    assert len(set(advantages[:7])) == 1, "equal rewards of one group get equal advantages"
    assert max(map(abs, advantages)) < 2.6
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-12)
    assert (advantages[7] > 0) == (single > common)


def test_rewards_that_differ_by_rounding_are_not_blown_up():
    advantages = group_advantages([0.1 + 0.2] * 4 + [0.3] * 4, "grpo")
    assert max(map(abs, advantages)) < 1e-9


def test_every_drop_reason_is_counted_and_the_rest_is_trained():
    group = make_group([0.0, 1.0] * 5)
    p = group.prompt
    group = swap(group, 0, make_sample(p, 0.0, answer=(), finish_reason=FinishReason.ERROR, error="non-finite logits"))
    group = swap(group, 1, make_sample(p, 0.0, finish_reason=FinishReason.ABORT))
    group = swap(group, 2, make_sample(p, 0.0, logprobs=(-1.0, math.nan, -1.0)))
    group = swap(group, 3, make_sample(p, 0.0, answer=()))
    group = swap(group, 4, make_sample(p, 0.0, finish_reason=FinishReason.LENGTH))
    group = swap(group, 5, make_sample(p, 0.0, mask=(False,) * 3))
    equal = make_group([0.5] * 3)
    alone = swap(make_group([0.0, 1.0]), 0, make_sample(p, 0.0, finish_reason=FinishReason.ABORT))
    batch = batch_of(group, equal, alone, mask_truncated=True)
    assert batch.ledger.dropped == {
        "error": 1,
        "aborted": 2,
        "bad_logprobs": 1,
        "empty_answer": 1,
        "truncated": 1,
        "no_loss_tokens": 1,
        "equal_rewards": 3,
        "no_baseline": 1,
    }
    assert batch.ledger.dropped.keys() == {reason.value for reason in DropReason}, "each reason is tried here"
    assert (batch.ledger.generated, batch.ledger.trained) == (15, 4)
    assert advantage_by_sample(batch).keys() == {6, 7, 8, 9}
    for reason, count in batch.ledger.dropped.items():
        assert batch.metrics[f"dropped/{reason}"] == count


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_failed_requests_stay_out_of_the_baseline(reason):
    group = make_group([1.0, 0.0, 0.5, 0.0])
    group = swap(group, 3, make_sample(group.prompt, 0.0, finish_reason=reason))
    advantages = advantage_by_sample(batch_of(group, advantage="group_mean"))
    assert advantages == {0: 0.5, 1: -0.5, 2: 0.0}


def test_truncated_answers_keep_their_reward_but_get_no_loss():
    group = make_group([1.0, 0.0, 1.0, 0.0])
    group = swap(group, 3, make_sample(group.prompt, 0.0, finish_reason=FinishReason.LENGTH))
    masked = batch_of(group, advantage="group_mean", mask_truncated=True)
    assert advantage_by_sample(masked) == {0: 0.5, 1: -0.5, 2: 0.5}
    assert masked.mini_batches[0].num_loss_tokens == 9
    assert masked.metrics["truncated_share"] == 0.25
    assert advantage_by_sample(batch_of(group, advantage="group_mean")).keys() == {0, 1, 2, 3}


def test_failed_grading_is_reward_zero_counted_and_trained():
    group = make_group([1.0, 0.0, 1.0])
    group = swap(group, 1, make_sample(group.prompt, 0.0, failure="timeout"))
    group = swap(group, 2, make_sample(group.prompt, 0.0, failure="exception: ValueError"))
    batch = batch_of(group, advantage="group_mean")
    assert advantage_by_sample(batch) == pytest.approx({0: 2 / 3, 1: -1 / 3, 2: -1 / 3})
    failures = {name: value for name, value in batch.metrics.items() if name.startswith("failures")}
    assert failures == {"failures": 2.0, "failures/timeout": 1.0, "failures/exception": 1.0}


def test_without_a_baseline_equal_rewards_still_push():
    batch = batch_of(make_group([1.0] * 3), make_group([0.0] * 2), make_group([2.0]), advantage="none")
    assert advantage_by_sample(batch) == {0: 1.0, 1: 1.0, 2: 1.0, 5: 2.0}
    assert batch.ledger.dropped == {"equal_rewards": 2}


def test_a_harvest_without_signal_takes_no_step():
    for groups in ([], [make_group([0.0] * 4), make_group([1.0] * 4)]):
        batch = batch_of(*groups, updates_per_rollout=2)
        assert batch.mini_batches == ()
        assert batch.ledger.trained == 0
        assert all(math.isfinite(value) for value in batch.metrics.values())


def test_metrics_by_hand():
    first = make_group([0.0, 1.0], answer=(1, 2))
    second = make_group([1.0, 1.0], answer=(1, 2, 3, 4), adapter_version=4, finish_reason=FinishReason.LENGTH)
    metrics = batch_of(first, second).metrics
    expected = {
        "samples": 4,
        "samples_trained": 2,
        "groups_trained": 1,
        "tokens_generated": 12,
        "tokens_trained": 4,
        "reward": 0.75,
        "reward_std": 0.5,
        "group_reward_std": math.sqrt(0.5) / 2,
        "answer_tokens_mean": 3,
        "answer_tokens_max": 4,
        "truncated_share": 0.5,
        "adapter_version_min": 3,
        "adapter_version_max": 4,
        "failures": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": math.nan}, "reward nan"),
        ({"reward": math.inf}, "reward inf"),
        ({"reward": 1e31}, "reward 1e"),
        ({"reward": 0.5, "failure": "timeout"}, "failed grading .timeout. but has reward 0.5"),
        ({"reward": 1.0, "mask": (True, True)}, "3 answer tokens but 2 loss mask entries"),
        ({"reward": 1.0, "logprobs": (-1.0,) * 4}, "3 answer tokens but 4 logprobs"),
    ],
)
def test_malformed_samples_are_refused(change, message):
    group = make_group([0.0, 1.0], name="q17")
    with pytest.raises(DataError, match=f"q17.*{message}"):
        batch_of(swap(group, 0, make_sample(group.prompt, **change)))


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="empty prompt"):
        batch_of(make_group([0.0, 1.0], prompt=()))


@pytest.mark.parametrize("temperature", [0.0, -0.5, math.nan, math.inf])
def test_a_temperature_that_cannot_divide_is_refused(temperature):
    with pytest.raises(ConfigError, match=r"sampling\.temperature"):
        batch_of(make_group([0.0, 1.0]), temperature=temperature)


@pytest.mark.parametrize("kind", ["grpo", "group_mean", "rloo"])
def test_a_group_of_one_is_refused_where_samples_are_compared(kind):
    with pytest.raises(ConfigError, match="group_size: 2 or more"):
        batch_of(make_group([1.0]), advantage=kind)


def test_an_unknown_advantage_is_refused():
    with pytest.raises(ConfigError, match="'gae'"):
        group_advantages([0.0, 1.0], "gae")


@pytest.mark.parametrize("kind", KINDS)
def test_zero_is_a_reward(kind):
    advantages = group_advantages([0.0, 1.0], kind)
    assert advantages[0] < advantages[1]
    assert len(advantage_by_sample(batch_of(make_group([0.0, 1.0]), advantage=kind))) == 2
