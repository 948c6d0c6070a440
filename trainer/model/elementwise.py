"""Norms, activations and mixes with backward passes written out: they keep little and recompute the rest.

The plain twins, and the formulas, are in `k3.ops`; all weights here are frozen and get no gradient. Everything is
computed in fp32 and cast back. Shape legend: T tokens, H hidden, F MLP inner width, N rows of an AttnRes mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vecdot

from miles_k3.k3.ops.attn_res import KEY_EPS


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float):
        x32 = x.float()
        rstd = _rstd(x32, eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x32 * rstd).to(x.dtype).mul_(weight.to(x.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, rstd = ctx.saved_tensors
        return _rms_norm_backward(grad.float() * weight.float(), x.float(), rstd).to(x.dtype), None, None


def _rstd(x32: Tensor, eps: float) -> Tensor:
    return vecdot(x32, x32).div_(x32.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)


def _rms_norm_backward(grad_unit: Tensor, x32: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of x from that of x * rstd; takes `grad_unit`'s memory."""
    along = (vecdot(grad_unit, x32).unsqueeze(-1) * rstd.square()).div_(-x32.shape[-1])
    return grad_unit.addcmul_(x32, along).mul_(rstd)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ops.norm.rms_norm`: [..., D] in x's dtype."""
    return _RmsNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, gate: Tensor, eps: float):
        rstd = _rstd(x, eps)
        ctx.save_for_backward(x, weight, gate, rstd)
        return (x * rstd).mul_(weight).mul_(torch.sigmoid(gate.float())).to(gate.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, gate, rstd = ctx.saved_tensors
        s = torch.sigmoid(gate.float())
        along_gate = grad.float() * s
        d_gate = (x * rstd).mul_(weight).mul_(along_gate).mul_(1.0 - s).to(gate.dtype)
        return _rms_norm_backward(along_gate.mul_(weight), x, rstd), None, d_gate, None


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """KDA's output: rms_norm(x) * sigmoid(gate), normalised over the last dimension; x fp32, result in gate's dtype."""
    return _GatedNorm.apply(x, weight, gate, eps)  # pyright: ignore[reportReturnType]


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor, beta: float, linear_beta: float):
        ctx.betas, ctx.dtype = (beta, linear_beta), gate_up.dtype
        parts = SituParts.of(gate_up, beta, linear_beta)
        ctx.save_for_backward(*parts.to_save(gate_up))
        return parts.value().to(gate_up.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = SituParts.restored(ctx.saved_tensors, *ctx.betas)
        return parts.backward(grad.float()).to(ctx.dtype), None, None


@dataclass(frozen=True, slots=True, eq=False)
class SituParts:
    """SiTU taken apart: tanh(gate / beta), sigmoid(gate), tanh(up / linear_beta), fp32 [T, F] each."""

    tanh_gate: Tensor
    sigmoid_gate: Tensor
    tanh_up: Tensor
    beta: float
    linear_beta: float

    @classmethod
    def of(cls, gate_up: Tensor, beta: float, linear_beta: float) -> SituParts:
        """From a fused [T, 2F]."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return cls((gate / beta).tanh_(), torch.sigmoid(gate), (up / linear_beta).tanh_(), beta, linear_beta)

    def to_save(self, gate_up: Tensor) -> tuple[Tensor, ...]:
        """What the backward needs: the parts where they cost little more than the fused input, as tanh is slow on a
        CPU; the input where it is narrower."""
        wide = gate_up.dtype == torch.float32
        return (self.tanh_gate, self.sigmoid_gate, self.tanh_up) if wide else (gate_up,)

    @classmethod
    def restored(cls, saved: Sequence[Tensor], beta: float, linear_beta: float) -> SituParts:
        if len(saved) == 1:
            return cls.of(saved[0], beta, linear_beta)
        tanh_gate, sigmoid_gate, tanh_up = saved
        return cls(tanh_gate, sigmoid_gate, tanh_up, beta, linear_beta)

    def value(self) -> Tensor:
        """[beta tanh(g / beta) sigmoid(g)] * [lb tanh(u / lb)]."""
        return (self.tanh_gate * self.sigmoid_gate).mul_(self.beta).mul_(self.tanh_up * self.linear_beta)

    def backward(self, grad: Tensor) -> Tensor:
        """fp32 gradient of the fused [T, 2F], from that of the value."""
        out = grad.new_empty(*grad.shape[:-1], 2 * grad.shape[-1])
        d_gate, d_up = out.chunk(2, dim=-1)
        scaled = grad * self.sigmoid_gate
        torch.mul(scaled * self.tanh_gate, (1.0 - self.tanh_up.square()).mul_(self.beta), out=d_up)
        slope = (1.0 - self.tanh_gate.square()).addcmul_(self.tanh_gate, 1.0 - self.sigmoid_gate, value=self.beta)
        torch.mul(scaled.mul_(self.tanh_up), slope.mul_(self.linear_beta), out=d_gate)
        return out


def situ(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """As `ops.situ.situ` of the two halves of a fused [T, 2F]: [T, F]."""
    return _Situ.apply(gate_up, beta, linear_beta)  # pyright: ignore[reportReturnType]


class _KdaGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f_TNK: Tensor, a_log_N: Tensor, dt_bias_NK: Tensor, lower_bound: float):
        rate_N1 = a_log_N.exp().unsqueeze(-1)
        g_TNK = (f_TNK.float() + dt_bias_NK).mul_(rate_N1).sigmoid_().mul_(lower_bound)
        ctx.save_for_backward(g_TNK, rate_N1)
        ctx.lower_bound, ctx.dtype = lower_bound, f_TNK.dtype
        return g_TNK

    @staticmethod
    def backward(ctx, grad_TNK: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        g_TNK, rate_N1 = ctx.saved_tensors
        slope_TNK = (1.0 - g_TNK / ctx.lower_bound).mul_(g_TNK).mul_(rate_N1)
        return slope_TNK.mul_(grad_TNK).to(ctx.dtype), None, None, None


def kda_gate(f_TNK: Tensor, a_log_N: Tensor, dt_bias_NK: Tensor, lower_bound: float) -> Tensor:
    """As `ops.kda.kda_gate`: log decay, fp32 [T, N, K]."""
    return _KdaGate.apply(f_TNK, a_log_N, dt_bias_NK, lower_bound)  # pyright: ignore[reportReturnType]


class _AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_H: Tensor, *rows: Tensor):
        rows32 = [row.float() for row in rows]
        rstds = [_rstd(row, KEY_EPS).squeeze(-1) for row in rows32]
        scores_TN = torch.stack([(row @ query_H).mul_(r) for row, r in zip(rows32, rstds, strict=True)], dim=-1)
        p_TN = torch.softmax(scores_TN, dim=-1)
        mix_TH = rows32[0] * p_TN[:, :1]
        for i, row in enumerate(rows32[1:], 1):
            mix_TH.addcmul_(row, p_TN[:, i : i + 1])
        ctx.save_for_backward(query_H, scores_TN, p_TN, torch.stack(rstds, dim=-1), *rows)
        return mix_TH.to(rows[0].dtype)

    @staticmethod
    def backward(ctx, grad_TH: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        query_H, scores_TN, p_TN, rstd_TN, *rows = ctx.saved_tensors
        grad32_TH = grad_TH.float()
        d_p_TN = torch.stack([vecdot(grad32_TH, row.float()) for row in rows], dim=-1)
        d_scores_TN = p_TN * (d_p_TN - vecdot(p_TN, d_p_TN).unsqueeze(-1))
        along_query_TN = d_scores_TN * rstd_TN
        along_row_TN = (along_query_TN * rstd_TN).mul_(scores_TN).div_(-query_H.shape[0])
        grads = []
        for i, row in enumerate(rows):
            at = slice(i, i + 1)
            d_row_TH = grad32_TH * p_TN[:, at]
            d_row_TH.addcmul_(row.float(), along_row_TN[:, at]).addcmul_(along_query_TN[:, at], query_H)
            grads.append(d_row_TH.to(row.dtype) if ctx.needs_input_grad[1 + i] else None)
        return None, *grads


def attn_res(query_H: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
    """As `ops.attn_res.attn_res` with its query given: mix [T, H] of `rows` in their dtype."""
    return _AttnRes.apply(query_H, *rows)  # pyright: ignore[reportReturnType]
