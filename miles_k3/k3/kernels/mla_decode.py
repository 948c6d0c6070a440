# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""MLA of one query a sequence over the paged latent cache, in absorbed form: split over the context, then merged.

The plain twin is `ops.decode.mla_step` over gathered pages.

Shapes: B sequences, N heads, Q query channels (nope then extra), C latent, L = C + extra cached numbers, V value
channels, P pages a sequence, G tokens a page, S splits of the context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import (
    BLACKWELL,
    INTERPRETED,
    capability,
    check_whole,
    dependent,
    power_of_two,
    wait_for_inputs,
)
from miles_k3.k3.kernels.online_softmax import accumulate

TARGET_PROGRAMS = 264  # two for each of an H200's multiprocessors
TOKENS = 64  # of a step


def mla_decode(q_BNQ: Tensor, cache_KGL: Tensor, page_BP: Tensor, length_B: Tensor, w_k_NPC: Tensor, w_v_NVC: Tensor,
               *, num_splits: int | None = None) -> Tensor:  # fmt: skip
    """[B, N, V] in q's dtype. `page_BP` int32: the pool's pages of each sequence; `length_B`: its cached tokens.

    Rows of length 0 are padding and give zeros. What lies behind a sequence's end, NaN included, is never read.
    """
    nope, latent = w_k_NPC.shape[1], w_k_NPC.shape[2]
    q_latent_NBC = torch.bmm(q_BNQ[..., :nope].transpose(0, 1), w_k_NPC)
    q_BNL = torch.cat([q_latent_NBC.transpose(0, 1), q_BNQ[..., nope:]], dim=-1)
    read_BNC = paged_read(q_BNL, cache_KGL, page_BP, length_B, latent, q_BNQ.shape[-1] ** -0.5, num_splits=num_splits)
    return torch.bmm(read_BNC.transpose(0, 1), w_v_NVC.transpose(1, 2)).transpose(0, 1)


