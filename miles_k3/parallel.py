"""Which part of the model each rank of a layout holds, and why a layout can't work. Imports no torch.

Ranks are numbered as megatron numbers them: tp fastest, then cp, dp, pp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from miles_k3.config import ParallelSection, Recipe, TrainerSection
from miles_k3.k3.config import K3Config


def stage_layers(parallel: ParallelSection, num_layers: int) -> tuple[range, ...]:
    """The layers of each of the pp * vpp stages in model order: equal parts, the last takes what is left.

    12 x 7 + 9 for the 93 layers of K3 on eight stages. Call only where `layout_problems` finds nothing.
    """
    stages = parallel.pp * parallel.vpp
    counts = parallel.stage_layers
    if counts is None:
        each = -(-num_layers // stages)
        if num_layers - each * (stages - 1) < 1:
            each = num_layers // stages
        counts = (*[each] * (stages - 1), num_layers - each * (stages - 1))
    starts = [sum(counts[:i]) for i in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def rank_stages(parallel: ParallelSection, num_layers: int, pp_rank: int) -> tuple[range, ...]:
    """The stages of pipeline rank `pp_rank`, one for each virtual stage."""
    return stage_layers(parallel, num_layers)[pp_rank :: parallel.pp]


def data_parallel_size(parallel: ParallelSection, world_size: int) -> int:
    return world_size // (parallel.tp * parallel.pp * parallel.cp)


def smallest_world(parallel: ParallelSection) -> int:
    """The least number of ranks that the layout runs on: one data-parallel rank, or more where ep needs them."""
    stage = parallel.tp * parallel.cp
    return parallel.pp * stage * (parallel.ep // math.gcd(stage, parallel.ep))


def planned_world(recipe: Recipe) -> int:
    """The ranks that `cluster` asks for, or the least number that the layout runs on."""
    cluster = recipe.cluster
    return cluster.nodes * cluster.ranks_per_node or smallest_world(recipe.trainer.parallel)


def layout_problems(config: K3Config, section: TrainerSection, world_size: int) -> list[str]:
    """Why `section`'s layout can't run this model on `world_size` ranks, one sentence each; empty when it can."""
    p = section.parallel
    return [
        *_world_problems(p, world_size),
        *_width_problems(config, p),
        *_stage_problems(config, p),
        *_moe_problems(config, p, world_size),
        *_context_problems(section),
    ]


def _world_problems(p: ParallelSection, world_size: int) -> Iterator[str]:
    ranks = p.tp * p.pp * p.cp
    if world_size % ranks:
        yield (
            f"trainer.parallel needs a multiple of tp {p.tp} * pp {p.pp} * cp {p.cp} = {ranks} ranks, but there are "
            f"{world_size}; start with torchrun --nproc-per-node {smallest_world(p)}, or for miles-k3 launch set "
            "cluster.ranks_per_node, or change the layout"
        )


def _width_problems(config: K3Config, p: ParallelSection) -> Iterator[str]:
    widths = {
        "KDA heads": config.kda_num_heads, "MLA heads": config.num_attention_heads, "vocabulary": config.vocab_size,
        "dense MLP width": config.intermediate_size,
    }  # fmt: skip
    if config.moe_layers:
        widths["shared expert width"] = config.shared_intermediate_size
    for name, width in widths.items():
        if width % p.tp:
            yield (
                f"the model's {name} {width} can't be split over trainer.parallel.tp {p.tp}; choose a tp that divides"
            )


def _stage_problems(config: K3Config, p: ParallelSection) -> Iterator[str]:
    stages, layers = p.pp * p.vpp, config.num_hidden_layers
    if p.vpp > 1 and p.pp == 1:
        yield f"trainer.parallel.vpp is {p.vpp} but pp is 1: virtual stages interleave the stages of a pipeline"
    if p.stage_layers is not None:
        if len(p.stage_layers) != stages or sum(p.stage_layers) != layers:
            yield (
                f"trainer.parallel.stage_layers {list(p.stage_layers)} names {len(p.stage_layers)} stages and "
                f"{sum(p.stage_layers)} layers; expected pp {p.pp} * vpp {p.vpp} = {stages} stages and the model's "
                f"{layers} layers"
            )
    elif stages > layers:
        yield f"pp {p.pp} * vpp {p.vpp} = {stages} stages for the model's {layers} layers; each needs at least one"


def _moe_problems(config: K3Config, p: ParallelSection, world_size: int) -> Iterator[str]:
    if not config.moe_layers:
        if p.ep > 1:
            yield f"trainer.parallel.ep is {p.ep} but the model has no MoE layer; set ep: 1"
        return
    if config.num_experts % p.ep:
        yield f"the model's {config.num_experts} experts can't be split over trainer.parallel.ep {p.ep}"
    per_stage = world_size // p.pp
    if per_stage % p.ep:
        yield (
            f"trainer.parallel.ep {p.ep} doesn't divide the {per_stage} ranks of a pipeline stage (tp * cp * dp): "
            "expert-parallel ranks are taken from them"
        )
    if p.tp > 1 and not p.sequence_parallel:
        yield (
            f"trainer.parallel.tp is {p.tp} with sequence_parallel: false and the model has MoE layers: every "
            "tensor-parallel rank would route the same tokens and their gradients would count tp times; set "
            "sequence_parallel: true"
        )


def _context_problems(section: TrainerSection) -> Iterator[str]:
    p = section.parallel
    unit = token_multiple(p)
    if section.micro_batch_tokens % unit:
        yield (
            f"trainer.micro_batch_tokens {section.micro_batch_tokens} is not a multiple of {unit}, which cp {p.cp} "
            f"(two chunks a rank) and tp {p.tp} need; the next one is {-(-section.micro_batch_tokens // unit) * unit}"
        )


def token_multiple(parallel: ParallelSection) -> int:
    """What the tokens of a packed stream must be a multiple of; streams are padded to it.

    Each context-parallel rank takes two chunks of the zigzag order, and sequence parallelism splits a rank's tokens.
    """
    chunks = 2 * parallel.cp if parallel.cp > 1 else 1
    split = parallel.tp if parallel.sequence_parallel else 1
    return chunks * split
