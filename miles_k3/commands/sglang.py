"""`miles-k3 sglang-commands`: how SGLang is started for a recipe, without starting it."""

from __future__ import annotations

import typer

from miles_k3.commands.options import RecipeArg, SetOption


def sglang_commands(recipe: RecipeArg, overrides: SetOption = None) -> None:
    """Print the commands that start SGLang for a recipe: engine, nodes, prefill and decode workers.

    Exits with 2 and every reason when SGLang can't serve the recipe's model so.
    """
    from miles_k3.errors import LaunchError
    from miles_k3.k3.config import K3Config
    from miles_k3.recipe import load_recipe
    from miles_k3.rollout.sglang.arguments import sglang_problems
    from miles_k3.rollout.sglang.commands import serve_commands

    loaded = load_recipe(recipe, overrides or []).recipe
    if loaded.rollout.engine != "sglang":
        raise LaunchError(
            f"rollout.engine is {loaded.rollout.engine}, so the recipe starts no SGLang; "
            "add --set rollout.engine=sglang"
        )
    config = K3Config.from_folder(loaded.model.path)
    if problems := sglang_problems(loaded, config):
        raise LaunchError("\n".join(problems))
    for line in serve_commands(loaded, config):
        typer.echo(line)
