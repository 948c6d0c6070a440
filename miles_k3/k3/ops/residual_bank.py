"""Attention Residuals for inference: bank and prefix in one buffer, norms of bank rows computed once.

The same results as `attn_res.attn_res`, its plain twin, without stacking rows at every aggregation.
Shapes: N rows, T tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_k3.k3.ops.attn_res import KEY_EPS
from miles_k3.k3.ops.decode import rms_norm


class ResidualBank:
    """Rows 0..n-1 of `rows_NTH` are the bank, row n is the prefix; a write step only moves n on."""

    def __init__(self, embedding_TH: Tensor, max_rows: int) -> None:
        self.rows_NTH = embedding_TH.new_empty(max_rows, *embedding_TH.shape)
        self.rows_NTH[0].copy_(embedding_TH)
        self._scale_NT = torch.empty(max_rows, embedding_TH.shape[0], device=embedding_TH.device)
        self.num_banked = 0

    @property
    def prefix_TH(self) -> Tensor:
        return self.rows_NTH[self.num_banked]

    def bank(self, output_TH: Tensor) -> None:
        """Write step: the prefix joins the bank, the sublayer's output starts the next one."""
        if not self.num_banked:
            self._scale_prefix()  # no aggregation has seen row 0 yet
        self.num_banked += 1
        self.prefix_TH.copy_(output_TH)

    def add(self, output_TH: Tensor) -> None:
        """An ordinary step: prefix += output."""
        self.prefix_TH.add_(output_TH)

    def mix(self, query_H: Tensor) -> Tensor:
        """Softmax over all rows' scores, [T, H] in the rows' dtype; `query_H` fp32 is norm weight times projection."""
        if not self.num_banked:
            return self.prefix_TH
        self._scale_prefix()
        rows = self.rows_NTH[: self.num_banked + 1].float()
        p_NT = (rows @ query_H).mul_(self._scale_NT[: self.num_banked + 1]).softmax(0)
        return (p_NT.unsqueeze(-1) * rows).sum(0).to(self.rows_NTH.dtype)

    def mix_norm(self, query_H: Tensor, norm_H: Tensor, eps: float, tap_TH: Tensor | None = None) -> Tensor:
        """RMSNorm of the mix: what a sublayer reads. `tap_TH` gets the mix itself."""
        mix_TH = self.mix(query_H)
        if tap_TH is not None:
            tap_TH.copy_(mix_TH)
        return rms_norm(mix_TH, norm_H, eps)

    def select(self, tokens: Tensor) -> ResidualBank:
        """A copy that holds some of the tokens only."""
        part = object.__new__(ResidualBank)
        part.rows_NTH = self.rows_NTH[: self.num_banked + 1].index_select(1, tokens)
        part._scale_NT = self._scale_NT[: self.num_banked + 1].index_select(1, tokens)
        part.num_banked = self.num_banked
        return part

    def _scale_prefix(self) -> None:
        row = self.prefix_TH.float()
        scale = torch.linalg.vecdot(row, row).div_(row.shape[-1]).add_(KEY_EPS)
        torch.rsqrt(scale, out=self._scale_NT[self.num_banked])
