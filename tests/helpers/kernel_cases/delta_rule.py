"""KDA: decode, verify and fold, its convolution."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers.kernel_cases.common import Draw, case, near
from torch import Tensor

from miles_k3.k3.kernels.kda_decode import KdaDecodeWeights, kda_decode
from miles_k3.k3.kernels.kda_verify import kda_fold_, kda_verify_positions
from miles_k3.k3.kernels.packed_conv import packed_conv
from miles_k3.k3.ops import decode
from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.ops.short_conv import short_conv
from miles_k3.rollout.speculative.replay import ReplayBuffer

RECORDED = ("raw_TLD", "k_TLNK", "v_TLNV", "g_TLNK", "beta_TLN")


@case
def kda_decode_steps(device: torch.device, dtype: torch.dtype) -> None:
    """Three tokens in a row over scattered slots with padding rows; slots that nobody names don't change a bit."""
    heads, keys, values, width, slots = 3, 16, 32, 4, 6
    for seed, order in enumerate(([4, -1, 0, 2], [-1], [5])):
        draw, channels = Draw(device, dtype, seed), heads * (2 * keys + values)
        weights = KdaDecodeWeights(
            conv_D1W=draw.normal(channels, 1, width, dtype=torch.float32), eps=1e-5, lower_bound=-5.0,
            rate_N=draw.normal(heads, dtype=torch.float32).exp(), o_norm_V=draw.normal(values, dtype=torch.float32),
            dt_bias_NK=draw.normal(heads, keys, dtype=torch.float32),
        )  # fmt: skip
        pool = draw.normal(slots, heads * keys * values + 7, dtype=torch.float32)  # an odd stride between slots
        states = pool[:, : heads * keys * values].view(slots, heads, keys, values)
        windows = draw.normal(slots, width - 1, channels)
        slot = torch.tensor(order, dtype=torch.int32, device=device)
        live = [i for i, s in enumerate(order) if s >= 0]
        at = slot[live].long()
        state, window = states[at].clone(), windows[at].clone()
        idle = [s for s in range(slots) if s not in order]
        before = states[idle].clone(), windows[idle].clone()
        for _ in range(3):
            raw, f, beta, gate = (
                draw.normal(len(order), *s) for s in ((channels,), (heads, keys), (heads,), (heads, values))
            )
            out = kda_decode(raw, f, beta, gate, weights, states, windows, slot)
            expected = kda_twin(raw[live], f[live], beta[live], gate[live], weights, state, window)
            near(out[live], expected, dtype)
            near(states[at], state, torch.float32, 1.0 if dtype == torch.float32 else 100.0)
            assert torch.equal(windows[at], window)
            assert not out[[i for i in range(len(order)) if i not in live]].any()
        assert torch.equal(states[idle], before[0])
        assert torch.equal(windows[idle], before[1])


