"""From graded groups to optimizer steps: filtering, advantages, packing. Pure, and it accounts for every sample."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from miles_k3.config import AlgorithmSection
from miles_k3.errors import ConfigError, DataError
from miles_k3.packing import TrainSequence, pack_mini_batches
from miles_k3.types import FinishReason, Group, Ledger, Sample, TrainBatch

STD_EPS = 1e-4  # keeps rewards that differ only by rounding from being blown up to O(1); the same value as TRL's
MAX_REWARD = 1e30  # squares fit float64, the value itself fits float32


class DropReason(StrEnum):
    """Why a sample isn't trained on. The first three say nothing about the policy and stay out of the baseline too."""

    ERROR = "error"  # the engine failed the request
    ABORTED = "aborted"  # cancelled, so the answer is only a part
    BAD_LOGPROBS = "bad_logprobs"  # a trained token's rollout logprob is not finite
    EMPTY_ANSWER = "empty_answer"  # nothing was sampled
    TRUNCATED = "truncated"  # cut by max_new_tokens, with mask_truncated on
    NO_LOSS_TOKENS = "no_loss_tokens"  # its loss mask is all zero
    NO_BASELINE = "no_baseline"  # the others of its group are unusable, nothing is left to compare with
    EQUAL_REWARDS = "equal_rewards"  # no answer of the group is better than another


OUTSIDE_BASELINE = frozenset({DropReason.ERROR, DropReason.ABORTED, DropReason.BAD_LOGPROBS})


def make_batch(
    groups: Sequence[Group],
    algorithm: AlgorithmSection,
    *,
    micro_batch_tokens: int,
    updates_per_rollout: int,
    temperature: float,
) -> TrainBatch:
    """Turn one harvest into optimizer steps; every sample is either trained on or counted under a `DropReason`.

    A sample whose grading failed (timeout, exception) has reward 0 and is trained like any other wrong answer: the
    policy made it, and an answer that hangs the scorer should become less likely. `sequence_ids` index
    `[s for g in groups for s in g.samples]`. With no usable group there are no mini-batches.

    Raises DataError for a sequence longer than `micro_batch_tokens` or a malformed sample, ConfigError for a
    temperature that isn't above 0 or a group of one under an advantage that compares samples.
    """
    if not 0.0 < temperature < math.inf:
        raise ConfigError(
            f"rollout.sampling.temperature is {temperature}; training divides by it, so set it above 0, e.g. 1.0"
        )
    kept, reasons, first = [], {}, 0
    for group in groups:
        sequences, dropped = _judge_group(group, first, algorithm)
        kept += [sequences] if sequences else []
        reasons.update(dropped)
        first += len(group.samples)
    mini_batches = pack_mini_batches(
        kept, micro_batch_tokens=micro_batch_tokens, updates_per_rollout=updates_per_rollout
    )
    ledger = Ledger(
        generated=sum(len(group.samples) for group in groups),
        trained=sum(len(micro.sequence_ids) for mini in mini_batches for micro in mini.micro_batches),
        dropped=Counter(reason.value for reason in reasons.values()),
    )
    ledger.check()
    metrics = _metrics(groups, reasons) | {
        "tokens_trained": float(sum(mini.num_loss_tokens for mini in mini_batches)),
        "samples_trained": float(ledger.trained),
        "groups_trained": float(len(kept)),
    }
    return TrainBatch(mini_batches=mini_batches, temperature=temperature, ledger=ledger, metrics=metrics)


def group_advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """Advantages of one group's answers, in float64; exactly 0 for all where all rewards are equal.

    `kind`, as in `AlgorithmSection.advantage`, with m the group's mean and n its size:
      grpo: (r - m) / (s + STD_EPS), s the sample standard deviation (divisor n - 1): the rewards are a draw of n from
        the policy's distribution and s estimates its spread. GRPO (arXiv 2402.03300) leaves the divisor open; TRL
        takes n - 1 too.
      group_mean: r - m (Dr. GRPO, arXiv 2503.20783).
      rloo: r minus the mean of the others, which is (r - m) n / (n - 1) (arXiv 2402.14740).
      none: r.

    Deviations are taken from the group's first reward before the mean: the difference of equal floats is exactly 0,
    while a rounded mean of eight times 0.35 isn't 0.35.
    """
    if kind == "none" or not rewards:
        return list(rewards)
    n = len(rewards)
    shifted = [reward - rewards[0] for reward in rewards]
    mean = math.fsum(shifted) / n
    deviations = [value - mean for value in shifted]
    if n == 1 or kind == "group_mean":
        return deviations
    if kind == "rloo":
        return [deviation * n / (n - 1) for deviation in deviations]
    if kind == "grpo":
        std = math.sqrt(math.fsum(deviation * deviation for deviation in deviations) / (n - 1))
        return [deviation / (std + STD_EPS) for deviation in deviations]
    raise ConfigError(f"algorithm.advantage is {kind!r}; known are grpo, group_mean, rloo, none")