def paged_read(q_BNL: Tensor, cache_KGL: Tensor, page_BP: Tensor, length_B: Tensor, latent: int, scale: float, *,
               num_splits: int | None = None, head_block: int | None = None) -> Tensor:  # fmt: skip
    """Softmax of q over each sequence's cached rows times their latents: [B, N, C]; fp32 sums.

    Pages and tokens of the pool may have any stride between them, rows [L] are contiguous; all pages of `page_BP`
    within a sequence's length are valid.
    """
    check_whole(q_BNL=q_BNL)
    batch, heads, width = q_BNL.shape
    page_size, most = cache_KGL.shape[1], page_BP.shape[1] * cache_KGL.shape[1]
    # Measured: a short context is a chain of latencies, so many small programs; a long one reads each row less often.
    head_block = head_block or power_of_two(heads, at_least=16, at_most=16 if most <= 8 * TOKENS else 64)
    head_blocks = triton.cdiv(heads, head_block)
    if num_splits is None:
        num_splits = min(max(1, TARGET_PROGRAMS // (batch * head_blocks)), triton.cdiv(most, TOKENS), 64)
    # A tile of 64 heads is one for Blackwell's tensor cores, where a second stage is 112 KiB more than there is.
    stages = 1 if head_block == 64 and capability() >= BLACKWELL else 2
    part = torch.empty(num_splits, batch, heads, latent, device=q_BNL.device)
    lse = torch.empty(num_splits, batch, heads, device=q_BNL.device)
    out = q_BNL.new_empty(batch, heads, latent)
    if not batch:
        return out
    _read_split[(head_blocks, num_splits, batch)](
        q_BNL, cache_KGL, page_BP, length_B, part, lse, cache_KGL.stride(0),
        cache_KGL.stride(1), page_BP.stride(0), batch, scale,
        HEADS=heads, LATENT=latent, EXTRA=width - latent, PAGE=page_size, SPLITS=num_splits, HEAD_BLOCK=head_block,
        LATENT_BLOCK=power_of_two(latent, at_least=16), EXTRA_BLOCK=power_of_two(width - latent, at_least=16),
        TOKENS=TOKENS, INTERPRETED=INTERPRETED, num_warps=8 if head_block == 64 else 4, num_stages=stages,
        **dependent(),
    )  # fmt: skip
    _merge[(heads, batch)](
        part, lse, out, batch, HEADS=heads, LATENT=latent, SPLITS=num_splits, SPLIT_BLOCK=power_of_two(num_splits),
        LATENT_BLOCK=power_of_two(latent), num_warps=4, **dependent(),
    )  # fmt: skip
    return out


@triton.jit
def _attend(acc, top, total, q, q_extra, cache_ptr, page_ptr, first, length, page_stride, token_stride, scale,
            LATENT: tl.constexpr,
            EXTRA: tl.constexpr, PAGE: tl.constexpr, LATENT_BLOCK: tl.constexpr, EXTRA_BLOCK: tl.constexpr,
            TOKENS: tl.constexpr):  # fmt: skip
    """One run of tokens."""
    c, e = tl.arange(0, LATENT_BLOCK), tl.arange(0, EXTRA_BLOCK)
    at = first + tl.arange(0, TOKENS)
    seen = at < length
    page = tl.load(page_ptr + at // PAGE, mask=seen, other=0).to(tl.int64)
    cache_at = cache_ptr + page * page_stride + (at % PAGE) * token_stride
    rows = tl.load(cache_at[:, None] + c[None, :], mask=seen[:, None] & (c < LATENT)[None, :], other=0.0)
    extra = tl.load(cache_at[None, :] + LATENT + e[:, None], mask=seen[None, :] & (e < EXTRA)[:, None], other=0.0)
    score = tl.dot(q, tl.trans(rows), input_precision="ieee")
    score = tl.dot(q_extra, extra, score, input_precision="ieee") * scale
    return accumulate(acc, top, total, tl.where(seen[None, :], score, -1e30), rows)


@triton.jit
def _read_split(q_ptr, cache_ptr, page_ptr, length_ptr, part_ptr, lse_ptr, page_stride, token_stride,
                table_stride, batch, scale, HEADS: tl.constexpr, LATENT: tl.constexpr, EXTRA: tl.constexpr,
                PAGE: tl.constexpr, SPLITS: tl.constexpr, HEAD_BLOCK: tl.constexpr, LATENT_BLOCK: tl.constexpr,
                EXTRA_BLOCK: tl.constexpr, TOKENS: tl.constexpr, INTERPRETED: tl.constexpr,
                PDL: tl.constexpr = False):  # fmt: skip
    """Every SPLITS-th run of tokens of one sequence, for HEAD_BLOCK heads: their weighted latents and log-sum-exp."""
    wait_for_inputs(PDL)
    split, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    c, e = tl.arange(0, LATENT_BLOCK), tl.arange(0, EXTRA_BLOCK)
    WIDTH: tl.constexpr = LATENT + EXTRA
    length = tl.load(length_ptr + row)
    q_at = q_ptr + (row * HEADS + head)[:, None] * WIDTH
    real = head < HEADS
    q = tl.load(q_at + c[None, :], mask=real[:, None] & (c < LATENT)[None, :], other=0.0)
    q_extra = tl.load(q_at + LATENT + e[None, :], mask=real[:, None] & (e < EXTRA)[None, :], other=0.0)
    top = tl.full([HEAD_BLOCK], -1e30, tl.float32)
    total = tl.zeros([HEAD_BLOCK], tl.float32)
    acc = tl.zeros([HEAD_BLOCK, LATENT_BLOCK], tl.float32)
    page_ptr += row * table_stride
    first = split * TOKENS
    if INTERPRETED:  # which takes no range with run-time bounds
        while first < length:
            acc, top, total = _attend(
                acc, top, total, q, q_extra, cache_ptr, page_ptr, first, length, page_stride, token_stride, scale,
                LATENT, EXTRA, PAGE, LATENT_BLOCK, EXTRA_BLOCK, TOKENS,
            )  # fmt: skip
            first += SPLITS * TOKENS
    else:
        for begin in range(first, length, SPLITS * TOKENS):
            acc, top, total = _attend(
                acc, top, total, q, q_extra, cache_ptr, page_ptr, begin, length, page_stride, token_stride, scale,
                LATENT, EXTRA, PAGE, LATENT_BLOCK, EXTRA_BLOCK, TOKENS,
            )  # fmt: skip
    empty = total == 0.0
    place = (split * batch + row) * HEADS + head
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(part_ptr + place[:, None] * LATENT + c[None, :], acc, mask=real[:, None] & (c < LATENT)[None, :])
    tl.store(lse_ptr + place, tl.where(empty, -float("inf"), top + tl.log(tl.where(empty, 1.0, total))), mask=real)


@triton.jit
def _merge(part_ptr, lse_ptr, out_ptr, batch, HEADS: tl.constexpr, LATENT: tl.constexpr, SPLITS: tl.constexpr,
           SPLIT_BLOCK: tl.constexpr, LATENT_BLOCK: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """The splits' results weighted by their share of the softmax."""
    wait_for_inputs(PDL)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    s, c = tl.arange(0, SPLIT_BLOCK), tl.arange(0, LATENT_BLOCK)
    place = (s * batch + row) * HEADS + head
    lse = tl.load(lse_ptr + place, mask=s < SPLITS, other=-float("inf"))
    top = tl.maximum(tl.max(lse, 0), -1e30)
    share = tl.exp(lse - top)
    share = share / tl.maximum(tl.sum(share, 0), 1e-30)
    ok = (s < SPLITS)[:, None] & (c < LATENT)[None, :]
    part = tl.load(part_ptr + place[:, None] * LATENT + c[None, :], mask=ok, other=0.0)
    read = tl.sum(part * share[:, None], 0)
    tl.store(out_ptr + (row * HEADS + head) * LATENT + c, read.to(out_ptr.dtype.element_ty), mask=c < LATENT)
