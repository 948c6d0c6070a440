"""Sequences of a harvest, dealt into optimizer steps and packed into micro-batches. Pure and deterministic.

Shape legend: T tokens of a packed stream, B sequences, L MoE layers, K chosen experts per token; P prompt and A answer
tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from miles_k3.errors import DataError
from miles_k3.types import MicroBatch, MiniBatch, Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSequence:
    """One sample that is trained on; `index` counts all samples of the harvest, dropped ones included."""

    index: int
    sample: Sample
    advantage: float


def pack_mini_batches(
    groups: Sequence[Sequence[TrainSequence]], *, micro_batch_tokens: int, updates_per_rollout: int
) -> tuple[MiniBatch, ...]:
    """Split whole groups over at most `updates_per_rollout` optimizer steps and pack each into micro-batches.

    Raises DataError for a sequence longer than `micro_batch_tokens` and for routed experts that don't fit.
    """
    samples = [sequence.sample for group in groups for sequence in group]
    _check_lengths(samples, micro_batch_tokens)
    _check_routing(samples)
    sizes = [sum(sequence.sample.num_tokens for sequence in group) for group in groups]
    return tuple(
        _mini_batch([sequence for g in part for sequence in groups[g]], micro_batch_tokens)
        for part in split_groups(sizes, updates_per_rollout)
    )


def split_groups(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Deal groups of `sizes` tokens into at most `parts` mini-batches; returns group indices, ascending in each.

    The numbers of groups differ by at most one; within that, the largest group goes to the lightest mini-batch.
    Fewer groups than `parts` give fewer mini-batches, never an empty one.
    """
    bins: list[list[int]] = [[] for _ in range(min(parts, len(sizes)))]
    tokens = [0] * len(bins)
    for group in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = min(range(len(bins)), key=lambda b: (len(bins[b]), tokens[b], b))
        bins[lightest].append(group)
        tokens[lightest] += sizes[group]
    return [sorted(part) for part in bins]


def pack_lengths(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """First-fit decreasing: indices of `lengths` in bins of at most `limit`, ascending in each; ties keep their order.

    At most 11/9 of the optimal number of bins, plus one (Johnson 1973). No length may exceed `limit`.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(limit)
        bins[place].append(index)
        room[place] -= lengths[index]
    return [sorted(part) for part in bins]


def _check_lengths(samples: Iterable[Sample], micro_batch_tokens: int) -> None:
    too_long = sorted((sample.num_tokens for sample in samples if sample.num_tokens > micro_batch_tokens), reverse=True)
    if too_long:
        shown = ", ".join(map(str, too_long[:8])) + (", ..." if len(too_long) > 8 else "")
        raise DataError(
            f"{len(too_long)} sequences of {shown} tokens don't fit trainer.micro_batch_tokens {micro_batch_tokens}; "
            f"set it to {too_long[0]} or more, or lower rollout.sampling.max_new_tokens"
        )


def _check_routing(samples: Sequence[Sample]) -> None:
    """Raise DataError unless all samples carry routes of their own length and one [L, K], or none does."""
    routes = [sample.completion.routed_experts for sample in samples]
    present = [route for route in routes if route is not None]
    if present and len(present) != len(samples):
        raise DataError(
            f"{len(present)} of {len(samples)} samples carry routed experts; all of them or none is expected"
        )
    for sample, route in zip(samples, present, strict=False):
        expected = (sample.num_tokens - 1, *present[0].shape[1:])
        if route.ndim != 3 or tuple(route.shape) != expected or route.dtype is not torch.int16:
            raise DataError(
                f"a sample of prompt {sample.prompt.id!r} has routed experts {list(route.shape)} of {route.dtype}; "
                f"[tokens - 1, layers, experts] = {list(expected)} of torch.int16 is expected"
            )


def _mini_batch(sequences: Sequence[TrainSequence], micro_batch_tokens: int) -> MiniBatch:
    packs = pack_lengths([sequence.sample.num_tokens for sequence in sequences], micro_batch_tokens)
    return MiniBatch(
        micro_batches=tuple(_micro_batch([sequences[i] for i in pack]) for pack in packs),
        num_loss_tokens=sum(sum(sequence.sample.loss_mask) for sequence in sequences),
        num_sequences=len(sequences),
    )


def _micro_batch(sequences: Sequence[TrainSequence]) -> MicroBatch:
    """Pack whole sequences. Answer token i sits at P + i and is predicted by entry P + i - 1."""
    tokens: list[int] = []
    targets: list[int] = []
    mask: list[float] = []
    advantages: list[float] = []
    logprobs: list[float] = []
    ends = [0]
    routes = []
    for sequence in sequences:
        prompt, completion = sequence.sample.prompt.token_ids, sequence.sample.completion
        ids = (*prompt, *completion.token_ids)
        before = (len(prompt) - 1) * [0.0]
        tokens += ids
        targets += (*ids[1:], 0)
        mask += (*before, *sequence.sample.loss_mask, 0.0)
        advantages += (*before, *len(completion.token_ids) * [sequence.advantage], 0.0)
        logprobs += (*before, *completion.logprobs, 0.0)
        ends.append(len(tokens))
        if completion.routed_experts is not None:
            last = completion.routed_experts.new_full((1, *completion.routed_experts.shape[1:]), -1)
            routes += [completion.routed_experts, last]
    return MicroBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        targets=torch.tensor(targets, dtype=torch.int64),
        loss_mask=torch.tensor(mask, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        sequence_ids=torch.tensor([sequence.index for sequence in sequences], dtype=torch.int64),
        routed_experts=torch.cat(routes) if routes else None,
    )
