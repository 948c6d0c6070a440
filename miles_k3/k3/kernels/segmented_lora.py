# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""Dense LoRA where each token names its adapter: y += scaling B_s (A_s x), in two launches for any mix of versions.

The plain twin is `ops.lora.lora_delta` with one term an adapter.

Shapes: T tokens, I inputs, O outputs, R rank, S adapters, K splits of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import power_of_two

_INPUT_BLOCK = 128


def segmented_lora_(y_TO: Tensor, x_TI: Tensor, slot_T: Tensor, factors: Sequence[tuple[Tensor, Tensor]],
                    scalings: Sequence[float]) -> Tensor:  # fmt: skip
    """Add each token's delta to y in place; returns y. `factors[s]` is (A [R, I], B [O, R]), all of one rank.

    `slot_T` int32: a token's adapter, negative for the bare base, whose rows are not touched. Sums are fp32; the low
    product is rounded to x's dtype, as the plain twin's is. Rows of x and y may be strided.
    """
    if not factors or not y_TO.numel():
        return y_TO
    num_tokens, width = x_TI.shape
    rank = factors[0][0].shape[0]
    token_block = power_of_two(num_tokens, at_least=16, at_most=64)
    token_blocks = triton.cdiv(num_tokens, token_block)
    splits = max(1, min(triton.cdiv(width, 4 * _INPUT_BLOCK), 128 // token_blocks))
    low = torch.empty(splits, num_tokens, rank, device=x_TI.device)
    common = {"RANK": rank, "RANK_BLOCK": power_of_two(rank, at_least=16), "ADAPTERS": len(factors)}
    _shrink[(splits, token_blocks)](
        x_TI, tuple(a for a, _ in factors), slot_T, low, num_tokens, x_TI.stride(0), INPUTS=width, SPLITS=splits,
        TOKEN_BLOCK=token_block, INPUT_BLOCK=_INPUT_BLOCK, num_warps=4, num_stages=3, **common,
    )  # fmt: skip
    out_block = 64
    _expand[(triton.cdiv(y_TO.shape[1], out_block), token_blocks)](
        y_TO, tuple(b for _, b in factors), tuple(scalings), slot_T, low, num_tokens, y_TO.stride(0), y_TO.shape[1],
        SPLITS=splits, TOKEN_BLOCK=token_block, OUT_BLOCK=out_block, num_warps=4, **common,
    )  # fmt: skip
    return y_TO


@triton.jit
def _shrink(x_ptr, factors, slot_ptr, low_ptr, num_tokens, stride, INPUTS: tl.constexpr, SPLITS: tl.constexpr,
            TOKEN_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
            ADAPTERS: tl.constexpr):  # fmt: skip
    """low [K, T, R]: each split's part of A x, for the adapter that each token names."""
    split = tl.program_id(0)
    token = tl.program_id(1) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    r, i = tl.arange(0, RANK_BLOCK), tl.arange(0, INPUT_BLOCK)
    slot = tl.load(slot_ptr + token, mask=token < num_tokens, other=-1)
    acc = tl.zeros([TOKEN_BLOCK, RANK_BLOCK], tl.float32)
    for s in tl.static_range(ADAPTERS):
        mine = slot == s
        if tl.max(mine.to(tl.int32), 0) == 1:
            for step in range(0, INPUTS, SPLITS * INPUT_BLOCK):
                at = step + split * INPUT_BLOCK + i
                x_at = x_ptr + token.to(tl.int64)[:, None] * stride + at[None, :]
                x = tl.load(x_at, mask=mine[:, None] & (at < INPUTS)[None, :], other=0.0)
                a_at = factors[s] + r[None, :] * INPUTS + at[:, None]
                a = tl.load(a_at, mask=(r < RANK)[None, :] & (at < INPUTS)[:, None], other=0.0)
                acc = tl.dot(x, a, acc, input_precision="ieee")
    low_at = low_ptr + (split * num_tokens + token)[:, None] * RANK + r[None, :]
    tl.store(low_at, acc, mask=(token < num_tokens)[:, None] & (r < RANK)[None, :])


@triton.jit
def _expand(y_ptr, factors, scalings, slot_ptr, low_ptr, num_tokens, stride, num_outputs, SPLITS: tl.constexpr,
            TOKEN_BLOCK: tl.constexpr, OUT_BLOCK: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
            ADAPTERS: tl.constexpr):  # fmt: skip
    """y += B low, the splits of low summed in their order."""
    token = tl.program_id(1) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    out = tl.program_id(0) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    r = tl.arange(0, RANK_BLOCK)
    slot = tl.load(slot_ptr + token, mask=token < num_tokens, other=-1)
    low_ok = (token < num_tokens)[:, None] & (r < RANK)[None, :]
    low = tl.zeros([TOKEN_BLOCK, RANK_BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        low += tl.load(low_ptr + (split * num_tokens + token)[:, None] * RANK + r[None, :], mask=low_ok, other=0.0)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    delta = tl.zeros([TOKEN_BLOCK, OUT_BLOCK], tl.float32)
    for s in tl.static_range(ADAPTERS):
        mine = slot == s
        if tl.max(mine.to(tl.int32), 0) == 1:
            b_at = factors[s] + out[None, :] * RANK + r[:, None]
            b = tl.load(b_at, mask=(r < RANK)[:, None] & (out < num_outputs)[None, :], other=0.0)
            own = tl.where(mine[:, None], low * scalings[s], 0.0).to(b.dtype)
            delta = tl.dot(own, b, delta, input_precision="ieee")
    y_at = y_ptr + token.to(tl.int64)[:, None] * stride + out[None, :]
    ok = (slot >= 0)[:, None] & (out < num_outputs)[None, :]
    tl.store(y_at, (tl.load(y_at, mask=ok, other=0.0).to(tl.float32) + delta).to(DTYPE), mask=ok)
