# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""Dense LoRA where each token names its adapter: scaling B (A x), added to a projection or ahead of SiTU.

low = A x rides in the launch that makes the projection itself (`skinny.products_`); here is what B makes of it. The
plain twin is `ops.lora.lora_delta` with one term an adapter.

Shapes: T tokens, O outputs, F MLP width, R rank, S adapters of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import dependent, power_of_two, wait_for_inputs
from miles_k3.k3.kernels.skinny import Product, products_


def low_products(x_TI: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, list[Product]]:
    """(fp32 [S, T, R], the products that fill it): A of each adapter, all of one rank, times x."""
    rank = factors[0].shape[0] if factors else 1
    low_STR = torch.empty(len(factors), x_TI.shape[0], rank, device=x_TI.device)
    return low_STR, [Product(a, low) for a, low in zip(factors, low_STR, strict=True)]


def segmented_lora_(y_TO: Tensor, x_TI: Tensor, slot_T: Tensor, factors: Sequence[tuple[Tensor, Tensor]],
                    scalings: Sequence[float]) -> Tensor:  # fmt: skip
    """Add each token's delta to y in place, by itself; returns y. `factors[s]` is (A [R, I], B [O, R])."""
    low_STR, products = low_products(x_TI, [a for a, _ in factors])
    products_(x_TI, products)
    return expand_(y_TO, low_STR, slot_T, [b for _, b in factors], scalings)


def expand_(y_TO: Tensor, low_STR: Tensor, slot_T: Tensor, bs: Sequence[Tensor], scalings: Sequence[float]) -> Tensor:
    """y += scaling_s B_s low_s for the tokens with slot s, in place; returns y. `bs[s]` is [O, R].

    `slot_T` int32: a token's adapter, negative for the bare base, whose rows are not touched. The low product is
    rounded to the factors' dtype, as the plain twin's is, and the sum to y's. Rows of y may be strided.
    """
    num_tokens, width = y_TO.shape
    if not bs or not y_TO.numel():
        return y_TO
    token_block = power_of_two(num_tokens, at_least=16, at_most=64)
    rank = low_STR.shape[2]
    _expand[(triton.cdiv(width, 64), triton.cdiv(num_tokens, token_block))](
        y_TO, low_STR, slot_T, tuple(bs), tuple(scalings), num_tokens, y_TO.stride(0), low_STR.stride(0),
        low_STR.stride(1), width, ADAPTERS=len(bs), RANK=rank, RANK_BLOCK=power_of_two(rank, at_least=16),
        TOKEN_BLOCK=token_block, OUT_BLOCK=64, num_warps=4, **dependent(),
    )  # fmt: skip
    return y_TO


def situ_with_lora(
    h_T2F: Tensor, betas: tuple[float, float], low_STR: Tensor | None = None, low_up_STR: Tensor | None = None,
    slot_T: Tensor | None = None, gate_bs: Sequence[Tensor] = (), up_bs: Sequence[Tensor] = (),
    scalings: Sequence[float] = (),
) -> Tensor:  # fmt: skip
    """SiTU of a fused gate/up projection with each token's delta added before: [T, F] in h's dtype (spec 2.5, 5.4).

    `low_up_STR` None: gate and up share their A. The plain twin is `ops.situ` after `ops.lora`.
    """
    num_tokens, width = h_T2F.shape[0], h_T2F.shape[1] // 2
    out = h_T2F.new_empty(num_tokens, width)
    if not out.numel():
        return out
    if gate_bs and (low_STR is None or slot_T is None):
        raise ValueError("gate_bs come with low_STR and slot_T: the low products and whose each token is")
    low = h_T2F if low_STR is None else low_STR
    low_up = low if low_up_STR is None else low_up_STR
    rank = low.shape[2] if gate_bs and low_STR is not None else 1
    token_block = power_of_two(num_tokens, at_least=16, at_most=64) if gate_bs else 16
    _situ[(triton.cdiv(width, 64), triton.cdiv(num_tokens, token_block))](
        h_T2F, out, low, low_up, h_T2F if slot_T is None else slot_T, tuple(gate_bs), tuple(up_bs), tuple(scalings),
        num_tokens, h_T2F.stride(0), low.stride(0), low.stride(1), *betas, WIDTH=width, ADAPTERS=len(gate_bs),
        RANK=rank, RANK_BLOCK=power_of_two(rank, at_least=16), TOKEN_BLOCK=token_block, OUT_BLOCK=64, num_warps=4,
        **dependent(),
    )  # fmt: skip
    return out


