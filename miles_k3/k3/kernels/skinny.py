# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""Several products of the same few rows in one launch: what a decode step reads its dense weights with.

With up to 16 rows a product is one pass over its weight. One launch for all weights that read the same input fills the
GPU even where a single one (a router, LoRA's A) is much too small to: small weights come first and hide behind the
large. The plain twin is `x @ weight.t()`.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import dependent, dividing_block, power_of_two, wait_for_inputs

MOST_ROWS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """`out_TO` = x W^T, or += with `add`, rounded once to its dtype. `out` may be strided between rows."""

    weight_OI: Tensor
    out_TO: Tensor
    add: bool = False


def products_(x_TI: Tensor, products: Sequence[Product]) -> None:
    """Fill each product's output. Sums are fp32. Up to `MOST_ROWS` rows take one launch, more one library call each.

    Raises ValueError on a weight of another width, or one whose rows are not contiguous.
    """
    for p in products:
        if p.weight_OI.shape[1] != x_TI.shape[1] or p.weight_OI.stride(1) != 1 or x_TI.stride(1) != 1:
            raise ValueError(
                f"x {tuple(x_TI.shape)} and a weight {tuple(p.weight_OI.shape)} with strides {p.weight_OI.stride()}: "
                "expected rows of one width, contiguous"
            )
    if not x_TI.shape[0] or not products:
        return
    if x_TI.shape[0] > MOST_ROWS:
        for p in products:
            _library(x_TI, p)
        return
    ordered = sorted(products, key=lambda p: p.weight_OI.shape[0])
    widths = tuple(p.weight_OI.shape[0] for p in ordered)
    cut = _Cut.of(*x_TI.shape)
    ends = tuple(accumulate(triton.cdiv(width, cut.outputs) for width in widths))
    _skinny[(ends[-1],)](
        x_TI, tuple(p.weight_OI for p in ordered), tuple(p.out_TO for p in ordered),
        tuple(p.weight_OI.stride(0) for p in ordered), tuple(p.out_TO.stride(0) for p in ordered), x_TI.stride(0),
        x_TI.shape[0], ends, widths, ADDS=tuple(p.add for p in ordered), COUNT=len(ordered), INPUTS=x_TI.shape[1],
         OUT_BLOCK=cut.outputs, INPUT_BLOCK=cut.inputs, ROW_BLOCK=cut.rows,
        num_warps=cut.warps, num_stages=4, **dependent(),
    )  # fmt: skip


def _library(x_TI: Tensor, p: Product) -> None:
    weight_t = p.weight_OI.t()
    if p.add:
        p.out_TO.addmm_(x_TI, weight_t)
    elif p.out_TO.dtype == x_TI.dtype:
        torch.mm(x_TI, weight_t, out=p.out_TO)
    elif x_TI.is_cuda:
        torch.mm(x_TI, weight_t, out_dtype=p.out_TO.dtype, out=p.out_TO)
    else:
        torch.mm(x_TI.to(p.out_TO.dtype), weight_t.to(p.out_TO.dtype), out=p.out_TO)


@dataclass(frozen=True, slots=True)
class _Cut:
    outputs: int
    inputs: int
    rows: int
    warps: int

    @classmethod
    def of(cls, num_rows: int, width: int) -> _Cut:
        """Measured on an H200 at K3's widths: a row at a time is a vector product, more go to the tensor cores."""
        if num_rows == 1:
            return cls(1, 1024, 1, 4) if width % 1024 == 0 else cls(8, dividing_block(width, 512), 1, 4)
        if width <= 256:
            return cls(64, dividing_block(width, 128), power_of_two(num_rows, at_least=8), 4)
        return cls(32, dividing_block(width, 128), power_of_two(num_rows, at_least=8), 2)


@triton.jit
def _skinny(x_ptr, weights, outs, weight_strides, out_strides, x_stride, num_rows, ends, widths, ADDS: tl.constexpr,
            COUNT: tl.constexpr, INPUTS: tl.constexpr, OUT_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr,
            ROW_BLOCK: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """A program makes OUT_BLOCK outputs of one of the products, for all rows. `ends`: programs up to each product's."""
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    for n in tl.static_range(COUNT):
        first = ends[n - 1] if n > 0 else 0
        if (program >= first) & (program < ends[n]):
            out = (program - first) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
            if ROW_BLOCK == 1:
                _row(x_ptr, weights[n], outs[n], weight_strides[n], out, widths[n], ADDS[n], INPUTS, OUT_BLOCK,
                     INPUT_BLOCK)  # fmt: skip
            else:
                _rows(x_ptr, weights[n], outs[n], weight_strides[n], out_strides[n], x_stride, num_rows, out,
                      widths[n], ADDS[n], INPUTS, OUT_BLOCK, INPUT_BLOCK, ROW_BLOCK)  # fmt: skip


@triton.jit
def _row(x_ptr, weight_ptr, out_ptr, weight_stride, out, width, ADD: tl.constexpr, INPUTS: tl.constexpr,
         OUT_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr):  # fmt: skip
    i, ok = tl.arange(0, INPUT_BLOCK), out < width
    acc = tl.zeros([OUT_BLOCK, INPUT_BLOCK], tl.float32)
    weight_ptr += out.to(tl.int64)[:, None] * weight_stride + i[None, :]
    for step in range(0, INPUTS, INPUT_BLOCK):
        inside = step + i < INPUTS
        weight = tl.load(weight_ptr + step, mask=ok[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_ptr + step + i, mask=inside, other=0.0)
        acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if ADD:
        total += tl.load(out_ptr + out, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + out, total.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _rows(x_ptr, weight_ptr, out_ptr, weight_stride, out_stride, x_stride, num_rows, out, width,
          ADD: tl.constexpr, INPUTS: tl.constexpr, OUT_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr,
          ROW_BLOCK: tl.constexpr):  # fmt: skip
    i, row = tl.arange(0, INPUT_BLOCK), tl.arange(0, ROW_BLOCK)
    ok, real = out < width, row < num_rows
    acc = tl.zeros([OUT_BLOCK, ROW_BLOCK], tl.float32)
    weight_ptr += out.to(tl.int64)[:, None] * weight_stride + i[None, :]
    x_ptr += row[None, :] * x_stride + i[:, None]
    for step in range(0, INPUTS, INPUT_BLOCK):
        inside = step + i < INPUTS
        weight = tl.load(weight_ptr + step, mask=ok[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_ptr + step, mask=real[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    out_at = out_ptr + row[None, :] * out_stride + out[:, None]
    mask = ok[:, None] & real[None, :]
    if ADD:
        acc += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
