"""`miles-k3 bench ...`: kernels, whole engine steps and modes of speculation, measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_k3.commands.options import RecipeArg, SetOption

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


Folder = Annotated[Path, typer.Option("--model", help="Folder with a config.json: weights of its widths are drawn.")]


def bench_decode(
    model: Folder = Path("assets/k3-4layer"),
    batch: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Requests; may be repeated.")] = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of each prompt.")] = 256,
    out: Out = Path("runs/bench"),
) -> None:
    """Recorded decode steps of the engine with and without LoRA, random weights, beside the bytes' floor."""
    _engine_bench("decode", model, batch or [1, 8, 64], context, out)


def bench_prefill(
    model: Folder = Path("assets/k3-4layer"),
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Of one prompt, computed in one chunk.")] = 8192,
    out: Out = Path("runs/bench"),
) -> None:
    """One prompt in one chunk with and without LoRA, random weights, beside the FLOPs' floor."""
    _engine_bench("prefill", model, [1], tokens, out)


def bench_swap(model: Folder = Path("assets/k3-4layer"), out: Out = Path("runs/bench")) -> None:
    """A whole adapter into the engine's idle slot, on an idle device and while requests decode."""
    _engine_bench("swap", model, [8], 256, out)


def _engine_bench(name: str, model: Path, batches: list[int], context: int, out: Path) -> None:
    from miles_k3 import engine_bench, kernel_bench

    ceilings, rows = engine_bench.run(
        name, model, batches, context, told=lambda row: typer.echo(f"{row.shape}: {row.ms:.3f} ms", err=True)
    )
    typer.echo(kernel_bench.markdown(rows))
    typer.echo(f"{ceilings.device}; written: {kernel_bench.write(name, ceilings, rows, out)}", err=True)


def bench_speculative(
    recipe: RecipeArg,
    overrides: SetOption = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Requests; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="New tokens of each.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that count, after one that doesn't.")] = 5,
    known: Annotated[
        float | None,
        typer.Option("--known", min=0.0, max=1.0, help="Pretend that each drafted token is right with this chance."),
    ] = None,
    random_draft: Annotated[bool, typer.Option("--random-draft", help="A new draft: costs, no acceptance.")] = False,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="The recipe's shapes only.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 1.0,
    past_stop: Annotated[bool, typer.Option("--past-stop", help="Answers go on behind their end to --tokens.")] = False,
    out: Out = Path("runs/bench"),
) -> None:
    """Tokens a second without speculation, verifying all, and trimming; the costs that trim goes by."""
    from miles_k3.recipe import load_recipe
    from miles_k3.speculation_bench import BenchPlan, bench_modes, markdown

    plan = BenchPlan(
        batches=batch or (1, 8, 64, 256), new_tokens=tokens, rounds=rounds, known=known, random_draft=random_draft,
        random_weights=random_weights, temperature=temperature, past_stop=past_stop,
    )  # fmt: skip
    exported = Path(recipe) / "adapter"
    rates = bench_modes(
        load_recipe(recipe, overrides or []).recipe, exported if exported.is_dir() else None, plan, out,
        told=lambda r: typer.echo(f"batch {r.batch}, {r.mode}: {r.median:,.0f} tokens/s", err=True),
    )  # fmt: skip
    typer.echo(markdown(rates))
    typer.echo(f"written: {out / 'speculative.json'}, {out / 'costs.json'}", err=True)
