"""Shards lent to an engine over several ranks: what its processes read, what is refused, what a restart reads."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_processes import Process
from helpers.thread_world import on_threads
from helpers.tiny import tiny_adapter, tiny_config

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.update import as_shard, make_update
from miles_k3.errors import AdapterError, EngineError
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.bucket import places
from miles_k3.rollout.sglang.lending import Lending
from miles_k3.rollout.sglang.neighbour import NeighbourEngine, SpeakingEngine
from miles_k3.rollout.sglang.span import held_experts, worker_experts
from miles_k3.types import AdapterConfig, AdapterUpdate, LentAdapter, SamplingParams
from miles_k3.world import World

CONFIG, ADAPTER = tiny_config(), AdapterConfig(rank=4, alpha=8.0)
LAYOUT = adapter_layout(CONFIG, ADAPTER)
EXPERTS = range(CONFIG.num_experts)
TP4 = load_recipe(
    "k3-4layer", ["rollout.engine=sglang", "rollout.engine_tp=4", "rollout.sglang.ep=2", "cluster.ranks_per_node=0"]
).recipe
TP2 = load_recipe(
    "k3-4layer", ["rollout.engine=sglang", "rollout.engine_tp=2", "rollout.sglang.ep=2", "cluster.ranks_per_node=0"]
).recipe


def whole(version: int) -> AdapterUpdate:
    return make_update(version, ADAPTER, tiny_adapter(CONFIG, ADAPTER, seed=version, dtype=torch.float32))


def shard_of(version: int, world: World, recipe: Any = TP2) -> AdapterUpdate:
    return as_shard(whole(version), LAYOUT, held_experts(recipe, CONFIG, world.rank, world.size))


def read(lent: LentAdapter, worker: int, tp: int, ep: int) -> dict[str, torch.Tensor]:
    """What a worker of the engine finds behind its handle."""
    each = tp // len(lent.shards)
    shard = lent.shards[worker // each]
    opener, arguments = shard.once[worker % each]
    flat, needed = opener(*arguments), worker_experts(worker, tp=tp, ep=ep, experts=EXPERTS)
    found = {}
    for name, shape, start in places(LAYOUT, shard.experts, needed):
        size = torch.Size(shape).numel() * 2
        found[name] = flat[start : start + size].view(torch.bfloat16).view(shape)
    return found


def check(lent: LentAdapter, version: int, tp: int, ep: int) -> None:
    expected = whole(version).tensors
    for worker in range(tp):
        needed, found = worker_experts(worker, tp=tp, ep=ep, experts=EXPERTS), read(lent, worker, tp, ep)
        assert list(found) == list(LAYOUT)
        for name, tensor in found.items():
            own = expected[name][needed.start : needed.stop] if LAYOUT[name].per_expert else expected[name]
            assert torch.equal(tensor, own.to(torch.bfloat16)), (worker, name)


@pytest.mark.parametrize(
    ("recipe", "ranks", "tp", "ep"),
    [(TP2, 4, 2, 2), (TP4, 4, 4, 2), (TP4, 1, 4, 2)],
    ids=["two engines", "an expert's columns over two", "one rank with four GPUs"],
)
def test_every_worker_finds_its_share_and_no_more(recipe: Any, ranks: int, tp: int, ep: int) -> None:
    def rank(world: World) -> int:
        lending, given = Lending(recipe, CONFIG, world), []
        speaks = world.rank % tp == 0
        lending.hand_over(
            shard_of(3, world, recipe), -1, (lambda lent: (check(lent, 3, tp, ep), given.append(lent))[1])
            if speaks else None,
        )  # fmt: skip
        return len(given)

    found = [rank(World())] if ranks == 1 else on_threads(ranks, rank)
    assert found == [int(r % tp == 0) for r in range(ranks)]


def other_version(update: AdapterUpdate) -> AdapterUpdate:
    return as_shard(whole(2), LAYOUT, update.shard.experts if update.shard else None)


def other_content(update: AdapterUpdate) -> AdapterUpdate:
    tensors = tiny_adapter(CONFIG, ADAPTER, seed=9, dtype=torch.float32)
    return as_shard(make_update(1, ADAPTER, tensors), LAYOUT, update.shard.experts if update.shard else None)


def other_experts(update: AdapterUpdate) -> AdapterUpdate:
    return as_shard(whole(1), LAYOUT, range(2, 6))


def damaged(update: AdapterUpdate) -> AdapterUpdate:
    assert update.shard is not None
    update.shard.flat[-1] += 1
    return update


def gone(update: AdapterUpdate) -> AdapterUpdate:
    raise SystemExit


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (other_version, "expected to be v1"),
        (other_content, "rank 3 lends a shard of adapter v1, sha256 .* all must be of one export"),
        (other_experts, "came as the shard of experts 2-5, expected was the shard of experts 4-7"),
        (damaged, "has sha256"),
        (gone, "another process of this run has ended"),
    ],
)
def test_a_fault_of_one_rank_is_every_ranks_and_no_engine_hears_of_it(
    fault: Callable[[AdapterUpdate], AdapterUpdate], said: str
) -> None:
    """Of both engines: what was lent before stays, and is read again."""

    lendings: list[Lending] = []  # all of them live as long as any rank reads

    def rank(world: World) -> tuple[str, int]:
        lending, given = Lending(TP2, CONFIG, world), []
        lendings.append(lending)
        load = given.append if world.rank % 2 == 0 else None
        lending.hand_over(shard_of(0, world), -1, load)
        try:
            update = shard_of(1, world)
            lending.hand_over(fault(update) if world.rank == 3 else update, 0, load)
        except Exception as error:  # noqa: BLE001  (looked at below)
            for lent in given:
                kept = tuple(dataclasses.replace(s, once=(s.kept,)) for s in lent.shards)
                check(dataclasses.replace(lent, shards=kept), 0, 2, 2)
            return str(error), len(given)
        return "", len(given)

    told = on_threads(4, rank)
    if fault is gone:
        assert isinstance(told.pop(), SystemExit)
    assert [count for _, count in told] == [1, 0, 1, 0][: len(told)], "version 0 alone was loaded"
    words = [text for text, _ in told]
    assert all(re.search(said, text) for text in words), words


def test_an_engine_that_refuses_leaves_the_version_before_on_all_ranks() -> None:
    def refuse(lent: LentAdapter) -> None:
        raise AdapterError("SGLang refused it")

    def rank(world: World) -> str:
        with pytest.raises(AdapterError, match="SGLang refused it"):
            Lending(TP2, CONFIG, world).hand_over(shard_of(0, world), -1, refuse if world.rank == 0 else None)
        return "raised"

    assert on_threads(2, rank) == ["raised"] * 2


def lent_here() -> list[str]:
    gc.collect()
    links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [str(link.readlink()) for link in links if "miles-k3-adapter" in str(link.readlink())]


class Reader(Process):
    """An engine's process that reads what it is given."""

    def load(self, update: Any) -> int:
        super().load(update)
        check(update, update.version, 2, 2)
        return self.version


