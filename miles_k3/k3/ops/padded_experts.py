"""The routed experts as a few batched products, each expert's rows padded to the fullest expert's number.

For CPUs, where a grouped product is a loop over experts. Inference only; `latent_moe.latent_experts` is the plain twin.
Shapes: T tokens, K chosen experts, E experts, C capacity, Z latent, I expert inner width, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.k3.ops.decode import situ_
from miles_k3.k3.ops.lora import ExpertLoraTerm

MAX_PADDING = 4  # rows computed for each real one; beyond it the grouped form is cheaper


@dataclass(frozen=True, slots=True, eq=False)
class PaddedDispatch:
    """`place_TK`: row of [E * C] where each choice is computed; `token_P`: token of each place, 0 where it is empty."""

    place_TK: Tensor
    token_P: Tensor
    num_experts: int
    capacity: int

    @classmethod
    def of(cls, experts_TK: Tensor, num_experts: int) -> PaddedDispatch | None:
        """None when the experts are too unevenly loaded for padding to pay. Reads the capacity on the host."""
        flat_M = experts_TK.flatten()
        counts_E = torch.bincount(flat_M, minlength=num_experts)
        capacity = int(counts_E.max())
        if num_experts * capacity > MAX_PADDING * flat_M.shape[0]:
            return None
        order_M = torch.argsort(flat_M, stable=True)
        shift_E = torch.arange(num_experts, device=flat_M.device) * capacity - (counts_E.cumsum(0) - counts_E)
        place_M = torch.empty_like(order_M)
        sorted_place_M = shift_E[flat_M[order_M]] + torch.arange(flat_M.shape[0], device=flat_M.device)
        place_M[order_M] = sorted_place_M
        token_P = flat_M.new_zeros(num_experts * capacity)
        token_P[sorted_place_M] = order_M // experts_TK.shape[1]
        return cls(place_M, token_P, num_experts, capacity)

    def spread(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [E, C, D]; empty places hold some token's row, whose results nobody collects."""
        return x_TD.index_select(0, self.token_P).view(self.num_experts, self.capacity, -1)

    def collect(self, y_ECD: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum of each token's results: fp32 [T, D]."""
        rows = y_ECD.flatten(0, 1).index_select(0, self.place_TK).view(*weights_TK.shape, -1)
        return (rows.float() * weights_TK.unsqueeze(-1)).sum(1)


def padded_experts(
    z_TZ: Tensor,
    weights_TK: Tensor,
    dispatch: PaddedDispatch,
    w13_E2IZ: Tensor,
    w2_EZI: Tensor,
    *,
    situ_beta: float,
    situ_linear_beta: float,
    lora: Sequence[ExpertLoraTerm] = (),
) -> Tensor:
    """Weighted sum of the chosen experts, [T, Z]. `rows_T1` of the terms are bool here.

    B2 is shared by all experts, so its product is taken once a token, after the weighted sum (spec 5.4).
    """
    hidden = torch.bmm(dispatch.spread(z_TZ), w13_E2IZ.transpose(1, 2))
    gate, up = hidden.chunk(2, dim=-1)
    for term in lora:
        for half, a, b in ((gate, term.a1, term.b1), (up, term.a3, term.b3)):
            low_TR = _of_rows(z_TZ @ a.t(), term)
            half.baddbmm_(dispatch.spread(low_TR), b.transpose(1, 2), alpha=term.scaling)
    act = situ_(hidden, situ_beta, situ_linear_beta)
    out_TZ = dispatch.collect(torch.bmm(act, w2_EZI.transpose(1, 2)), weights_TK).to(z_TZ.dtype)
    for term in lora:
        low_TR = dispatch.collect(torch.bmm(act, term.a2.transpose(1, 2)), weights_TK).to(z_TZ.dtype)
        out_TZ.addmm_(_of_rows(low_TR, term), term.b2.t(), alpha=term.scaling)
    return out_TZ


def _of_rows(low_TR: Tensor, term: ExpertLoraTerm) -> Tensor:
    return low_TR if term.rows_T1 is None else torch.where(term.rows_T1, low_TR, 0.0)
