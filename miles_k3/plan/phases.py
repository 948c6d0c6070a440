"""A rank's memory in each phase of a step, in the order in which `miles_k3/loop.py` goes through them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.parallel import data_parallel_size, rank_stages, token_multiple
from miles_k3.plan.activations import Batch, Numbers, stage_peak
from miles_k3.plan.engine import SGLANG_HOST_BYTES, EngineBytes, engine_bytes
from miles_k3.plan.shapes import Bytes, Phase, RankPlan
from miles_k3.plan.weights import AdapterNumbers, BaseBytes, Share, adapter_numbers, base_bytes
from miles_k3.rollout.sglang.span import held_experts

FP32, BF16 = 4, 2
# The interpreter with torch, megatron-core and transformers takes about 0.7 GB; the rest is room. One grading process.
PROCESS_BYTES, GRADER_BYTES = 900_000_000, 200_000_000
CONTEXT_BYTES = 1_500_000_000  # assumed: a process's CUDA context and its NCCL buffers
EXPORT_BUCKET_BYTES = 64 << 20  # of trainer/adapter_exchange and of adapters/transport: two are alive at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """What an embedded engine takes more in a process of its own: its base, and the newest adapter on the rank's host,
    for the process that may come after it."""

    base: int
    adapter: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Bytes of one rank, whatever the phase. `lent`: of the host's copy of what SGLang has read."""

    base: int
    engine: EngineBytes
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    export: int
    lent: int
    loading: int
    checkpoint: int
    apart: Apart | None = None


def rank_plans(
    recipe: Recipe, c: K3Config, world: int, *, cuda: bool, fla: bool, apart: bool = False
) -> tuple[RankPlan, ...]:  # fmt: skip
    """One plan for each pipeline rank: the others of its stage hold the same. `apart`: each rank's embedded engine has
    a process and a base of its own (`miles-k3 launch`)."""
    stages = range(recipe.trainer.parallel.pp)
    return tuple(_rank_plan(recipe, c, world, pp_rank, cuda=cuda, fla=fla, apart=apart) for pp_rank in stages)


def _rank_plan(
    recipe: Recipe, c: K3Config, world: int, pp_rank: int, *, cuda: bool, fla: bool, apart: bool
) -> RankPlan:  # fmt: skip
    stages = rank_stages(recipe.trainer.parallel, c.num_hidden_layers, pp_rank)
    layers, world_stages = [layer for stage in stages for layer in stage], recipe.trainer.parallel.pp
    facts = rank_facts(recipe, c, world, pp_rank, cuda=cuda, fla=fla)
    if apart and recipe.rollout.engine == "embedded":
        facts = dataclasses.replace(facts, apart=_apart(recipe, c))
    shown = ", ".join(f"{stage.start}-{stage.stop - 1}" for stage in stages)
    return RankPlan(
        name=f"stage {pp_rank}: layers {shown}" if world_stages > 1 else f"every rank: layers {shown}",
        layers=len(layers), count=world // world_stages, device=_device(recipe, facts, cuda), host=_host(recipe, facts),
    )  # fmt: skip


def rank_facts(recipe: Recipe, c: K3Config, world: int, pp_rank: int, *, cuda: bool, fla: bool) -> Facts:
    """What the ranks of a pipeline stage hold and need."""
    p, itemsize = recipe.trainer.parallel, _itemsize(recipe)
    stages = rank_stages(p, c.num_hidden_layers, pp_rank)
    share = Share(
        layers=[layer for stage in stages for layer in stage], experts=c.num_experts // p.ep, tp=p.tp,
        embedding=stages[0].start == 0, head=stages[-1].stop == c.num_hidden_layers,
    )  # fmt: skip
    packed, embedded = recipe.model.base_dtype == "mxfp4", recipe.rollout.engine == "embedded"
    held = base_bytes(c, Share.whole(c) if embedded else share, itemsize=itemsize, packed=packed)
    own = adapter_numbers(c, share, recipe.lora.rank, one_gate_up_a=recipe.lora.share_gate_up_a)
    state = _optimizer_numbers(recipe, own, world)
    cut = base_bytes(c, share, itemsize=itemsize, packed=packed).gate_up if embedded and p.tp > 1 else 0
    return Facts(
        base=held.total + cut,
        engine=engine_bytes(recipe, c, itemsize),
        adapter=own.total * itemsize,
        gradients=own.total * FP32,
        optimizer=state * (2 * FP32 if itemsize == FP32 else 3 * FP32),  # in fp32 the masters are the factors
        activations=_activations(recipe, c, world, pp_rank, cuda=cuda, fla=fla),
        export=_export_bytes(recipe, c, world, itemsize),
        lent=0 if embedded else _exported_numbers(recipe, c, world) * BF16,
        loading=_loading_bytes(c, held, own, itemsize, packed=packed),
        checkpoint=state * 3 * FP32,
    )


