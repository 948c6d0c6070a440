"""`miles-k3 plan`: what a recipe takes of every rank's memory, before anything is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miles_k3.commands.options import RecipeArg, SetOption

if TYPE_CHECKING:
    from miles_k3.plan.changes import Fix
    from miles_k3.plan.shapes import Plan


def plan(
    recipe: RecipeArg,
    overrides: SetOption = None,
    picture: Annotated[Path | None, typer.Option("--picture", metavar="PNG", help="Draw it, too.")] = None,
    launch: Annotated[
        bool, typer.Option("--launch", help="As miles-k3 launch starts it: each engine in a process of its own.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Bytes of every rank, phase and item as JSON.")] = False,
) -> None:
    """Plan the memory of every rank and phase from the model's config.json alone, and say what to change if it doesn't
    fit; then the exit code is 1. No weights and no GPU are needed."""
    from miles_k3.plan.changes import smallest_fix
    from miles_k3.plan.planner import plan as plan_recipe
    from miles_k3.plan.planner import read_config, this_machine
    from miles_k3.plan.report import report_lines
    from miles_k3.recipe import load_recipe
    from miles_k3.rollout.sglang.arguments import sglang_problems
    from miles_k3.rollout.sglang.span import span_problems

    loaded = load_recipe(recipe, overrides or [])
    config = read_config(loaded.recipe)
    cluster = loaded.recipe.cluster
    machine = this_machine(gpu=loaded.recipe.model.device != "cpu" and cluster.gpu_memory_gb is None)
    machine = dataclasses.replace(machine, apart=launch)
    found = plan_recipe(loaded.recipe, config, machine, name=loaded.name)
    fix = None if found.fits else smallest_fix(loaded.recipe, config, machine)
    if as_json:
        import json

        typer.echo(json.dumps(_as_json(found, fix), indent=1))
    else:
        for line in report_lines(found, fix):
            typer.echo(line)
        own = sglang_problems(loaded.recipe, config) if loaded.recipe.rollout.engine == "sglang" else []
        spans = span_problems(loaded.recipe, ranks=found.world, per_node=cluster.ranks_per_node, launcher="ray")
        for problem in (*own, *spans):
            typer.echo(f"\nmemory aside, miles-k3 launch refuses it: {problem}")
    if picture is not None:
        from miles_k3.plan.picture import draw

        typer.echo(f"written: {draw(found, picture)}", err=True)
    if not found.fits:
        raise typer.Exit(1)


def _as_json(found: Plan, fix: Fix | None) -> dict[str, Any]:
    return {
        "recipe": found.name,
        "world": found.world,
        "cuda": found.cuda,
        "fits": found.fits,
        "checkpoint_bytes": found.disk_bytes,
        "smallest_change": None if fix is None else fix.values,
        "worst": [
            {
                "where": v.pool.where, "capacity_bytes": v.pool.capacity, "ranks_sharing": v.pool.ranks,
                "rank": v.rank.name, "phase": v.phase, "needed_bytes": v.needed, "items": dict(v.items),
            }
            for v in found.verdicts
        ],
        "ranks": [
            {
                "name": rank.name, "count": rank.count,
                "device": {phase: dict(items) for phase, items in rank.device.items()},
                "host": {phase: dict(items) for phase, items in rank.host.items()},
            }
            for rank in found.ranks
        ],
    }  # fmt: skip
