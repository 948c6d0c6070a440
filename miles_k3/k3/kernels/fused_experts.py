# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""The routed experts of an inference step in three launches beside the routing: gate/up with SiTU, down, combine.

LoRA is in them: B1(A1 z) and B3(A3 z) enter before SiTU, A2 reads the activation beside the down product, and B2,
which all experts share, comes once a token after the weighted sum (spec 5.4). The plain twin is
`ops.latent_moe.latent_experts`.

Shapes: T tokens, K chosen experts, M = T * K rows sorted by expert, E experts, Z latent, I inner width, R rank,
S adapters of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.grouped_mxfp4 import Shape, forward_shape, multiply_packed, uses_assembly
from miles_k3.k3.kernels.launch import dividing_block, power_of_two
from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts, nibble_order, nibble_source
from miles_k3.k3.kernels.tiles import SMALL_ROWS, Routed, dispatch
from miles_k3.k3.ops.lora import ExpertLoraTerm


def fused_experts(
    z_TZ: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    *,
    situ_beta: float,
    situ_linear_beta: float,
    lora: Sequence[ExpertLoraTerm] = (),
    shape: Shape | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts, [T, Z] in z's dtype (bfloat16 or float32).

    w13 [E, 2I, Z] holds w1 (gate) rows then w3 (up) rows; w2 [E, Z, I]; Z and I are multiples of 64. All terms
    have one rank. Nothing waits for the device and no size depends on the routing, so that
    a CUDA graph may hold it.
    """
    top_k, out = experts_TK.shape[1], z_TZ.new_empty(z_TZ.shape[0], w2.out_width)
    if not z_TZ.shape[0]:
        return out
    shape = shape or forward_shape(experts_TK.numel(), w13.num_experts)
    routed = dispatch(experts_TK, w13.num_experts, shape.block)
    low_PS2TR, scale_ST = _low(z_TZ, lora)
    front = replace(shape, registers=128) if shape.rows == 128 else shape  # what follows the sum takes many
    act_MI = _gate_up(nibble_order(z_TZ), routed, w13, front, (situ_beta, situ_linear_beta), low_PS2TR, lora)
    y_MZ, low_SPMR = _down(act_MI, routed, w2, shape, lora)
    block = power_of_two(w2.out_width, at_most=1024)
    _combine[(triton.cdiv(w2.out_width, block), z_TZ.shape[0])](
        y_MZ, low_SPMR, tuple(t.b2 for t in lora), scale_ST, weights_TK, out, w2.out_width,
        experts_TK.numel(), RANK=low_SPMR.shape[-1], RANK_BLOCK=power_of_two(low_SPMR.shape[-1]),
        SPLITS=low_SPMR.shape[1], TOP_K_BLOCK=power_of_two(top_k), TERMS=len(lora), TOP_K=top_k,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _low(z_TZ: Tensor, lora: Sequence[ExpertLoraTerm]) -> tuple[Tensor, Tensor]:
    """(the splits' parts of what the shared A1 and A3 make of each token, scaled [P, S, 2, T, R]; scaling [S, T]).

    Both fp32, and 0 for tokens that an adapter doesn't speak for.
    """
    num_tokens, width = z_TZ.shape
    rank, splits = (lora[0].a1.shape[0] if lora else 1), (8 if num_tokens <= 256 else 1)
    low = torch.empty(splits, len(lora), 2, num_tokens, rank, device=z_TZ.device)
    scale = torch.empty(len(lora), num_tokens, device=z_TZ.device)
    if lora:
        block = power_of_two(num_tokens, at_least=16, at_most=64)
        _low_kernel[(2 * len(lora) * splits, triton.cdiv(num_tokens, block))](
            z_TZ, tuple(t.a1 for t in lora), tuple(t.a3 for t in lora),
            tuple(z_TZ if t.rows_T1 is None else t.rows_T1 for t in lora), tuple(t.scaling for t in lora), low, scale,
            num_tokens, MASKED=sum((t.rows_T1 is not None) << i for i, t in enumerate(lora)), WIDTH=width, RANK=rank,
            RANK_BLOCK=power_of_two(rank, at_least=16), TERMS=len(lora), SPLITS=splits, TOKEN_BLOCK=block,
            INPUT_BLOCK=128, num_warps=4, num_stages=3,
        )  # fmt: skip
    return low, scale


def _gate_up(z_TZ: Tensor, routed: Routed, w13: PackedExperts, shape: Shape, betas: tuple[float, float],
             low_PS2TR: Tensor, lora: Sequence[ExpertLoraTerm]) -> Tensor:  # fmt: skip
    """SiTU of both projections, rows sorted by expert, in nibble order for the next product: [M, I]."""
    inner, columns = w13.out_width // 2, z_TZ.shape[1] // 4
    act = z_TZ.new_empty(routed.order_M.shape[0], inner)
    tiles = routed.tiles
    _gate_up_kernel[(triton.cdiv(2 * inner, shape.outputs), tiles.expert_G.shape[0])](
        z_TZ, w13.codes_EOC, w13.scale_EOG, act, routed.order_M, tiles.expert_G, tiles.start_G, tiles.rows_G,
        low_PS2TR, tuple(t.b1 for t in lora), tuple(t.b3 for t in lora), z_TZ.shape[0], *betas,
        INNER=inner, COLUMNS=columns, RANK=low_PS2TR.shape[-1],
        RANK_BLOCK=power_of_two(low_PS2TR.shape[-1], at_least=16),
        TERMS=len(lora), SPLITS=low_PS2TR.shape[0], TOP_K=routed.top_k, OUT_BLOCK=shape.outputs,
        COLUMN_BLOCK=dividing_block(columns, shape.columns),
        ROW_BLOCK=shape.rows, MORE_ROWS=shape.more_rows, WIDE=w13.wide, ASSEMBLY=uses_assembly(z_TZ),
        **shape.launch,
    )  # fmt: skip
    return act


def _down(act_MI: Tensor, routed: Routed, w2: PackedExperts, shape: Shape, lora: Sequence[ExpertLoraTerm]
          ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(down product [M, Z], parts of A2 of the activation fp32 [S, splits, M, R]), rows as in [T * K]."""
    num_rows, columns = act_MI.shape[0], act_MI.shape[1] // 4
    rank = lora[0].a2.shape[1] if lora else 1
    # Few rows: A2 must not outlast the down product. Many: it hides behind it, and its parts would cost memory.
    splits = 8 if num_rows <= SMALL_ROWS else 1
    y = act_MI.new_empty(num_rows, w2.out_width)
    low = torch.empty(len(lora), splits, num_rows, rank, device=y.device)
    tiles, blocks = routed.tiles, triton.cdiv(w2.out_width, shape.outputs)
    _down_kernel[(blocks + len(lora) * splits, tiles.expert_G.shape[0])](
        act_MI, w2.codes_EOC, w2.scale_EOG, y, routed.order_M, tiles.expert_G, tiles.start_G, tiles.rows_G,
        low, tuple(t.a2 for t in lora), num_rows, OUTPUTS=w2.out_width, COLUMNS=columns, RANK=rank,
        RANK_BLOCK=power_of_two(rank, at_least=16), TERMS=len(lora), SPLITS=splits, OUT_BLOCK=shape.outputs,
        COLUMN_BLOCK=dividing_block(columns, shape.columns), ROW_BLOCK=shape.rows, MORE_ROWS=shape.more_rows,
        WIDE=w2.wide, ASSEMBLY=uses_assembly(act_MI), **shape.launch,
    )  # fmt: skip
    return y, low


@triton.jit
def _low_kernel(z_ptr, a1s, a3s, masks, scalings, low_ptr, scale_ptr, num_tokens, MASKED: tl.constexpr,
                WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, TERMS: tl.constexpr,
                SPLITS: tl.constexpr, TOKEN_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr):  # fmt: skip
    """One split of one adapter's A1 or A3 for a block of tokens. MASKED: a bit for each adapter that has a mask."""
    which = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    token = tl.program_id(1) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    r, i = tl.arange(0, RANK_BLOCK), tl.arange(0, INPUT_BLOCK)
    real = token < num_tokens
    for s in tl.static_range(TERMS):
        scale = tl.full([TOKEN_BLOCK], 1.0, tl.float32) * scalings[s]
        if (MASKED >> s) & 1:
            scale *= tl.load(masks[s] + token, mask=real, other=0).to(tl.float32)
        for half in tl.static_range(2):
            if which == 2 * s + half:
                factor_ptr = a1s[s] if half == 0 else a3s[s]
                acc = tl.zeros([TOKEN_BLOCK, RANK_BLOCK], tl.float32)
                for step in range(0, WIDTH, SPLITS * INPUT_BLOCK):
                    at = step + split * INPUT_BLOCK + i
                    z_at = z_ptr + token.to(tl.int64)[:, None] * WIDTH + at[None, :]
                    z = tl.load(z_at, mask=real[:, None] & (at < WIDTH)[None, :], other=0.0)
                    a_at = factor_ptr + r[None, :] * WIDTH + at[:, None]
                    a = tl.load(a_at, mask=(r < RANK)[None, :] & (at < WIDTH)[:, None], other=0.0)
                    acc = tl.dot(z, a, acc, input_precision="ieee")
                low_at = low_ptr + ((split * TERMS * 2 + which) * num_tokens + token)[:, None] * RANK + r[None, :]
                tl.store(low_at, acc * scale[:, None], mask=real[:, None] & (r < RANK)[None, :])
                if split == 0:
                    tl.store(scale_ptr + s * num_tokens + token, scale, mask=real)


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
def _add_front_lora(acc, low_ptr, b1, b3, token, token_ok, num_tokens, split_stride, out, out_ok, is_up,
                    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """acc += B1 low1 in the gates' rows and B3 low3 in the ups'."""
    r = tl.arange(0, RANK_BLOCK)
    b_at = out[:, None] * RANK + r[None, :]
    ok = (out_ok[:, None]) & (r < RANK)[None, :]
    low_at = low_ptr + token[None, :] * RANK + r[:, None]
    low_ok = token_ok[None, :] & (r < RANK)[:, None]
    low1 = tl.load(low_at, mask=low_ok, other=0.0)
    low3 = tl.load(low_at + num_tokens * RANK, mask=low_ok, other=0.0)
    for split in tl.static_range(1, SPLITS):
        part_at = low_at + split * split_stride
        low1 += tl.load(part_at, mask=low_ok, other=0.0)
        low3 += tl.load(part_at + num_tokens * RANK, mask=low_ok, other=0.0)
    gate = tl.load(b1 + b_at, mask=ok & (is_up == 0)[:, None], other=0.0)
    acc = tl.dot(gate, low1.to(gate.dtype), acc, input_precision="ieee")
    up = tl.load(b3 + b_at, mask=ok & (is_up == 1)[:, None], other=0.0)
    return tl.dot(up, low3.to(up.dtype), acc, input_precision="ieee")


@triton.jit
def _gate_up_kernel(z_ptr, code_ptr, scale_ptr, act_ptr, order_ptr, expert_ptr, start_ptr, rows_ptr, low_ptr, b1s, b3s,
                    num_tokens, beta, linear_beta, INNER: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
                    RANK_BLOCK: tl.constexpr, TERMS: tl.constexpr, SPLITS: tl.constexpr, TOP_K: tl.constexpr,
                    OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
                    MORE_ROWS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    tile = tl.program_id(1)
    rows = tl.load(rows_ptr + tile)
    if rows == 0:
        return
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    start = tl.load(start_ptr + tile).to(tl.int64)
    MORE: tl.constexpr = MORE_ROWS if MORE_ROWS else 16
    # In the matrix unit's layout a thread holds rows g and g + 8 of sixteen: gate and up of one output.
    i = tl.arange(0, OUT_BLOCK)
    first = tl.program_id(0) * (OUT_BLOCK // 2)
    place = first + tl.arange(0, OUT_BLOCK // 2)
    out = nibble_source(first + (i // 16) * 8 + i % 8)
    is_up = (i // 8) % 2
    row = tl.arange(0, ROW_BLOCK)
    more_row = ROW_BLOCK + tl.arange(0, MORE)
    token = tl.load(order_ptr + start + row, mask=row < rows, other=0) // TOP_K
    more_token = tl.load(order_ptr + start + more_row, mask=more_row < rows, other=0) // TOP_K
    acc = tl.zeros([OUT_BLOCK, ROW_BLOCK], tl.float32)
    more = tl.zeros([OUT_BLOCK, MORE], tl.float32)
    acc, more = multiply_packed(
        acc, more, code_ptr + expert * (2 * INNER * COLUMNS), scale_ptr + expert * (2 * INNER * (COLUMNS // 8)), z_ptr,
        token, row < rows, more_token, more_row < rows, out + is_up * INNER, out < INNER, COLUMNS, OUT_BLOCK,
        COLUMN_BLOCK, ROW_BLOCK, MORE_ROWS, INNER % (OUT_BLOCK // 2) == 0, WIDE, ASSEMBLY,
    )  # fmt: skip
    split_stride = TERMS * 2 * num_tokens * RANK
    for s in tl.static_range(TERMS):
        low = low_ptr + s * 2 * num_tokens * RANK
        b1, b3 = b1s[s] + expert * (INNER * RANK), b3s[s] + expert * (INNER * RANK)
        acc = _add_front_lora(
            acc,
            low,
            b1,
            b3,
            token,
            row < rows,
            num_tokens,
            split_stride,
            out,
            out < INNER,
            is_up,
            RANK,
            RANK_BLOCK,
            SPLITS,
        )
        if MORE_ROWS:
            more = _add_front_lora(
                more,
                low,
                b1,
                b3,
                more_token,
                more_row < rows,
                num_tokens,
                split_stride,
                out,
                out < INNER,
                is_up,
                RANK,
                RANK_BLOCK,
                SPLITS,
            )
    act_ptr += start * INNER
    _store_situ(acc, act_ptr, row, rows, place, beta, linear_beta, INNER, OUT_BLOCK, ROW_BLOCK)
    if MORE_ROWS:
        _store_situ(more, act_ptr, more_row, rows, place, beta, linear_beta, INNER, OUT_BLOCK, MORE)


@triton.jit
def _low_rank_rows(act_ptr, a, low_ptr, order_ptr, row, rows, split, COLUMNS: tl.constexpr, RANK: tl.constexpr,
                   RANK_BLOCK: tl.constexpr, SPLITS: tl.constexpr, ROW_BLOCK: tl.constexpr):  # fmt: skip
    """low [rows, R]: A2 of an expert times its rows of the activation, over every SPLITS-th 64 inputs."""
    r, k = tl.arange(0, RANK_BLOCK), tl.arange(0, 64)
    acc = tl.zeros([RANK_BLOCK, ROW_BLOCK], tl.float32)
    for step in range(0, 4 * COLUMNS, SPLITS * 64):
        at = step + split * 64 + k
        inside = at < 4 * COLUMNS
        factor_at = a + r[:, None] * (4 * COLUMNS) + at[None, :]
        factor = tl.load(factor_at, mask=(r < RANK)[:, None] & inside[None, :], other=0.0)
        factor = factor.reshape(RANK_BLOCK, 16, 4).permute(0, 2, 1).reshape(RANK_BLOCK, 64)  # into nibble order
        x_at = act_ptr + row[None, :] * (4 * COLUMNS) + at[:, None]
        x = tl.load(x_at, mask=inside[:, None] & (row < rows)[None, :], other=0.0)
        acc = tl.dot(factor, x, acc, input_precision="ieee")
    place = tl.load(order_ptr + row, mask=row < rows, other=0)
    at = low_ptr + place[None, :] * RANK + r[:, None]
    tl.store(at, acc, mask=(r < RANK)[:, None] & (row < rows)[None, :])


@triton.jit
def _down_kernel(act_ptr, code_ptr, scale_ptr, y_ptr, order_ptr, expert_ptr, start_ptr, rows_ptr, low_ptr, a2s,
                 num_rows, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
                 TERMS: tl.constexpr, SPLITS: tl.constexpr, OUT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
                 ROW_BLOCK: tl.constexpr, MORE_ROWS: tl.constexpr, WIDE: tl.constexpr,
                 ASSEMBLY: tl.constexpr):  # fmt: skip
    """The first TERMS * SPLITS programs of a tile make A2's parts, the others the down product."""
    tile = tl.program_id(1)
    rows = tl.load(rows_ptr + tile)
    if rows == 0:
        return
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    start = tl.load(start_ptr + tile).to(tl.int64)
    MORE: tl.constexpr = MORE_ROWS if MORE_ROWS else 16
    act_ptr += start * (4 * COLUMNS)
    order_ptr += start
    row = tl.arange(0, ROW_BLOCK)
    more_row = ROW_BLOCK + tl.arange(0, MORE)
    for s in tl.static_range(TERMS):
        if tl.program_id(0) // SPLITS == s:
            split = tl.program_id(0) % SPLITS
            a = a2s[s] + expert * (RANK * 4 * COLUMNS)
            low = low_ptr + (s * SPLITS + split).to(tl.int64) * num_rows * RANK
            _low_rank_rows(act_ptr, a, low, order_ptr, row, rows, split, COLUMNS, RANK, RANK_BLOCK, SPLITS, ROW_BLOCK)
            if MORE_ROWS:
                _low_rank_rows(
                    act_ptr, a, low, order_ptr, more_row, rows, split, COLUMNS, RANK, RANK_BLOCK, SPLITS, MORE
                )
    if tl.program_id(0) < TERMS * SPLITS:
        return
    out = (tl.program_id(0) - TERMS * SPLITS) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    acc = tl.zeros([OUT_BLOCK, ROW_BLOCK], tl.float32)
    more = tl.zeros([OUT_BLOCK, MORE], tl.float32)
    acc, more = multiply_packed(
        acc, more, code_ptr + expert * (OUTPUTS * COLUMNS), scale_ptr + expert * (OUTPUTS * (COLUMNS // 8)), act_ptr,
        row, row < rows, more_row, more_row < rows, out, out < OUTPUTS, COLUMNS, OUT_BLOCK, COLUMN_BLOCK, ROW_BLOCK,
        MORE_ROWS, OUTPUTS % OUT_BLOCK == 0, WIDE, ASSEMBLY,
    )  # fmt: skip
    ok = (out < OUTPUTS)[:, None]
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    place = tl.load(order_ptr + row, mask=row < rows, other=0).to(tl.int64)
    tl.store(y_ptr + place[None, :] * OUTPUTS + out[:, None], acc.to(DTYPE), mask=ok & (row < rows)[None, :])
    if MORE_ROWS:
        place = tl.load(order_ptr + more_row, mask=more_row < rows, other=0).to(tl.int64)
        tl.store(y_ptr + place[None, :] * OUTPUTS + out[:, None], more.to(DTYPE), mask=ok & (more_row < rows)[None, :])


@triton.jit
def _combine(y_ptr, low_ptr, b2s, scale_ptr, weight_ptr, out_ptr, width, num_rows, RANK: tl.constexpr,
             RANK_BLOCK: tl.constexpr, SPLITS: tl.constexpr, TOP_K_BLOCK: tl.constexpr, TERMS: tl.constexpr,
             TOP_K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One token's rows times its router weights, in fp32, and B2 of its weighted low rows."""
    token = tl.program_id(1).to(tl.int64)
    z = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weight_ptr + token * TOP_K + k)
        total += weight * tl.load(y_ptr + (token * TOP_K + k) * width + z, mask=z < width, other=0.0).to(tl.float32)
    r = tl.arange(0, RANK_BLOCK)
    for s in tl.static_range(TERMS):
        k, split = tl.arange(0, TOP_K_BLOCK), tl.arange(0, SPLITS)
        weight = tl.load(weight_ptr + token * TOP_K + k, mask=k < TOP_K, other=0.0)
        at = (s * SPLITS + split)[None, :, None] * num_rows + token * TOP_K + k[:, None, None]
        ok = (k < TOP_K)[:, None, None] & (r < RANK)[None, None, :]
        parts = tl.load(low_ptr + at * RANK + r[None, None, :], mask=ok, other=0.0)
        low = tl.sum(tl.sum(parts * weight[:, None, None], 0), 0)
        b2 = tl.load(
            b2s[s] + z[:, None] * RANK + r[None, :], mask=(z < width)[:, None] & (r < RANK)[None, :], other=0.0
        )
        scale = tl.load(scale_ptr + s * (num_rows // TOP_K) + token)
        total += scale * tl.sum(b2.to(tl.float32) * low[None, :], 1)
    tl.store(out_ptr + token * width + z, total.to(out_ptr.dtype.element_ty), mask=z < width)
