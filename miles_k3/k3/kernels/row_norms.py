# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""RMSNorms and output gates of single rows, each one launch and one pass over memory.

Rounding is the plain twin's: `ops.decode.rms_norm` rounds the scaled row, then its product with the weight.

Shapes: T tokens, H hidden or any width, N heads, V value channels, C latent, L = C + extra cached numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import dependent, power_of_two, wait_for_inputs


def rms_norm_rows(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMSNorm of contiguous-in-H rows, [T, H] in x's dtype."""
    out, width = x_TH.new_empty(x_TH.shape), x_TH.shape[1]
    if x_TH.shape[0]:
        _norm_rows[(x_TH.shape[0],)](
            x_TH, weight_H, out, x_TH.stride(0), eps, WIDTH=width, BLOCK=power_of_two(width),
            num_warps=8 if width > 2048 else 4, **dependent(),
        )  # fmt: skip
    return out


def gated_heads(o_TNV: Tensor, gate_TD: Tensor, norm_V: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """o * sigmoid(gate), [T, N * V] in the gate's dtype; with `norm_V` each head's RMSNorm comes first (spec 2.3).

    o may be fp32 beside a bfloat16 gate; rows of both may be strided, heads of o not.
    """
    num_tokens, heads, values = o_TNV.shape
    out = gate_TD.new_empty(num_tokens, heads * values)
    if num_tokens:
        per_program = max(1, 16 // max(1, values // 128))
        _gated[(num_tokens, triton.cdiv(heads, per_program))](
            o_TNV, gate_TD, o_TNV if norm_V is None else norm_V, out, o_TNV.stride(0), o_TNV.stride(1),
            gate_TD.stride(0), eps, HEADS=heads, VALUES=values, NORM=norm_V is not None,
            HEAD_BLOCK=power_of_two(per_program), VALUE_BLOCK=power_of_two(values), num_warps=4, **dependent(),
        )  # fmt: skip
    return out


def mla_norms_(
    q_TA: Tensor, q_norm_A: Tensor, row_TL: Tensor, kv_norm_C: Tensor, eps: float,
    cache_KGL: Tensor | None = None, write_T: Tensor | None = None,
) -> None:  # fmt: skip
    """Norm the low query and the latent in place, and write [latent | extra key] to the cache rows `write_T`.

    Pages and tokens of the pool may have any stride between them; a negative row is padding and is not
    written. One launch (spec 2.4).
    """
    num_tokens, low = q_TA.shape
    latent, width = kv_norm_C.shape[0], row_TL.shape[1]
    if not num_tokens:
        return
    cache, token_stride = (row_TL, 0) if cache_KGL is None else (cache_KGL, cache_KGL.stride(1))
    _mla_norms[(num_tokens, 2)](
        q_TA, q_norm_A, row_TL, kv_norm_C, cache, q_TA if write_T is None else write_T, q_TA.stride(0),
        row_TL.stride(0), cache.stride(0), token_stride, eps, LOW=low, LATENT=latent, EXTRA=width - latent,
        PAGE=1 if cache_KGL is None else cache_KGL.shape[1], WRITES=cache_KGL is not None, LOW_BLOCK=power_of_two(low),
        LATENT_BLOCK=power_of_two(latent), EXTRA_BLOCK=power_of_two(width - latent), num_warps=4, **dependent(),
    )  # fmt: skip


@triton.jit
def _normed(x, weight, width, eps, DTYPE: tl.constexpr):
    """x fp32, zero beyond its width."""
    scaled = (x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)).to(DTYPE).to(tl.float32)
    return (scaled * weight.to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit
def _norm_rows(x_ptr, weight_ptr, out_ptr, stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
               PDL: tl.constexpr = False):  # fmt: skip
    wait_for_inputs(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=i < WIDTH, other=0.0)
    tl.store(out_ptr + row * WIDTH + i, _normed(x, weight, WIDTH, eps, out_ptr.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def _gated(o_ptr, gate_ptr, norm_ptr, out_ptr, o_stride, head_stride, gate_stride, eps, HEADS: tl.constexpr,
           VALUES: tl.constexpr, NORM: tl.constexpr, HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
           PDL: tl.constexpr = False):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    v = tl.arange(0, VALUE_BLOCK)
    ok = (head < HEADS)[:, None] & (v < VALUES)[None, :]
    o = tl.load(o_ptr + token * o_stride + head[:, None] * head_stride + v[None, :], mask=ok, other=0.0)
    o = o.to(tl.float32)
    at = head[:, None] * VALUES + v[None, :]
    if NORM:
        o = o * tl.rsqrt(tl.sum(o * o, 1) / VALUES + eps)[:, None]
        o = o * tl.load(norm_ptr + v, mask=v < VALUES, other=0.0).to(tl.float32)[None, :]
    gate = tl.load(gate_ptr + token * gate_stride + at, mask=ok, other=0.0).to(tl.float32)
    out = (o * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * (HEADS * VALUES) + at, out, mask=ok)


@triton.jit
def _mla_norms(q_ptr, q_norm_ptr, row_ptr, kv_norm_ptr, cache_ptr, write_ptr, q_stride, row_stride, page_stride,
               token_stride, eps, LOW: tl.constexpr, LATENT: tl.constexpr, EXTRA: tl.constexpr,
               PAGE: tl.constexpr, WRITES: tl.constexpr, LOW_BLOCK: tl.constexpr, LATENT_BLOCK: tl.constexpr,
               EXTRA_BLOCK: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """Program 0 of a token norms the query, program 1 the latent."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        i = tl.arange(0, LOW_BLOCK)
        at = q_ptr + token * q_stride + i
        low = tl.load(at, mask=i < LOW, other=0.0).to(tl.float32)
        q_norm = tl.load(q_norm_ptr + i, mask=i < LOW, other=0.0)
        tl.store(at, _normed(low, q_norm, LOW, eps, q_ptr.dtype.element_ty), mask=i < LOW)
        return
    c, e = tl.arange(0, LATENT_BLOCK), tl.arange(0, EXTRA_BLOCK)
    row_ptr += token * row_stride
    x = tl.load(row_ptr + c, mask=c < LATENT, other=0.0).to(tl.float32)
    kv_norm = tl.load(kv_norm_ptr + c, mask=c < LATENT, other=0.0)
    latent = _normed(x, kv_norm, LATENT, eps, row_ptr.dtype.element_ty)
    tl.store(row_ptr + c, latent, mask=c < LATENT)
    if WRITES:
        write = tl.load(write_ptr + token).to(tl.int64)
        cache_ptr += (write // PAGE) * page_stride + (write % PAGE) * token_stride
        extra = tl.load(row_ptr + LATENT + e, mask=e < EXTRA, other=0.0)
        tl.store(cache_ptr + c, latent.to(cache_ptr.dtype.element_ty), mask=(c < LATENT) & (write >= 0))
        tl.store(cache_ptr + LATENT + e, extra.to(cache_ptr.dtype.element_ty), mask=(e < EXTRA) & (write >= 0))
