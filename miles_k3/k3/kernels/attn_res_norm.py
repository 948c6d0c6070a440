# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""Attention Residuals in one kernel: write the last sublayer's output, mix all rows, apply the norm that follows.

The plain twins are `ops.residual_bank.ResidualBank` (add, bank, mix) and `ops.norm.rms_norm`.

Shapes: N rows (bank, then the prefix), T tokens, H hidden.
"""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import check_whole, dependent, power_of_two, wait_for_inputs
from miles_k3.k3.ops.attn_res import KEY_EPS


class Write(IntEnum):
    """What happens to the sublayer's output before the mix."""

    NOTHING = 0
    ADD = 1  # prefix += output
    BANK = 2  # the prefix joins the bank, the output is the next one


def attn_res_norm(rows_NTH: Tensor, num_banked: int, query_H: Tensor, norm_weight_H: Tensor, eps: float,
                  output_TH: Tensor | None = None, write: Write = Write.NOTHING, tap_TH: Tensor | None = None
                  ) -> tuple[Tensor, int]:  # fmt: skip
    """(RMSNorm of the mix [T, H] in the rows' dtype, rows banked afterwards).

    Rows 0..num_banked-1 of `rows_NTH` are the bank, row num_banked is the prefix; `query_H` fp32 is norm weight times
    projection. `output_TH` is written as `write` says, in place in `rows_NTH`, before the rows are read. With an empty
    bank the mix is the prefix itself. `tap_TH` gets the mix before its norm; it may be columns of a wider buffer.
    """
    if tap_TH is not None and (tap_TH.stride(1) != 1 or tap_TH.dtype != rows_NTH.dtype):
        raise ValueError(f"taps of {tap_TH.dtype} and strides {tap_TH.stride()}; expected {rows_NTH.dtype}, stride 1")
    check_whole(row_TH=rows_NTH[0], **({} if output_TH is None else {"output_TH": output_TH}))
    if (output_TH is None) != (write is Write.NOTHING):
        raise ValueError(f"write is {write.name} and the output is {'missing' if output_TH is None else 'given'}")
    banked = num_banked + (write is Write.BANK)
    _, num_tokens, hidden = rows_NTH.shape
    if banked >= rows_NTH.shape[0]:
        raise ValueError(f"{banked} banked rows and a prefix don't fit into {rows_NTH.shape[0]} rows")
    out = rows_NTH.new_empty(num_tokens, hidden)
    if num_tokens:
        _attn_res_norm[(num_tokens,)](
            rows_NTH, output_TH if output_TH is not None else rows_NTH, query_H, norm_weight_H, out,
            out if tap_TH is None else tap_TH, rows_NTH.stride(0), 0 if tap_TH is None else tap_TH.stride(0), eps,
            KEY_EPS, HIDDEN=hidden, ROWS=banked + 1, ROW_BLOCK=power_of_two(banked + 1), WRITE=int(write),
            TAP=tap_TH is not None, STEP=power_of_two(hidden, at_most=256), BLOCK=power_of_two(hidden),
            num_warps=16 if hidden > 4096 else 4, **dependent(),
        )  # fmt: skip
    return out, banked


@triton.jit
def _attn_res_norm(row_ptr, output_ptr, query_ptr, norm_ptr, out_ptr, tap_ptr, row_stride, tap_stride, eps, key_eps,
                   HIDDEN: tl.constexpr, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr, WRITE: tl.constexpr,
                   TAP: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """One token. For the scores each warp reads its own row, so that sums hardly cross warps; for the mix all share."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = row_ptr.dtype.element_ty
    row_ptr += token * HIDDEN
    prefix_ptr = row_ptr + (ROWS - 1) * row_stride
    h = tl.arange(0, BLOCK)
    inside = h < HIDDEN
    if WRITE != 0:
        prefix = tl.load(output_ptr + token * HIDDEN + h, mask=inside, other=0.0)
        if WRITE == 1:
            prefix = tl.load(prefix_ptr + h, mask=inside, other=0.0).to(tl.float32) + prefix.to(tl.float32)
        tl.store(prefix_ptr + h, prefix.to(DTYPE), mask=inside)
        tl.debug_barrier()  # other threads read it below
    mix = tl.zeros([BLOCK], tl.float32)
    if ROWS == 1:
        mix = tl.load(prefix_ptr + h, mask=inside, other=0.0).to(tl.float32)
    else:
        rank = tl.arange(0, ROW_BLOCK)
        n, b = rank[:, None], tl.arange(0, STEP)[None, :]
        dots = tl.zeros([ROW_BLOCK, STEP], tl.float32)
        squares = tl.zeros([ROW_BLOCK, STEP], tl.float32)
        for first in tl.static_range(0, HIDDEN, STEP):
            ok = (n < ROWS) & (first + b < HIDDEN)
            rows = tl.load(row_ptr + n * row_stride + first + b, mask=ok, other=0.0).to(tl.float32)
            dots += rows * tl.load(query_ptr + first + b, mask=first + b < HIDDEN, other=0.0)
            squares += rows * rows
        score = tl.sum(dots, 1) * tl.rsqrt(tl.sum(squares, 1) / HIDDEN + key_eps)
        score = tl.where(rank < ROWS, score, -float("inf"))
        share = tl.exp(score - tl.max(score, 0))
        share = share / tl.sum(share, 0)
        for i in tl.static_range(ROWS):
            row = tl.load(row_ptr + i * row_stride + h, mask=inside, other=0.0).to(tl.float32)
            mix += row * tl.sum(tl.where(rank == i, share, 0.0), 0)
        mix = mix.to(DTYPE).to(tl.float32)
    if TAP:
        tl.store(tap_ptr + token * tap_stride + h, mix.to(DTYPE), mask=inside)
    scaled = (mix * tl.rsqrt(tl.sum(mix * mix, 0) / HIDDEN + eps)).to(DTYPE).to(tl.float32)
    weight = tl.load(norm_ptr + h, mask=inside, other=0.0).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + h, (scaled * weight).to(DTYPE), mask=inside)
