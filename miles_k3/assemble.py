"""A recipe's parts: model, task, engine, trainer, reward workers, put together the same way by every command."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from miles_k3.config import Recipe
from miles_k3.errors import ConfigError, LaunchError
from miles_k3.k3.config import K3Config
from miles_k3.k3.random_weights import random_base
from miles_k3.k3.weights import ResidentBase, load_base
from miles_k3.launch import pick_device, pick_threads, refuse_launch
from miles_k3.plan.report import gb
from miles_k3.protocols import Engine, Trainer
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.proposal import Speculative
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.rollout.tasks.registry import GradedTask, make_task
from miles_k3.rollout.tasks.rewards import RewardPool
from miles_k3.speculating import prepare_speculation, speculative_of
from miles_k3.tokenizer import load_tokenizer
from miles_k3.types import AdapterConfig
from miles_k3.world import ALONE, World

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """The frozen base and its tokenizer, held once and shared. `base` is None where nobody here computes with it."""

    config: K3Config
    base: ResidentBase | None
    tokenizer: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Everything that a loop works with on one rank. `trainer` is None where nothing is trained."""

    world: World
    model: Model
    task: GradedTask
    rewards: RewardPool
    engine: Engine
    trainer: Trainer | None


EngineMaker = Callable[[Recipe, Model], Engine]


@contextmanager
def assembled(
    recipe: Recipe, *, training: bool, world: World = ALONE, new_engine: EngineMaker | None = None
) -> Iterator[Parts]:
    """This rank's parts of `recipe`, ended in reverse order afterwards. Reward workers start while the model loads.

    `new_engine` gives the engine where it is not `make_engine`'s. Collective. Raises LaunchError, before anything is
    loaded or started, when the recipe can't run on these ranks.
    """
    torch.set_num_threads(pick_threads(recipe.run.threads, world))
    config = model_config(recipe)
    refuse_launch(recipe, config, world, training=training)
    with ExitStack() as stack:
        with_base = training or recipe.rollout.engine == "embedded"
        model, task, rewards = world.together(lambda: _load(recipe, config, world, stack, with_base=with_base))
        trainer = make_trainer(recipe, model) if training else None
        engine = world.together(lambda: new_engine(recipe, model) if new_engine else make_engine(recipe, model, world))
        stack.callback(engine.close)
        yield Parts(world=world, model=model, task=task, rewards=rewards, engine=engine, trainer=trainer)


def model_config(recipe: Recipe) -> K3Config:
    """The model's config, with what the recipe says of it."""
    config = K3Config.from_folder(recipe.model.path)
    if recipe.model.mla_latent_norm_eps is not None:
        config = dataclasses.replace(config, mla_latent_norm_eps=recipe.model.mla_latent_norm_eps)
    return config


def load_engine(recipe: Recipe, world: World) -> EmbeddedEngine:
    """An embedded engine with a base of its own, for a process that does not train. `world` is its place."""
    model = load_model(recipe, world)
    return make_embedded_engine(recipe, model, longest_sequence(recipe, model.config))


def load_model(recipe: Recipe, world: World) -> Model:
    """A base of its own and its tokenizer, for a process that does not train."""
    torch.set_num_threads(pick_threads(recipe.run.threads, world))
    return _load_model(recipe, model_config(recipe), load_tokenizer(recipe.model.tokenizer_folder), world)


def load_recipe_engine(recipe: Recipe, world: World, *, first_gpu: int = 0, meeting_place: str | None = None) -> Engine:
    """The recipe's engine for a process that does nothing else. SGLang's GPUs begin at `first_gpu`; its machines, where
    there are several, find one another at `meeting_place`."""
    if recipe.rollout.engine == "embedded":
        return load_engine(recipe, world)
    config = model_config(recipe)
    return start_sglang_engine(
        recipe, config, load_tokenizer(recipe.model.tokenizer_folder), longest_sequence(recipe, config), first_gpu,
        meeting_place,
    )  # fmt: skip


def _load(
    recipe: Recipe, config: K3Config, world: World, stack: ExitStack, *, with_base: bool
) -> tuple[Model, GradedTask, RewardPool]:
    tokenizer = load_tokenizer(recipe.model.tokenizer_folder)
    task = make_task(recipe.task, tokenizer, seed=recipe.run.seed)
    rewards = stack.enter_context(RewardPool(task, recipe.task.reward_workers, recipe.task.reward_timeout_s))
    if not with_base:
        return Model(config=config, base=None, tokenizer=tokenizer), task, rewards
    return _load_model(recipe, config, tokenizer, world), task, rewards


