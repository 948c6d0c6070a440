"""K3's Triton kernels against their plain twins, on any device: a GPU, or a CPU in Triton's interpreter.

`python -m helpers.kernel_cases` (with TRITON_INTERPRET=1) runs each case on the CPU in fp32 and prints name -> error.
Fresh memory is full of NaN, so an output that nobody wrote shows.

Tolerance, of the largest value: fp32 1e-5, the rounding of sums of at most a few hundred products in another order.
bfloat16 2e-2 where the twin rounds every intermediate to 8 bits (2^-9 each, a few of them in a row).
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from miles_k3.k3.kernels import grouped_mxfp4 as grouped
from miles_k3.k3.kernels.attn_res_norm import Write, attn_res_norm
from miles_k3.k3.kernels.block_attention import block_attention
from miles_k3.k3.kernels.dense_lora import segmented_lora_, situ_with_lora
from miles_k3.k3.kernels.fused_experts import fused_experts
from miles_k3.k3.kernels.grouped_mxfp4 import Shape, grouped_mxfp4_linear
from miles_k3.k3.kernels.kda_decode import KdaDecodeWeights, kda_decode
from miles_k3.k3.kernels.kda_verify import kda_fold_, kda_verify_positions
from miles_k3.k3.kernels.mla_decode import mla_decode
from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts
from miles_k3.k3.kernels.packed_conv import packed_conv
from miles_k3.k3.kernels.router import choose_experts
from miles_k3.k3.kernels.row_norms import gated_heads, mla_norms_, rms_norm_rows
from miles_k3.k3.kernels.skinny import MOST_ROWS, Product, products_
from miles_k3.k3.kernels.tiles import Tiles, dispatch
from miles_k3.k3.ops import decode, mxfp4
from miles_k3.k3.ops.latent_moe import RENORM_EPS, Dispatch, grouped_linear_naive, latent_experts
from miles_k3.k3.ops.lora import ExpertLoraTerm, LoraTerm, lora_delta
from miles_k3.k3.ops.norm import rms_norm
from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.ops.residual_bank import ResidualBank
from miles_k3.k3.ops.short_conv import short_conv
from miles_k3.k3.ops.situ import situ
from miles_k3.k3.weights import ExpertBank
from miles_k3.rollout.speculative.draft import DraftContext
from miles_k3.rollout.speculative.replay import ReplayBuffer
from miles_k3.trainer.model import experts as trainer_experts
from miles_k3.trainer.model.experts import Factors

RECORDED = ("raw_TLD", "k_TLNK", "v_TLNV", "g_TLNK", "beta_TLN")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CASES: dict[str, Callable[[torch.device, torch.dtype], None]] = {}


def case(check: Callable[[torch.device, torch.dtype], None]) -> Callable[[torch.device, torch.dtype], None]:
    CASES[check.__name__] = check
    return check


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Fresh tensors hold NaN (integers: their largest value)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    scale = max(expected.abs().max().item(), 1e-6) if expected.numel() else 1.0
    limit = factor * TOLERANCE[dtype] * scale
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=limit)


class Draw:
    """Random tensors of one seed on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def packed(self, *shape: int, scales: tuple[int, int] = (120, 125)) -> tuple[Tensor, Tensor]:
        *rows, width = shape
        codes = self.integers(0, 256, *rows, width // 2, dtype=torch.uint8)
        return codes, self.integers(*scales, *rows, width // 32, dtype=torch.uint8)

    def chosen(self, tokens: int, top_k: int, experts: int) -> Tensor:
        order = torch.rand(tokens, experts, generator=self.generator).argsort(1)
        return order[:, :top_k].to(self.device)


LOADS = {
    "ragged": [3, 0, 17, 1, 21], "empty ends": [0, 5, 0], "one token": [0, 1, 0, 0], "all to one": [0, 40, 0],
    "nothing": [0, 0],
}  # fmt: skip
SMALL = Shape(outputs=32, columns=16, rows=16, stages=2)
TWO_PARTS = replace(SMALL, more_rows=16)
NARROW = replace(SMALL, rows=8, warps=2)


@case
def grouped_mxfp4(device: torch.device, dtype: torch.dtype) -> None:
    """Forward and gradient over ragged loads; widths that divide no block, and scale bytes beyond 128."""
    for i, loads in enumerate(LOADS.values()):
        out, width = ((40, 128), (64, 64))[i % 2]
        draw = Draw(device, dtype, i)
        packed, scale = draw.packed(len(loads), out, width, scales=((100, 140), (120, 125))[i % 2])
        weight = PackedExperts.of(packed, scale)
        ends = torch.tensor(loads, device=device).cumsum(0).int()
        x, grad = draw.normal(sum(loads), width).requires_grad_(), draw.normal(sum(loads), out)
        y = grouped_mxfp4_linear(x, weight, ends)
        (dx,) = torch.autograd.grad(y, x, grad)
        x32 = x.detach().float().requires_grad_()
        expected = grouped_linear_naive(x32, mxfp4.dequantize(packed, scale), ends)
        (expected_dx,) = torch.autograd.grad(expected, x32, grad.float())
        near(y, expected, dtype)
        near(dx, expected_dx, dtype)
        if i == 0:
            for shape in (NARROW, SMALL, TWO_PARTS):
                near(grouped.grouped_mxfp4(x.detach(), weight, ends, shape), expected, dtype)
            for shape in (SMALL, TWO_PARTS):
                near(grouped.grouped_mxfp4_transposed(grad, weight, ends, shape), expected_dx, dtype)


@case
def mxfp4_every_code(device: torch.device, dtype: torch.dtype) -> None:
    """All 256 code bytes under all scale bytes that don't overflow: exact, and NaN for scale 255."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)[None]
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)[None].contiguous()
    rows = slice(40, 251) if dtype == torch.bfloat16 else slice(0, 252)
    for chosen in (slice(40, 129), rows, slice(255, 256)):
        packed, scales = codes[:, chosen].contiguous().to(device), scale[:, chosen].contiguous().to(device)
        ends = torch.tensor([32], dtype=torch.int32, device=device)
        at = torch.arange(0, 512, 16)
        x = torch.zeros(32, 512)
        x[torch.arange(32), at] = 1.0  # each row reads one column, so nothing is summed
        x = x.to(device, dtype)
        expected = mxfp4.dequantize(packed, scales)[0, :, at.to(device)].t()
        y = grouped_mxfp4_linear(x, PackedExperts.of(packed, scales), ends)
        if chosen.start == 255:
            packed.fill_(0x11)  # no zero, which would make NaN of an infinite factor too
            y = grouped_mxfp4_linear(torch.ones_like(x[:2]), PackedExperts.of(packed, scales), ends // 16)
            assert y.isnan().all()
        else:
            assert torch.equal(y.float(), expected), (chosen, (y.float() - expected).abs().max())


@case
def tiles_and_dispatch(device: torch.device, dtype: torch.dtype) -> None:
    """The quick launch sorts as torch does and cuts the tiles that `Tiles.of` cuts."""
    for i, (tokens, top_k, experts, block) in enumerate([(1, 1, 1, 1), (1, 4, 9, 16), (37, 3, 11, 4), (90, 5, 7, 32)]):
        chosen = Draw(device, dtype, i).chosen(tokens, top_k, experts)
        routed, twin = dispatch(chosen, experts, block), Dispatch.of(chosen, experts)
        assert torch.equal(routed.order_M.long(), twin.order_M)
        tiles = Tiles.of(twin.ends_E, chosen.numel(), block)
        found, expected = (
            [row for row in zip(*(x.tolist() for x in (t.expert_G, t.start_G, t.rows_G)), strict=True) if row[2]]
            for t in (routed.tiles, tiles)
        )
        assert found == expected


def expert_term(draw: Draw, experts: int, latent: int, inner: int, rank: int, rows: Tensor | None) -> ExpertLoraTerm:
    return ExpertLoraTerm(
        a1=draw.normal(rank, latent) / 8, b1=draw.normal(experts, inner, rank), a3=draw.normal(rank, latent) / 8,
        b3=draw.normal(experts, inner, rank), a2=draw.normal(experts, rank, inner) / 8, b2=draw.normal(latent, rank),
        scaling=0.7, rows_T1=rows,
    )  # fmt: skip


def fp32_term(term: ExpertLoraTerm) -> ExpertLoraTerm:
    factors = {name: getattr(term, name).float() for name in ("a1", "b1", "a3", "b3", "a2", "b2")}
    return ExpertLoraTerm(**factors, scaling=term.scaling, rows_T1=term.rows_T1)


@case
def fused_experts_and_lora(device: torch.device, dtype: torch.dtype) -> None:
    """No adapter, one, and two versions with tokens of neither; ragged loads; every form of a tile."""
    experts, latent, inner, top_k = 5, 64, 64, 3
    betas = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
    cases = [(9, 0, SMALL), (9, 1, NARROW), (11, 2, TWO_PARTS), (1, 1, NARROW)]
    for i, (tokens, adapters, shape) in enumerate(cases):
        draw = Draw(device, dtype, i)
        w13, w2 = draw.packed(experts, 2 * inner, latent), draw.packed(experts, latent, inner)
        z, chosen = draw.normal(tokens, latent), draw.chosen(tokens, top_k, experts)
        chosen[: tokens // 2] = chosen[0]  # some experts get most rows
        weights = draw.normal(tokens, top_k, dtype=torch.float32).sigmoid()
        which = torch.arange(tokens, device=device)[:, None] % 3
        masks = [None] if adapters == 1 else [(which == a).float() for a in range(adapters)]
        terms = [expert_term(draw, experts, latent, inner, 5, mask) for mask in masks]
        packs = PackedExperts.of(*w13), PackedExperts.of(*w2)
        out = fused_experts(z, weights, chosen, *packs, lora=terms, shape=shape, **betas)
        expected = latent_experts(
            z.float(), weights, chosen, mxfp4.dequantize(*w13), mxfp4.dequantize(*w2),
            lora=[fp32_term(t) for t in terms], **betas,
        )  # fmt: skip
        near(out, expected, dtype)


def stable_route(logits: Tensor, bias: Tensor, top_k: int, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """`route` after its product, with a stable sort: of equal scores the lower expert first."""
    scores = torch.sigmoid(logits)
    chosen = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    if forced is not None:
        chosen = torch.where((forced >= 0).all(-1, keepdim=True), forced, chosen)
    weights = scores.gather(1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + RENORM_EPS), chosen


@case
def router(device: torch.device, dtype: torch.dtype) -> None:
    """Random scores, exact ties, saturated scores, negative sums and replayed experts: the same experts in order."""
    for i, (tokens, experts, top_k) in enumerate([(1, 8, 2), (7, 896, 16), (5, 33, 5)]):
        draw = Draw(device, torch.float32, i)
        logits, bias = 3 * draw.normal(tokens, experts), 0.5 * draw.normal(experts)
        forced = draw.integers(0, experts, tokens, top_k)
        forced[::2, 0] = -1
        tied = draw.integers(-2, 3, tokens, experts).float()
        for scores, shift, replay in (
            (logits, bias, None), (tied, torch.zeros_like(bias), None), (torch.zeros_like(logits), bias - 1, None),
            (200 * logits, torch.zeros_like(bias), None), (logits, bias, forced),
        ):  # fmt: skip
            found = choose_experts(scores, shift, top_k=top_k, renormalize=True, scaling=1.0, forced_TK=replay)
            expected = stable_route(scores, shift, top_k, replay)
            assert torch.equal(found[1], expected[1]), (i, found[1], expected[1])
            near(found[0], expected[0], torch.float32)


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
def attention_residuals(device: torch.device, dtype: torch.dtype) -> None:
    """A walk of writes as a model makes them, on a width that is no power of two."""
    tokens, hidden, most = 5, 96, 5
    draw = Draw(device, dtype, 0)
    embedding, weight = draw.normal(tokens, hidden), draw.normal(hidden)
    rows = torch.full((most, tokens, hidden), float("nan"), device=device, dtype=dtype)
    rows[0] = embedding
    bank, banked = ResidualBank(embedding, most), 0
    taps = torch.full((tokens, 3 * hidden), 7.0, device=device, dtype=dtype)
    for write in (Write.NOTHING, Write.BANK, Write.ADD, Write.BANK, Write.ADD, Write.ADD, Write.BANK, Write.NOTHING):
        query = 0.2 * draw.normal(hidden, dtype=torch.float32)
        output = None if write is Write.NOTHING else draw.normal(tokens, hidden)
        if output is not None:
            (bank.bank if write is Write.BANK else bank.add)(output)
        tap = taps[:, hidden : 2 * hidden]
        x, banked = attn_res_norm(rows, banked, query, weight, 1e-5, output, write, tap)
        near(x, rms_norm(bank.mix(query), weight, 1e-5), dtype)
        near(tap, bank.mix(query), dtype)
        assert (taps.unflatten(1, (3, hidden))[:, ::2] == 7.0).all()
        assert banked == bank.num_banked
        assert torch.equal(rows[: banked + 1], bank.rows_NTH[: banked + 1])


@case
def mla_decode_pages(device: torch.device, dtype: torch.dtype) -> None:
    """Ragged contexts, one token, padding; pages in any order with NaN behind each sequence's end and in free pages."""
    heads, nope, extra, latent, values, page, pages = 5, 16, 8, 32, 12, 8, 40
    for seed, (lengths, splits) in enumerate(itertools.product(([1, 70, 0, 33], [8]), (None, 1, 3))):
        draw = Draw(device, dtype, seed)
        pool = torch.full((pages, page, 2 * (latent + extra) + 8), float("nan"), device=device, dtype=dtype)
        cache = pool[:, :, latent + extra : 2 * (latent + extra)]  # the second layer's rows of each token
        table = torch.randperm(pages, generator=draw.generator)[: len(lengths) * -(-max(lengths) // page)]
        table = table.view(len(lengths), -1).to(device, torch.int32)
        gathered = torch.zeros(len(lengths), table.shape[1] * page, latent + extra, device=device, dtype=dtype)
        for b, length in enumerate(lengths):
            gathered[b, :length] = draw.normal(length, latent + extra)
            rows = cache[table[b].long()].flatten(0, 1)
            rows[:length] = gathered[b, :length]
            cache[table[b].long()] = rows.unflatten(0, (-1, page))
        q = draw.normal(len(lengths), heads, nope + extra)
        w_k, w_v = draw.normal(heads, nope, latent) / 4, draw.normal(heads, values, latent) / 4
        length = torch.tensor(lengths, dtype=torch.int32, device=device)
        out = mla_decode(q, cache, table, length, w_k, w_v, num_splits=splits)
        hidden = torch.arange(gathered.shape[1], device=device)[None, None] >= length[:, None, None]
        bias = torch.zeros(hidden.shape, device=device).masked_fill(hidden, -torch.inf)
        live = [b for b, n in enumerate(lengths) if n]
        expected = decode.mla_step(*(x.float() for x in (q, gathered, bias, w_k, w_v)))
        near(out[live], expected[live], dtype)
        assert not out[[b for b, n in enumerate(lengths) if not n]].any()


@case
def draft_block_attention(device: torch.device, dtype: torch.dtype) -> None:
    """Ragged contexts, none at all, queries that share heads; pages in any order, NaN behind each end and elsewhere."""
    for seed, (size, heads, kv_heads, width) in enumerate([(3, 6, 2, 20), (7, 8, 2, 64), (1, 4, 4, 16)]):
        draw, page, lengths = Draw(device, dtype, seed), 8, [1, 70, 0, 33]
        layers, numbers = 2, 2 * kv_heads * width
        pool = torch.full((40, page, 5 + layers * numbers), float("nan"), device=device, dtype=dtype)
        cache = pool[:, :, 5:]
        table = torch.randperm(40, generator=draw.generator)[:36].view(4, -1).to(device, torch.int32)
        gathered = torch.zeros(4, 72, layers * numbers, device=device, dtype=dtype)
        for b, length in enumerate(lengths):
            gathered[b, :length] = draw.normal(length, layers * numbers)
            rows = cache[table[b].long()].flatten(0, 1)
            rows[:length] = gathered[b, :length]
            cache[table[b].long()] = rows.unflatten(0, (-1, page))
        q, (k, v) = draw.normal(4, size, heads, width), (draw.normal(4, size, kv_heads, width) for _ in range(2))
        keys, values = gathered.float().unflatten(-1, (layers, 2, kv_heads, width))[:, :, 1].unbind(2)
        plain = DraftContext(keys=(keys,), values=(values,))
        length = torch.tensor(lengths, device=device)
        expected = plain.attention(length.unsqueeze(1), size)(0, q.float(), k.float(), v.float())
        near(block_attention(q, k, v, cache, table, length, numbers), expected, dtype)


@case
def segmented_lora(device: torch.device, dtype: torch.dtype) -> None:
    """Tokens of two adapters and of none, in any order; strided rows; an input width that divides no block."""
    for seed, (tokens, width, out, rank) in enumerate([(1, 40, 24, 4), (70, 200, 100, 5), (16, 1030, 64, 16)]):
        draw = Draw(device, dtype, seed)
        x, y = draw.normal(tokens, 2 * width)[:, :width], draw.normal(tokens, out + 3)[:, :out]
        factors = [(draw.normal(rank, width) / width**0.5, draw.normal(out, rank)) for _ in range(2)]
        slot = draw.integers(-1, 2, tokens, dtype=torch.int32)
        terms = [
            LoraTerm(a.float(), b.float(), s, (slot == i).float()[:, None])
            for i, ((a, b), s) in enumerate(zip(factors, (0.5, 2.0), strict=True))
        ]
        delta = lora_delta(x.float(), terms)
        assert delta is not None
        expected, before = y.float() + delta, y.clone()
        assert segmented_lora_(y, x, slot, factors, (0.5, 2.0)) is y
        near(y, expected, dtype)
        assert torch.equal(y[slot < 0], before[slot < 0])


@case
def skinny_products(device: torch.device, dtype: torch.dtype) -> None:
    """One row, a few, the most and more: weights of all sizes in one launch, strided outputs, fp32 ones, added ones."""
    for seed, (rows, inputs) in enumerate([(1, 40), (1, 2048), (3, 200), (MOST_ROWS, 64), (MOST_ROWS + 1, 96)]):
        draw = Draw(device, dtype, seed)
        x = draw.normal(rows, inputs + 5)[:, :inputs]
        weights = [draw.normal(width, inputs) / inputs**0.5 for width in (70, 1, 129)]
        side = torch.full((rows, 80), float("nan"), device=device, dtype=dtype)
        before = draw.normal(rows, 129)
        products = [
            Product(weights[0], side[:, 3:73]),
            Product(weights[1], torch.empty(rows, 1, device=device)),
            Product(weights[2], before.clone(), add=True),
        ]
        products_(x, products)
        for p, old in zip(products, (0.0, 0.0, before.float()), strict=True):
            near(p.out_TO, old + x.float() @ p.weight_OI.float().t(), dtype)
        assert side[:, :3].isnan().all()
        assert side[:, 73:].isnan().all()


@case
def situ_lora(device: torch.device, dtype: torch.dtype) -> None:
    """Without an adapter; gate and up with one A and with two; tokens of two adapters and of none."""
    width, rank, betas = 72, 5, (4.0, 25.0)
    for seed, (tokens, shared) in enumerate([(1, True), (21, False), (70, True)]):
        draw = Draw(device, dtype, seed)
        h, slot = 3 * draw.normal(tokens, 2 * width), draw.integers(-1, 2, tokens, dtype=torch.int32)
        near(situ_with_lora(h, betas), situ(h[:, :width].float(), h[:, width:].float(), *betas), dtype)
        lows = [draw.normal(2, tokens, rank).float() for _ in range(1 if shared else 2)]
        bs = [[draw.normal(width, rank) for _ in range(2)] for _ in range(2)]
        halves = []
        for half, low, factors in zip(h.float().chunk(2, dim=1), (lows[0], lows[-1]), bs, strict=True):
            total = half
            for s, scaling in enumerate((0.5, 2.0)):
                mine = (slot == s)[:, None].float()
                total = total + mine * scaling * (low[s].to(dtype).float() @ factors[s].float().t())
            halves.append(total)
        out = situ_with_lora(h, betas, lows[0], None if shared else lows[1], slot, bs[0], bs[1], (0.5, 2.0))
        near(out, situ(halves[0], halves[1], *betas), dtype)


@case
def norms_and_gates(device: torch.device, dtype: torch.dtype) -> None:
    """Rows of odd widths, gates beside strided heads, with and without each head's norm."""
    draw = Draw(device, dtype, 0)
    for rows, width in ((1, 40), (7, 100)):
        x, weight = draw.normal(rows, width + 3)[:, :width], draw.normal(width)
        near(rms_norm_rows(x, weight, 1e-5), rms_norm(x, weight, 1e-5), dtype)
    for heads, values in ((3, 24), (40, 16)):
        o, gate = (draw.normal(5, heads, values, dtype=d) for d in (torch.float32, dtype))
        norm = draw.normal(values)
        gated = gate.float().sigmoid().flatten(1)
        near(gated_heads(o, gate.flatten(1)), o.flatten(1) * gated, dtype)
        expected = rms_norm(o, norm.float(), 1e-5).flatten(1) * gated
        near(gated_heads(o.transpose(0, 1).contiguous().transpose(0, 1), gate.flatten(1), norm, 1e-5), expected, dtype)


@case
def mla_norms(device: torch.device, dtype: torch.dtype) -> None:
    """Both norms in place, the rows in the cache, padding and everybody else's rows untouched."""
    low, latent, extra, page, pages = 40, 32, 8, 4, 6
    for seed, write in enumerate(([5, -1, 22, 0], None)):
        draw = Draw(device, dtype, seed)
        q, row = draw.normal(4, low), draw.normal(4, latent + extra + 2)[:, : latent + extra]
        q_norm, kv_norm = draw.normal(low), draw.normal(latent)
        expected_q = rms_norm(q, q_norm, 1e-6)
        expected = torch.cat([rms_norm(row[:, :latent], kv_norm, 1e-6), row[:, latent:]], dim=1)
        width = latent + extra
        pool = draw.normal(pages, page, 2 * width + 3)
        cache, before = pool[:, :, width : 2 * width], pool.clone()  # the second layer's rows of each token
        twin = cache.clone()
        if write is None:
            mla_norms_(q, q_norm, row, kv_norm, 1e-6)
        else:
            mla_norms_(q, q_norm, row, kv_norm, 1e-6, cache, torch.tensor(write, device=device))
            live = [i for i, w in enumerate(write) if w >= 0]
            twin.view(-1, latent + extra)[[write[i] for i in live]] = row[live]
        near(q, expected_q, dtype)
        near(row, expected, dtype)
        assert torch.equal(cache, twin)
        assert torch.equal(pool[:, :, :width], before[:, :, :width])
        assert torch.equal(pool[:, :, 2 * width :], before[:, :, 2 * width :])


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


@case
def experts_of_the_trainer(device: torch.device, dtype: torch.dtype) -> None:
    """`expert_rows` on packed codes against itself on unpacked weights: the output and every gradient."""
    experts, latent, inner, rank, scaling = 4, 64, 64, 8, 0.7
    draw = Draw(device, dtype, 0)
    w13, w2 = draw.packed(experts, 2 * inner, latent), draw.packed(experts, latent, inner)
    ends = torch.tensor([3, 3, 20, 26], device=device).cumsum(0).int()
    rows = int(ends[-1])
    factors = Factors(
        draw.normal(rows, rank), draw.normal(rows, rank), draw.normal(experts, inner, rank),
        draw.normal(experts, inner, rank), draw.normal(experts, rank, inner) / 8, draw.normal(latent, rank),
    )  # fmt: skip
    x, weight, grad = draw.normal(rows, latent), draw.normal(rows).float().sigmoid(), draw.normal(rows, latent)
    found = []
    for takes in (False, True):
        bank = ExpertBank(*w13, *w2)
        inputs = [t.clone().requires_grad_() for t in (x, weight, *factors)]
        before, trainer_experts.takes_kernels = trainer_experts.takes_kernels, lambda _, takes=takes: takes
        try:
            lora = Factors(*inputs[2:])
            out = trainer_experts.expert_rows(inputs[0], inputs[1], ends, bank, (4.0, 25.0), scaling, lora)
            found.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
        finally:
            trainer_experts.takes_kernels = before
    for plain, fused in zip(*found, strict=True):
        near(fused, plain, dtype)


def main() -> None:
    """Every case on the CPU, as Triton's interpreter runs it."""
    results: dict[str, str] = {}
    for name, check in CASES.items():
        try:
            with nan_filled_memory():
                check(torch.device("cpu"), torch.float32)
            results[name] = ""
        except Exception:  # noqa: BLE001 - each case is reported by itself
            results[name] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
