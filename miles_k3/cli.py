"""The command line. Commands import what they need when they run, so that --help answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from miles_k3.commands.bench import bench_app
from miles_k3.commands.doctor import doctor
from miles_k3.commands.draft import draft_app
from miles_k3.commands.export import export
from miles_k3.commands.import_peft import import_peft
from miles_k3.commands.launch import launch
from miles_k3.commands.options import RecipeArg, SetOption
from miles_k3.commands.plan import plan
from miles_k3.commands.recipe import recipe_app
from miles_k3.commands.serve import serve
from miles_k3.commands.sglang import sglang_commands
from miles_k3.commands.verify_lossless import verify_lossless
from miles_k3.errors import MilesError, remedy

app = typer.Typer(
    help="Post-train Kimi K3 with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(recipe_app, name="recipe")
app.add_typer(draft_app, name="draft")

app.command()(plan)
app.command()(launch)
app.command()(serve)
app.command("sglang-commands")(sglang_commands)
app.command()(doctor)
app.command()(verify_lossless)
app.command()(export)
app.command("import")(import_peft)

app.add_typer(bench_app, name="bench")

USER_ERROR = 2
SIGNALLED = 128  # plus the signal's number, as shells have it


def main() -> None:
    """Entry point: a MilesError becomes its sentences on stderr and exit code 2, and so does a refusal of the system,
    such as a full disk; `--debug`, wherever it is on the line, shows where the error came from."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _main()
        return
    from miles_k3.world import end_alone

    end_alone(_main)


def _main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    try:
        app(["--debug", *arguments] if debug else arguments)
    except (MilesError, OSError) as error:
        if debug:
            raise
        from miles_k3.world import first_to_say

        sentences = (str(error) if isinstance(error, MilesError) else _os_sentence(error)).splitlines()
        place = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        text = "\n".join(f"error: {line}{place}" for line in sentences)
        if first_to_say(text):
            typer.echo(text, err=True)
        sys.exit(USER_ERROR)


def _os_sentence(error: OSError) -> str:
    """What the system refused, in one line; files that were published before are whole."""
    import errno

    hint = remedy(error, "another path, such as another run.folder", "miles-k3 --debug shows where it happened")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint += "; a run goes on from its last checkpoint with --resume"
    place = f"{error.filename}: " if error.filename is not None else ""
    return f"{place}{error.strerror or str(error) or type(error).__name__}; {hint}"


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors and more of the log.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    from miles_k3.logs import set_up_logging

    set_up_logging(debug=debug, rank=int(os.environ.get("RANK", "0")))


@app.command()
def train(
    recipe: RecipeArg,
    overrides: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run from its newest checkpoint.")] = False,
) -> None:
    """Post-train a model as the recipe says. `torchrun --nproc-per-node N -m miles_k3 train` starts N ranks.

    Ended by Ctrl-C or SIGTERM, it writes a checkpoint and exits with 130 or 143.
    """
    from miles_k3.recipe import load_recipe
    from miles_k3.run_folder import RunFolder
    from miles_k3.world import join_world

    world = join_world()
    loaded = world.once(lambda: load_recipe(recipe, overrides or []))
    with RunFolder.create(loaded.recipe, resume=resume, world=world) as run:
        if world.first:
            typer.echo(f"run folder: {run.path}", err=True)
        from miles_k3.loop import run_training

        result = run_training(loaded.recipe, run, resume=resume)
    if world.first:
        typer.echo(f"adapter: {result.adapter}" + (f"; pictures: {run.plots}" if result.plots else ""), err=True)
    if result.stopped_by is not None:
        raise typer.Exit(SIGNALLED + result.stopped_by)


@app.command("eval")
def evaluate(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a run's folder and its adapter.")],
    adapter: Annotated[
        Path | None, typer.Option("--adapter", metavar="FOLDER", help="PEFT folder; for a run its own is taken.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Measure held-out accuracy, of the base model or with an adapter."""
    import dataclasses

    from miles_k3.errors import ConfigError
    from miles_k3.recipe import load_recipe
    from miles_k3.world import join_world

    world = join_world()
    loaded = world.once(lambda: load_recipe(recipe, overrides or []))
    if adapter is None and loaded.path.name == "recipe.yaml" and Path(recipe).is_dir():
        adapter = Path(recipe) / "adapter"
        if not adapter.is_dir():
            raise ConfigError(
                f"{adapter} does not exist: the run has exported no adapter yet; name one with --adapter, or evaluate "
                f"the base model through {loaded.path}"
            )
    if adapter is not None and not adapter.is_dir():
        raise ConfigError(f"--adapter {adapter}: no such folder; expected a PEFT folder with adapter_config.json")
    from miles_k3.loop import run_eval

    if world.first:
        typer.echo(f"adapter: {adapter or 'none, the base model'}", err=True)
    result = run_eval(loaded.recipe, adapter, world)
    for field in dataclasses.fields(result) if world.first else ():
        value = getattr(result, field.name)
        typer.echo(f"{field.name}: {value:.4f}" if isinstance(value, float) else f"{field.name}: {value}")


@app.command()
def check(recipe: RecipeArg, overrides: SetOption = None) -> None:
    """Try out everything a run needs, without training: model, draft, data, template, reward, disk, memory."""
    from miles_k3.check import check_recipe
    from miles_k3.findings import print_findings
    from miles_k3.recipe import load_recipe
    from miles_k3.world import world_of

    world = world_of()
    if not world.first:
        return
    findings = check_recipe(load_recipe(recipe, overrides or []).recipe, world)
    print_findings(findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[Path, typer.Option("--out", help="The comparison's picture, for several runs.")] = Path("runs.png"),
) -> None:
    """Draw a run's reward, mismatch and time as PNG; for several runs also one picture that compares them."""
    from miles_k3.plot import plot_run, plot_runs

    for picture in [path for run in runs for path in plot_run(run)] + ([plot_runs(runs, out)] if len(runs) > 1 else []):
        typer.echo(picture)


@app.command()
def demo(seed: Annotated[int, typer.Option("--seed", min=0, help="Another seed, another run.")] = 0) -> None:
    """Post-train the tiny model that ships with the product, in about three minutes."""
    from miles_k3.demo import run_demo

    run_demo(seed)


@app.command()
def version() -> None:
    """Show the product's version and those of the libraries that decide its numbers."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from miles_k3 import __version__

    typer.echo(f"miles-k3 {__version__}")
    typer.echo(f"python {sys.version.split()[0]}")
    for package in ("torch", "megatron-core", "transformers", "triton", "flash-linear-attention", "sglang"):
        try:
            typer.echo(f"{package} {installed(package)}")
        except PackageNotFoundError:
            typer.echo(f"{package} not installed")