@triton.jit
def _delta(low_ptr, slot, slot_stride, low_stride, b, s: tl.constexpr, scaling, token, num_tokens, out, num_outputs,
           RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, delta):  # fmt: skip
    """delta [TOKENS, OUTS] += scaling B low, of the tokens whose slot is s."""
    r = tl.arange(0, RANK_BLOCK)
    low_at = low_ptr + s * slot_stride + token[:, None] * low_stride + r[None, :]
    mine = (slot == s)[:, None] & (token < num_tokens)[:, None] & (r < RANK)[None, :]
    low = tl.load(low_at, mask=mine, other=0.0).to(b.dtype.element_ty).to(tl.float32) * scaling
    b_at = b + out[None, :] * RANK + r[:, None]
    factor = tl.load(b_at, mask=(r < RANK)[:, None] & (out < num_outputs)[None, :], other=0.0)
    return tl.dot(low.to(factor.dtype), factor, delta, input_precision="ieee")


@triton.jit
def _expand(y_ptr, low_ptr, slot_ptr, bs, scalings, num_tokens, y_stride, slot_stride, low_stride, num_outputs,
            ADAPTERS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, TOKEN_BLOCK: tl.constexpr,
            OUT_BLOCK: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(1) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    out = tl.program_id(0) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    slot = tl.load(slot_ptr + token, mask=token < num_tokens, other=-1)
    delta = tl.zeros([TOKEN_BLOCK, OUT_BLOCK], tl.float32)
    for s in tl.static_range(ADAPTERS):
        if tl.max((slot == s).to(tl.int32), 0) == 1:
            delta = _delta(low_ptr, slot, slot_stride, low_stride, bs[s], s, scalings[s], token, num_tokens, out,
                           num_outputs, RANK, RANK_BLOCK, delta)  # fmt: skip
    y_at = y_ptr + token.to(tl.int64)[:, None] * y_stride + out[None, :]
    ok = (slot >= 0)[:, None] & (out < num_outputs)[None, :]
    y = tl.load(y_at, mask=ok, other=0.0).to(tl.float32) + delta
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _situ(h_ptr, out_ptr, low_ptr, low_up_ptr, slot_ptr, gate_bs, up_bs, scalings, num_tokens, h_stride, slot_stride,
          low_stride, beta, linear_beta, WIDTH: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr,
          RANK_BLOCK: tl.constexpr, TOKEN_BLOCK: tl.constexpr, OUT_BLOCK: tl.constexpr,
          PDL: tl.constexpr = False):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(1) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    out = tl.program_id(0) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    ok = (token < num_tokens)[:, None] & (out < WIDTH)[None, :]
    h_at = h_ptr + token.to(tl.int64)[:, None] * h_stride + out[None, :]
    gate = tl.load(h_at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(h_at + WIDTH, mask=ok, other=0.0).to(tl.float32)
    if ADAPTERS > 0:
        slot = tl.load(slot_ptr + token, mask=token < num_tokens, other=-1)
        for s in tl.static_range(ADAPTERS):
            if tl.max((slot == s).to(tl.int32), 0) == 1:
                gate = _delta(low_ptr, slot, slot_stride, low_stride, gate_bs[s], s, scalings[s], token, num_tokens,
                              out, WIDTH, RANK, RANK_BLOCK, gate)  # fmt: skip
                up = _delta(low_up_ptr, slot, slot_stride, low_stride, up_bs[s], s, scalings[s], token, num_tokens,
                            out, WIDTH, RANK, RANK_BLOCK, up)  # fmt: skip
    act = beta * _tanh(gate / beta) * tl.sigmoid(gate) * (linear_beta * _tanh(up / linear_beta))
    out_at = out_ptr + token.to(tl.int64)[:, None] * WIDTH + out[None, :]
    tl.store(out_at, act.to(out_ptr.dtype.element_ty), mask=ok)
