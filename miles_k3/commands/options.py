"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeArg = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, the name of a shipped recipe, or the folder of a run.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value, e.g. --set trainer.lr=1.0e-4.")
]
