"""`miles-k3 bench ...`: kernels, whole engine steps and modes of speculation, measured on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from miles_k3.bench import EngineBench
from miles_k3.commands.options import RecipeArg, SetOption

if TYPE_CHECKING:  # brings torch
    from miles_k3.bench.measures import Ceilings, Row

bench_app = typer.Typer(no_args_is_help=True, help="Measure parts of the product on this machine.")

Tokens = Annotated[
    list[int] | None, typer.Option("--tokens", min=1, help="Tokens, or sequences of one token; may be repeated.")
]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where <bench>.json goes.")]


def _bench(name: str, tokens: list[int] | None, out: Path) -> None:
    from miles_k3.bench import kernels

    _told(name, *kernels.run(name, tokens, told=_progress), out)


def _progress(row: Row) -> None:
    typer.echo(f"{row.kernel}, {row.shape}: {1e3 * row.ms:,.1f} µs", err=True)


def _told(name: str, ceilings: Ceilings, rows: list[Row], out: Path) -> None:
    from miles_k3.bench.measures import markdown, write

    typer.echo(markdown(rows))
    typer.echo(
        f"{ceilings.device}: {ceilings.bytes_s / 1e12:.2f} TB/s read, {ceilings.flops_s / 1e12:.3g} TFLOP/s; "
        f"written: {write(name, ceilings, rows, out)}",
        err=True,
    )


@bench_app.command("moe")
def bench_moe(tokens: Tokens = None, out: Out = Path("runs/bench")) -> None:
    """Router and routed experts, packed MXFP4, with and without LoRA; from 1,024 tokens on also training's products."""
    _bench("moe", tokens, out)


@bench_app.command("kda")
def bench_kda(tokens: Tokens = None, out: Out = Path("runs/bench")) -> None:
    """One decoded token of KDA, beside fla's recurrent kernel and plain torch."""
    _bench("kda", tokens, out)


@bench_app.command("attention")
def bench_attention(tokens: Tokens = None, out: Out = Path("runs/bench")) -> None:
    """MLA decode over 8,192 tokens of context, attention residuals with their norm, dense LoRA of two versions."""
    _bench("attention", tokens, out)


Folder = Annotated[
    Path,
    typer.Option(
        "--model", metavar="FOLDER", show_default="the shipped k3-4layer",
        help="Folder with a config.json: weights of its widths are drawn.",
    ),
]  # fmt: skip
DeviceName = Literal["cuda", "cpu"]
Device = Annotated[DeviceName, typer.Option("--device", help="cpu is for a small model.")]
Batch = Annotated[list[int] | None, typer.Option("--batch", min=1, help="Requests; may be repeated.")]
Context = Annotated[int, typer.Option("--context", min=1, help="Tokens of each prompt.")]
ASSETS = Path(__file__).resolve().parents[2] / "assets"  # beside the package, as recipes are
K3_LAYERS = ASSETS / "k3-4layer"

DECODE_STEPS: dict[EngineBench, str] = {
    "decode": "Decode steps of the engine with and without LoRA, random weights, beside the bytes' floor.",
    "eager": "Decode steps of two layers, one of each kind, beside the same in eager torch with unpacked experts.",
    "variants": "Decode steps without the shared experts' branch, with dependent launches, and as they are.",
}


def _decode_steps(name: EngineBench) -> Callable[..., None]:
    def bench(
        model: Folder = K3_LAYERS, batch: Batch = None, context: Context = 256, device: Device = "cuda",
        out: Out = Path("runs/bench"),
    ) -> None:  # fmt: skip
        _engine_bench(name, model, batch or [1, 8, 64], context, device, out)

    return bench


for _name, _text in DECODE_STEPS.items():
    bench_app.command(_name, help=_text)(_decode_steps(_name))


@bench_app.command("prefill")
def bench_prefill(
    model: Folder = K3_LAYERS,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Of one prompt, computed in one chunk.")] = 8192,
    device: Device = "cuda",
    out: Out = Path("runs/bench"),
) -> None:
    """One prompt in one chunk with and without LoRA, random weights, beside the FLOPs' floor."""
    _engine_bench("prefill", model, [1], tokens, device, out)


