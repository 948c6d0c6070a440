"""Rows in another order, whose gradient goes back by a gather: `index_select`'s own adds up one by one.

Shape legend: M rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_M: Tensor, order_M: Tensor, inverse_M: Tensor):
        ctx.inverse_M = inverse_M
        return x_M.index_select(0, order_M)

    @staticmethod
    def backward(ctx, grad_M: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_M.index_select(0, ctx.inverse_M), None, None


def permute(x_M: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
    """Rows in another order: [M, ...] -> [M, ...]."""
    return _Permute.apply(x_M, order_M, inverse_M)  # pyright: ignore[reportReturnType]
