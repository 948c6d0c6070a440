"""Compile the Triton kernels at Kimi K3's widths for a GPU that needn't be there, and say what each one takes.

Nothing is launched: inputs lie on the CPU, and a driver that only names its target stands in for CUDA's. Registers,
spilled bytes and hazards (`wgmma_hazards.py`) are those of the assembled code. The code goes to Triton's cache, so a
machine with the GPU and the same Triton finds it there.

    python scripts/compile_kernels.py --capability 90 [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from wgmma_hazards import hazards

from miles_k3.k3.kernels.attn_res_norm import Write, attn_res_norm
from miles_k3.k3.kernels.block_attention import block_attention
from miles_k3.k3.kernels.dense_lora import segmented_lora_, situ_with_lora
from miles_k3.k3.kernels.fused_experts import fused_experts
from miles_k3.k3.kernels.grouped_mxfp4 import grouped_mxfp4, grouped_mxfp4_transposed
from miles_k3.k3.kernels.kda_decode import KdaDecodeWeights, kda_decode
from miles_k3.k3.kernels.kda_verify import kda_fold_, kda_verify_positions
from miles_k3.k3.kernels.launch import dependent_launches
from miles_k3.k3.kernels.mla_decode import paged_read
from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts
from miles_k3.k3.kernels.packed_conv import packed_conv
from miles_k3.k3.kernels.router import choose_experts
from miles_k3.k3.kernels.row_norms import gated_heads, mla_norms_, rms_norm_rows
from miles_k3.k3.kernels.skinny import Product, products_
from miles_k3.k3.kernels.token_draw import draw_tokens
from miles_k3.k3.ops.lora import ExpertLoraTerm
from miles_k3.k3.ops.packed import Packed
from miles_k3.rollout.sglang.hooks.row_lora import ExpertFactors, RowHooks
from miles_k3.rollout.speculative.replay import ReplayBuffer

HIDDEN, LATENT, INNER, EXPERTS, TOP_K, RANK = 7168, 3584, 3072, 896, 16, 16
VOCAB = 163840
HEADS, DIM, KV_LATENT, EXTRA, LOW_QUERY, SLOTS = 96, 128, 512, 64, 1536, 4
FEW_EXPERTS = 16  # their number is no part of the code, but for the tile that it leads to
HOPPER = 90
EXPERT_LOADS = (1, 8, 11, 20, 40, 100, 146, 256)  # rows an expert, one for each form of a tile, and more
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """`shared` and `spilled` in bytes, of a block and of a thread; `hazards` of its asynchronous products: none where
    all is right; `waits` for the kernels before it by itself."""

    kernel: str
    call: str
    warps: int
    registers: int
    spilled: int
    shared: int
    hazards: int
    waits: bool


class _Target:
    """A driver of no device: compiles for `target`, and has nothing to launch on."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_only(capability: int, found: list[tuple[str, Any]]) -> Iterator[None]:
    """Within it a launch compiles its kernel and adds (name, compiled) to `found`."""
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, **options: Any) -> Any:
        options["warmup"] = True
        found.append((self.fn.__name__, run(self, *args, **options)))
        return found[-1][1]

    triton.runtime.driver.set_active(_Target(GPUTarget("cuda", capability, 32)))  # pyright: ignore[reportArgumentType]
    JITFunction.run = warm_up
    try:
        yield
    finally:
        JITFunction.run = run


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def calls() -> Iterator[tuple[str, Any]]:
    """(what it is, a call) for each form that serving and training take."""
    yield from _residual_calls()
    yield from _kda_calls()
    yield from _mla_calls()
    yield from _moe_calls()
    yield from _dense_calls()
    yield from _draw_calls()
    yield from _sglang_calls()