@case
def kda_verify_and_fold(device: torch.device, dtype: torch.dtype) -> None:
    """Against decode itself, bit for bit: every output of a verify, and states and windows after every count kept,
    with NaN in what was recorded behind; states and windows as they were until the fold. The last one is padding."""
    heads, keys, values, width, slots, layers = 2, 16, 32, 4, 5, 2
    lengths, order = [3, 1, 5, 2], [4, 0, 2, -1]
    draw, channels, total = Draw(device, dtype, 0), heads * (2 * keys + values), sum(lengths)
    weights = [
        KdaDecodeWeights(
            conv_D1W=draw.normal(channels, 1, width, dtype=torch.float32), eps=1e-5, lower_bound=-5.0,
            rate_N=draw.normal(heads, dtype=torch.float32).exp(), o_norm_V=draw.normal(values, dtype=torch.float32),
            dt_bias_NK=draw.normal(heads, keys, dtype=torch.float32),
        ) for _ in range(layers)
    ]  # fmt: skip
    states = draw.normal(layers, slots, heads, keys, values, dtype=torch.float32)
    windows = draw.normal(layers, slots, width - 1, channels)
    sizes = ((channels,), (heads, keys), (heads,), (heads, values))
    inputs = [[draw.normal(total, *size) for size in sizes] for _ in range(layers)]
    slot = torch.tensor(order, device=device)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    kept = ReplayBuffer(
        raw_TLD=draw.normal(total, layers, channels), k_TLNK=draw.normal(total, layers, heads, keys),
        v_TLNV=draw.normal(total, layers, heads, values),
        g_TLNK=draw.normal(total, layers, heads, keys, dtype=torch.float32),
        beta_TLN=draw.normal(total, layers, heads, dtype=torch.float32),
    )  # fmt: skip
    before = states.clone(), windows.clone()
    outs = []
    for n, (raw, f, beta, gate) in enumerate(inputs):
        outs.append(kda_verify_positions(raw, f, beta, gate, weights[n], states[n], windows[n], slot, cu, kept, n))
    assert torch.equal(states, before[0])
    assert torch.equal(windows, before[1])
    assert not any(out[-2:].any() for out in outs)
    for counts in ([3, 1, 5, 0], [0, 0, 4, 2], [2, 1, 0, 0], [1, 0, 2, 1]):
        state, window = states.clone(), windows.clone()
        for n in range(layers):
            for j in range(5):
                row = [int(cu[b]) + j if j < counts[b] else 0 for b in range(3)]
                at = torch.tensor([order[b] if j < counts[b] else -1 for b in range(3)], device=device)
                raw, f, beta, gate = (x[row] for x in inputs[n])
                out = kda_decode(raw, f, beta, gate, weights[n], state[n], window[n], at)
                for b in range(3):
                    assert j >= counts[b] or torch.equal(out[b], outs[n][row[b]]), (n, j, b)
        folded, rolled = states.clone(), windows.clone()
        poisoned = replace(kept, **{name: getattr(kept, name).clone() for name in RECORDED})
        for b, count in enumerate(counts):
            for name in RECORDED:
                getattr(poisoned, name)[int(cu[b]) + count : int(cu[b + 1])] = float("nan")
        kda_fold_(folded, rolled, slot, cu[:-1], torch.tensor(counts, device=device), poisoned)
        assert torch.equal(folded, state), counts
        assert torch.equal(rolled, window), counts


def kda_twin(raw: Tensor, f: Tensor, beta: Tensor, gate: Tensor, w: KdaDecodeWeights, state: Tensor, window: Tensor
             ) -> Tensor:  # fmt: skip
    """The engine's own steps on gathered rows."""
    heads, keys = f.shape[1:]
    values = gate.shape[2]
    y = decode.short_conv_step_(raw, w.conv_D1W, window)
    q, k, v = y.split([heads * keys, heads * keys, heads * values], dim=-1)
    g = w.lower_bound * torch.sigmoid(w.rate_N[:, None] * (f.float() + w.dt_bias_NK))
    o = decode.kda_step_(q.view(f.shape), k.view(f.shape), v.view(gate.shape), g, beta.float().sigmoid(), state)
    return (decode.rms_norm(o, w.o_norm_V, w.eps) * gate.float().sigmoid()).to(raw.dtype)


@case
def packed_convolution(device: torch.device, dtype: torch.dtype) -> None:
    """Sequences shorter than the kernel, with windows before them and without."""
    channels, width = 70, 4
    draw = Draw(device, dtype, 0)
    packed = Packed.from_lengths([1, 9, 2, 17], device)
    x, weight = draw.normal(packed.num_tokens, channels), draw.normal(width, channels, dtype=torch.float32)
    for window in (None, draw.normal(4, width - 1, channels)):
        expected = short_conv(x.float(), weight.t()[:, None], packed, None if window is None else window.float())
        near(packed_conv(x, weight, packed, window), expected, dtype)
