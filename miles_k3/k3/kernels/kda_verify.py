# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""Verify and fold of ReplaySSM (spec 6.6): a few tokens of KDA that leave the state alone, and the state moved on.

Verify first makes what needs no state, convolutions, norms and decays, and keeps what would move one; then it runs a
request's positions one after the other with the state in registers. Fold
replays as many of them as were accepted, in all layers and heads at once. Both run decode's own functions on tiles of
decode's shape: what fold leaves is what decode would have left, bit for bit. The plain twins are
`rollout.speculative.verify.kda_verify` with `short_conv_verify`, and `ReplayBuffer.fold_`.

Shapes: T positions of the verify, B requests, L KDA layers, N heads, K key and V value channels, D = N * (2 K + V)
convolved channels, W kernel width.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.kda_decode import LAUNCH, KdaDecodeWeights, advance, pass_key, pass_query, read
from miles_k3.k3.ops.norm import L2_EPS


class Kept(Protocol):
    """Where a verify leaves what moves the states: by position and layer. g and beta are fp32."""

    @property
    def raw_TLD(self) -> Tensor: ...
    @property
    def k_TLNK(self) -> Tensor: ...
    @property
    def v_TLNV(self) -> Tensor: ...
    @property
    def g_TLNK(self) -> Tensor: ...
    @property
    def beta_TLN(self) -> Tensor: ...


def kda_verify_positions(raw_TD: Tensor, f_TNK: Tensor, beta_TN: Tensor, gate_TNV: Tensor, weights: KdaDecodeWeights,
                         states_SNKV: Tensor, windows_SWD: Tensor, slot_B: Tensor, cu_B1: Tensor, kept: Kept,
                         layer: int) -> Tensor:  # fmt: skip
    """[T, N, V] in raw's dtype, ready for o_proj, as `kda_decode` would give position by position; writes `kept`.

    Request b's positions are `cu_B1[b]` to `cu_B1[b + 1]`; its state and window are read only. One whose slot is
    negative is padding: its positions give zeros, and nothing of them is kept.
    """
    num_rows, heads, keys = f_TNK.shape
    values = gate_TNV.shape[2]
    out = raw_TD.new_empty(num_rows, heads, values)
    scratch = torch.empty(num_rows, heads, 3 * keys + values, device=raw_TD.device)
    at = [t[:, layer] for t in (kept.raw_TLD, kept.k_TLNK, kept.v_TLNV, kept.g_TLNK, kept.beta_TLN)]
    if not num_rows:
        return out
    grid, widths = (heads, slot_B.shape[0]), {"HEADS": heads, "KEYS": keys, "VALUES": values}
    _prepare[grid](
        raw_TD, f_TNK, beta_TN, weights.conv_D1W, weights.rate_N, weights.dt_bias_NK, windows_SWD, slot_B, cu_B1, *at,
        scratch, raw_TD.stride(0), f_TNK.stride(0), beta_TN.stride(0), windows_SWD.stride(0), windows_SWD.stride(1),
        *(t.stride(0) for t in at), weights.lower_bound, L2_EPS, keys**-0.5, **widths, **LAUNCH,
    )  # fmt: skip
    kept_beta_TN = at[-1]
    _verify[grid](
        kept_beta_TN, gate_TNV, weights.o_norm_V, states_SNKV, slot_B, cu_B1, out, scratch, kept_beta_TN.stride(0),
        gate_TNV.stride(0), states_SNKV.stride(0), weights.eps, **widths, **LAUNCH,
    )  # fmt: skip
    return out