def _residual_calls() -> Iterator[tuple[str, Any]]:
    query, weight = randn(HIDDEN, dtype=torch.float32), randn(HIDDEN)
    for banked, write in ((0, Write.NOTHING), (1, Write.ADD), (2, Write.BANK), (8, Write.ADD)):
        rows, output = randn(banked + 2, 8, HIDDEN), None if write is Write.NOTHING else randn(8, HIDDEN)
        yield (
            f"{banked} banked",
            lambda r=rows, b=banked, o=output, w=write: attn_res_norm(r, b, query, weight, 1e-5, o, w),
        )
        yield (
            f"{banked} banked, tap",
            lambda r=rows, b=banked, o=output, w=write: attn_res_norm(
                r, b, query, weight, 1e-5, o, w, randn(8, 5 * HIDDEN)[:, :HIDDEN]
            ),
        )
    yield "hidden", lambda: rms_norm_rows(randn(8, HIDDEN), weight, 1e-5)
    yield "latent", lambda: rms_norm_rows(randn(8, LATENT), randn(LATENT), 1e-5)


def _kda_calls() -> Iterator[tuple[str, Any]]:
    channels, states = 3 * HEADS * DIM, randn(2, SLOTS, HEADS, DIM, DIM, dtype=torch.float32)
    windows, slot = randn(2, SLOTS, 3, channels), torch.zeros(2, dtype=torch.int32)
    weights = KdaDecodeWeights(
        conv_D1W=randn(channels, 1, 4, dtype=torch.float32), rate_N=randn(HEADS, dtype=torch.float32),
        dt_bias_NK=randn(HEADS, DIM, dtype=torch.float32), o_norm_V=randn(DIM, dtype=torch.float32), eps=1e-5,
        lower_bound=-5.0,
    )  # fmt: skip
    one = randn(2, channels), randn(2, HEADS, DIM), randn(2, HEADS), randn(2, HEADS, DIM)
    yield "a token", lambda: kda_decode(*one, weights, states[0], windows[0], slot)
    rows, wide = 16, slot.long()
    kept = ReplayBuffer(
        raw_TLD=randn(rows, 2, channels), k_TLNK=randn(rows, 2, HEADS, DIM), v_TLNV=randn(rows, 2, HEADS, DIM),
        g_TLNK=randn(rows, 2, HEADS, DIM, dtype=torch.float32), beta_TLN=randn(rows, 2, HEADS, dtype=torch.float32),
    )  # fmt: skip
    some = randn(rows, channels), randn(rows, HEADS, DIM), randn(rows, HEADS), randn(rows, HEADS, DIM)
    cu = torch.tensor([0, 8, 16])
    yield "verify", lambda: kda_verify_positions(*some, weights, states[0], windows[0], wide, cu, kept, 0)
    yield "fold", lambda: kda_fold_(states, windows, wide, cu[:-1], wide, kept)
    packed = Packed.from_lengths([30, 34])
    yield "prefill", lambda: packed_conv(randn(64, channels), randn(4, channels), packed)
    yield "prefill with windows", lambda: packed_conv(randn(64, channels), randn(4, channels), packed, windows[0, :2])
    o = randn(64, HEADS, DIM)
    yield "norm", lambda: gated_heads(o, randn(64, HEADS * DIM), weights.o_norm_V, 1e-5)


