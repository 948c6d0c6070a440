"""Log-probabilities and entropies straight from hidden states through a frozen vocabulary projection.

The projection is frozen, so the gradient of a token's log-probability with respect to its hidden state is known as soon
as the logits are: (W[target] - p W) / temperature. The forward keeps these H numbers per token and lets the V logits
go, a few rows at a time; the backward is one multiplication. The naive form is `loss.token_logprobs`.

Shape legend: M tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_NUMBERS = 1 << 24  # logits held at once: 64 MiB in fp32


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MH: Tensor, weight_VH: Tensor, targets_M: Tensor, temperature: float, entropy_gradient: bool):
        want = ctx.needs_input_grad[0]
        logprobs, entropies, slopes, entropy_slopes = [], [], [], []
        rows = max(1, CHUNK_NUMBERS // weight_VH.shape[0])
        for x, target in zip(x_MH.split(rows), targets_M.split(rows), strict=True):
            logits = (x @ weight_VH.t()).float().div_(temperature)
            logp = logits.sub_(logits.logsumexp(1, keepdim=True))
            p = logp.exp()
            mean = (p * logp).sum(1, keepdim=True)
            logprobs.append(logp.gather(1, target[:, None]))
            entropies.append(-mean)
            if want:
                slopes.append((weight_VH[target] - p.to(x.dtype) @ weight_VH) / temperature)
            if want and entropy_gradient:
                entropy_slopes.append((p * (mean - logp)).to(x.dtype) @ weight_VH / temperature)
        ctx.entropy_gradient = entropy_gradient
        empty = x_MH.new_zeros(0)
        ctx.save_for_backward(*(torch.cat(s) if s else empty for s in (slopes, entropy_slopes)))
        out = (torch.cat(parts).squeeze(1) if parts else empty.float() for parts in (logprobs, entropies))
        return tuple(out)

    @staticmethod
    def backward(ctx, grad_logprobs_M: Tensor, grad_entropies_M: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        slopes_MH, entropy_slopes_MH = ctx.saved_tensors
        grad = slopes_MH * grad_logprobs_M[:, None].to(slopes_MH.dtype)
        if ctx.entropy_gradient:
            grad = torch.addcmul(grad, entropy_slopes_MH, grad_entropies_M[:, None].to(grad.dtype))
        return grad, None, None, None, None


def head_logprobs(
    x_MH: Tensor, weight_VH: Tensor, targets_M: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the targets, entropies in nats) of softmax(x W^T / temperature): fp32 [M] each.

    Without `entropy_gradient` no gradient flows back from the entropies.
    """
    return _FrozenHead.apply(x_MH, weight_VH, targets_M, temperature, entropy_gradient)  # pyright: ignore[reportReturnType]