@bench_app.command("swap")
def bench_swap(model: Folder = K3_LAYERS, device: Device = "cuda", out: Out = Path("runs/bench")) -> None:
    """A whole adapter into the engine's idle slot, on an idle device and while requests decode."""
    _engine_bench("swap", model, [8], 256, device, out)


def _engine_bench(
    name: EngineBench, model: Path, batches: list[int], context: int, device: DeviceName, out: Path
) -> None:  # fmt: skip
    from miles_k3.bench import engine_steps

    _told(name, *engine_steps.run(name, model, batches, context, _progress, device=device), out)


@bench_app.command("train")
def bench_train(
    recipe: RecipeArg,
    overrides: SetOption = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=2, help="Of a step; without it, a micro-batch.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Steps that count, after one that doesn't.")] = 5,
    out: Out = Path("runs/bench"),
) -> None:
    """The trainer's forward, step and adapter export at a recipe's widths, random weights, beside the FLOPs' floor."""
    from miles_k3.bench import training
    from miles_k3.recipe import load_recipe

    recipe_ = load_recipe(recipe, overrides or []).recipe
    _told("train", *training.run(recipe_, tokens, repeats, _progress), out)


@bench_app.command("speculative")
def bench_speculative(
    recipe: RecipeArg,
    overrides: SetOption = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Requests; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="New tokens of each.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that count, after one that doesn't.")] = 5,
    known: Annotated[
        float | None,
        typer.Option("--known", min=0.0, max=1.0, help="Suppose that each drafted token is accepted with this chance."),
    ] = None,
    random_draft: Annotated[bool, typer.Option("--random-draft", help="A new draft: costs, no acceptance.")] = False,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="The recipe's shapes only.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 1.0,
    past_stop: Annotated[bool, typer.Option("--past-stop", help="Answers go on behind their end to --tokens.")] = False,
    learning: Annotated[int, typer.Option("--learning", min=0, help="Rounds before, that trim learns from.")] = 0,
    cpu_clock: Annotated[bool, typer.Option("--cpu-clock", help="Seconds of this process, not the wall's.")] = False,
    out: Out = Path("runs/bench"),
) -> None:
    """Tokens a second without speculation, verifying all, and trimming; the costs that trim goes by."""
    from miles_k3.bench.speculation import BenchPlan, bench_modes, markdown
    from miles_k3.recipe import load_recipe

    plan = BenchPlan(
        batches=batch or (1, 8, 64, 256), new_tokens=tokens, rounds=rounds, known=known, random_draft=random_draft,
        random_weights=random_weights, temperature=temperature, past_stop=past_stop, cpu_clock=cpu_clock,
        learning=learning,
    )  # fmt: skip
    exported = Path(recipe) / "adapter"
    rates = bench_modes(
        load_recipe(recipe, overrides or []).recipe, exported if exported.is_dir() else None, plan, out,
        told=lambda r: typer.echo(f"batch {r.batch}, {r.mode}: {r.median:,.0f} tokens/s", err=True),
    )  # fmt: skip
    typer.echo(markdown(rates))
    typer.echo(f"written: {out / 'speculative.json'}, {out / 'costs.json'}", err=True)


@bench_app.command("cache")
def bench_cache(
    trace: Annotated[list[str] | None, typer.Option("--trace", help="Traces to replay; without it, all.")] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of each trace.")] = 10_000,
    budget: Annotated[float, typer.Option("--budget", min=1.0, help="Cache memory of one rank, GiB.")] = 80.0,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Ranks that share the KDA heads.")] = 8,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="Its config.json; without it, Kimi K3's.")
    ] = None,
    out: Out = Path("runs/bench"),
) -> None:
    """Replay traces of reinforcement learning against the prefix cache's policies, with a real model's byte sizes."""
    from miles_k3.bench import cache
    from miles_k3.k3.config import K3Config

    config = K3Config.from_folder(model or ASSETS / "kimi-k3")
    rows = cache.bench_cache(
        config, trace or list(cache.TRACES), requests=requests, tp=tp, budget_gib=budget,
        told=lambda row: typer.echo(f"{row['trace']}, {row['policy']}: {row['seconds']:.1f} s", err=True),
    )  # fmt: skip
    typer.echo(cache.markdown(rows))
    facts = {"requests": requests, "budget_gib": budget, "tp": tp}
    typer.echo(f"written: {', '.join(map(str, cache.write(rows, facts, out)))}", err=True)
