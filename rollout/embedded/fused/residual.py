"""Attention Residuals where a write waits for the aggregation that follows it: both are one launch.

Shapes: N rows, T tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_k3.k3.kernels.attn_res_norm import Write, attn_res_norm
from miles_k3.k3.ops.attn_res import KEY_EPS
from miles_k3.k3.ops.residual_bank import ResidualBank


class FusedResidual(ResidualBank):
    """`ResidualBank` whose last write is pending until something reads."""

    def __init__(self, embedding_TH: Tensor, max_rows: int) -> None:
        self.rows_NTH = embedding_TH.new_empty(max_rows, *embedding_TH.shape)
        self.rows_NTH[0].copy_(embedding_TH)
        self.num_banked = 0
        self._pending: tuple[Tensor, Write] | None = None

    @property
    def prefix_TH(self) -> Tensor:
        self._settle()
        return self.rows_NTH[self.num_banked]

    def bank(self, output_TH: Tensor) -> None:
        self._settle()
        self._pending = output_TH, Write.BANK

    def add(self, output_TH: Tensor) -> None:
        self._settle()
        self._pending = output_TH, Write.ADD

    def mix_norm(self, query_H: Tensor, norm_H: Tensor, eps: float, tap_TH: Tensor | None = None) -> Tensor:
        output_TH, write = self._pending or (None, Write.NOTHING)
        out_TH, self.num_banked = attn_res_norm(
            self.rows_NTH, self.num_banked, query_H, norm_H, eps, output_TH, write, tap_TH
        )  # fmt: skip
        self._pending = None
        return out_TH

    def mix(self, query_H: Tensor) -> Tensor:
        self._settle()
        if not self.num_banked:
            return self.prefix_TH
        rows = self.rows_NTH[: self.num_banked + 1].float()
        scale_NT = (rows.square().sum(-1) / rows.shape[-1] + KEY_EPS).rsqrt()
        p_NT = ((rows @ query_H) * scale_NT).softmax(0)
        return (p_NT.unsqueeze(-1) * rows).sum(0).to(self.rows_NTH.dtype)

    def select(self, tokens: Tensor) -> ResidualBank:
        self._settle()
        part = object.__new__(FusedResidual)
        # One row more: a write that banks needs a place.
        part.rows_NTH = self.rows_NTH.new_empty(self.num_banked + 2, tokens.shape[0], self.rows_NTH.shape[2])
        torch.index_select(self.rows_NTH[: self.num_banked + 1], 1, tokens, out=part.rows_NTH[: self.num_banked + 1])
        part.num_banked, part._pending = self.num_banked, None
        return part

    def _settle(self) -> None:
        if self._pending is None:
            return
        (output_TH, write), self._pending = self._pending, None
        if write is Write.BANK:
            self.num_banked += 1
            self.rows_NTH[self.num_banked].copy_(output_TH)
        else:
            self.rows_NTH[self.num_banked].add_(output_TH)
