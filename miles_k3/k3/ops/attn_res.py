"""Attention Residuals: a softmax over earlier residual snapshots replaces the residual stream (spec 2.2).

Shapes: T tokens, N rows (bank snapshots and the prefix), H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KEY_EPS = 1e-5


def attn_res_naive(prefix_TH: Tensor, bank: Sequence[Tensor], norm_weight_H: Tensor, proj_weight_1H: Tensor) -> Tensor:
    """The plain twin: step by step as the spec words it. Returns [T, H] in prefix's dtype."""
    rows_TNH = torch.stack([*bank, prefix_TH], dim=1).float()
    keys_TNH = rows_TNH * torch.rsqrt(rows_TNH.square().mean(-1, keepdim=True) + KEY_EPS)
    scores_TN = (keys_TNH * norm_weight_H.float() * proj_weight_1H.float().reshape(-1)).sum(-1)
    p_TN = torch.softmax(scores_TN, dim=-1)
    return (p_TN.unsqueeze(-1) * rows_TNH).sum(1).to(prefix_TH.dtype)


def attn_res(prefix_TH: Tensor, bank: Sequence[Tensor], norm_weight_H: Tensor, proj_weight_1H: Tensor) -> Tensor:
    """Mix of the bank rows and the prefix, [T, H] in prefix's dtype; with an empty bank the prefix itself.

    Keys are normalised, values are the raw rows; no 1/sqrt(H); softmax and sum in fp32. The query is the product of
    norm weight and projection, so no normalised copy of a row is ever made.
    """
    if not bank:
        return prefix_TH
    query_H = norm_weight_H.float() * proj_weight_1H.float().reshape(-1)
    rows = [r.float() for r in (*bank, prefix_TH)]
    width = prefix_TH.shape[-1]
    scores = [(r @ query_H) * torch.rsqrt(torch.linalg.vecdot(r, r) / width + KEY_EPS) for r in rows]
    p_TN = torch.softmax(torch.stack(scores, dim=-1), dim=-1)
    mix = rows[0] * p_TN[:, :1]
    for i, row in enumerate(rows[1:], 1):
        mix = torch.addcmul(mix, row, p_TN[:, i : i + 1])
    return mix.to(prefix_TH.dtype)
