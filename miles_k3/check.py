"""A dry run: everything that a run needs, tried out before it starts, each answered in one line."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_k3.config import Recipe
from miles_k3.errors import CheckpointError
from miles_k3.findings import Finding, Findings
from miles_k3.parallel import data_parallel_size, layout_problems, planned_world
from miles_k3.plan.planner import Machine, checkpoint_bytes, on_cuda, plan, this_machine
from miles_k3.plan.report import gb, listed
from miles_k3.tokenizer import PROBE, read_tokenizer, render_probe
from miles_k3.world import ALONE, TORCHRUN, World

if TYPE_CHECKING:
    from miles_k3.k3.config import K3Config
    from miles_k3.rollout.tasks.registry import GradedTask
    from miles_k3.types import Prompt

TRIED_PROMPTS = 8


def check_recipe(recipe: Recipe, world: World = ALONE) -> list[Finding]:
    """Ask every question that can be answered; what depends on a failed one is left out. Loads no weights.

    `world`: the ranks of the launcher; in one process the least number that the recipe's layout needs is assumed.
    """
    found = Findings()
    _check_sizes(found, recipe)
    config = _check_model(found, recipe)
    assumed = world.size == 1
    if assumed:
        world = _assumed_world(recipe)
    if config is not None:
        _check_layout(found, recipe, config, world, assumed=assumed)
        _check_draft(found, recipe)
    tokenizer = _check_tokenizer(found, recipe, config)
    if tokenizer is not None:
        _check_task(found, recipe, tokenizer)
    if config is not None:
        _check_disk(found, recipe, config)
        drafts = all(finding.ok or "draft" not in finding.name for finding in found)
        if drafts and not layout_problems(config, recipe.trainer, world.size):
            _check_memory(found, recipe, config, world)
    return list(found)


def longest_sequence(recipe: Recipe) -> int:
    """Tokens of the longest prompt and answer that the recipe allows."""
    return recipe.task.max_prompt_tokens + recipe.rollout.sampling.max_new_tokens


def _check_sizes(found: Findings, recipe: Recipe) -> None:
    longest, packed = longest_sequence(recipe), recipe.trainer.micro_batch_tokens  # the recipe was refused otherwise
    found.add("sizes", True, f"the longest sequence of {longest} tokens fits into a micro-batch of {packed}")


def _check_model(found: Findings, recipe: Recipe) -> K3Config | None:
    from miles_k3.k3.config import K3Config

    config = None
    with found.asking("model"):
        folder = Path(recipe.model.path)
        config = K3Config.from_folder(folder)
        layers = f"{len(config.kda_layers)} KDA and {len(config.mla_layers)} MLA layers, {config.num_experts} experts"
        found.add("model", True, f"{folder}: {layers}")
        longest, limit = longest_sequence(recipe), config.max_position_embeddings
        hint = "" if longest <= limit else "; lower task.max_prompt_tokens or rollout.sampling.max_new_tokens"
        found.add("length", longest <= limit, f"sequences of up to {longest} tokens, the model takes {limit}{hint}")
        _check_weights(found, recipe, folder, config)
    return config


def _check_layout(found: Findings, recipe: Recipe, config: K3Config, world: World, *, assumed: bool) -> None:
    from miles_k3.launch import named_launch_problems, train_command

    problems = list(named_launch_problems(recipe, config, world))
    for name, problem in problems:
        found.add(name, False, problem)
    if not problems:
        p = recipe.trainer.parallel
        sizes = ", ".join(f"{name} {getattr(p, name)}" for name in ("tp", "pp", "vpp", "cp", "ep"))
        dp = data_parallel_size(p, world.size)
        which = "as started"
        if assumed:
            asked = recipe.cluster.ranks_per_node > 0
            which = "as cluster says" if asked else "the least for this layout; a multiple adds data-parallel ranks"
        found.add(
            "layout",
            True,
            f"{sizes}, dp {dp} on {world.size} ranks ({which}): start with "
            f"{train_command('RECIPE', world.size, world.local_size, world.launcher)}",
        )


def _check_draft(found: Findings, recipe: Recipe) -> None:
    """What is wrong with it was found with the layout."""
    from miles_k3.k3.draft_config import DraftConfig

    at = recipe.rollout.speculative
    if at.mode != "off" and all(finding.name != "draft" for finding in found):
        costs = {"trim": f", costs {at.costs or 'measured at the start'}"}.get(at.mode, "")
        found.add("draft", True, f"{at.draft}: a draft of this model; {at.mode}, {at.accept}{costs}")
        longest = longest_sequence(recipe)
        if at.draft is not None and (most := DraftConfig.from_folder(at.draft).max_position_embeddings) < longest:
            found.warn(
                "draft", f"it takes {most} tokens (max_position_embeddings), sequences here have up to {longest}: "
                "behind that it drafts in vain", "take or train a draft of this length, or lower the lengths",
            )  # fmt: skip


def _assumed_world(recipe: Recipe) -> World:
    """The ranks that the recipe asks for, started by what can start its engines: those over several ranks need Ray."""
    ranks = planned_world(recipe)
    spans = ranks > 1 and recipe.rollout.engine == "sglang" and recipe.rollout.engine_tp > 1
    return World(
        size=ranks, local_size=recipe.cluster.ranks_per_node or _ranks_here(recipe, ranks),
        launcher="ray" if spans else TORCHRUN,
    )  # fmt: skip


def _ranks_here(recipe: Recipe, ranks: int) -> int:
    """How many of them one host would run: one a CUDA device, all of them on a CPU."""
    import torch

    on_cuda = recipe.model.device != "cpu" and torch.cuda.is_available()
    return min(ranks, torch.cuda.device_count()) if on_cuda else ranks


def _check_weights(found: Findings, recipe: Recipe, folder: Path, config: K3Config) -> None:
    from miles_k3.k3.safetensors_io import Checkpoint
    from miles_k3.k3.weights import UNPACKED

    if recipe.model.weights == "random":
        found.add("weights", True, "random, drawn at the start: what is trained is worth nothing but its speed")
        return

    with found.asking("weights"), Checkpoint(folder) as checkpoint:
        problems = checkpoint.check(checkpoint.table(config))
        if recipe.model.base_dtype == "mxfp4" and not checkpoint.packed:
            problems.append(f"{folder}: {UNPACKED}")
        for problem in problems[:10]:
            found.add("weights", False, problem)
        if len(problems) > 10:
            found.add("weights", False, f"and {len(problems) - 10} more tensors")
        if not problems:
            files = {header.file for header in checkpoint.headers.values()}
            counted = f"{len(checkpoint.headers)} tensors in {len(files)} file{'s'[: len(files) != 1]}"
            found.add("weights", True, f"{counted}, headers and sizes right")


def _check_tokenizer(found: Findings, recipe: Recipe, config: K3Config | None) -> Any | None:
    folder = recipe.model.tokenizer_folder
    if not (Path(folder) / "tokenizer.json").is_file():
        found.add("tokenizer", False, f"{folder}/tokenizer.json does not exist; copy it from the model's source")
        return None
    try:
        tokenizer = read_tokenizer(folder)
    except CheckpointError as error:
        found.add("tokenizer", False, f"transformers can't load the tokenizer: {error}")
        return None
    size = len(tokenizer)
    fits = config is None or size <= config.vocab_size
    limit = "" if config is None else f", the model has {config.vocab_size} rows"
    found.add("tokenizer", fits, f"{size} tokens{limit}")
    return tokenizer if fits and _check_template(found, folder, tokenizer) else None


def _check_template(found: Findings, folder: str, tokenizer: Any) -> bool:
    with found.asking("template"):
        text = render_probe(folder, tokenizer)
        found.add("template", PROBE in text, f"a question becomes {text!r}")
        return PROBE in text
    return False


def _check_task(found: Findings, recipe: Recipe, tokenizer: Any) -> None:
    from miles_k3.rollout.tasks.registry import make_task

    with found.asking("task"):
        task = make_task(recipe.task, tokenizer, seed=recipe.run.seed)
        prompts = task.next(TRIED_PROMPTS)
        longest = max(len(prompt.token_ids) for prompt in prompts)
        skipped = f"; skipped {task.skipped}" if task.skipped else ""
        found.add(
            "task",
            True,
            f"{task.name}: prompts of up to {longest} tokens, {recipe.task.max_prompt_tokens} allowed{skipped}",
        )
        if recipe.eval.prompts:
            with found.asking("eval"):
                held_out = len(task.eval_prompts(recipe.eval.prompts))
                found.add("eval", held_out > 0, f"{held_out} held-out prompts")
        with found.asking("reward"):
            _check_reward(found, recipe, task, prompts)


def _check_reward(found: Findings, recipe: Recipe, task: GradedTask, prompts: list[Prompt]) -> None:
    from miles_k3.rollout.tasks.rewards import RewardPool

    prompt = next((p for p in prompts if p.answer), prompts[0])
    answer, named = prompt.answer, repr(prompt.answer)
    if recipe.task.scorer == "length":  # the answer column says how long an answer is to be
        answer, named = "x" * int(prompt.answer), f"of {prompt.answer} characters"
    with RewardPool(task, 1, recipe.task.reward_timeout_s) as pool:

        async def ask() -> tuple[Any, Any]:
            return await pool.grade(prompt, answer), await pool.grade(prompt, "")

        right, empty = asyncio.run(ask())
    if failure := right.failure or empty.failure:
        found.add("reward", False, f"grading failed: {failure}; see the task's scorer and task.reward_timeout_s")
    elif not prompt.answer:
        found.add("reward", True, f"an empty answer gets {empty.reward:g}; the task gives no right answer to try")
    else:
        ok = right.reward >= 1.0 and empty.reward < right.reward
        text = f"the right answer {named} gets {right.reward:g}, an empty one {empty.reward:g}"
        found.add(
            "reward", ok, text if ok else f"{text}; expected 1 and less: check the task's answers and task.scorer"
        )


def _check_disk(found: Findings, recipe: Recipe, config: K3Config) -> None:
    with found.asking("disk"):
        needed = (recipe.run.keep_checkpoints + 1) * checkpoint_bytes(recipe, config)
        folder = Path(recipe.run.folder).expanduser().absolute()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        kept = f"{recipe.run.keep_checkpoints} checkpoints and one being written"
        hint = "" if needed <= free else "; lower run.keep_checkpoints or choose another run.folder"
        found.add("disk", needed <= free, f"{gb(needed)} for {kept}, {gb(free)} free in {folder}{hint}")


def _check_memory(found: Findings, recipe: Recipe, config: K3Config, world: World) -> None:
    with found.asking("memory"):
        machine = this_machine(gpu=recipe.model.device != "cpu")
        if machine.gpus == 0 and on_cuda(recipe, machine):  # looked at from a machine without GPUs
            machine = Machine()
        for verdict in plan(recipe, config, machine, world=world.size).verdicts:
            pool = verdict.pool
            there = "" if pool.capacity is None else f", {gb(pool.capacity)} {pool.source}"
            hint = "" if verdict.fits else "; `miles-k3 plan` finds what to change"
            parts = listed(verdict.items.items())
            found.add(
                "memory", verdict.fits,
                f"{pool.where}: about {gb(verdict.needed)} in {verdict.phase} ({parts}){there}{hint}",
            )  # fmt: skip
