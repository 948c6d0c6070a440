# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""One token of KDA in one launch: convolution, norms, gate, delta rule, output norm and output gate (spec 2.3).

A program owns one head of one sequence: it reads that head's state once and writes it once, in place in the pool. The
plain twins are `ops.decode.short_conv_step_`, `kda_step_` and `rms_norm`, in that order.

Shapes: B rows of the batch, N heads, K key and V value channels, D = N * (2 K + V) convolved channels, W kernel width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import dependent, wait_for_inputs
from miles_k3.k3.ops.norm import L2_EPS

# At most 128 registers: two programs a multiprocessor, one waits for its state while the other computes.
LAUNCH = {"num_warps": 8, "maxnreg": 128, "enable_fp_fusion": False}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KdaDecodeWeights:
    """A layer's small parameters, fp32: conv [D, 1, W], rate [N] (exp of A_log), dt_bias [N, K], o_norm [V]."""

    conv_D1W: Tensor
    rate_N: Tensor
    dt_bias_NK: Tensor
    o_norm_V: Tensor
    eps: float
    lower_bound: float


def kda_decode(raw_BD: Tensor, f_BNK: Tensor, beta_BN: Tensor, gate_BNV: Tensor, weights: KdaDecodeWeights,
               states_SNKV: Tensor, windows_SWD: Tensor, slot_B: Tensor) -> Tensor:  # fmt: skip
    """[B, N, V] in raw's dtype, ready for o_proj; the pools' rows `slot_B` advance by one token in place.

    raw: q, k, v projections before the convolution; f, beta, gate: before their sigmoids. Pools: states fp32
    [slots, N, K, V] and windows [slots, W-1, D] with any stride between slots. A row whose slot is negative is padding:
    it touches no slot and gives zeros. Slots of one call differ. Raises ValueError on widths that it does not take.
    """
    num_rows, heads, keys = f_BNK.shape
    values = gate_BNV.shape[2]
    width = weights.conv_D1W.shape[2]
    if width != 4 or keys & (keys - 1) or values & (values - 1):
        raise ValueError(
            f"the convolution is {width} wide and heads are {keys} and {values}; the kernel takes 4 and powers of two"
        )
    out = raw_BD.new_empty(num_rows, heads, values)
    scratch = torch.empty(num_rows, heads, 3 * keys + values, device=raw_BD.device)
    if num_rows:
        _kda_decode[(heads, num_rows)](
            raw_BD, f_BNK, beta_BN, gate_BNV, weights.conv_D1W, weights.rate_N, weights.dt_bias_NK, weights.o_norm_V,
            states_SNKV, windows_SWD, slot_B, out, scratch, raw_BD.stride(0), f_BNK.stride(0), beta_BN.stride(0),
            gate_BNV.stride(0), states_SNKV.stride(0), windows_SWD.stride(0), windows_SWD.stride(1), weights.eps,
            weights.lower_bound, L2_EPS, keys**-0.5, HEADS=heads, KEYS=keys, VALUES=values,
            **LAUNCH, **dependent(),
        )  # fmt: skip
    return out


@triton.jit
def _convolve(raw_ptr, window_ptr, conv_ptr, channel, window_stride):
    """SiLU of one token's convolution over four taps, rounded to raw's dtype; and the taps that stay, newest last."""
    raw = tl.load(raw_ptr + channel)
    first = tl.load(window_ptr + channel)
    second = tl.load(window_ptr + window_stride + channel)
    third = tl.load(window_ptr + 2 * window_stride + channel)
    total = first.to(tl.float32) * tl.load(conv_ptr + channel * 4)
    total += second.to(tl.float32) * tl.load(conv_ptr + channel * 4 + 1)
    total += third.to(tl.float32) * tl.load(conv_ptr + channel * 4 + 2)
    total += raw.to(tl.float32) * tl.load(conv_ptr + channel * 4 + 3)
    value = (total * tl.sigmoid(total)).to(raw_ptr.dtype.element_ty).to(tl.float32)
    return value, second, third, raw.to(window_ptr.dtype.element_ty)


@triton.jit
def _push(window_ptr, channel, window_stride, first, second, third):
    tl.store(window_ptr + channel, first)
    tl.store(window_ptr + window_stride + channel, second)
    tl.store(window_ptr + 2 * window_stride + channel, third)


