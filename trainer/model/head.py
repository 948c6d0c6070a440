"""Log-probabilities and entropies straight from hidden states through a frozen vocabulary projection.

The projection is frozen, so the gradient of a token's log-probability with respect to its hidden state is known as soon
as the logits are: (W[target] - p W) / temperature. The forward keeps these H numbers per token and lets the logits go,
a few rows at a time; the backward is one multiplication. Each tensor-parallel rank has a part of the vocabulary: ranks
exchange a maximum and three sums per row, never logits, and each keeps its own part of the gradient, which
`collectives.enter` sums. The naive form is `loss.token_logprobs`.

Shape legend: M tokens, H hidden, V vocabulary of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from miles_k3.trainer.distributed import Axis

# Logits held at once, 64 MiB and 512 MiB in fp32: a GPU wants hundreds of rows a product.
CHUNK_NUMBERS, CUDA_CHUNK_NUMBERS = 1 << 24, 1 << 27


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The chunk's quantities that the whole vocabulary decides, and this rank's probabilities p [M, V]."""

    logp_MV: Tensor
    p_MV: Tensor
    target_logp_M1: Tensor
    mean_logp_M1: Tensor  # sum of p log p: minus the entropy


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MH: Tensor, weight_VH: Tensor, targets_M: Tensor, temperature: float, entropy_gradient: bool,
                tp: Axis):  # fmt: skip
        want = ctx.needs_input_grad[0]
        logprobs, entropies, slopes, entropy_slopes = [], [], [], []
        rows = max(1, (CUDA_CHUNK_NUMBERS if x_MH.is_cuda else CHUNK_NUMBERS) // weight_VH.shape[0])
        for x, target in zip(x_MH.split(rows), targets_M.split(rows), strict=True):
            if not x.shape[0]:
                continue
            local, here_M1 = _own(target, weight_VH.shape[0], tp)
            r = _price((x @ weight_VH.t()).float().div_(temperature), local, here_M1, tp)
            logprobs.append(r.target_logp_M1)
            entropies.append(-r.mean_logp_M1)
            if want:
                chosen = torch.where(here_M1, weight_VH[local], 0.0)
                slopes.append((chosen - r.p_MV.to(x.dtype) @ weight_VH) / temperature)
            if want and entropy_gradient:
                spread = (r.p_MV * (r.mean_logp_M1 - r.logp_MV)).to(x.dtype)
                entropy_slopes.append(spread @ weight_VH / temperature)
        ctx.entropy_gradient = entropy_gradient
        empty = x_MH.new_zeros(0, x_MH.shape[1])
        ctx.save_for_backward(*(torch.cat(s) if s else empty for s in (slopes, entropy_slopes)))
        blank = x_MH.new_zeros(0, dtype=torch.float32)
        return tuple(torch.cat(parts).squeeze(1) if parts else blank for parts in (logprobs, entropies))

    @staticmethod
    def backward(ctx, grad_logprobs_M: Tensor, grad_entropies_M: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        slopes_MH, entropy_slopes_MH = ctx.saved_tensors
        grad = slopes_MH * grad_logprobs_M[:, None].to(slopes_MH.dtype)
        if ctx.entropy_gradient:
            grad = torch.addcmul(grad, entropy_slopes_MH, grad_entropies_M[:, None].to(grad.dtype))
        return grad, None, None, None, None, None


def _own(target_M: Tensor, vocab: int, tp: Axis) -> tuple[Tensor, Tensor]:
    """(the targets' rows in this rank's part, 0 for those of another; which are its own, [M, 1])."""
    local = target_M - tp.rank * vocab
    here = (local >= 0) & (local < vocab)
    return torch.where(here, local, 0), here.unsqueeze(1)


def _price(logits_MV: Tensor, local_M: Tensor, here_M1: Tensor, tp: Axis) -> _Rows:
    """Takes the logits' memory."""
    top_M1 = logits_MV.amax(1, keepdim=True)
    if tp.size > 1:
        dist.all_reduce(top_M1, dist.ReduceOp.MAX, group=tp.group)
    shifted = logits_MV.sub_(top_M1)
    p_MV = shifted.exp()
    target = torch.where(here_M1, shifted.gather(1, local_M[:, None]), 0.0)
    sums_M3 = torch.cat([p_MV.sum(1, keepdim=True), (p_MV * shifted).sum(1, keepdim=True), target], dim=1)
    if tp.size > 1:
        dist.all_reduce(sums_M3, group=tp.group)
    total, weighted, target = sums_M3.split(1, dim=1)
    log_total = total.log()
    return _Rows(shifted.sub_(log_total), p_MV.div_(total), target - log_total, weighted / total - log_total)


def head_logprobs(
    x_MH: Tensor, weight_VH: Tensor, targets_M: Tensor, temperature: float, *, entropy_gradient: bool = False,
    tp: Axis | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(log-probabilities of the targets, entropies in nats) of softmax(x W^T / temperature): fp32 [M] each.

    `weight_VH`: this rank's part of the vocabulary along `tp`; x and targets are the same on all of its ranks, x's
    gradient is this rank's part. Without `entropy_gradient` no gradient flows back from the entropies.
    """
    axis = Axis() if tp is None else tp
    return _FrozenHead.apply(x_MH, weight_VH, targets_M, temperature, entropy_gradient, axis)  # pyright: ignore[reportReturnType]
