# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""Grouped product with packed experts: rows sorted by expert times their own expert's MXFP4 weight, and its transpose.

No expert is ever unpacked in memory: codes become bfloat16 in registers on their way to the tensor cores. The weight is
the left operand, so a tile's tokens are the narrow side and few rows cost little padding. The plain twin is
`mxfp4.dequantize` with `ops.latent_moe.grouped_linear`.

Shapes: M rows sorted by expert, E experts, O outputs, D inputs, C = D/4 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import (
    BLACKWELL,
    INTERPRETED,
    capability,
    check_whole,
    dividing_block,
    power_of_two,
    wait_for_products,
)
from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts, nibble_order, side_by_side, unpack
from miles_k3.k3.kernels.tiles import Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a product is cut (a weight's outputs and 16-bit columns, rows of tokens) and launched.

    `more_rows`: a second accumulator beside `rows`, for tiles that are no power of two. `registers`: the most a thread
    may take, so that two programs share a multiprocessor: one unpacks while the other multiplies.
    """

    outputs: int
    columns: int
    rows: int
    more_rows: int = 0
    warps: int = 4
    stages: int = 3
    registers: int | None = None

    @property
    def block(self) -> int:
        return self.rows + self.more_rows

    @property
    def launch(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


DECODE = Shape(outputs=64, columns=64, rows=8, warps=2)  # bound by memory and by unpacking; no warp group's instruction


def rows_of(load: float) -> tuple[int, int]:
    """(rows, more rows) of a tile: the fewest padded rows for `load` rows an expert, most of whose loads are alike."""
    if load <= 96:
        return power_of_two(int(1.2 * load) + 1, at_least=16, at_most=128), 0
    likely = load + load**0.5  # one standard deviation of a random choice
    padded = {more: -(-likely // (128 + more)) * (128 + more) for more in (0, 32)}
    return (128, 32) if padded[32] <= padded[0] else (128, 0)


def forward_shape(num_rows: int, num_experts: int) -> Shape:
    """By the average load: each expert's weights should be unpacked once, for all of its rows."""
    load = num_rows / num_experts
    if load <= 6.2:  # so far unpacking some experts twice costs less than a warp group's instruction and its wait
        return DECODE
    if load <= 10:
        return Shape(outputs=64, columns=64, rows=16)
    rows, more = rows_of(load)
    if rows <= 64:
        return Shape(outputs=128, columns=32, rows=rows, more_rows=more)
    # Products don't run beside the unpacking of the same program, so that two programs must fit.
    return Shape(outputs=128, columns=16, rows=rows, more_rows=more, warps=8, registers=128)


def backward_shape(num_rows: int, num_experts: int) -> Shape:
    """`columns` are four outputs each here, and `outputs` the length of a step of the sum."""
    rows, more = rows_of(num_rows / num_experts)
    # Triton 3.6 can't pipeline this loop on Blackwell's tensor cores: it stops in the compiler.
    stages = 1 if rows == 128 and capability() >= BLACKWELL else 3
    return Shape(outputs=64, columns=32, rows=rows, more_rows=more, warps=8, stages=stages, registers=128)


def grouped_mxfp4(x_MD: Tensor, weight: PackedExperts, ends_E: Tensor, shape: Shape | None = None) -> Tensor:
    """[M, D] -> [M, O]: rows of segment e (which ends at `ends_E[e]`) times weight e transposed, summed in fp32.

    x is bfloat16 or float32; its rows may be strided. Empty segments are fine; nothing waits for the device.
    """
    shape = shape or forward_shape(x_MD.shape[0], weight.num_experts)
    out = x_MD.new_empty(x_MD.shape[0], weight.out_width)
    if not x_MD.shape[0]:
        return out
    tiles = Tiles.of(ends_E, x_MD.shape[0], shape.block)
    columns = weight.codes_EOC.shape[2]
    block = dividing_block(columns, shape.columns)
    _forward[(triton.cdiv(weight.out_width, shape.outputs), tiles.expert_G.shape[0])](
        nibble_order(x_MD), weight.codes_EOC, weight.scale_EOG, out, tiles.expert_G, tiles.start_G, tiles.rows_G,
        weight.out_width, COLUMNS=columns, OUT_BLOCK=shape.outputs, COLUMN_BLOCK=block, ROW_BLOCK=shape.rows,
        MORE_ROWS=shape.more_rows, WIDE=weight.wide, ASSEMBLY=uses_assembly(x_MD), **shape.launch,
    )  # fmt: skip
    return out


def grouped_mxfp4_transposed(
    dy_MO: Tensor, weight: PackedExperts, ends_E: Tensor, shape: Shape | None = None
) -> Tensor:
    """[M, O] -> [M, D]: a gradient's rows times their own expert's weight, summed over O in fp32.

    Raises ValueError where rows have gaps between them.
    """
    check_whole(dy_MO=dy_MO)
    shape = shape or backward_shape(dy_MO.shape[0], weight.num_experts)
    out = dy_MO.new_empty(dy_MO.shape[0], weight.in_width)
    if not dy_MO.shape[0]:
        return out
    tiles = Tiles.of(ends_E, dy_MO.shape[0], shape.block)
    columns = weight.codes_EOC.shape[2]
    _backward[(triton.cdiv(columns, shape.columns), tiles.expert_G.shape[0])](
        dy_MO, weight.codes_EOC, weight.scale_EOG, out, tiles.expert_G, tiles.start_G, tiles.rows_G, weight.out_width,
        COLUMNS=columns, OUT_BLOCK=shape.outputs, COLUMN_BLOCK=shape.columns, ROW_BLOCK=shape.rows,
        MORE_ROWS=shape.more_rows, WIDE=weight.wide, ASSEMBLY=uses_assembly(dy_MO),
        **shape.launch,
    )  # fmt: skip
    return out


def uses_assembly(x: Tensor) -> bool:
    """Whether codes are unpacked two at a time; fp32 products and Triton's interpreter take the plain way."""
    return x.dtype == torch.bfloat16 and not INTERPRETED


class _GroupedMxfp4(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MD: Tensor, weight: PackedExperts, ends_E: Tensor):
        ctx.weight = weight
        ctx.save_for_backward(ends_E)
        return grouped_mxfp4(x_MD, weight, ends_E)

    @staticmethod
    def backward(ctx, grad_MO: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (ends_E,) = ctx.saved_tensors
        return grouped_mxfp4_transposed(grad_MO.contiguous(), ctx.weight, ends_E), None, None


def grouped_mxfp4_linear(x_MD: Tensor, weight: PackedExperts, ends_E: Tensor) -> Tensor:
    """`grouped_mxfp4` with a gradient for x; the frozen weight needs none."""
    return _GroupedMxfp4.apply(x_MD, weight, ends_E)  # pyright: ignore[reportReturnType]


@triton.jit
def multiply_packed(acc, more, code_ptr, scale_ptr, x_ptr, x_row, row_ok, more_row, more_ok, out_row, out_ok,
                    COLUMNS: tl.constexpr, OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
                    ROW_BLOCK: tl.constexpr, MORE_ROWS: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
                    ASSEMBLY: tl.constexpr):  # fmt: skip
    """acc [OUT_BLOCK, ROW_BLOCK] (and `more`, where MORE_ROWS) += weight rows `out_row` times x rows `x_row`.

    `code_ptr`, `scale_ptr`: of the tile's expert; x: [rows, 4 * COLUMNS] in nibble order. WHOLE: every output exists.
    """
    column, group, k = tl.arange(0, COLUMN_BLOCK), tl.arange(0, COLUMN_BLOCK // 8), tl.arange(0, 4 * COLUMN_BLOCK)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    codes_at = code_ptr + out_row[:, None] * COLUMNS + column[None, :]
    scale_at = scale_ptr + out_row[:, None] * (COLUMNS // 8) + group[None, :]
    row_at = x_ptr + x_row[None, :] * (4 * COLUMNS)
    more_at = x_ptr + more_row[None, :] * (4 * COLUMNS) + k[:, None]
    nibble = (column // 16) * 64 + column % 16
    for first in range(0, COLUMNS, COLUMN_BLOCK):
        if WHOLE:
            codes = tl.load(codes_at + first)
            scale = tl.load(scale_at + first // 8)
        else:
            codes = tl.load(codes_at + first, mask=out_ok[:, None], other=0)
            scale = tl.load(scale_at + first // 8, mask=out_ok[:, None], other=0)
        w0, w1, w2, w3 = unpack(codes, scale, OUT_BLOCK, COLUMN_BLOCK, DTYPE, WIDE, ASSEMBLY)
        if ROW_BLOCK < 16:  # too narrow for a warp group's instruction; a warp's own wants the nibbles one by one
            x_at = row_at + (4 * first + nibble)[:, None]
            acc = tl.dot(w0, tl.load(x_at, mask=row_ok[None, :], other=0.0), acc, input_precision="ieee")
            acc = tl.dot(w1, tl.load(x_at + 16, mask=row_ok[None, :], other=0.0), acc, input_precision="ieee")
            acc = tl.dot(w2, tl.load(x_at + 32, mask=row_ok[None, :], other=0.0), acc, input_precision="ieee")
            acc = tl.dot(w3, tl.load(x_at + 48, mask=row_ok[None, :], other=0.0), acc, input_precision="ieee")
        else:
            weight = side_by_side(w0, w1, w2, w3, OUT_BLOCK, COLUMN_BLOCK)
            x = tl.load(row_at + (4 * first + k)[:, None], mask=row_ok[None, :], other=0.0)
            acc = tl.dot(weight, x, acc, input_precision="ieee")
            if MORE_ROWS:
                x = tl.load(more_at + 4 * first, mask=more_ok[None, :], other=0.0)
                more = tl.dot(weight, x, more, input_precision="ieee")
            wait_for_products(column, ASSEMBLY)
    return acc, more


@triton.jit
def _forward_tile(x_ptr, code_ptr, scale_ptr, out_ptr, rows, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
                  OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
                  MORE_ROWS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    MORE: tl.constexpr = MORE_ROWS if MORE_ROWS else 16
    WHOLE: tl.constexpr = OUTPUTS % OUT_BLOCK == 0
    out = tl.program_id(0) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    row, more_row = tl.arange(0, ROW_BLOCK), ROW_BLOCK + tl.arange(0, MORE)
    acc, more = tl.zeros([OUT_BLOCK, ROW_BLOCK], tl.float32), tl.zeros([OUT_BLOCK, MORE], tl.float32)
    acc, more = multiply_packed(
        acc, more, code_ptr, scale_ptr, x_ptr, row, row < rows, more_row, more_row < rows, out, out < OUTPUTS, COLUMNS,
        OUT_BLOCK, COLUMN_BLOCK, ROW_BLOCK, MORE_ROWS, WHOLE, WIDE, ASSEMBLY,
    )  # fmt: skip
    ok = (out < OUTPUTS)[:, None]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + row[None, :] * OUTPUTS + out[:, None], acc.to(DTYPE), mask=ok & (row < rows)[None, :])
    if MORE_ROWS:
        at = out_ptr + more_row[None, :] * OUTPUTS + out[:, None]
        tl.store(at, more.to(DTYPE), mask=ok & (more_row < rows)[None, :])


@triton.jit
def _forward(x_ptr, code_ptr, scale_ptr, out_ptr, expert_ptr, start_ptr, rows_ptr, OUTPUTS: tl.constexpr,
             COLUMNS: tl.constexpr, OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
             MORE_ROWS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    tile = tl.program_id(1)
    rows = tl.load(rows_ptr + tile)
    if rows == 0:
        return
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    start = tl.load(start_ptr + tile).to(tl.int64)
    x_ptr += start * (4 * COLUMNS)
    out_ptr += start * OUTPUTS
    code_ptr += expert * OUTPUTS * COLUMNS
    scale_ptr += expert * OUTPUTS * (COLUMNS // 8)
    if MORE_ROWS > 0 and rows <= MORE_ROWS:  # what an expert has beyond a whole tile
        _forward_tile(
            x_ptr, code_ptr, scale_ptr, out_ptr, rows, OUTPUTS, COLUMNS, OUT_BLOCK, COLUMN_BLOCK,
            MORE_ROWS if MORE_ROWS else ROW_BLOCK, 0, WIDE, ASSEMBLY,
        )  # fmt: skip
    else:
        _forward_tile(
            x_ptr, code_ptr, scale_ptr, out_ptr, rows, OUTPUTS, COLUMNS, OUT_BLOCK, COLUMN_BLOCK, ROW_BLOCK, MORE_ROWS,
            WIDE, ASSEMBLY,
        )  # fmt: skip


@triton.jit
def _store_inputs(out_ptr, acc, row, rows, COLUMNS: tl.constexpr, COLUMN_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """A tile [4 * COLUMN_BLOCK, ROW_BLOCK] in nibble order to its rows, in the natural order."""
    acc = acc.to(out_ptr.dtype.element_ty).reshape(COLUMN_BLOCK // 16, 4, 16, ROW_BLOCK)
    acc = acc.permute(0, 2, 1, 3).reshape(4 * COLUMN_BLOCK, ROW_BLOCK)
    place = tl.program_id(0) * (4 * COLUMN_BLOCK) + tl.arange(0, 4 * COLUMN_BLOCK)
    at = out_ptr + row[None, :] * (4 * COLUMNS) + place[:, None]
    tl.store(at, acc, mask=(place < 4 * COLUMNS)[:, None] & (row < rows)[None, :])


@triton.jit
def _backward_tile(dy_ptr, code_ptr, scale_ptr, out_ptr, rows, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
                   OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
                   MORE_ROWS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    MORE: tl.constexpr = MORE_ROWS if MORE_ROWS else 16
    column = tl.program_id(0) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    group = tl.program_id(0) * (COLUMN_BLOCK // 8) + tl.arange(0, COLUMN_BLOCK // 8)
    row, more_row = tl.arange(0, ROW_BLOCK), ROW_BLOCK + tl.arange(0, MORE)
    step = tl.arange(0, OUT_BLOCK)
    codes_at = code_ptr + step[:, None] * COLUMNS + column[None, :]
    scale_at = scale_ptr + step[:, None] * (COLUMNS // 8) + group[None, :]
    dy_at = dy_ptr + row[None, :] * OUTPUTS + step[:, None]
    more_at = dy_ptr + more_row[None, :] * OUTPUTS + step[:, None]
    DTYPE: tl.constexpr = dy_ptr.dtype.element_ty
    acc = tl.zeros([4 * COLUMN_BLOCK, ROW_BLOCK], tl.float32)
    more = tl.zeros([4 * COLUMN_BLOCK, MORE], tl.float32)
    for first in range(0, OUTPUTS, OUT_BLOCK):
        inside = (first + step < OUTPUTS)[:, None]
        codes = tl.load(codes_at, mask=inside & (column < COLUMNS)[None, :], other=0)
        scale = tl.load(scale_at, mask=inside & (group < COLUMNS // 8)[None, :], other=0)
        w0, w1, w2, w3 = unpack(codes, scale, OUT_BLOCK, COLUMN_BLOCK, DTYPE, WIDE, ASSEMBLY)
        weight = tl.trans(side_by_side(w0, w1, w2, w3, OUT_BLOCK, COLUMN_BLOCK))
        dy = tl.load(dy_at, mask=inside & (row < rows)[None, :], other=0.0)
        acc = tl.dot(weight, dy, acc, input_precision="ieee")
        if MORE_ROWS:
            dy = tl.load(more_at, mask=inside & (more_row < rows)[None, :], other=0.0)
            more = tl.dot(weight, dy, more, input_precision="ieee")
            more_at += OUT_BLOCK
        wait_for_products(column, ASSEMBLY)
        codes_at += OUT_BLOCK * COLUMNS
        scale_at += OUT_BLOCK * (COLUMNS // 8)
        dy_at += OUT_BLOCK
    _store_inputs(out_ptr, acc, row, rows, COLUMNS, COLUMN_BLOCK, ROW_BLOCK)
    if MORE_ROWS:
        _store_inputs(out_ptr, more, more_row, rows, COLUMNS, COLUMN_BLOCK, MORE)


@triton.jit
def _backward(dy_ptr, code_ptr, scale_ptr, out_ptr, expert_ptr, start_ptr, rows_ptr, OUTPUTS: tl.constexpr,
              COLUMNS: tl.constexpr, OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
              MORE_ROWS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    tile = tl.program_id(1)
    rows = tl.load(rows_ptr + tile)
    if rows == 0:
        return
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    start = tl.load(start_ptr + tile).to(tl.int64)
    dy_ptr += start * OUTPUTS
    out_ptr += start * (4 * COLUMNS)
    code_ptr += expert * OUTPUTS * COLUMNS
    scale_ptr += expert * OUTPUTS * (COLUMNS // 8)
    if MORE_ROWS > 0 and rows <= MORE_ROWS:
        _backward_tile(
            dy_ptr, code_ptr, scale_ptr, out_ptr, rows, OUTPUTS, COLUMNS, OUT_BLOCK, COLUMN_BLOCK,
            MORE_ROWS if MORE_ROWS else ROW_BLOCK, 0, WIDE, ASSEMBLY,
        )  # fmt: skip
    else:
        _backward_tile(
            dy_ptr, code_ptr, scale_ptr, out_ptr, rows, OUTPUTS, COLUMNS, OUT_BLOCK, COLUMN_BLOCK, ROW_BLOCK,
            MORE_ROWS, WIDE, ASSEMBLY,
        )  # fmt: skip
