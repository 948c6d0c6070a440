"""Routed experts on rows sorted by expert, with the backward pass written out.

Frozen packed or dense weights, LoRA factors, SiTU and the router's weights in one function, which keeps SiTU's
parts and recomputes the rest; packed weights are unpacked tile by tile, and again in the backward. The plain twin is
`k3.ops.latent_moe.latent_experts`.
Shape legend: T tokens, K chosen experts per token, M = T * K rows sorted by expert, Z latent, I inner width, E experts,
R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vecdot

from miles_k3.k3.ops.latent_moe import Dispatch
from miles_k3.k3.weights import ExpertBank
from miles_k3.trainer.model.elementwise import SituParts
from miles_k3.trainer.model.permute import permute

if TYPE_CHECKING:
    from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts

TILE_NUMBERS = 1 << 29  # weights unpacked at once: 1 GiB in bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which token (`token_M`) and which place of the [T * K] list (`order_M`) each sorted row is, and back."""

    token_M: Tensor
    order_M: Tensor
    place_M: Tensor
    ends_E: Tensor
    top_k: int

    @classmethod
    def of(cls, experts_TK: Tensor, num_experts: int) -> Rows:
        dispatch = Dispatch.of(experts_TK, num_experts)
        token_M = dispatch.order_M // dispatch.top_k
        return cls(token_M, dispatch.order_M, dispatch.place_M, dispatch.ends_E, dispatch.top_k)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, rows: Rows):
        ctx.rows = rows
        return x_TD.index_select(0, rows.token_M)

    @staticmethod
    def backward(ctx, grad_MD: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows: Rows = ctx.rows
        return grad_MD.index_select(0, rows.place_M).unflatten(0, (-1, rows.top_k)).sum(1), None


def spread(x_TD: Tensor, rows: Rows) -> Tensor:
    """Copy each token to its rows: [T, D] -> [M, D]."""
    return _Spread.apply(x_TD, rows)  # pyright: ignore[reportReturnType]


def spread_weights(weights_TK: Tensor, rows: Rows) -> Tensor:
    """The router weight of each row: [T, K] -> [M]."""
    return permute(weights_TK.reshape(-1), rows.order_M, rows.place_M)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_MZ: Tensor, weights_TK: Tensor, rows: Rows):
        ctx.rows, ctx.dtype = rows, y_MZ.dtype
        y_TKZ = y_MZ.index_select(0, rows.place_M).unflatten(0, (-1, rows.top_k))
        return (y_TKZ.float() * weights_TK.unsqueeze(-1)).sum(1).to(y_MZ.dtype)

    @staticmethod
    def backward(ctx, grad_TZ: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_TZ.to(ctx.dtype).index_select(0, ctx.rows.token_M), None, None


def combine(y_MZ: Tensor, weights_TK: Tensor, rows: Rows) -> Tensor:
    """Each token's rows times its router weights, summed in fp32: [M, Z] -> [T, Z].

    The way back is half of a pair with `expert_rows`: it sends each row the token's gradient *without* the weight,
    which `expert_rows` has and multiplies with. The weights' gradient comes from there too, where the activation is at
    hand, so that no row of the output is kept and rows travel between ranks in the compute dtype.
    """
    return _Combine.apply(y_MZ, weights_TK.detach(), rows)  # pyright: ignore[reportReturnType]


class Factors(NamedTuple):
    """LoRA of one layer's experts on sorted rows: scaled inputs times a1 and a3, then the other factors."""

    low1_MR: Tensor
    low3_MR: Tensor
    b1_EIR: Tensor
    b3_EIR: Tensor
    a2_ERI: Tensor
    b2_ZR: Tensor

    def aligned(self) -> Factors:
        """The same with the rank padded by zeros to `aligned_rank`; low products may have come that wide."""
        rank = aligned_rank(self.b1_EIR.shape[-1], self.b1_EIR.dtype)
        low1, low3, b1, b3, b2 = (
            F.pad(t, (0, rank - t.shape[-1])) if t.shape[-1] < rank else t for t in self if t is not self.a2_ERI
        )
        return Factors(low1, low3, b1, b3, F.pad(self.a2_ERI, (0, 0, 0, rank - self.a2_ERI.shape[1])), b2)


def aligned_rank(rank: int, dtype: torch.dtype) -> int:
    """The rank rounded up to whole 16 bytes, as grouped_mm wants its rows."""
    unit = 16 // dtype.itemsize
    return -(-rank // unit) * unit


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MZ: Tensor, weight_M: Tensor, ends: Tensor, bank: ExpertBank, betas: tuple[float, float],
                scaling: float, *factors: Tensor):  # fmt: skip
        weights = FrozenExperts.of(bank, ends, x_MZ)
        lora = Factors(*factors) if factors else None
        h = weights.times(x_MZ, "w13")
        if lora is not None:
            gate, up = h.chunk(2, dim=-1)
            gate += _grouped(lora.low1_MR, lora.b1_EIR, ends)
            up += _grouped(lora.low3_MR, lora.b3_EIR, ends)
        parts = SituParts.of(h, *betas)
        act = parts.value().to(h.dtype)
        out = weights.times(act, "w2")
        if lora is not None:
            out.addmm_(_grouped(act, lora.a2_ERI, ends), lora.b2_ZR.t(), alpha=scaling)
        saved = parts.to_save(h)
        ctx.save_for_backward(weight_M, ends, *saved, *factors)
        ctx.weights, ctx.betas, ctx.scaling, ctx.num_saved = weights, betas, scaling, len(saved)
        return out

    @staticmethod
    def backward(ctx, grad_MZ: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        weight_M, ends, *rest = ctx.saved_tensors
        saved, factors = rest[: ctx.num_saved], rest[ctx.num_saved :]
        lora, dtype = Factors(*factors) if factors else None, saved[0].dtype
        weights: FrozenExperts = ctx.weights
        parts = SituParts.restored(saved, *ctx.betas)
        act = parts.value()
        grad = grad_MZ.contiguous()
        # `combine` sent the gradient without the weights: the router's then needs the activation, not the output.
        d_low2 = None if lora is None else (grad @ lora.b2_ZR).mul_(ctx.scaling)
        d_act = weights.times(grad, "w2", transposed=True)
        if lora is not None and d_low2 is not None:
            d_act += F.grouped_mm(d_low2, lora.a2_ERI, offs=ends)
        d_act = d_act.float()
        d_weight_M, weight_M1 = vecdot(d_act, act), weight_M.unsqueeze(-1)
        d_h = parts.backward(d_act.mul_(weight_M1)).to(dtype)
        d_x = weights.times(d_h, "w13", transposed=True)
        if lora is None or d_low2 is None:
            return d_x, d_weight_M, None, None, None, None
        act = act.to(dtype)
        d_gate, d_up = (half.contiguous() for half in d_h.chunk(2, dim=-1))
        weighted_low2, weighted_d_low2 = (
            (t.float() * weight_M1).to(dtype) for t in (_grouped(act, lora.a2_ERI, ends), d_low2)
        )
        d_lora = Factors(
            low1_MR=F.grouped_mm(d_gate, lora.b1_EIR, offs=ends),
            low3_MR=F.grouped_mm(d_up, lora.b3_EIR, offs=ends),
            b1_EIR=F.grouped_mm(d_gate.t(), lora.low1_MR, offs=ends),
            b3_EIR=F.grouped_mm(d_up.t(), lora.low3_MR, offs=ends),
            a2_ERI=F.grouped_mm(weighted_d_low2.t(), act, offs=ends),
            b2_ZR=(grad.t() @ weighted_low2).mul_(ctx.scaling),
        )
        return d_x, d_weight_M, None, None, None, None, *d_lora


@dataclass(frozen=True, slots=True, eq=False)
class FrozenExperts:
    """Grouped products with a bank's weights. Packed ones are unpacked inside the kernels (`kernels`), or elsewhere a
    few experts at a time, and dropped again.

    `edges`: (first expert, last + 1, first row, last row + 1) of each tile; None where nothing is unpacked.
    """

    bank: ExpertBank
    ends_E: Tensor
    edges: tuple[tuple[int, int, int, int], ...] | None
    kernels: tuple[PackedExperts, PackedExperts] | None = None

    @classmethod
    def of(cls, bank: ExpertBank, ends_E: Tensor, x_MD: Tensor) -> FrozenExperts:
        """For rows like x's. Waits for the device once where tiles are unpacked."""
        if not bank.packed:
            return cls(bank, ends_E, None)
        kernels = bank.for_kernels() if takes_kernels(x_MD) else None
        if kernels is not None:
            return cls(bank, ends_E, None, kernels)
        ends, size = [0, *ends_E.tolist()], max(1, TILE_NUMBERS // bank.numbers_per_expert)
        cuts = range(0, len(ends) - 1, size)
        tiles = ((a, min(a + size, len(ends) - 1)) for a in cuts)
        return cls(bank, ends_E, tuple((a, b, ends[a], ends[b]) for a, b in tiles if ends[b] > ends[a]))

    def times(self, x_MD: Tensor, which: Literal["w13", "w2"], *, transposed: bool = False) -> Tensor:
        """Each row times its own expert's weight [O, D], or a gradient times its transpose [D, O]: [M, O]."""
        if self.kernels is not None:
            from miles_k3.k3.kernels.grouped_mxfp4 import grouped_mxfp4, grouped_mxfp4_transposed

            weight = self.kernels[0 if which == "w13" else 1]
            return (grouped_mxfp4_transposed if transposed else grouped_mxfp4)(x_MD, weight, self.ends_E)
        if self.edges is None:
            return self._product(x_MD, self.bank.weight(which, x_MD.dtype), self.ends_E, transposed)
        parts = []
        for first, last, start, stop in self.edges:
            weight = self.bank.part(slice(first, last)).weight(which, x_MD.dtype)
            parts.append(self._product(x_MD[start:stop], weight, self.ends_E[first:last] - start, transposed))
        return torch.cat(parts)

    @staticmethod
    def _product(x_MD: Tensor, weight_EOD: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
        return F.grouped_mm(x_MD, weight_EOD if transposed else weight_EOD.transpose(1, 2), offs=ends_E)


def takes_kernels(x_MD: Tensor) -> bool:
    """In fp32 the kernels' products leave the tensor cores, and unpacking first is faster."""
    return x_MD.is_cuda and x_MD.dtype == torch.bfloat16


def _grouped(x_MD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Each row times its own expert's weight: [M, D] -> [M, O]."""
    return F.grouped_mm(x_MD, weight_EOD.transpose(1, 2), offs=ends_E)


def expert_rows(x_MZ: Tensor, weight_M: Tensor, ends_E: Tensor, bank: ExpertBank, betas: tuple[float, float],
                scaling: float = 1.0, lora: Factors | None = None) -> Tensor:  # fmt: skip
    """Each row through its expert: [M, Z] in x's dtype. The way back expects `combine`'s gradients.

    `weight_M` fp32: the rows' router weights, for the way back. `betas`: SiTU's; `scaling`: LoRA's, for the back
    projection (the front's is in `lora.low1_MR`, `low3_MR`).
    """
    factors = () if lora is None else lora.aligned()
    if not x_MZ.shape[0]:  # another rank's gradients still pass here, so the result must hang on the inputs
        return x_MZ + (sum(f.sum() for f in factors[:2]) + weight_M.sum()).to(x_MZ.dtype)
    return _Experts.apply(x_MZ, weight_M, ends_E, bank, betas, scaling, *factors)  # pyright: ignore[reportReturnType]