@triton.jit
def pass_key(scratch_ptr, k, v, g, key, value, l2_eps, KEYS: tl.constexpr):
    """Leave what moves a state in memory: each thread computes one channel here, and `advance` reads those of its part
    of the state after a barrier."""
    tl.store(scratch_ptr + KEYS + key, k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps))
    tl.store(scratch_ptr + 2 * KEYS + key, tl.exp(g))
    tl.store(scratch_ptr + 3 * KEYS + value, v)


@triton.jit
def pass_query(scratch_ptr, q, key, l2_eps, scale):
    """The same for `read`."""
    tl.store(scratch_ptr + key, q * (tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * scale))


@triton.jit
def advance(state, scratch_ptr, beta, key, value, KEYS: tl.constexpr):
    """The state one token later. Decode, verify and fold run this on tiles of one shape, without fused
    multiply-adds, so their states are equal bit for bit."""
    k = tl.load(scratch_ptr + KEYS + key)
    v = tl.load(scratch_ptr + 3 * KEYS + value)
    state = state * tl.load(scratch_ptr + 2 * KEYS + key)[:, None]
    u = beta * (v - tl.sum(k[:, None] * state, 0))
    return state + k[:, None] * u[None, :]


@triton.jit
def read(state, scratch_ptr, gate, norm, key, eps, VALUES: tl.constexpr):
    """A head's output after its norm and gate, fp32."""
    o = tl.sum(tl.load(scratch_ptr + key)[:, None] * state, 0)
    o = o * tl.rsqrt(tl.sum(o * o, 0) / VALUES + eps) * norm
    return o * tl.sigmoid(gate.to(tl.float32))


@triton.jit
def _kda_decode(raw_ptr, f_ptr, beta_ptr, gate_ptr, conv_ptr, rate_ptr, dt_ptr, norm_ptr, state_ptr, window_ptr,
                slot_ptr, out_ptr, scratch_ptr, raw_stride, f_stride, beta_stride, gate_stride, state_stride,
                window_slot_stride, window_stride, eps, lower_bound, l2_eps, scale, HEADS: tl.constexpr,
                KEYS: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    wait_for_inputs(PDL)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    out_at = out_ptr + (row * HEADS + head) * VALUES + value
    if slot < 0:
        tl.store(out_at, tl.zeros([VALUES], out_ptr.dtype.element_ty))
        return
    state_at = state_ptr + slot * state_stride + head * (KEYS * VALUES) + key[:, None] * VALUES + value[None, :]
    state = tl.load(state_at)
    raw_ptr += row * raw_stride
    window_ptr += slot * window_slot_stride
    q_channel = head * KEYS + key
    k_channel = HEADS * KEYS + q_channel
    v_channel = 2 * HEADS * KEYS + head * VALUES + value
    q, q1, q2, q3 = _convolve(raw_ptr, window_ptr, conv_ptr, q_channel, window_stride)
    k, k1, k2, k3 = _convolve(raw_ptr, window_ptr, conv_ptr, k_channel, window_stride)
    v, v1, v2, v3 = _convolve(raw_ptr, window_ptr, conv_ptr, v_channel, window_stride)
    f = tl.load(f_ptr + row * f_stride + head * KEYS + key).to(tl.float32)
    g = lower_bound * tl.sigmoid(tl.load(rate_ptr + head) * (f + tl.load(dt_ptr + head * KEYS + key)))
    scratch_ptr += (row * HEADS + head) * (3 * KEYS + VALUES)
    pass_key(scratch_ptr, k, v, g, key, value, l2_eps, KEYS)
    pass_query(scratch_ptr, q, key, l2_eps, scale)
    tl.debug_barrier()  # several threads read a tap that one of them moves
    _push(window_ptr, q_channel, window_stride, q1, q2, q3)
    _push(window_ptr, k_channel, window_stride, k1, k2, k3)
    _push(window_ptr, v_channel, window_stride, v1, v2, v3)
    beta = tl.sigmoid(tl.load(beta_ptr + row * beta_stride + head).to(tl.float32))
    state = advance(state, scratch_ptr, beta, key, value, KEYS)
    tl.store(state_at, state)
    gate = tl.load(gate_ptr + row * gate_stride + head * VALUES + value)
    o = read(state, scratch_ptr, gate, tl.load(norm_ptr + value), key, eps, VALUES)
    tl.store(out_at, o.to(out_ptr.dtype.element_ty))