def _apart(recipe: Recipe, c: K3Config) -> Apart:
    itemsize, packed = _itemsize(recipe), recipe.model.base_dtype == "mxfp4"
    whole = adapter_numbers(c, Share.whole(c), recipe.lora.rank, one_gate_up_a=False).total
    base = base_bytes(c, Share.whole(c), itemsize=itemsize, packed=packed).total
    return Apart(base=base, adapter=whole * itemsize)


def _itemsize(recipe: Recipe) -> int:
    return FP32 if recipe.model.dtype == "float32" else BF16


def _optimizer_numbers(recipe: Recipe, own: AdapterNumbers, world: int) -> int:
    """Numbers of which this rank keeps Adam's state: a share of them with the distributed optimizer."""
    if not recipe.trainer.distributed_optimizer:
        return own.total
    p = recipe.trainer.parallel
    per_stage = world // p.pp
    return math.ceil(own.dense * p.tp / per_stage) + math.ceil(own.expert * p.ep / per_stage)


def _activations(recipe: Recipe, c: K3Config, world: int, pp_rank: int, *, cuda: bool, fla: bool) -> int:
    t, p = recipe.trainer, recipe.trainer.parallel
    longest = recipe.task.max_prompt_tokens + recipe.rollout.sampling.max_new_tokens
    lengths = full_micro_batch(longest, t.micro_batch_tokens, token_multiple(p))
    answered = recipe.rollout.sampling.max_new_tokens / longest
    batch = Batch(
        lengths=lengths, cp=p.cp, split=p.tp if p.sequence_parallel else 1,
        wanted=math.ceil(sum(lengths) * answered / p.cp),
    )  # fmt: skip
    numbers = Numbers(
        itemsize=_itemsize(recipe), lora_rank=recipe.lora.rank, tp=p.tp, ep=p.ep, cuda=cuda, fla=fla,
        packed=recipe.model.base_dtype == "mxfp4",
    )  # fmt: skip
    recomputed = {"full": {"layer"}, "selective": set(t.recompute_sublayers), "none": set[str]()}[t.recompute]
    return stage_peak(
        c, rank_stages(p, c.num_hidden_layers, pp_rank), batch, numbers, recomputed=frozenset(recomputed),
        in_flight=_in_flight(recipe, world, pp_rank, sum(lengths), longest),
    )  # fmt: skip