def _mla_calls() -> Iterator[tuple[str, Any]]:
    width, page = KV_LATENT + EXTRA, 64
    yield "gate", lambda: gated_heads(randn(8, HEADS, DIM), randn(8, HEADS * DIM))
    cache, write = randn(4, page, width), torch.zeros(8, dtype=torch.int32)
    low, row = randn(8, LOW_QUERY), randn(8, width)
    yield "to the cache", lambda: mla_norms_(low, randn(LOW_QUERY), row, randn(KV_LATENT), 1e-5, cache, write)
    yield "no cache", lambda: mla_norms_(low, randn(LOW_QUERY), row, randn(KV_LATENT), 1e-5)
    for batch, pages in ((1, 8), (8, 8), (64, 128)):
        table, length = torch.zeros(batch, pages, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
        q = randn(batch, HEADS, width)
        yield f"{batch} x {pages} pages", lambda q=q, t=table, n=length: paged_read(q, cache, t, n, KV_LATENT, 0.1)
    q, (k, v), wide = randn(2, 7, 64, 64), (randn(2, 7, 16, 64) for _ in range(2)), randn(4, page, 2 * width + 10240)
    pages, count = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    yield "a draft's block", lambda: block_attention(q, k, v, wide[:, :, 2 * width :], pages, count, 2048)


def _packed(*shape: int) -> PackedExperts:
    *rows, width = shape
    codes = torch.zeros(*rows, width // 2, dtype=torch.uint8)
    return PackedExperts.of(codes, torch.full((*rows, width // 32), 120, dtype=torch.uint8))


def _moe_calls() -> Iterator[tuple[str, Any]]:
    bias = randn(EXPERTS, dtype=torch.float32)
    logits = randn(8, EXPERTS, dtype=torch.float32)
    yield "router", lambda: choose_experts(logits, bias, top_k=TOP_K, renormalize=True, scaling=1.0)
    w13, w2 = _packed(FEW_EXPERTS, 2 * INNER, LATENT), _packed(FEW_EXPERTS, LATENT, INNER)
    term = ExpertLoraTerm(
        a1=randn(RANK, LATENT), b1=randn(FEW_EXPERTS, INNER, RANK), a3=randn(RANK, LATENT),
        b3=randn(FEW_EXPERTS, INNER, RANK), a2=randn(FEW_EXPERTS, RANK, INNER), b2=randn(LATENT, RANK), scaling=2.0,
    )  # fmt: skip
    for tokens in EXPERT_LOADS:
        chosen = torch.arange(FEW_EXPERTS).repeat(tokens, 1)[:, :TOP_K]
        z, weights = randn(tokens, LATENT), randn(tokens, TOP_K, dtype=torch.float32)
        for name, lora in (("", ()), (", LoRA", (term,))):
            yield (
                f"{tokens} rows an expert{name}",
                lambda z=z, w=weights, c=chosen, t=lora: fused_experts(
                    z, w, c, w13, w2, situ_beta=4.0, situ_linear_beta=25.0, lora=t
                ),
            )
    for load in EXPERT_LOADS:
        rows, ends = load * FEW_EXPERTS, torch.full((FEW_EXPERTS,), load, dtype=torch.int32).cumsum(0).int()
        yield f"training, {load} rows an expert", lambda r=rows, e=ends: (
            grouped_mxfp4(randn(r, LATENT), w13, e), grouped_mxfp4_transposed(randn(r, 2 * INNER), w13, e),
            grouped_mxfp4(randn(r, INNER), w2, e), grouped_mxfp4_transposed(randn(r, LATENT), w2, e),
        )  # fmt: skip


def _dense_calls() -> Iterator[tuple[str, Any]]:
    for tokens in (1, 2, 4, 8, 16):
        x = randn(tokens, HIDDEN)
        products = [
            Product(randn(width, HIDDEN), randn(tokens, width, dtype=dtype))
            for width, dtype in ((256, BF16), (96, BF16), (RANK, torch.float32))
        ]
        added = [Product(randn(256, HIDDEN), randn(tokens, 256), add=True)]
        yield f"{tokens} rows", partial(products_, x, products)
        yield f"{tokens} rows added", partial(products_, x, added)
    factors = [(randn(RANK, HIDDEN), randn(512, RANK)) for _ in range(2)]
    for tokens in (1, 8, 64):
        slot = torch.zeros(tokens, dtype=torch.int32)
        for count in (1, 2):
            some = factors[:count]
            yield (
                f"{tokens} tokens, {count} adapters",
                lambda t=tokens, s=slot, f=some: segmented_lora_(
                    randn(t, 512), randn(t, HIDDEN), s, f, (1.0,) * len(f)
                ),
            )
            low, bs = torch.zeros(count, tokens, RANK), [randn(INNER, RANK)] * count
            yield (
                f"{tokens} tokens, {count} adapters",
                lambda t=tokens, s=slot, l=low, b=bs: situ_with_lora(
                    randn(t, 2 * INNER), (4.0, 25.0), l, None, s, b, b, (1.0,) * len(b)
                ),
            )
        yield f"{tokens} tokens", lambda t=tokens: situ_with_lora(randn(t, 2 * INNER), (4.0, 25.0))


def _draw_calls() -> Iterator[tuple[str, Any]]:
    for rows in (1, 8):
        one, whole = torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
        yield (
            f"{rows} rows",
            lambda r=rows, o=one, w=whole: draw_tokens(randn(r, VOCAB, dtype=torch.float32), o, w.bool(), w, w),
        )


def _sglang_calls() -> Iterator[tuple[str, Any]]:
    """LoRA of the experts in SGLang's decode steps, at the rank of the recipes and at the largest."""
    for rank in (RANK, 64):
        factors = ExpertFactors(
            a13=randn(1, 1, 2 * rank, LATENT), b13=randn(1, FEW_EXPERTS, 2 * INNER, rank),
            a2=randn(1, FEW_EXPERTS, rank, INNER), b2=randn(1, 1, LATENT, rank),
        )  # fmt: skip
        for tokens in (1, 8):
            hooks = RowHooks(factors, torch.zeros(tokens, dtype=torch.int32))
            weights, chosen = randn(tokens, TOP_K, dtype=torch.float32), torch.zeros(tokens, TOP_K, dtype=torch.int32)
            yield (
                f"{tokens} tokens in SGLang, rank {rank}",
                lambda h=hooks, t=tokens, w=weights, c=chosen: (
                    h.after_gate_up(randn(t, LATENT), randn(t, TOP_K, 2 * INNER), w, c),
                    h.after_down(randn(t * TOP_K, INNER), randn(t, TOP_K, LATENT), w, c),
                ),
            )


def _told(cubin: Path, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True).stdout


def usage(cubin: Path) -> tuple[int, int]:
    """(registers, spilled bytes) of a thread, from the assembler's own tool."""
    text = _told(cubin, "-res-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text!r}")
    return int(match[1]), int(match[2])


def _hazards(capability: int, cubin: Path) -> int:
    """Only Hopper's products read registers while the program goes on; of later GPUs Triton's tools can't tell more."""
    return len(hazards(_told(cubin, "-sass"))) if capability == HOPPER else 0


def compile_all(capability: int, scratch: Path, *, dependent: bool = False) -> list[Compiled]:
    """Every kernel of `calls`, once for each of its forms. `dependent`: as they are for programmatic launches."""
    seen: dict[str, Compiled] = {}
    for call, launch in calls():
        found: list[tuple[str, Any]] = []
        with compiling_only(capability, found), dependent_launches() if dependent else nullcontext():
            launch()
        for name, kernel in found:
            if kernel.hash in seen:
                continue
            cubin = scratch / "kernel.cubin"
            cubin.write_bytes(kernel.asm["cubin"])
            registers, spilled = usage(cubin)
            seen[kernel.hash] = Compiled(
                kernel=name, call=call, warps=kernel.metadata.num_warps, registers=registers, spilled=spilled,
                shared=kernel.metadata.shared, hazards=_hazards(capability, cubin),
                waits="griddepcontrol.wait" in kernel.asm["ptx"],
            )  # fmt: skip
    return list(seen.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="90 is Hopper, 100 Blackwell.")
    parser.add_argument("--dependent", action="store_true", help="As programmatic dependent launches take them.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        rows = compile_all(options.capability, Path(scratch), dependent=options.dependent)
    print("| kernel | call | warps | registers | spilled | shared | hazards |\n|---|---|---|---|---|---|---|")
    for r in rows:
        print(f"| {r.kernel} | {r.call} | {r.warps} | {r.registers} | {r.spilled} | {r.shared:,} | {r.hazards} |")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