def _load_model(recipe: Recipe, config: K3Config, tokenizer: Any, world: World) -> Model:
    dtype, device = DTYPES[recipe.model.dtype], pick_device(recipe.model.device, world.local_rank)
    if recipe.model.weights == "random":
        log.info("drawing random weights for %s", recipe.model.path)
        base = random_base(
            config, dtype=dtype, device=device, base_dtype=recipe.model.base_dtype, seed=recipe.run.seed
        )  # fmt: skip
    else:
        size = sum(file.stat().st_size for file in Path(recipe.model.path).glob("*.safetensors"))
        log.info("loading %s, %s", recipe.model.path, gb(size))
        base = load_base(recipe.model.path, config, dtype=dtype, device=device, base_dtype=recipe.model.base_dtype)
    return Model(config=config, base=base, tokenizer=tokenizer)


def adapter_config(recipe: Recipe) -> AdapterConfig:
    return AdapterConfig(rank=recipe.lora.rank, alpha=recipe.lora.alpha, share_gate_up_a=recipe.lora.share_gate_up_a)


def make_engine(recipe: Recipe, model: Model, world: World = ALONE) -> Engine:
    """The recipe's engine, on this rank's device."""
    longest = longest_sequence(recipe, model.config)
    if recipe.rollout.engine == "sglang":
        return make_sglang_engine(recipe, model, world, longest)
    return make_embedded_engine(recipe, model, longest)


def longest_sequence(recipe: Recipe, config: K3Config) -> int:
    longest = recipe.task.max_prompt_tokens + recipe.rollout.sampling.max_new_tokens
    if longest > config.max_position_embeddings:
        raise ConfigError(
            f"task.max_prompt_tokens + rollout.sampling.max_new_tokens is {longest}; the model takes "
            f"{config.max_position_embeddings} (max_position_embeddings): lower one of them"
        )
    return longest


def make_sglang_engine(recipe: Recipe, model: Model, world: World, longest: int) -> Engine:
    """SGLang in processes of its own on this rank's GPUs, started again when they end; returns when it serves."""
    from miles_k3.rollout.sglang.lending import Lending
    from miles_k3.rollout.sglang.neighbour import SpeakingEngine
    from miles_k3.rollout.sglang.process import SglangProcess

    def start() -> SglangProcess:
        return SglangProcess(
            lambda: start_sglang_engine(recipe, model.config, model.tokenizer, longest, world.local_rank)
        )

    cluster = recipe.cluster
    engine = SpeakingEngine(
        start, Lending(recipe, model.config, world), name="SGLang", restarts=cluster.engine_restarts,
        timeout_s=cluster.engine_timeout_s,
    )  # fmt: skip
    engine.ready()
    return engine


def start_sglang_engine(
    recipe: Recipe, config: K3Config, tokenizer: Any, longest: int, first_gpu: int, meeting_place: str | None = None
) -> SglangEngine:
    from miles_k3.rollout.sglang.start import start_sglang

    return start_sglang(
        recipe, config, tokenizer=tokenizer, adapter_config=adapter_config(recipe), max_sequence_tokens=longest,
        first_gpu=first_gpu, meeting_place=meeting_place,
    )  # fmt: skip


def make_embedded_engine(
    recipe: Recipe, model: Model, longest: int, *, speculative: Speculative | None = None
) -> EmbeddedEngine:
    """The engine in this process, on the base that the trainer computes with. `speculative` instead of the recipe's."""
    rollout = recipe.rollout
    assert model.base is not None, "an embedded engine computes with the base"
    try:
        engine = EmbeddedEngine(
            model.base, model.config, tokenizer=model.tokenizer, adapter_config=adapter_config(recipe),
            max_lora_rank=rollout.max_lora_rank, max_running=rollout.max_running, page_size=rollout.page_size,
            num_pages=rollout.num_pages, prefill_chunk_tokens=rollout.prefill_chunk_tokens, max_sequence_tokens=longest,
            prefix_cache=rollout.prefix_cache, cache_slots=rollout.cache_slots,
            cache_pool=rollout.cache_pool, cache_min_tokens=rollout.cache_min_tokens,
            track_interval=rollout.track_interval, reserve_tokens=rollout.reserve_tokens, overlap=rollout.overlap,
            speculative=speculative or speculative_of(rollout.speculative, model.config),
            kernels=rollout.kernels, cuda_graphs=rollout.cuda_graphs,
        )  # fmt: skip
        prepare_speculation(engine, rollout.speculative)
        return engine
    except (MemoryError, OverflowError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and not re.search("alloc|memory|overflow", str(e)):
            raise
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise LaunchError(
            f"rollout.max_running {rollout.max_running}, rollout.num_pages {rollout.num_pages}, rollout.page_size "
            f"{rollout.page_size} and rollout.max_lora_rank {rollout.max_lora_rank} don't fit into memory ({reason}); "
            "lower one of them"
        ) from e


def make_trainer(recipe: Recipe, model: Model) -> Trainer:
    from miles_k3.trainer.megatron import MegatronTrainer  # brings megatron-core, which evaluation does without

    assert model.base is not None, "a trainer computes with the base"
    return MegatronTrainer(
        model.base, model.config, adapter=adapter_config(recipe), section=recipe.trainer, algorithm=recipe.algorithm,
        total_steps=recipe.run.steps, seed=recipe.run.seed,
    )  # fmt: skip
