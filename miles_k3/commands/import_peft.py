"""`miles-k3 import`: a run that begins with somebody's adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_peft(
    source: Annotated[Path, typer.Argument(metavar="PEFT_FOLDER", help="With adapter_config.json and its tensors.")],
    recipe: Annotated[str, typer.Option("--recipe", metavar="RECIPE", help="What to train, and on which model.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The run's folder; it doesn't exist yet.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value of the recipe.")
    ] = None,
) -> None:
    """Make a run's folder that begins with a PEFT adapter; `miles-k3 train FOLDER` starts it."""
    from miles_k3.importing import import_peft as make

    made = make(source, recipe, out, overrides or [])
    typer.echo(f"adapter: rank {made.config.rank}, alpha {made.config.alpha:g}, sha256 {made.sha256[:12]}; it fits")
    for line in (*made.changes, *made.notes):
        typer.echo(str(line))
    typer.echo(f"ready: miles-k3 train {out}")