def test_a_process_started_again_reads_the_same_shards_until_the_next_are_lent() -> None:
    """Also after the exported ones are gone; the neighbour has nothing to do for it."""
    processes = [Reader(lambda verb: verb == "score"), Reader(), Reader()]

    lendings: list[Lending] = []

    def rank(world: World) -> tuple[int, list[str]]:
        lending, left = Lending(TP2, CONFIG, world), iter(processes)
        lendings.append(lending)
        if world.rank:
            engine: Any = NeighbourEngine(lending)
        else:
            engine = SpeakingEngine(lambda: next(left), lending, name="engine", restarts=2, timeout_s=60.0)
        for version in range(2):
            engine.load_adapter(shard_of(version, world))
            gc.collect()
        if world.rank == 0:
            engine.score([[1, 2]])
        return engine.adapter_version, processes[1].verbs

    (version, verbs), (follows, _) = on_threads(2, rank)
    assert (version, follows) == (1, 1)
    assert verbs == ["start", "load", "score"]


def test_of_each_rank_one_copy_stays_on_the_host() -> None:
    lendings = []

    def rank(world: World) -> None:
        lendings.append(Lending(TP2, CONFIG, world))
        for version in range(3):
            lendings[-1].hand_over(shard_of(version, world), version - 1, lambda lent: None)

    rank(World())
    rank(World())
    assert len(lent_here()) == 2
    lendings.clear()
    assert lent_here() == []


def test_a_neighbour_answers_nothing() -> None:
    engine = NeighbourEngine(Lending(TP2, CONFIG, World(rank=1, size=2)))
    engine.sleep()
    engine.wake()
    for ask in (lambda: engine.score([[1, 2]]), lambda: asyncio.run(engine.generate([1], SamplingParams()))):
        with pytest.raises(EngineError, match="belongs to another rank's engine"):
            ask()
