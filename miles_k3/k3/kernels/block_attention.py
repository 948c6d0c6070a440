# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""Attention of a draft's blocks (spec 6.3) over cached tokens where they lie, and over each block itself.

The plain twin is `speculative.draft.DraftContext.attention` over gathered pages.

Shapes: S sequences, G tokens of a block, N query heads, M key-value heads, D head width, K pages of the cache, P those
of a sequence, Z tokens of a page, C numbers of a cached token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import INTERPRETED, power_of_two
from miles_k3.k3.kernels.online_softmax import accumulate

TOKENS = 64  # of a step


def block_attention(q_SGND: Tensor, k_SGMD: Tensor, v_SGMD: Tensor, cache_KZC: Tensor, page_SP: Tensor,
                    length_S: Tensor, first: int) -> Tensor:  # fmt: skip
    """[S, G, N, D] in q's dtype. `page_SP`: rows of the cache that hold each sequence's first `length_S` tokens; a
    token's keys are its numbers from `first` on, its values those behind them.

    Every token of a block sees the cached ones and its whole block. What lies behind a sequence's end, NaN included, is
    never read. Pages and tokens may have any stride between them, rows of q, k and v are contiguous.
    """
    batch, size, heads, width = q_SGND.shape
    kv_heads, out = k_SGMD.shape[2], q_SGND.new_empty(q_SGND.shape)
    if not batch:
        return out
    rows = size * (heads // kv_heads)
    _block_attention[(kv_heads, batch)](
        q_SGND.contiguous(), k_SGMD.contiguous(), v_SGMD.contiguous(), cache_KZC, page_SP, length_S, out,
        cache_KZC.stride(0), cache_KZC.stride(1), page_SP.stride(0), first, width**-0.5, SIZE=size, HEADS=heads,
        KV_HEADS=kv_heads, WIDTH=width, PAGE=cache_KZC.shape[1], ROW_BLOCK=power_of_two(rows, at_least=16),
        OWN_BLOCK=power_of_two(size, at_least=16), WIDTH_BLOCK=power_of_two(width, at_least=16), TOKENS=TOKENS,
        INTERPRETED=INTERPRETED, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _seen(acc, top, total, q, keys, values, seen, scale):
    """Keys [D, tokens] and values [tokens, D]."""
    score = tl.dot(q, keys, input_precision="ieee") * scale
    return accumulate(acc, top, total, tl.where(seen[None, :], score, -1e30), values)


@triton.jit
def _cached(acc, top, total, q, cache_ptr, page_ptr, first, length, page_stride, token_stride, scale, d,
            WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    at = first + tl.arange(0, TOKENS)
    seen = at < length
    page = tl.load(page_ptr + at // PAGE, mask=seen, other=0).to(tl.int64)
    token_at = cache_ptr + page * page_stride + (at % PAGE) * token_stride
    ok = seen[:, None] & (d < WIDTH)[None, :]
    keys = tl.load(token_at[:, None] + d[None, :], mask=ok, other=0.0)
    values = tl.load(token_at[:, None] + VALUES + d[None, :], mask=ok, other=0.0)
    return _seen(acc, top, total, q, tl.trans(keys), values, seen, scale)


@triton.jit
def _block_attention(q_ptr, k_ptr, v_ptr, cache_ptr, page_ptr, length_ptr, out_ptr, page_stride, token_stride,
                     table_stride, first_number, scale, SIZE: tl.constexpr, HEADS: tl.constexpr,
                     KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, ROW_BLOCK: tl.constexpr,
                     OWN_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
                     INTERPRETED: tl.constexpr):  # fmt: skip
    """All queries of one sequence's block that share a key-value head."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    VALUES: tl.constexpr = KV_HEADS * WIDTH
    r, d, own = tl.arange(0, ROW_BLOCK), tl.arange(0, WIDTH_BLOCK), tl.arange(0, OWN_BLOCK)
    real = (r < SIZE * GROUP)[:, None] & (d < WIDTH)[None, :]
    query = (row * SIZE + r // GROUP) * HEADS + head * GROUP + r % GROUP
    q = tl.load(q_ptr + query[:, None] * WIDTH + d[None, :], mask=real, other=0.0)
    length = tl.load(length_ptr + row)
    page_ptr += row * table_stride
    cache_ptr += first_number + head * WIDTH
    top = tl.full([ROW_BLOCK], -1e30, tl.float32)
    total = tl.zeros([ROW_BLOCK], tl.float32)
    acc = tl.zeros([ROW_BLOCK, WIDTH_BLOCK], tl.float32)
    if INTERPRETED:  # which takes no range with run-time bounds
        first = 0
        while first < length:
            acc, top, total = _cached(acc, top, total, q, cache_ptr, page_ptr, first, length, page_stride,
                                      token_stride, scale, d, WIDTH, VALUES, PAGE, TOKENS)  # fmt: skip
            first += TOKENS
    else:
        for begin in range(0, length, TOKENS):
            acc, top, total = _cached(acc, top, total, q, cache_ptr, page_ptr, begin, length, page_stride,
                                      token_stride, scale, d, WIDTH, VALUES, PAGE, TOKENS)  # fmt: skip
    own_at = ((row * SIZE + own) * KV_HEADS + head)[:, None] * WIDTH + d[None, :]
    inside = (own < SIZE)[:, None] & (d < WIDTH)[None, :]
    keys = tl.load(k_ptr + own_at, mask=inside, other=0.0)
    values = tl.load(v_ptr + own_at, mask=inside, other=0.0)
    acc, top, total = _seen(acc, top, total, q, tl.trans(keys), values, own < SIZE, scale)
    out = acc / total[:, None]
    tl.store(out_ptr + query[:, None] * WIDTH + d[None, :], out.to(out_ptr.dtype.element_ty), mask=real)
