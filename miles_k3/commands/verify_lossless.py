"""`miles-k3 verify-lossless`: speculation proven to change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_k3.commands.options import RecipeArg, SetOption


def verify_lossless(
    recipe: RecipeArg,
    overrides: SetOption = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts that are answered greedily.")] = 128,
    samples: Annotated[int, typer.Option("--samples", min=100, help="Sampled answers to each sampled prompt.")] = 20000,
    sampled_prompts: Annotated[int, typer.Option("--sampled-prompts", min=1, help="Prompts that are sampled.")] = 1,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where report.md and report.json go.")] = Path(
        "runs/lossless"
    ),
) -> None:
    """Compare a recipe's speculation with plain decoding: greedy answers, the distribution at temperature 1, and the
    hybrid state after every commit. Exits with 1 where they differ, or where this run was too small to tell; a run's
    folder brings its adapter."""
    from miles_k3.losslessness import markdown
    from miles_k3.losslessness import verify_lossless as verify
    from miles_k3.recipe import load_recipe

    exported = Path(recipe) / "adapter"
    report = verify(
        load_recipe(recipe, overrides or []).recipe, exported if exported.is_dir() else None, out,
        num_prompts=prompts, samples=samples, sampled_prompts=sampled_prompts,
    )  # fmt: skip
    typer.echo(markdown(report))
    typer.echo(f"written: {out / 'report.md'}", err=True)
    if not report.passed:
        found = "a difference was found" if report.differs else "no difference was found, but it isn't shown either"
        typer.echo("; ".join([f"exit code 1: {found}", *report.missing]), err=True)
        raise typer.Exit(1)
