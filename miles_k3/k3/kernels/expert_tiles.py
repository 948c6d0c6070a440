# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""One tile of the routed experts: gate and up with SiTU, and down. `fused_experts` launches them.

Shapes: rows of one expert, I inner width, R rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from miles_k3.k3.kernels.expert_lora import add_front_lora, low_rank_rows
from miles_k3.k3.kernels.grouped_mxfp4 import multiply_packed
from miles_k3.k3.kernels.launch import wait_for_inputs
from miles_k3.k3.kernels.mxfp4_unpack import nibble_source


@triton.jit
def _tanh(x):
    """Relative error of a few 1e-7 for any x: near zero the sums of exponentials would cancel."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = tl.abs(x) * (1.0 + s * (-0.33333333 + s * (0.13333333 + s * (-0.05396825 + s * 0.02186949))))
    size = tl.where(tl.abs(x) < 0.125, near, far)
    return tl.where(x < 0, -size, size)


@triton.jit
def _store_situ(acc, act_ptr, row, rows, place, beta, linear_beta, INNER: tl.constexpr, OUT_BLOCK: tl.constexpr,
                ROW_BLOCK: tl.constexpr):  # fmt: skip
    """SiTU of a tile whose rows 16a..16a+7 are gates and 16a+8..16a+15 their ups, to the activation's `place`."""
    halves = acc.reshape(OUT_BLOCK // 16, 2, 8, ROW_BLOCK).permute(0, 2, 3, 1)
    gate, up = tl.split(halves)
    value = beta * _tanh(gate / beta) * tl.sigmoid(gate) * (linear_beta * _tanh(up / linear_beta))
    value = value.reshape(OUT_BLOCK // 2, ROW_BLOCK).to(act_ptr.dtype.element_ty)
    tl.store(
        act_ptr + row[None, :] * INNER + place[:, None], value, mask=(place < INNER)[:, None] & (row < rows)[None, :]
    )


@triton.jit
def _gate_up_tile(z_ptr, code_ptr, scale_ptr, act_ptr, order_ptr, rows, expert, low_ptr, b1s, b3s, num_tokens, beta,
                  linear_beta, INNER: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
                  RANK_BLOCK: tl.constexpr, TERMS: tl.constexpr, SPLITS: tl.constexpr, TOP_K: tl.constexpr,
                  OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
                  MORE_ROWS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    MORE: tl.constexpr = MORE_ROWS if MORE_ROWS else 16
    # In the matrix unit's layout a thread holds rows g and g + 8 of sixteen: gate and up of one output.
    i = tl.arange(0, OUT_BLOCK)
    first = tl.program_id(0) * (OUT_BLOCK // 2)
    place = first + tl.arange(0, OUT_BLOCK // 2)
    out = nibble_source(first + (i // 16) * 8 + i % 8)
    is_up = (i // 8) % 2
    row, more_row = tl.arange(0, ROW_BLOCK), ROW_BLOCK + tl.arange(0, MORE)
    token = tl.load(order_ptr + row, mask=row < rows, other=0) // TOP_K
    more_token = tl.load(order_ptr + more_row, mask=more_row < rows, other=0) // TOP_K
    acc, more = tl.zeros([OUT_BLOCK, ROW_BLOCK], tl.float32), tl.zeros([OUT_BLOCK, MORE], tl.float32)
    acc, more = multiply_packed(
        acc, more, code_ptr, scale_ptr, z_ptr, token, row < rows, more_token, more_row < rows, out + is_up * INNER,
        out < INNER, COLUMNS, OUT_BLOCK, COLUMN_BLOCK, ROW_BLOCK, MORE_ROWS, INNER % (OUT_BLOCK // 2) == 0, WIDE,
        ASSEMBLY,
    )  # fmt: skip
    split_stride = TERMS * 2 * num_tokens * RANK
    for s in tl.static_range(TERMS):
        low = low_ptr + s * 2 * num_tokens * RANK
        b1, b3 = b1s[s] + expert * (INNER * RANK), b3s[s] + expert * (INNER * RANK)
        acc = add_front_lora(
            acc, low, b1, b3, token, row < rows, num_tokens, split_stride, out, out < INNER, is_up, RANK, RANK_BLOCK,
            SPLITS,
        )  # fmt: skip
        if MORE_ROWS:
            more = add_front_lora(
                more, low, b1, b3, more_token, more_row < rows, num_tokens, split_stride, out, out < INNER, is_up,
                RANK, RANK_BLOCK, SPLITS,
            )  # fmt: skip
    _store_situ(acc, act_ptr, row, rows, place, beta, linear_beta, INNER, OUT_BLOCK, ROW_BLOCK)
    if MORE_ROWS:
        _store_situ(more, act_ptr, more_row, rows, place, beta, linear_beta, INNER, OUT_BLOCK, MORE)


@triton.jit
def gate_up_kernel(z_ptr, code_ptr, scale_ptr, act_ptr, order_ptr, expert_ptr, start_ptr, rows_ptr, low_ptr, b1s, b3s,
                   num_tokens, beta, linear_beta, INNER: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
                   RANK_BLOCK: tl.constexpr, TERMS: tl.constexpr, SPLITS: tl.constexpr, TOP_K: tl.constexpr,
                   OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
                   MORE_ROWS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr,
                   PDL: tl.constexpr = False):  # fmt: skip
    """SiTU of both projections, with LoRA. What an expert has beyond a whole tile gets a narrow one."""
    wait_for_inputs(PDL)
    tile = tl.program_id(1)
    rows = tl.load(rows_ptr + tile)
    if rows == 0:
        return
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    start = tl.load(start_ptr + tile).to(tl.int64)
    code_ptr += expert * (2 * INNER * COLUMNS)
    scale_ptr += expert * (2 * INNER * (COLUMNS // 8))
    act_ptr += start * INNER
    order_ptr += start
    if MORE_ROWS > 0 and rows <= MORE_ROWS:
        _gate_up_tile(
            z_ptr, code_ptr, scale_ptr, act_ptr, order_ptr, rows, expert, low_ptr, b1s, b3s, num_tokens, beta,
            linear_beta, INNER, COLUMNS, RANK, RANK_BLOCK, TERMS, SPLITS, TOP_K, OUT_BLOCK, COLUMN_BLOCK,
            MORE_ROWS if MORE_ROWS else ROW_BLOCK, 0, WIDE, ASSEMBLY,
        )  # fmt: skip
    else:
        _gate_up_tile(
            z_ptr, code_ptr, scale_ptr, act_ptr, order_ptr, rows, expert, low_ptr, b1s, b3s, num_tokens, beta,
            linear_beta, INNER, COLUMNS, RANK, RANK_BLOCK, TERMS, SPLITS, TOP_K, OUT_BLOCK, COLUMN_BLOCK, ROW_BLOCK,
            MORE_ROWS, WIDE, ASSEMBLY,
        )  # fmt: skip


@triton.jit
def _store_down(y_ptr, acc, order_ptr, row, rows, out, OUTPUTS: tl.constexpr):
    place = tl.load(order_ptr + row, mask=row < rows, other=0).to(tl.int64)
    ok = (out < OUTPUTS)[:, None] & (row < rows)[None, :]
    tl.store(y_ptr + place[None, :] * OUTPUTS + out[:, None], acc.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _down_tile(act_ptr, code_ptr, scale_ptr, y_ptr, order_ptr, rows, expert, low_ptr, a2s, num_rows,
               OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
               TERMS: tl.constexpr, SPLITS: tl.constexpr, OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
               ROW_BLOCK: tl.constexpr, MORE_ROWS: tl.constexpr, WIDE: tl.constexpr,
               ASSEMBLY: tl.constexpr):  # fmt: skip
    MORE: tl.constexpr = MORE_ROWS if MORE_ROWS else 16
    row, more_row = tl.arange(0, ROW_BLOCK), ROW_BLOCK + tl.arange(0, MORE)
    for s in tl.static_range(TERMS):
        if tl.program_id(0) // SPLITS == s:
            split = tl.program_id(0) % SPLITS
            a = a2s[s] + expert * (RANK * 4 * COLUMNS)
            low = low_ptr + (s * SPLITS + split).to(tl.int64) * num_rows * RANK
            low_rank_rows(act_ptr, a, low, order_ptr, row, rows, split, COLUMNS, RANK, RANK_BLOCK, SPLITS, ROW_BLOCK)
            if MORE_ROWS:
                low_rank_rows(
                    act_ptr, a, low, order_ptr, more_row, rows, split, COLUMNS, RANK, RANK_BLOCK, SPLITS, MORE
                )
    if tl.program_id(0) >= TERMS * SPLITS:
        out = (tl.program_id(0) - TERMS * SPLITS) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
        acc, more = tl.zeros([OUT_BLOCK, ROW_BLOCK], tl.float32), tl.zeros([OUT_BLOCK, MORE], tl.float32)
        acc, more = multiply_packed(
            acc, more, code_ptr, scale_ptr, act_ptr, row, row < rows, more_row, more_row < rows, out, out < OUTPUTS,
            COLUMNS, OUT_BLOCK, COLUMN_BLOCK, ROW_BLOCK, MORE_ROWS, OUTPUTS % OUT_BLOCK == 0, WIDE, ASSEMBLY,
        )  # fmt: skip
        _store_down(y_ptr, acc, order_ptr, row, rows, out, OUTPUTS)
        if MORE_ROWS:
            _store_down(y_ptr, more, order_ptr, more_row, rows, out, OUTPUTS)


@triton.jit
def down_kernel(act_ptr, code_ptr, scale_ptr, y_ptr, order_ptr, expert_ptr, start_ptr, rows_ptr, low_ptr, a2s,
                num_rows, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
                TERMS: tl.constexpr, SPLITS: tl.constexpr, OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
                ROW_BLOCK: tl.constexpr, MORE_ROWS: tl.constexpr, WIDE: tl.constexpr,
                ASSEMBLY: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """The first TERMS * SPLITS programs of a tile make A2's parts, the others the down product."""
    wait_for_inputs(PDL)
    tile = tl.program_id(1)
    rows = tl.load(rows_ptr + tile)
    if rows == 0:
        return
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    start = tl.load(start_ptr + tile).to(tl.int64)
    code_ptr += expert * (OUTPUTS * COLUMNS)
    scale_ptr += expert * (OUTPUTS * (COLUMNS // 8))
    act_ptr += start * (4 * COLUMNS)
    order_ptr += start
    if MORE_ROWS > 0 and rows <= MORE_ROWS:
        _down_tile(
            act_ptr, code_ptr, scale_ptr, y_ptr, order_ptr, rows, expert, low_ptr, a2s, num_rows, OUTPUTS, COLUMNS,
            RANK, RANK_BLOCK, TERMS, SPLITS, OUT_BLOCK, COLUMN_BLOCK, MORE_ROWS if MORE_ROWS else ROW_BLOCK, 0, WIDE,
            ASSEMBLY,
        )  # fmt: skip
    else:
        _down_tile(
            act_ptr, code_ptr, scale_ptr, y_ptr, order_ptr, rows, expert, low_ptr, a2s, num_rows, OUTPUTS, COLUMNS,
            RANK, RANK_BLOCK, TERMS, SPLITS, OUT_BLOCK, COLUMN_BLOCK, ROW_BLOCK, MORE_ROWS, WIDE, ASSEMBLY,
        )  # fmt: skip