def kda_fold_(states_LSNKV: Tensor, windows_LSWD: Tensor, slot_B: Tensor, first_B: Tensor, count_B: Tensor, kept: Kept
              ) -> None:  # fmt: skip
    """Move each slot on by `count_B` positions from `first_B`, in place; what lies behind them is never read.

    Padding has a negative slot.
    """
    layers, _, heads, keys, values = states_LSNKV.shape
    batch, taps, channels = slot_B.shape[0], windows_LSWD.shape[2], windows_LSWD.shape[3]
    if not batch:
        return
    scratch = torch.empty(batch, layers, heads, 3 * keys + values, device=states_LSNKV.device)
    parts = (kept.k_TLNK, kept.v_TLNV, kept.g_TLNK, kept.beta_TLN)
    _fold[(heads, batch, layers)](
        states_LSNKV, slot_B, first_B, count_B, *parts, scratch, states_LSNKV.stride(0), states_LSNKV.stride(1),
        *(t.stride(0) for t in parts), *(t.stride(1) for t in parts), L2_EPS, HEADS=heads, KEYS=keys, VALUES=values,
        LAYERS=layers, **LAUNCH,
    )  # fmt: skip
    _roll[(triton.cdiv(channels, 1024), batch, layers)](
        windows_LSWD, kept.raw_TLD, slot_B, first_B, count_B, windows_LSWD.stride(0), windows_LSWD.stride(1),
        windows_LSWD.stride(2), kept.raw_TLD.stride(0), kept.raw_TLD.stride(1), channels, TAPS=taps, BLOCK=1024,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _convolved(first, second, third, raw, conv_ptr, channel, DTYPE: tl.constexpr):
    """SiLU over four taps in decode's order, rounded to raw's dtype."""
    total = first.to(tl.float32) * tl.load(conv_ptr + channel * 4)
    total += second.to(tl.float32) * tl.load(conv_ptr + channel * 4 + 1)
    total += third.to(tl.float32) * tl.load(conv_ptr + channel * 4 + 2)
    total += raw.to(tl.float32) * tl.load(conv_ptr + channel * 4 + 3)
    return (total * tl.sigmoid(total)).to(DTYPE).to(tl.float32)


@triton.jit
def _prepare(raw_ptr, f_ptr, beta_ptr, conv_ptr, rate_ptr, dt_ptr, window_ptr, slot_ptr, cu_ptr, kept_raw, kept_k,
             kept_v, kept_g, kept_beta, scratch_ptr, raw_stride, f_stride, beta_stride, window_slot_stride,
             window_stride, kept_raw_stride, kept_k_stride, kept_v_stride, kept_g_stride, kept_beta_stride, lower_bound,
             l2_eps, scale, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr):  # fmt: skip
    """All of one head's positions that needs no state: what moves it is kept, and passed on with the queries. The taps
    stay in registers from position to position."""
    head, request = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    if slot < 0:
        return
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    row = tl.load(cu_ptr + request).to(tl.int64)
    end = tl.load(cu_ptr + request + 1).to(tl.int64)
    window_ptr += slot * window_slot_stride
    qc, vc = head * KEYS + key, 2 * HEADS * KEYS + head * VALUES + value
    kc = HEADS * KEYS + qc
    q1, k1, v1 = tl.load(window_ptr + qc), tl.load(window_ptr + kc), tl.load(window_ptr + vc)
    window_ptr += window_stride
    q2, k2, v2 = tl.load(window_ptr + qc), tl.load(window_ptr + kc), tl.load(window_ptr + vc)
    window_ptr += window_stride
    q3, k3, v3 = tl.load(window_ptr + qc), tl.load(window_ptr + kc), tl.load(window_ptr + vc)
    rate, dt = tl.load(rate_ptr + head), tl.load(dt_ptr + head * KEYS + key)
    DTYPE: tl.constexpr = raw_ptr.dtype.element_ty
    TAP: tl.constexpr = window_ptr.dtype.element_ty
    while row < end:
        raw_at = raw_ptr + row * raw_stride
        q4, k4, v4 = tl.load(raw_at + qc), tl.load(raw_at + kc), tl.load(raw_at + vc)
        q = _convolved(q1, q2, q3, q4, conv_ptr, qc, DTYPE)
        k = _convolved(k1, k2, k3, k4, conv_ptr, kc, DTYPE)
        v = _convolved(v1, v2, v3, v4, conv_ptr, vc, DTYPE)
        f = tl.load(f_ptr + row * f_stride + head * KEYS + key).to(tl.float32)
        g = lower_bound * tl.sigmoid(rate * (f + dt))
        beta = tl.sigmoid(tl.load(beta_ptr + row * beta_stride + head).to(tl.float32))
        kept_at = kept_raw + row * kept_raw_stride
        tl.store(kept_at + qc, q4)
        tl.store(kept_at + kc, k4)
        tl.store(kept_at + vc, v4)
        tl.store(kept_k + row * kept_k_stride + head * KEYS + key, k.to(DTYPE))
        tl.store(kept_v + row * kept_v_stride + head * VALUES + value, v.to(DTYPE))
        tl.store(kept_g + row * kept_g_stride + head * KEYS + key, g)
        tl.store(kept_beta + row * kept_beta_stride + head, beta)
        own_ptr = scratch_ptr + (row * HEADS + head) * (3 * KEYS + VALUES)
        pass_key(own_ptr, k, v, g, key, value, l2_eps, KEYS)
        pass_query(own_ptr, q, key, l2_eps, scale)
        q1, q2, q3 = q2, q3, q4.to(TAP)
        k1, k2, k3 = k2, k3, k4.to(TAP)
        v1, v2, v3 = v2, v3, v4.to(TAP)
        row += 1


@triton.jit
def _verify(beta_ptr, gate_ptr, norm_ptr, state_ptr, slot_ptr, cu_ptr, out_ptr, scratch_ptr, beta_stride, gate_stride,
            state_stride, eps, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr):  # fmt: skip
    """One head of one request: its state stays in registers from position to position. `beta_ptr`: its sigmoid."""
    head, request = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    row = tl.load(cu_ptr + request).to(tl.int64)
    end = tl.load(cu_ptr + request + 1).to(tl.int64)
    if slot < 0:
        at = row
        while at < end:
            tl.store(out_ptr + (at * HEADS + head) * VALUES + value, tl.zeros([VALUES], out_ptr.dtype.element_ty))
            at += 1
        return
    state_at = state_ptr + slot * state_stride + head * (KEYS * VALUES) + key[:, None] * VALUES + value[None, :]
    state = tl.load(state_at)
    norm = tl.load(norm_ptr + value)
    while row < end:
        own_ptr = scratch_ptr + (row * HEADS + head) * (3 * KEYS + VALUES)
        state = advance(state, own_ptr, tl.load(beta_ptr + row * beta_stride + head), key, value, KEYS)
        gate = tl.load(gate_ptr + row * gate_stride + head * VALUES + value)
        o = read(state, own_ptr, gate, norm, key, eps, VALUES)
        tl.store(out_ptr + (row * HEADS + head) * VALUES + value, o.to(out_ptr.dtype.element_ty))
        row += 1


@triton.jit
def _fold(state_ptr, slot_ptr, first_ptr, count_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, scratch_ptr, layer_stride,
          state_stride, k_stride, v_stride, g_stride, beta_stride, k_layer, v_layer, g_layer, beta_layer, l2_eps,
          HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, LAYERS: tl.constexpr):  # fmt: skip
    head, request, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.load(count_ptr + request)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    if (count == 0) | (slot < 0):
        return
    row = tl.load(first_ptr + request).to(tl.int64)
    end = row + count
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    state_ptr += layer * layer_stride + slot * state_stride + head * (KEYS * VALUES)
    state_at = state_ptr + key[:, None] * VALUES + value[None, :]
    state = tl.load(state_at)
    scratch_ptr += ((request * LAYERS + layer) * HEADS + head) * (3 * KEYS + VALUES)
    while row < end:
        k = tl.load(k_ptr + row * k_stride + layer * k_layer + head * KEYS + key).to(tl.float32)
        v = tl.load(v_ptr + row * v_stride + layer * v_layer + head * VALUES + value).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + layer * g_layer + head * KEYS + key)
        beta = tl.load(beta_ptr + row * beta_stride + layer * beta_layer + head)
        pass_key(scratch_ptr, k, v, g, key, value, l2_eps, KEYS)
        tl.debug_barrier()
        state = advance(state, scratch_ptr, beta, key, value, KEYS)
        tl.debug_barrier()  # the next position writes where others may still read
        row += 1
    tl.store(state_at, state)


@triton.jit
def _roll(window_ptr, raw_ptr, slot_ptr, first_ptr, count_ptr, layer_stride, slot_stride, tap_stride, raw_stride,
          raw_layer, channels, TAPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The last TAPS inputs of each request, of its old window where too few were kept. A tap moves to an earlier one,
    so each is read before it is written."""
    request, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(count_ptr + request)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    if (count == 0) | (slot < 0):
        return
    first = tl.load(first_ptr + request).to(tl.int64)
    window_ptr += layer * layer_stride + slot * slot_stride
    raw_ptr += layer * raw_layer
    for tap in tl.static_range(TAPS):
        behind = count - TAPS + tap  # position of the request that belongs here; before 0: in the old window
        fresh = tl.load(raw_ptr + (first + behind) * raw_stride + d, mask=(d < channels) & (behind >= 0), other=0.0)
        old_at = window_ptr + (tap + count) * tap_stride + d
        old = tl.load(old_at, mask=(d < channels) & (behind < 0), other=0.0)
        moved = tl.where(behind >= 0, fresh.to(window_ptr.dtype.element_ty), old)
        tl.store(window_ptr + tap * tap_stride + d, moved, mask=d < channels)
