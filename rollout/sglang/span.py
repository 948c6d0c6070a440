"""Which ranks' GPUs one SGLang engine takes, and which of them speaks for it. Imports neither torch nor SGLang."""

from __future__ import annotations

from collections.abc import Iterator

from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.world import TORCHRUN, World


def engine_ranks(recipe: Recipe, rank: int, ranks: int) -> range:
    """The ranks on whose GPUs the engine of `rank` lies; the first of them speaks for it, the others have none."""
    size = recipe.rollout.engine_tp if recipe.rollout.engine == "sglang" and ranks > 1 else 1
    first = rank // size * size
    return range(first, first + size)


def sampled_share(recipe: Recipe, world: World, count: int) -> range:
    """This rank's part of `count` prompts: those of all ranks of its engine where it speaks for it, else none."""
    ranks = engine_ranks(recipe, world.rank, world.size)
    if world.rank != ranks.start:
        return range(0)
    return range(count * ranks.start // world.size, count * ranks.stop // world.size)


def worker_experts(worker: int, *, tp: int, ep: int, experts: range) -> range:
    """Those of the routed `experts` whose factors rank `worker` of an engine's `tp` has: SGLang numbers the ranks that
    share an expert's columns first, then the `ep` groups of experts."""
    group, each = worker // (tp // ep), len(experts) // ep
    return experts[group * each : (group + 1) * each]


def held_experts(recipe: Recipe, config: K3Config, rank: int, ranks: int) -> range | None:
    """Of which routed experts `rank` needs the factors for its part of its engine; None: a whole adapter, no shard."""
    if recipe.rollout.engine != "sglang":
        return None
    span, tp = engine_ranks(recipe, rank, ranks), recipe.rollout.engine_tp
    experts, each = range(config.num_experts if config.moe_layers else 0), tp // len(span)
    first = (rank - span.start) * each
    ends = [worker_experts(w, tp=tp, ep=recipe.rollout.sglang.ep, experts=experts) for w in (first, first + each - 1)]
    return range(ends[0].start, ends[-1].stop)


def span_problems(recipe: Recipe, *, ranks: int, per_node: int, launcher: str) -> Iterator[str]:
    """Why a run of so many ranks can't start the recipe's engines, a sentence each with what to change."""
    own, tp = recipe.rollout.sglang, recipe.rollout.engine_tp
    if own.disaggregation.transfer != "off":
        yield (
            f"rollout.sglang.disaggregation.transfer is {own.disaggregation.transfer}, but a run's adapters and "
            "requests go to whole engines: it starts no prefill and decode workers; set it to off, or start them by "
            "hand as `miles-k3 sglang-commands RECIPE` prints"
        )
    if tp == 1 and own.nodes == 1:
        return
    if ranks == 1:
        if own.nodes > 1:
            yield (
                f"rollout.sglang.nodes is {own.nodes}, but a run of one rank knows one machine; set it to 1, or start "
                "the ranks with `miles-k3 launch`"
            )
        return
    if launcher == TORCHRUN:
        yield (
            f"rollout.engine_tp is {tp}: an engine over several ranks' GPUs is started by `miles-k3 launch RECIPE`, "
            "not by torchrun; start it so, or set rollout.engine_tp: 1"
        )
    if ranks % tp or max(tp, per_node) % min(tp, per_node):
        yield (
            f"rollout.engine_tp {tp} doesn't cut {ranks} ranks, {per_node} a node, into whole engines; choose a number "
            "that divides the ranks of a node, or whole nodes"
        )
        return
    needed = max(1, tp // per_node)
    if own.nodes != needed:
        yield (
            f"rollout.sglang.nodes is {own.nodes}, but rollout.engine_tp {tp} over nodes of {per_node} ranks spans "
            f"{needed}; set it to {needed}"
        )
