"""Stable LatentMoE (spec 2.6): router on the full width, experts in the latent width.

Shapes: T tokens, H hidden, Z latent, I expert inner width, E experts, K chosen experts, M = T*K rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_k3.k3.ops.lora import ExpertLoraTerm
from miles_k3.k3.ops.situ import situ

RENORM_EPS = 1e-20


def route(x_TH: Tensor, gate_weight_EH: Tensor, bias_E: Tensor, *, top_k: int, renormalize: bool, scaling: float,
          forced_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights fp32 [T, K], experts int64 [T, K]). Sigmoid scores in fp32; the bias chooses but does not weigh.

    `forced_TK` replays given experts (entries < 0 fall back to the router's own choice of that token).
    """
    scores_TE = torch.sigmoid(x_TH.float() @ gate_weight_EH.float().t())
    experts_TK = torch.topk(scores_TE.detach() + bias_E.float(), top_k, dim=-1).indices
    if forced_TK is not None:
        forced = forced_TK.long()
        experts_TK = torch.where((forced >= 0).all(-1, keepdim=True), forced, experts_TK)
    weights_TK = scores_TE.gather(1, experts_TK)
    if renormalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + RENORM_EPS)
    return weights_TK * scaling, experts_TK


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """Tokens sorted by expert, so each expert's rows are one segment of a grouped matmul."""

    order_M: Tensor  # row of the [T*K] list at each sorted place
    place_M: Tensor  # the inverse
    ends_E: Tensor  # int32, end of each expert's segment
    top_k: int

    @classmethod
    def of(cls, experts_TK: Tensor, num_experts: int) -> Dispatch:
        flat = experts_TK.reshape(-1)
        order = torch.argsort(flat, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.shape[0], device=order.device)
        ends = torch.searchsorted(flat[order], torch.arange(num_experts, device=flat.device), right=True)
        return cls(order, place, ends.to(torch.int32), experts_TK.shape[1])

    def sort(self, x_TD: Tensor) -> Tensor:
        """Copy each token to its K places: [T, D] -> [M, D]; a permuted expand, so the gradient is a plain sum."""
        return x_TD.unsqueeze(1).expand(-1, self.top_k, -1).reshape(-1, x_TD.shape[-1])[self.order_M]

    def unsort(self, y_MD: Tensor) -> Tensor:
        """[M, D] -> [T, K, D]."""
        return y_MD[self.place_M].unflatten(0, (-1, self.top_k))


class _GroupedLinear(torch.autograd.Function):
    """x [M, in] times each segment's own weight [E, out, in], through torch's grouped_mm.

    Own backward: grouped_mm's gradient wants contiguous inputs, and a frozen weight needs no gradient at all.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        dx = F.grouped_mm(grad, weight, offs=ends) if ctx.needs_input_grad[0] else None
        dw = F.grouped_mm(grad.t(), x, offs=ends) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """[M, in] -> [M, out]; rows of segment e use weight[e]. Empty segments are fine.

    grouped_mm wants rows of whole 16 bytes, so narrow widths (a small LoRA rank in bf16) are padded with zeros.
    """
    unit, (out_width, in_width) = 16 // x_MI.element_size(), weight_EOI.shape[1:]
    pad_in, pad_out = -in_width % unit, -out_width % unit
    if pad_in or pad_out:
        weight_EOI = F.pad(weight_EOI, (0, pad_in, 0, pad_out))
        return _GroupedLinear.apply(F.pad(x_MI, (0, pad_in)), weight_EOI, ends_E)[:, :out_width]
    return _GroupedLinear.apply(x_MI, weight_EOI, ends_E)


def grouped_linear_naive(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The plain twin: a loop over experts."""
    starts = [0, *ends_E.tolist()]
    return torch.cat([x_MI[a:b] @ w.t() for a, b, w in zip(starts, starts[1:], weight_EOI, strict=False)])


def latent_experts(
    z_TZ: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_E2IZ: Tensor,
    w2_EZI: Tensor,
    *,
    situ_beta: float,
    situ_linear_beta: float,
    lora: Sequence[ExpertLoraTerm] = (),
) -> Tensor:
    """Weighted sum of the chosen experts, [T, Z]: router weight after the down projection, summed in fp32.

    w13 holds w1 (gate) rows then w3 (up) rows. LoRA terms enter before SiTU (w1, w3) and before the sum (w2).
    """
    dispatch = Dispatch.of(experts_TK, w13_E2IZ.shape[0])
    hidden = grouped_linear(dispatch.sort(z_TZ), w13_E2IZ, dispatch.ends_E)
    gate, up = hidden.chunk(2, dim=-1)
    rows = [None if t.rows_T1 is None else dispatch.sort(t.rows_T1).to(z_TZ.dtype) for t in lora]
    for term, mask in zip(lora, rows, strict=True):
        gate = gate + _front_delta(z_TZ, term.a1, term.b1, term.scaling, dispatch, mask)
        up = up + _front_delta(z_TZ, term.a3, term.b3, term.scaling, dispatch, mask)
    act = situ(gate, up, situ_beta, situ_linear_beta)
    out_MZ = grouped_linear(act, w2_EZI, dispatch.ends_E)
    for term, mask in zip(lora, rows, strict=True):
        low = grouped_linear(act, term.a2, dispatch.ends_E) * term.scaling
        out_MZ = out_MZ + (low if mask is None else low * mask) @ term.b2.t()
    return (dispatch.unsort(out_MZ).float() * weights_TK.unsqueeze(-1)).sum(1).to(z_TZ.dtype)


def _front_delta(z_TZ: Tensor, a: Tensor, b: Tensor, scaling: float, dispatch: Dispatch, mask: Tensor | None) -> Tensor:
    low = dispatch.sort(z_TZ @ a.t() * scaling)
    return grouped_linear(low if mask is None else low * mask, b, dispatch.ends_E)
