"""Hand-made training batches for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_k3.types import Ledger, MicroBatch, MiniBatch, TrainBatch


def random_tokens(lengths: Sequence[int], *, vocab: int = 256, seed: int = 0) -> list[Tensor]:
    """Sequences of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def micro_batch(sequences: Sequence[Tensor], *, seed: int = 0, first_id: int = 0) -> MicroBatch:
    """Pack `sequences`; the second half of each is trained on, with random advantages and engine log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0)
    targets = torch.cat([torch.cat([s[1:], torch.zeros(1, dtype=s.dtype)]) for s in sequences])
    mask = torch.cat([((torch.arange(len(s)) >= len(s) // 2) & (torch.arange(len(s)) < len(s) - 1)) for s in sequences])
    advantages = torch.cat([torch.randn(1, generator=generator).expand(len(s)) for s in sequences])
    return MicroBatch(
        tokens=torch.cat(list(sequences)),
        cu_seqlens=ends.to(torch.int32),
        targets=targets,
        loss_mask=mask.float(),
        advantages=torch.where(mask, advantages, 0.0),
        rollout_logprobs=torch.where(mask, torch.rand(len(mask), generator=generator) * -8.0, 0.0),
        sequence_ids=first_id + torch.arange(len(sequences)),
    )


def mini_batch(*micro_batches: MicroBatch) -> MiniBatch:
    """One optimizer step over the micro-batches, with its denominators counted."""
    counted = sum(
        int((micro.loss_mask[a:b] > 0).any())
        for micro in micro_batches
        for a, b in zip(micro.cu_seqlens[:-1].tolist(), micro.cu_seqlens[1:].tolist(), strict=True)
    )
    tokens = sum(int(micro.loss_mask.sum()) for micro in micro_batches)
    return MiniBatch(micro_batches=micro_batches, num_loss_tokens=tokens, num_sequences=counted)


def train_batch(*mini_batches: MiniBatch, temperature: float = 1.0) -> TrainBatch:
    """One harvest."""
    return TrainBatch(
        mini_batches=mini_batches, temperature=temperature, ledger=Ledger(generated=0, trained=0, dropped={})
    )
