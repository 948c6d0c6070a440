"""Packed inputs of the policy loss, shared by its tests."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from miles_k3.config import AlgorithmSection
from miles_k3.trainer.loss import LossOutput, policy_loss

LENGTHS = (5, 9, 1, 12)  # the third sequence has no loss token at all


def make_case(seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.6) -> dict[str, Tensor]:
    """Packed tensors of four sequences with ragged masks; every quantity is random and distinct."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(sum(LENGTHS), generator=generator, dtype=dtype)

    logprobs = -1.0 - normal(1.0).abs()
    old = logprobs + normal(spread)
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    mask = torch.zeros(sum(LENGTHS), dtype=torch.float32)
    advantages = torch.zeros(sum(LENGTHS), dtype=dtype)
    for i, (begin, end) in enumerate(pairwise(starts)):
        mask[begin + (2, 1, 0, 0)[i] : end - 1] = 1.0  # a prompt of one token has its first entry in the mask
        advantages[begin:end] = (1.0, -1.5, 3.0, 0.7)[i]
    mask[starts[1] + 4] = 0.0  # a hole, as a tool's answer makes
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": old + normal(spread),
        "advantages": advantages,
        "loss_mask": mask,
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32),
        "ref_logprobs": logprobs + normal(spread),
        "entropy": normal(1.0).abs(),
    }


def counts(case: Mapping[str, Tensor]) -> dict[str, Any]:
    """The denominators of a mini-batch that is this case."""
    per_sequence = [int(case["loss_mask"][a:b].sum()) for a, b in pairwise(case["cu_seqlens"].tolist())]
    return {"num_loss_tokens": sum(per_sequence), "num_sequences": sum(n > 0 for n in per_sequence)}


def loss_of(case: Mapping[str, Tensor], algorithm: AlgorithmSection | None = None, **changes: Any) -> LossOutput:
    """`policy_loss` of the case as a whole mini-batch; `changes` replace tensors or denominators."""
    inputs: dict[str, Any] = {**counts(case), **case, **changes}
    return policy_loss(**inputs, algorithm=algorithm or AlgorithmSection())


def gradient(leaf: Tensor) -> Tensor:
    """The gradient that backward left."""
    assert leaf.grad is not None
    return leaf.grad
