"""`miles-k3 recipe`: what a recipe says, where it says so, how two differ, and what each key means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miles_k3.commands.options import RecipeArg, SetOption

if TYPE_CHECKING:
    from miles_k3.recipe import LoadedRecipe

recipe_app = typer.Typer(no_args_is_help=True, help="Look at recipes.")


@recipe_app.command("show")
def show(
    recipe: RecipeArg,
    overrides: SetOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
) -> None:
    """Print every value in effect, where it came from, and the default where that is another."""
    from miles_k3.recipe import load_recipe
    from miles_k3.recipe_keys import MISSING, defaults

    loaded, usual = load_recipe(recipe, overrides or []), defaults()
    rows = []
    for key, value in _values(loaded).items():
        default = usual.get(key, MISSING)
        if default != value:
            rows.append((key, value, f"{loaded.sources[key]} (default {default})"))
        elif not changed:
            rows.append((key, value, loaded.sources[key]))
    for line in _aligned(rows):
        typer.echo(line)


@recipe_app.command("diff")
def diff(
    recipe: RecipeArg,
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="Another recipe; without it, the defaults.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Print the keys in which two recipes differ, or a recipe from the defaults. --set changes RECIPE."""
    from miles_k3.recipe import load_recipe
    from miles_k3.recipe_keys import MISSING, defaults

    first = _values(load_recipe(recipe, overrides or []))
    second = defaults() if other is None else _values(load_recipe(other))
    keys = [key for key in dict.fromkeys((*first, *second)) if first.get(key) != second.get(key)]
    # A section that one leaves empty and the other fills differs by what is in it.
    keys = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    named = [("", recipe, other or "default")]
    absent = MISSING if other is None else "-"
    rows = named + [(key, first.get(key, "-"), second.get(key, absent)) for key in keys]
    for line in _aligned(rows) if keys else [f"{recipe} and {other or 'the defaults'} say the same"]:
        typer.echo(line)


@recipe_app.command("explain")
def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key, such as trainer.lr, or a section.")],
) -> None:
    """Print what a key means: type, default, allowed values, its note in base.yaml, which shipped recipes set it."""
    from miles_k3.recipe_keys import explain_key

    for line in explain_key(key):
        typer.echo(line)


@recipe_app.command("schema")
def schema(
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it there instead.")] = None,
) -> None:
    """Print the JSON schema that editors check recipes with (recipes/recipe.schema.json ships)."""
    from miles_k3.recipe_keys import recipe_schema

    text = json.dumps(recipe_schema(), indent=1) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        typer.echo(out)


@recipe_app.command("list")
def list_recipes() -> None:
    """Print the names of the recipes that come with the product."""
    from miles_k3.recipe import shipped_recipes

    for name in shipped_recipes():
        typer.echo(name)


def _values(loaded: LoadedRecipe) -> dict[str, str]:
    """Dotted key -> its value as JSON."""
    from miles_k3.recipe import flatten

    return {key: json.dumps(value, ensure_ascii=False) for key, value in flatten(loaded.recipe.model_dump())}


def _aligned(rows: list[tuple[str, str, str]]) -> list[str]:
    """Aligned `key  value  source` lines; plain text, so that they can be searched and compared."""
    key_width = max((len(key) for key, _, _ in rows), default=0)
    value_width = min(48, max((len(value) for _, value, _ in rows), default=0))
    return [f"{key:<{key_width}}  {value:<{value_width}}  {last}".rstrip() for key, value, last in rows]
