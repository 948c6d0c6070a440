"""`miles-k3 draft`: the small model that drafts for speculative decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_k3.commands.options import RecipeArg, SetOption

draft_app = typer.Typer(no_args_is_help=True, help="The model that drafts tokens for the policy.")


@draft_app.command("train")
def train(
    recipe: RecipeArg,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where everything goes; draft/ is the result.")],
    overrides: SetOption = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")] = 1000,
    lr: Annotated[float, typer.Option("--lr", min=1e-12, help="Highest learning rate.")] = 2e-3,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Training prompts of the task.")] = 1024,
    group_size: Annotated[int, typer.Option("--group-size", min=1, help="Answers to each.")] = 2,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Answers of a step.")] = 64,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="Blocks of an answer in a step, at most.")] = 8,
    eval_prompts: Annotated[int, typer.Option("--eval-prompts", min=1, help="Held-out prompts to measure on.")] = 128,
    past_stop: Annotated[
        bool, typer.Option("--past-stop", help="Sample training answers on behind their end, to the recipe's limit.")
    ] = False,
    start: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="A draft to go on from; otherwise a small new one.")
    ] = None,
    save_every: Annotated[int, typer.Option("--save-every", min=0, help="Steps between checkpoints.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of weights, samples and order.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted training.")] = False,
) -> None:
    """Train a DSpark draft on answers that the recipe's policy, or a run's, samples itself; then measure how many of
    its tokens the policy accepts on held-out prompts."""
    from miles_k3.drafting import DraftPlan, train_draft
    from miles_k3.recipe import load_recipe
    from miles_k3.rollout.speculative.draft_train import DraftTraining

    exported = Path(recipe) / "adapter"
    plan = DraftPlan(
        training=DraftTraining(steps=steps, lr=lr, seed=seed, sequences_per_step=sequences, max_blocks=blocks),
        num_prompts=prompts, group_size=group_size, eval_prompts=eval_prompts, past_stop=past_stop,
        start=None if start is None else str(start), save_every=save_every,
    )  # fmt: skip
    loaded = load_recipe(recipe, overrides or []).recipe
    found = train_draft(loaded, exported if exported.is_dir() else None, out, plan, resume=resume)
    for name, a in found.items():
        rates = " ".join(f"{x / n:.2f}" if n else "-" for x, n in zip(a["accepted"], a["reached"], strict=True))
        typer.echo(
            f"{name:<24} {a['mean_accepted']:.2f} of a block accepted, {a['room']:.2f} possible; by position {rates}"
        )
    typer.echo(f"written: {out / 'draft'}")
