"""`miles-k3 bench moe|kda|attention`: the kernels at K3's widths beside the physical floor and plain torch, on one GPU.

The floor is bytes over a measured read of device memory, or FLOPs over a measured bf16 product, whichever takes longer;
both are measured in the same run. Every input is random; calls rotate over inputs, so that no cache holds the data.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_k3.bench.measures import Ceilings, Row, collected, timed
from miles_k3.errors import LaunchError
from miles_k3.k3.kernels.attn_res_norm import Write, attn_res_norm
from miles_k3.k3.kernels.dense_lora import segmented_lora_
from miles_k3.k3.kernels.fused_experts import fused_experts
from miles_k3.k3.kernels.grouped_mxfp4 import grouped_mxfp4, grouped_mxfp4_transposed
from miles_k3.k3.kernels.kda_decode import KdaDecodeWeights, kda_decode
from miles_k3.k3.kernels.mla_decode import mla_decode
from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts
from miles_k3.k3.kernels.router import choose_experts
from miles_k3.k3.ops import decode, mxfp4
from miles_k3.k3.ops.latent_moe import route
from miles_k3.k3.ops.lora import ExpertLoraTerm, LoraTerm, lora_delta
from miles_k3.k3.ops.norm import rms_norm
from miles_k3.k3.ops.residual_bank import ResidualBank

HIDDEN, LATENT, INNER, EXPERTS, TOP_K, RANK = 7168, 3584, 3072, 896, 16, 16
HEADS, DIM, NOPE, EXTRA, KV_LATENT, BANK_ROWS = 96, 128, 128, 64, 512, 8
BYTES = 17 / 32  # of an MXFP4 weight
BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def packed(*shape: int) -> tuple[Tensor, Tensor]:
    """Random codes with scales near 2^-11, for weights of about the size of a model's."""
    *rows, width = shape
    codes = torch.randint(0, 256, (*rows, width // 2), dtype=torch.uint8, device="cuda")
    return codes, torch.randint(114, 118, (*rows, width // 32), dtype=torch.uint8, device="cuda")


def chosen(tokens: int) -> Tensor:
    return torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, dim=1).indices


def expert_term() -> ExpertLoraTerm:
    return ExpertLoraTerm(
        a1=randn(RANK, LATENT) / 60, b1=randn(EXPERTS, INNER, RANK), a3=randn(RANK, LATENT) / 60,
        b3=randn(EXPERTS, INNER, RANK), a2=randn(EXPERTS, RANK, INNER) / 55, b2=randn(LATENT, RANK), scaling=2.0,
    )  # fmt: skip


def bench_moe(ceilings: Ceilings, tokens: Sequence[int]) -> Iterator[Row]:
    """Router and routed experts with and without LoRA, and at many tokens the grouped products of training."""
    codes13, scale13 = packed(EXPERTS, 2 * INNER, LATENT)
    codes2, scale2 = packed(EXPERTS, LATENT, INNER)
    w13, w2, lora = PackedExperts.of(codes13, scale13), PackedExperts.of(codes2, scale2), expert_term()
    for t in tokens:
        routes = [chosen(t) for _ in range(16 if t == 1 else 4 if t <= 256 else 1)]
        weights, z = torch.rand(t, TOP_K, device="cuda"), randn(t, LATENT)
        touched = statistics.mean(r.unique().numel() for r in routes)
        flops = 6.0 * t * TOP_K * LATENT * INNER
        yield _router_row(ceilings, t)
        for name, terms in (("experts", ()), (f"experts, LoRA rank {RANK}", (lora,))):
            extra = touched * 3 * INNER * RANK * 2 if terms else 0
            call = partial(fused_experts, z, weights, w13=w13, w2=w2, situ_beta=4.0, situ_linear_beta=25.0, lora=terms)
            yield Row(
                kernel=name, shape=f"{t} tokens, {touched:.0f} experts",
                ms=timed([partial(call, experts_TK=r) for r in routes]),
                floor_ms=ceilings.floor_ms(touched * 3 * INNER * LATENT * BYTES + extra, flops),
            )  # fmt: skip
        if t >= 1024:
            yield from _training_rows(ceilings, routes[0], (codes13, scale13), w13)


def _router_row(ceilings: Ceilings, tokens: int) -> Row:
    logits, bias = 3 * randn(tokens, EXPERTS, dtype=torch.float32), randn(EXPERTS, dtype=torch.float32)
    x, eye = logits, torch.eye(EXPERTS, device="cuda")
    call = partial(choose_experts, logits, bias, top_k=TOP_K, renormalize=True, scaling=1.0)
    peer = partial(route, x, eye, bias, top_k=TOP_K, renormalize=True, scaling=1.0)
    return Row(
        kernel="router, after its product", shape=f"{tokens} tokens", ms=timed([call] * 8),
        floor_ms=ceilings.floor_ms(logits.numel() * 4 + tokens * TOP_K * 12, 0), peer="torch, with an 896-wide product",
        peer_ms=timed([peer] * 8),
    )  # fmt: skip


def _training_rows(ceilings: Ceilings, experts_TK: Tensor, raw: tuple[Tensor, Tensor], w13: PackedExperts
                   ) -> Iterator[Row]:  # fmt: skip
    """Gate/up forward and its transpose, against a fresh dequantisation with torch's grouped_mm."""
    ends = torch.bincount(experts_TK.flatten(), minlength=EXPERTS).cumsum(0).int()
    rows = experts_TK.numel()
    x, dy = randn(rows, LATENT), randn(rows, 2 * INNER)
    flops, num_bytes = (
        4.0 * rows * LATENT * INNER,
        2 * EXPERTS * INNER * LATENT * BYTES + 2 * rows * (LATENT + 2 * INNER),
    )

    def plain(left: Tensor, transposed: bool) -> Tensor:
        weight = mxfp4.dequantize(*raw, BF16)
        return F.grouped_mm(left, weight if transposed else weight.transpose(1, 2), offs=ends)

    dense = mxfp4.dequantize(*raw, BF16)
    resident = [timed([partial(F.grouped_mm, *args, offs=ends)]) for args in ((x, dense.transpose(1, 2)), (dy, dense))]
    del dense
    calls = ((grouped_mxfp4, x, False), (grouped_mxfp4_transposed, dy, True))
    for (call, left, transposed), unpacked_ms in zip(calls, resident, strict=True):
        shape = f"{rows} rows, 2 x {INNER} by {LATENT}"
        row = Row(
            kernel=call.__name__, shape=shape, ms=timed([partial(call, left, w13, ends)]),
            floor_ms=ceilings.floor_ms(num_bytes, flops), peer="dequantise + grouped_mm",
            peer_ms=timed([partial(plain, left, transposed)], repeats=3),
        )  # fmt: skip
        yield row
        yield Row(kernel="grouped_mm on weights unpacked before", shape=shape, ms=unpacked_ms, floor_ms=row.floor_ms)


def bench_kda(ceilings: Ceilings, tokens: Sequence[int]) -> Iterator[Row]:
    """One decoded token a sequence, against fla's recurrent kernel alone and the engine's torch steps."""
    width = HEADS * DIM
    w = KdaDecodeWeights(
        conv_D1W=randn(3 * width, 1, 4, dtype=torch.float32), rate_N=randn(HEADS, dtype=torch.float32).exp(),
        dt_bias_NK=randn(HEADS, DIM, dtype=torch.float32), o_norm_V=randn(DIM, dtype=torch.float32), eps=1e-5,
        lower_bound=-5.0,
    )  # fmt: skip
    for t in tokens:
        copies = max(1, 32 // t)
        states = randn(copies * t, HEADS, DIM, DIM, dtype=torch.float32)
        windows = randn(copies * t, 3, 3 * width)
        raw, f, beta, gate = randn(t, 3 * width), randn(t, HEADS, DIM), randn(t, HEADS), randn(t, HEADS, DIM)
        slots = torch.randperm(copies * t, device="cuda").int().view(copies, t)
        calls = [partial(kda_decode, raw, f, beta, gate, w, states, windows, s) for s in slots]

        def steps(raw=raw, f=f, beta=beta, gate=gate, state=states[:t], window=windows[:t]) -> Tensor:
            q, k, v = decode.short_conv_step_(raw, w.conv_D1W, window).view(-1, 3, HEADS, DIM).unbind(1)
            g = w.lower_bound * torch.sigmoid(w.rate_N[:, None] * (f.float() + w.dt_bias_NK))
            o = decode.kda_step_(q, k, v, g, beta.float().sigmoid(), state)
            return decode.rms_norm(o, w.o_norm_V, w.eps).mul_(gate.float().sigmoid()).to(BF16)

        num_bytes = t * (2 * width * DIM * 4 + 6 * 3 * width * 2 + 2 * 3 * width)
        floor_ms = ceilings.floor_ms(num_bytes, 0)
        shape, ms = f"{t} sequences", timed(calls)
        peer_ms = timed([steps] * 2)
        yield Row(kernel="kda_decode", shape=shape, ms=ms, floor_ms=floor_ms, peer="torch steps", peer_ms=peer_ms)
        fla_ms = _fla_recurrent(t, states)
        if fla_ms is not None:
            yield Row(kernel="fla fused_recurrent_kda, the delta rule alone", shape=shape, ms=fla_ms, floor_ms=floor_ms)


def _fla_recurrent(tokens: int, states: Tensor) -> float | None:
    try:
        from fla.ops.kda import fused_recurrent_kda
    except ImportError:
        return None
    q, k, v, g = (randn(tokens, 1, HEADS, DIM) for _ in range(4))
    beta = torch.rand(tokens, 1, HEADS, device="cuda")
    call = partial(
        fused_recurrent_kda, q, k, v, -g.abs(), beta, initial_state=states[:tokens], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return timed([call] * 2)


def bench_attention(ceilings: Ceilings, tokens: Sequence[int], context: int = 8192) -> Iterator[Row]:
    """MLA over paged latents, attention residuals with their norm, dense LoRA of two versions."""
    for t in tokens:
        page, width = 64, KV_LATENT + EXTRA
        pages = context // page
        cache = randn(t * pages, page, width)
        table = torch.randperm(t * pages, device="cuda").int().view(t, pages)
        length = torch.full((t,), context, dtype=torch.int32, device="cuda")
        q, w_k, w_v = (
            randn(t, HEADS, NOPE + EXTRA),
            randn(HEADS, NOPE, KV_LATENT) / 11,
            randn(HEADS, DIM, KV_LATENT) / 22,
        )
        bias = torch.zeros(t, 1, context, device="cuda")
        gathered = cache[table.long()].flatten(1, 2)
        num_bytes = t * context * width * 2 + (w_k.numel() + w_v.numel()) * 2
        yield Row(
            kernel="mla_decode", shape=f"{t} x {context} tokens", peer="torch, pages gathered before",
            ms=timed([partial(mla_decode, q, cache, table, length, w_k, w_v)] * 4),
            floor_ms=ceilings.floor_ms(num_bytes, 2.0 * t * context * HEADS * (2 * KV_LATENT + EXTRA)),
            peer_ms=timed([partial(decode.mla_step, q, gathered, bias, w_k, w_v)] * 2),
        )  # fmt: skip
        del cache, gathered
        yield _residual_row(ceilings, t)
        yield _lora_row(ceilings, t)


def _residual_row(ceilings: Ceilings, tokens: int) -> Row:
    copies = max(1, 128 // tokens)
    banks = [ResidualBank(randn(tokens, HIDDEN), BANK_ROWS + 1) for _ in range(copies)]
    for bank in banks:
        for _ in range(BANK_ROWS):
            bank.bank(randn(tokens, HIDDEN))
    query, weight, output = randn(HIDDEN, dtype=torch.float32) / 85, randn(HIDDEN), randn(tokens, HIDDEN)

    def plain(bank: ResidualBank) -> Tensor:
        bank.add(output)
        return rms_norm(bank.mix(query), weight, 1e-5)

    calls = [partial(attn_res_norm, b.rows_NTH, BANK_ROWS, query, weight, 1e-5, output, Write.ADD) for b in banks]
    return Row(
        kernel="attn_res_norm", shape=f"{tokens} tokens, {BANK_ROWS} + 1 rows", ms=timed(calls), peer="torch",
        floor_ms=ceilings.floor_ms((BANK_ROWS + 4) * tokens * HIDDEN * 2, 0),
        peer_ms=timed([partial(plain, b) for b in banks]),
    )  # fmt: skip


def _lora_row(ceilings: Ceilings, tokens: int) -> Row:
    width, out = HIDDEN, HEADS * DIM
    factors = [(randn(RANK, width) / 85, randn(out, RANK)) for _ in range(2)]
    slot = torch.randint(-1, 2, (tokens,), device="cuda", dtype=torch.int32)
    x, y = randn(tokens, width), randn(tokens, out)
    terms = [LoraTerm(a, b, 1.0, (slot == i).to(BF16)[:, None]) for i, (a, b) in enumerate(factors)]
    num_bytes = 2 * (tokens * (width + 2 * out) + 2 * RANK * (width + out))

    def plain() -> Tensor:
        delta = lora_delta(x, terms)
        assert delta is not None
        return y.add_(delta)

    return Row(
        kernel="segmented_lora_", shape=f"{tokens} tokens, 2 of rank {RANK}", peer="torch, a term an adapter",
        ms=timed([partial(segmented_lora_, y, x, slot, factors, (1.0, 1.0))] * 4),
        floor_ms=ceilings.floor_ms(num_bytes, 0), peer_ms=timed([plain] * 4),
    )  # fmt: skip


BENCHES = {
    "moe": (bench_moe, (1, 8, 64, 8192)),
    "kda": (bench_kda, (1, 8, 64)),
    "attention": (bench_attention, (1, 8, 64)),
}


def run(name: str, tokens: Sequence[int] | None = None, told: Callable[[Row], None] = lambda _: None
        ) -> tuple[Ceilings, list[Row]]:  # fmt: skip
    """A bench's rows, `told` as they come. Raises LaunchError where there is no GPU."""
    if not torch.cuda.is_available():
        raise LaunchError(f"miles-k3 bench {name} measures Triton kernels and found no CUDA device; run it on a GPU")
    bench, usual = BENCHES[name]
    with torch.inference_mode():
        ceilings = Ceilings.measure()
        return ceilings, collected(bench(ceilings, tokens or usual), told)
