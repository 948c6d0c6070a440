# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""The LoRA parts inside the routed experts' kernels, and the shared A1 and A3 in front of them.

Shapes: T tokens, Z latent, R rank, S adapters, P splits of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import dependent, power_of_two, wait_for_inputs
from miles_k3.k3.ops.lora import ExpertLoraTerm


def front_low(z_TZ: Tensor, lora: Sequence[ExpertLoraTerm]) -> tuple[Tensor, Tensor]:
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
            INPUT_BLOCK=128, num_warps=4, num_stages=3, **dependent(),
        )  # fmt: skip
    return low, scale


@triton.jit
def _low_kernel(z_ptr, a1s, a3s, masks, scalings, low_ptr, scale_ptr, num_tokens, MASKED: tl.constexpr,
                WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, TERMS: tl.constexpr,
                SPLITS: tl.constexpr, TOKEN_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr,
                PDL: tl.constexpr = False):  # fmt: skip
    """One split of one adapter's A1 or A3 for a block of tokens. MASKED: a bit for each adapter that has a mask."""
    wait_for_inputs(PDL)
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
def add_front_lora(acc, low_ptr, b1, b3, token, token_ok, num_tokens, split_stride, out, out_ok, is_up,
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
def low_rank_rows(act_ptr, a, low_ptr, order_ptr, row, rows, split, COLUMNS: tl.constexpr, RANK: tl.constexpr,
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
