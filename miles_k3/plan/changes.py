"""The smallest change of a recipe that makes it fit: tried out by planning it, never guessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from miles_k3.config import Recipe
from miles_k3.errors import ConfigError
from miles_k3.k3.config import K3Config
from miles_k3.parallel import token_multiple
from miles_k3.plan.planner import Machine, plan
from miles_k3.plan.shapes import Plan

MOST_CHANGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Keys and their new values; `effort` orders changes: what costs time only, what changes the run, more machines."""

    values: Mapping[str, Any]
    effort: int
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """Changes that together fit, and the plan that shows it."""

    changes: tuple[Change, ...]
    plan: Plan

    @property
    def values(self) -> dict[str, Any]:
        return {key: value for change in self.changes for key, value in change.values.items()}


def smallest_fix(recipe: Recipe, config: K3Config, machine: Machine) -> Fix | None:
    """Up to three changes of the least effort together with which the recipe fits; None when no three of them do.

    Only changes that by themselves lower the need of a pool that is too small are combined.
    """
    before = plan(recipe, config, machine)
    helpful: list[Change] = []
    for change in candidates(recipe, config):
        found = _planned(recipe, config, machine, (change,))
        if found is not None and _excess(found) < _excess(before):
            helpful.append(change)
    groups = [group for size in range(1, MOST_CHANGES + 1) for group in combinations(helpful, size)]
    for chosen in sorted(groups, key=lambda group: sum(change.effort for change in group)):
        keys = [key for change in chosen for key in change.values]
        if len(set(keys)) < len(keys):
            continue
        found = _planned(recipe, config, machine, chosen)
        if found is not None and found.fits:
            return Fix(changes=chosen, plan=found)
    return None


def _excess(found: Plan) -> float:
    """By how much the pools are too small, as shares of them."""
    shares = (v.needed / v.pool.capacity for v in found.verdicts if v.pool.capacity and not v.fits)
    return sum(shares, 0.0)


def _planned(recipe: Recipe, config: K3Config, machine: Machine, changes: tuple[Change, ...]) -> Plan | None:
    """None where the changed recipe is refused."""
    try:
        return plan(changed(recipe, {k: v for c in changes for k, v in c.values.items()}), config, machine)
    except (ConfigError, ValidationError):
        return None


def changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with other values, judged again. Raises pydantic's ValidationError."""
    dumped = recipe.model_dump()
    for key, value in values.items():
        *sections, name = key.split(".")
        held = dumped
        for section in sections:
            held = held[section]
        held[name] = value
    return Recipe.model_validate(dumped)


def candidates(recipe: Recipe, config: K3Config) -> Iterator[Change]:
    """Single changes that may save memory, those that change least first."""
    yield from _sleeping(recipe)
    yield from _training(recipe)
    yield from _sampling(recipe)
    if recipe.model.base_dtype == "bf16":
        yield Change(values={"model.base_dtype": "mxfp4"}, effort=3, cost="experts are unpacked at each use")
    yield from _layout(recipe, config)
    if recipe.lora.rank > 1:
        rank = recipe.lora.rank // 2
        values = {"lora.rank": rank, "lora.alpha": recipe.lora.alpha / 2, "rollout.max_lora_rank": rank}
        yield Change(values=values, effort=9, cost="another adapter")


def _sleeping(recipe: Recipe) -> Iterator[Change]:
    if not recipe.rollout.sleep_while_training:
        yield Change(values={"rollout.sleep_while_training": True}, effort=1, cost="caches are allocated each step")
    if not recipe.trainer.sleep_while_rollout:
        yield Change(values={"trainer.sleep_while_rollout": True}, effort=1, cost="two copies to the host a step")
    if not recipe.trainer.distributed_optimizer:
        yield Change(values={"trainer.distributed_optimizer": True}, effort=1, cost="a gather a step")
    if recipe.trainer.async_checkpoint:
        yield Change(values={"trainer.async_checkpoint": False}, effort=2, cost="a step waits for its checkpoint")


def _training(recipe: Recipe) -> Iterator[Change]:
    trainer, unit = recipe.trainer, token_multiple(recipe.trainer.parallel)
    longest = recipe.task.max_prompt_tokens + recipe.rollout.sampling.max_new_tokens
    least = -(-longest // unit) * unit
    for tokens in sorted({max(least, trainer.micro_batch_tokens // 2 // unit * unit), least}, reverse=True):
        if tokens < trainer.micro_batch_tokens:
            yield Change(values={"trainer.micro_batch_tokens": tokens}, effort=2, cost="smaller products")
    if trainer.recompute == "none":
        values = {"trainer.recompute": "selective", "trainer.recompute_sublayers": ("mlp",)}
        yield Change(values=values, effort=2, cost="MLPs run forward twice")
    if trainer.recompute != "full":
        yield Change(values={"trainer.recompute": "full"}, effort=3, cost="everything runs forward twice")


def _sampling(recipe: Recipe) -> Iterator[Change]:
    rollout = recipe.rollout
    for running in (rollout.max_running // 2, rollout.max_running // 4, rollout.max_running // 8):
        if running:
            yield Change(values={"rollout.max_running": running}, effort=3, cost="fewer requests at once")
    for tokens in (rollout.prefill_chunk_tokens // 2, rollout.prefill_chunk_tokens // 4):
        if tokens:
            yield Change(values={"rollout.prefill_chunk_tokens": tokens}, effort=2, cost="prompts in more steps")
    if rollout.num_pages:
        yield Change(values={"rollout.num_pages": rollout.num_pages // 2}, effort=3, cost="fewer cached tokens")
    if rollout.prefix_cache != "off" and rollout.engine == "embedded":
        yield Change(values={"rollout.cache_slots": 1}, effort=2, cost="fewer prompts are shared")
    if rollout.engine != "embedded":
        yield Change(values={"rollout.engine_tp": 2 * rollout.engine_tp}, effort=4, cost="half as many engines")


def _layout(recipe: Recipe, config: K3Config) -> Iterator[Change]:
    p, cluster = recipe.trainer.parallel, recipe.cluster
    stages = p.pp * p.vpp
    if p.stage_layers is None and config.num_hidden_layers % stages:
        each, more = divmod(config.num_hidden_layers, stages)
        even = tuple(each + (i < more) for i in range(stages))
        yield Change(values={"trainer.parallel.stage_layers": even}, effort=2, cost="nothing")
    for axis in ("tp", "cp"):  # with as many experts for each rank more
        wider = {f"trainer.parallel.{axis}": 2 * getattr(p, axis), "trainer.parallel.ep": 2 * p.ep}
        yield from _more_ranks(recipe, wider)
    yield from _more_ranks(recipe, {"trainer.parallel.pp": 2 * p.pp, "trainer.parallel.stage_layers": None})
    if cluster.ranks_per_node:
        yield Change(values={"trainer.parallel.ep": 2 * p.ep}, effort=4, cost="experts' rows travel further")


def _more_ranks(recipe: Recipe, values: dict[str, Any]) -> Iterator[Change]:
    """The wider layout on twice the machines; where nothing says how many there are, on twice the ranks."""
    cluster = recipe.cluster
    machines = {"cluster.nodes": 2 * cluster.nodes} if cluster.ranks_per_node else {}
    yield Change(values={**values, **machines}, effort=20, cost="twice the ranks")
