"""`miles-k3 launch`: a run on a Ray cluster."""

from __future__ import annotations

from typing import Annotated

import typer


def launch(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A YAML file, a shipped recipe's name, or the folder of a run.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one value, e.g. --set cluster.nodes=2."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run from its newest checkpoint.")] = False,
) -> None:
    """Post-train a model on a Ray cluster: one started here, or the one at cluster.ray_address.

    Ended by Ctrl-C or SIGTERM, it writes a checkpoint and exits with 130 or 143.
    """
    from pathlib import Path

    from miles_k3.errors import LaunchError
    from miles_k3.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or []).recipe
    folder = Path(loaded.run.folder).expanduser().absolute()
    loaded = loaded.model_copy(update={"run": loaded.run.model_copy(update={"folder": str(folder)})})
    try:
        from miles_k3.ray.driver import launch as launch_run
    except ImportError as error:
        raise LaunchError(f"Ray can't be imported ({error}); install it with `pip install 'miles-k3[ray]'`") from error
    typer.echo(f"run folder: {folder / loaded.run.name}", err=True)
    result = launch_run(loaded, resume=resume, debug=context.parent is not None and context.parent.params["debug"])
    typer.echo(f"adapter: {result.adapter}; pictures: {folder / loaded.run.name / 'plots'}", err=True)
    if result.stopped_by is not None:
        place = folder / loaded.run.name
        typer.echo(
            f"{result.stopped_by.name} ended it after step {result.steps}; go on with miles-k3 launch {place} --resume",
            err=True,
        )
        raise typer.Exit(128 + result.stopped_by)
