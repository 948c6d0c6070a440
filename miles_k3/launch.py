"""Whether a recipe can run on the processes and devices that there are: asked before anything is loaded."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from miles_k3.config import Recipe
from miles_k3.config_speculative import SpeculativeSection
from miles_k3.errors import CheckpointError, ConfigError, EngineError, LaunchError
from miles_k3.k3.config import K3Config
from miles_k3.parallel import layout_problems
from miles_k3.rollout.sglang.arguments import named_problems
from miles_k3.rollout.sglang.span import span_problems
from miles_k3.rollout.sglang.versions import installed_version, version_problem
from miles_k3.rollout.speculative.draft_io import check_draft
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.world import TORCHRUN, World


def refuse_launch(recipe: Recipe, config: K3Config, world: World, *, training: bool) -> None:
    """Raise one LaunchError, the same on every rank, with all reasons of all ranks. Collective."""
    problems = dict.fromkeys(
        p for found in world.gather(launch_problems(recipe, config, world, training)) for p in found
    )
    if problems:
        raise LaunchError("\n".join(problems))


def launch_problems(recipe: Recipe, config: K3Config, world: World, training: bool = True) -> list[str]:
    """Why this process can't run its part, one sentence each. Without `training`, what only a trainer needs is left
    out."""
    return [text for _, text in named_launch_problems(recipe, config, world, training)]


def named_launch_problems(
    recipe: Recipe, config: K3Config, world: World, training: bool = True
) -> Iterator[tuple[str, str]]:
    """The same, each behind the name of what it is about."""
    yield from (("device", text) for text in _device_problems(recipe, world))
    yield from (("draft", text) for text in draft_problems(recipe.rollout.speculative, config))
    if recipe.rollout.engine == "sglang":
        yield from _sglang_problems(recipe, config, world)
    if training:
        yield from (("layout", text) for text in _cluster_problems(recipe, world))
        yield from (("layout", text) for text in layout_problems(config, recipe.trainer, world.size))
        yield from (("kernels", text) for text in _kernel_problems(recipe))
        if recipe.algorithm.routing_replay and not config.moe_layers:
            yield "routing", "algorithm.routing_replay is true but the model has no MoE layer; set it to false"


def draft_problems(section: SpeculativeSection, config: K3Config) -> list[str]:
    """What is wrong with the files of the embedded engine's draft, by headers alone, one sentence each."""
    if section.mode == "off" or section.draft is None:
        return []
    try:
        check_draft(section.draft, config)
        if section.costs is not None:
            CostProfile.load(Path(section.costs))
    except (CheckpointError, EngineError) as error:
        return str(error).splitlines()
    return []


def refuse_draft(section: SpeculativeSection, config: K3Config) -> None:
    """Raises ConfigError with all of it, before a model is loaded for nothing."""
    if problems := draft_problems(section, config):
        raise ConfigError(problems)


def refuse_other_engine(recipe: Recipe, command: str, why: str) -> None:
    """Raise ConfigError where the recipe's engine is not the one that `command` is made for."""
    if recipe.rollout.engine != "embedded":
        raise ConfigError(
            f"rollout.engine is {recipe.rollout.engine}, but {command} {why}; add --set rollout.engine=embedded "
            "--set rollout.engine_tp=1"
        )


def pick_device(wanted: str, local_rank: int = 0) -> torch.device:
    """auto: this process's CUDA device where there is one. Raises LaunchError when CUDA is asked for and absent."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("model.device is cuda, but torch sees no CUDA device; set model.device: auto or cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def pick_threads(wanted: int, world: World) -> int:
    """CPU threads of this process: `run.threads`, or torch's choice, which several ranks of a host share."""
    if wanted or world.local_size == 1:
        return wanted or torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // world.local_size)


def train_command(recipe: str, ranks: int, per_host: int | None = None, launcher: str = TORCHRUN) -> str:
    """How a run of that many ranks is started; on one host unless `per_host` says otherwise."""
    if launcher == "ray":
        return f"miles-k3 launch {recipe}"
    if ranks == 1:
        return f"miles-k3 train {recipe}"
    per_host = per_host or ranks
    hosts = f"--nnodes {ranks // per_host} " if per_host < ranks else ""
    return f"torchrun {hosts}--nproc-per-node {per_host} -m miles_k3 train {recipe}"


def _cluster_problems(recipe: Recipe, world: World) -> Iterator[str]:
    cluster = recipe.cluster
    asked = cluster.nodes * cluster.ranks_per_node
    if asked not in (0, world.size):
        yield (
            f"cluster.nodes {cluster.nodes} * cluster.ranks_per_node {cluster.ranks_per_node} ask for {asked} ranks, "
            f"but {world.size} were started; start with {train_command('RECIPE', asked, cluster.ranks_per_node)}, or "
            "set cluster.ranks_per_node: 0 to take any number"
        )


def _device_problems(recipe: Recipe, world: World) -> Iterator[str]:
    if recipe.model.device == "cpu":
        if torch.cuda.is_available():
            yield (
                "model.device is cpu but this machine has CUDA devices, and megatron-core would compute on them; set "
                "model.device: cuda, or hide the devices with CUDA_VISIBLE_DEVICES="
            )
        return
    if not torch.cuda.is_available():
        if recipe.model.device == "cuda":
            yield "model.device is cuda, but torch sees no CUDA device; set model.device: auto or cpu"
        return
    if world.local_size > torch.cuda.device_count():
        yield (
            f"{world.local_size} ranks were started on a host with {torch.cuda.device_count()} visible CUDA devices; "
            f"start with torchrun --nproc-per-node {torch.cuda.device_count()} on more hosts, or change the layout: "
            "each rank needs a device of its own"
        )


def _sglang_problems(recipe: Recipe, config: K3Config, world: World) -> Iterator[tuple[str, str]]:
    yield from named_problems(recipe, config)
    if problem := version_problem(installed_version()):
        yield "sglang version", problem
    if not torch.cuda.is_available():
        yield "device", "rollout.engine is sglang, but this machine has no CUDA device; set rollout.engine: embedded"
    per_node = recipe.cluster.ranks_per_node or world.local_size
    spans = span_problems(recipe, ranks=world.size, per_node=per_node, launcher=world.launcher)
    yield from (("sglang ranks", text) for text in spans)


def _kernel_problems(recipe: Recipe) -> Iterator[str]:
    on_cuda = recipe.model.device != "cpu" and torch.cuda.is_available()
    wanted = (
        ("mla_attention", "transformer_engine", "transformer_engine.pytorch", "TransformerEngine", "torch"),
        ("kda_kernel", "fla", "fla.ops.kda", "flash-linear-attention", "torch or auto"),
    )
    for key, value, module, name, other in wanted:
        if getattr(recipe.trainer, key) != value:
            continue
        if not on_cuda:
            yield f"trainer.{key} is {value}, which runs on CUDA, but this rank computes on the CPU; set it to {other}"
        elif reason := _import_problem(module):
            yield (
                f"trainer.{key} is {value}, but {name} can't be imported ({reason}); install it with "
                f"`pip install 'miles-k3[gpu]'`, or set trainer.{key}: {other}"
            )


def _import_problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # a missing library, or one made for another torch
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
