"""`miles-k3 bench moe|kda|attention`: the kernels on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Tokens = Annotated[
    list[int] | None, typer.Option("--tokens", min=1, help="Tokens, or sequences of one token; may be repeated.")
]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where <bench>.json goes.")]


def _bench(name: str, tokens: list[int] | None, out: Path) -> None:
    from miles_k3 import kernel_bench

    ceilings, rows = kernel_bench.run(
        name, tokens, told=lambda row: typer.echo(f"{row.kernel}, {row.shape}: {1e3 * row.ms:.1f} µs", err=True)
    )
    typer.echo(kernel_bench.markdown(rows))
    typer.echo(
        f"{ceilings.device}: {ceilings.bytes_s / 1e12:.2f} TB/s read, {ceilings.flops_s / 1e12:.0f} TFLOP/s in bf16; "
        f"written: {kernel_bench.write(name, ceilings, rows, out)}",
        err=True,
    )


def bench_moe(tokens: Tokens = None, out: Out = Path("runs/bench")) -> None:
    """Router and routed experts, packed MXFP4, with and without LoRA; from 1,024 tokens on also training's products."""
    _bench("moe", tokens, out)


def bench_kda(tokens: Tokens = None, out: Out = Path("runs/bench")) -> None:
    """One decoded token of KDA, beside fla's recurrent kernel and plain torch."""
    _bench("kda", tokens, out)


def bench_attention(tokens: Tokens = None, out: Out = Path("runs/bench")) -> None:
    """MLA decode over 8,192 tokens of context, attention residuals with their norm, dense LoRA of two versions."""
    _bench("attention", tokens, out)
