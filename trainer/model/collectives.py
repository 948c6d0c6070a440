"""Where activations cross ranks: into and out of a sublayer, and to the loss. Megatron's mappings, in our words.

Between sublayers a rank holds T / sp tokens (sp = tp under sequence parallelism, else 1); inside one it holds all T
tokens of its context-parallel share and a part of the heads or channels.
Shape legend: T tokens, D any width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from miles_k3.trainer.distributed import Axis, Ranks
from miles_k3.trainer.mcore import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


def enter(x_TD: Tensor, ranks: Ranks) -> Tensor:
    """Into a sublayer, once: [T / sp, D] -> [T, D]. The way back sums the tensor-parallel ranks' gradients."""
    if ranks.tp.size == 1:
        return x_TD
    if ranks.sequence_parallel:
        return gather_from_sequence_parallel_region(x_TD, tensor_parallel_output_grad=True, group=ranks.tp.group)
    return copy_to_tensor_model_parallel_region(x_TD, ranks.tp.group)


def leave(y_TD: Tensor, ranks: Ranks) -> Tensor:
    """Out of a sublayer, once: each rank's partial sum [T, D] -> the whole sum of its own tokens [T / sp, D]."""
    if ranks.tp.size == 1:
        return y_TD
    if ranks.sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(y_TD, ranks.tp.group)
    return reduce_from_tensor_model_parallel_region(y_TD, ranks.tp.group)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, size: int):
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad / ctx.size, None


def replicated(x: Tensor, ranks: Ranks) -> Tensor:
    """What `enter` gave, for a use that is the same on every tensor-parallel rank: its gradient, whole on each of
    them, must count once in the sum that `enter` makes on the way back."""
    return x if ranks.tp.size == 1 else _Replicated.apply(x, ranks.tp.size)  # pyright: ignore[reportReturnType]


def shared(x: Tensor, ranks: Ranks) -> Tensor:
    """A replicated tensor on its way to the heads of every rank (copy-to-TP): the way back sums the ranks' gradients.

    The MLA latents and the extra key pass here (spec 4.2), so their own factors see whole gradients.
    """
    return x if ranks.tp.size == 1 else copy_to_tensor_model_parallel_region(x, ranks.tp.group)


def gather_context(x_TD: Tensor, cp: Axis) -> Tensor:
    """Every context-parallel rank's tokens, rank after rank: [T, D] -> [cp * T, D]; gradients are reduce-scattered."""
    if cp.size == 1:
        return x_TD
    return gather_from_sequence_parallel_region(x_TD.contiguous(), tensor_parallel_output_grad=True, group=cp.group)


class _GatherForLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_XT: Tensor, cp: Axis):
        ctx.cp = cp
        return _all_gather(x_XT.t(), cp).t()

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad[:, ctx.cp.part(grad.shape[1])].contiguous(), None


def gather_for_loss(x_XT: Tensor, cp: Axis) -> Tensor:
    """[X, T] -> [X, cp * T] for a loss that every context-parallel rank computes alike: a rank's own gradients are
    already whole, so the way back only takes its part."""
    return x_XT if cp.size == 1 else _GatherForLoss.apply(x_XT, cp)  # pyright: ignore[reportReturnType]


def _all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Along dimension 0, rank after rank; no gradient."""
    x = x.contiguous()
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=axis.group)
    return out


def all_gather_states(x: Tensor, axis: Axis) -> Tensor:
    """[...] -> [ranks, ...]; no gradient."""
    return _all_gather(x.unsqueeze(0), axis)