def _judge_group(
    group: Group, first: int, algorithm: AlgorithmSection
) -> tuple[list[TrainSequence], dict[int, DropReason]]:
    """What of a group is trained on, and why the rest isn't; `first` is the harvest index of its first sample."""
    if len(group.samples) == 1 and algorithm.advantage != "none":
        raise ConfigError(
            f"prompt {group.prompt.id!r} has one sample, but algorithm.advantage {algorithm.advantage!r} compares the "
            "samples of a group: set rollout.group_size: 2 or more, or algorithm.advantage: none"
        )
    reasons = {}
    for index, sample in enumerate(group.samples, start=first):
        reason = _judge_sample(sample, algorithm)
        if reason is not None:
            reasons[index] = reason
    members = [
        (index, sample)
        for index, sample in enumerate(group.samples, start=first)
        if reasons.get(index) not in OUTSIDE_BASELINE
    ]
    rewards = [sample.grade.reward for _, sample in members]
    advantages = group_advantages(rewards, algorithm.advantage)
    group_reason = None
    if len(members) == 1 and algorithm.advantage != "none":
        group_reason = DropReason.NO_BASELINE
    elif algorithm.drop_equal_groups and len(set(rewards)) == 1 and advantages[0] == 0.0:
        group_reason = DropReason.EQUAL_REWARDS  # equal rewards other than 0 still push when there is no baseline
    kept = []
    for (index, sample), advantage in zip(members, advantages, strict=True):
        if index in reasons:
            continue
        if group_reason is not None:
            reasons[index] = group_reason
        else:
            kept.append(TrainSequence(index=index, sample=sample, advantage=advantage))
    return kept, reasons


def _judge_sample(sample: Sample, algorithm: AlgorithmSection) -> DropReason | None:
    """Why this sample alone, whatever its group, can't be trained on. Raises DataError when it is malformed."""
    completion = sample.completion
    if completion.finish_reason is FinishReason.ERROR or completion.error is not None:
        return DropReason.ERROR
    if completion.finish_reason is FinishReason.ABORT:
        return DropReason.ABORTED
    _check_sample(sample)
    pairs = zip(completion.logprobs, sample.loss_mask, strict=True)
    if any(masked_in and not math.isfinite(logprob) for logprob, masked_in in pairs):
        return DropReason.BAD_LOGPROBS
    if not completion.token_ids:
        return DropReason.EMPTY_ANSWER
    if algorithm.mask_truncated and completion.finish_reason is FinishReason.LENGTH:
        return DropReason.TRUNCATED
    if not any(sample.loss_mask):
        return DropReason.NO_LOSS_TOKENS
    return None


def _check_sample(sample: Sample) -> None:
    """Raise DataError unless the parts of a sample fit together."""
    name, answer = f"a sample of prompt {sample.prompt.id!r}", len(sample.completion.token_ids)
    if not sample.prompt.token_ids:
        raise DataError(f"{name} has an empty prompt; the first answer token needs one token before it")
    for what, values in (("logprobs", sample.completion.logprobs), ("loss mask entries", sample.loss_mask)):
        if len(values) != answer:
            raise DataError(f"{name} has {answer} answer tokens but {len(values)} {what}; one each is expected")
    reward = sample.grade.reward
    if not abs(reward) <= MAX_REWARD:  # also refuses NaN
        raise DataError(f"{name} has reward {reward}; a finite number within ±{MAX_REWARD:g} is expected")
    if sample.grade.failure is not None and reward != 0.0:
        raise DataError(f"{name} failed grading ({sample.grade.failure}) but has reward {reward}; a failure scores 0")


def _metrics(groups: Sequence[Group], reasons: dict[int, DropReason]) -> dict[str, float]:
    """Numbers about the harvest. Means are over all answers in a baseline, trained or not, and left out without any."""
    samples = [sample for group in groups for sample in group.samples]
    usable = [reasons.get(index) not in OUTSIDE_BASELINE for index in range(len(samples))]
    answers = [sample for sample, ok in zip(samples, usable, strict=True) if ok]
    failures = Counter(s.grade.failure.split(":")[0].strip() for s in answers if s.grade.failure is not None)
    metrics = {
        "samples": float(len(samples)),
        "tokens_generated": float(sum(len(sample.completion.token_ids) for sample in samples)),
        "failures": float(failures.total()),
    }
    dropped = Counter(reasons.values())
    metrics |= {f"dropped/{reason.value}": float(dropped[reason]) for reason in DropReason}
    metrics |= {f"failures/{kind}": float(count) for kind, count in sorted(failures.items())}
    if not answers:
        return metrics
    lengths = [len(sample.completion.token_ids) for sample in answers]
    versions = [sample.completion.adapter_version for sample in answers]
    flags, group_stds = iter(usable), []
    for group in groups:
        rewards = [sample.grade.reward for sample in group.samples if next(flags)]
        group_stds += [_std(rewards)] if rewards else []
    rewards = [sample.grade.reward for sample in answers]
    return metrics | {
        "reward": _mean(rewards),
        "reward_std": _std(rewards),
        "group_reward_std": _mean(group_stds),
        "answer_tokens_mean": _mean(lengths),
        "answer_tokens_max": float(max(lengths)),
        "truncated_share": _mean([s.completion.finish_reason is FinishReason.LENGTH for s in answers]),
        "adapter_version_min": float(min(versions)),
        "adapter_version_max": float(max(versions)),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Sample standard deviation (divisor n - 1); 0 for one value and exactly 0 for equal ones."""
    deviations = group_advantages(values, "group_mean")
    return math.sqrt(math.fsum(d * d for d in deviations) / max(len(values) - 1, 1))
