"""RMS and L2 norms (spec section 2, notation; 2.3)."""

from __future__ import annotations

import torch
from torch import Tensor

L2_EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D] in x's dtype: normalise in fp32, cast, then multiply by the weight."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def l2_norm(x: Tensor) -> Tensor:
    """x [..., D] -> fp32 x / sqrt(sum x^2 + 1e-6): sum, not mean; eps inside the root."""
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + L2_EPS)