def full_micro_batch(longest: int, tokens: int, unit: int) -> tuple[int, ...]:
    """Lengths of a micro-batch full of the longest sequences, padded to `unit`; the rest of it is one more sequence."""
    count, rest = divmod(tokens, longest)
    return (*[-(-longest // unit) * unit] * count, *([-(-rest // unit) * unit] if rest else []))


def _in_flight(recipe: Recipe, world: int, pp_rank: int, tokens: int, longest: int) -> int:
    """Forward passes that wait for their backward: megatron's warm-up of 1F1B, or of its interleaved schedule."""
    t, p = recipe.trainer, recipe.trainer.parallel
    samples = recipe.rollout.prompts_per_step * recipe.rollout.group_size // t.updates_per_rollout
    micro_batches = math.ceil(math.ceil(samples * longest / tokens) / data_parallel_size(p, world))
    if p.vpp == 1:
        return min(p.pp - pp_rank, micro_batches)
    return min(2 * (p.pp - pp_rank - 1) + (p.vpp - 1) * p.pp + 1, p.vpp * -(-micro_batches // p.pp) * p.pp)


def _export_bytes(recipe: Recipe, c: K3Config, world: int, itemsize: int) -> int:
    """What a rank gets of the adapter, once, and of several ranks the buckets that it comes in."""
    numbers = _exported_numbers(recipe, c, world)
    buckets = 0 if world == 1 else 2 * min(EXPORT_BUCKET_BYTES, numbers * itemsize)
    return numbers * itemsize + buckets


def _exported_numbers(recipe: Recipe, c: K3Config, world: int) -> int:
    """All of the adapter, or the shard of the engine's processes on the rank's GPU; any rank's has as many."""
    whole = adapter_numbers(c, Share.whole(c), recipe.lora.rank, one_gate_up_a=False)
    experts = held_experts(recipe, c, 0, world)
    if not experts:
        return whole.total
    return whole.dense + whole.expert * len(experts) // c.num_experts


def _loading_bytes(c: K3Config, base: BaseBytes, own: AdapterNumbers, itemsize: int, *, packed: bool) -> int:
    """Beside what stays: one layer's codes while they are unpacked, or the largest tensor; or a factor's fp32 draws."""
    reading = c.vocab_size * c.hidden_size * BF16 if packed else base.layer_codes + base.layer_experts // 2
    return max(reading, own.largest * 2 * FP32)


def _device(recipe: Recipe, f: Facts, cuda: bool) -> Mapping[Phase, Bytes]:
    alone = recipe.rollout.engine == "embedded" and f.apart is None
    engine_base = f.engine.base if f.apart is None else f.apart.base
    always = {"base": f.base, "engine base": engine_base, "adapter": f.adapter, "adapter slots": f.engine.slots}
    always["graphs"] = f.engine.graphs
    if f.engine.draft:
        always["draft"] = f.engine.draft
    if f.engine.kept:
        always["adapter copies"] = f.engine.kept
    always["runtime"] = CONTEXT_BYTES * (1 if alone else 2) if cuda else 0
    learning = {"gradients": f.gradients, "optimizer": f.optimizer}
    caches = {"KV": f.engine.kv, "states": f.engine.states, "replay": f.engine.replay}
    both = {**always, **learning, **caches}
    asleep = recipe.trainer.sleep_while_rollout
    phases = {
        Phase.LOAD: {**both, "buffers": f.loading},
        Phase.ROLLOUT: {**always, **caches, **({} if asleep else learning), "rollout work": f.engine.work},
        Phase.SWITCH: both,
        Phase.TRAIN: {**_beside_training(recipe, {**always, **caches}), **learning, "activations": f.activations},
        Phase.SYNC: {**both, "buffers": f.export},
        Phase.SAVE: both,
    }  # fmt: skip
    return {phase: {name: size for name, size in items.items() if size} for phase, items in phases.items()}


def _beside_training(recipe: Recipe, awake: Bytes) -> Bytes:
    """What of a rank stays while it trains: a sleeping engine gives its caches back, and SGLang its weights, too."""
    if not recipe.rollout.sleep_while_training:
        return awake
    given = {"KV", "states", "replay", *(["engine base"] if recipe.rollout.engine == "sglang" else [])}
    return {name: size for name, size in awake.items() if name not in given}


def _host(recipe: Recipe, f: Facts) -> Mapping[Phase, Bytes]:
    always = {"runtime": PROCESS_BYTES, "graders": recipe.task.reward_workers * GRADER_BYTES}
    if recipe.rollout.engine != "embedded":
        always["engine process"] = SGLANG_HOST_BYTES
        if recipe.rollout.sleep_while_training:  # the host's memory stays taken once it was
            always["sleeping engine"] = f.engine.base
        always["lent adapter"] = f.lent
    if f.apart is not None:
        always["engine process"] = PROCESS_BYTES + f.apart.adapter
    kept = {**always, "checkpoint": f.checkpoint} if recipe.trainer.async_checkpoint else always
    sleeping = {"sleeping optimizer": f.optimizer} if recipe.trainer.sleep_while_rollout else {}
    return {
        Phase.LOAD: always, Phase.ROLLOUT: {**kept, **sleeping}, Phase.SWITCH: {**kept, **sleeping},
        Phase.TRAIN: kept, Phase.SYNC: _lending_anew(kept, f), Phase.SAVE: {**always, "checkpoint": f.checkpoint},
    }  # fmt: skip


def _lending_anew(items: Bytes, f: Facts) -> Bytes:
    """The next adapter's shard beside the one before, which goes once all engines have the next."""
    return {**items, "lent adapter": 2 * f.lent} if f.lent else items
