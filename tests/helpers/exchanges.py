"""Exports of several ranks, sound and with a planted fault; run by a pool of ranks, which imports them by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from helpers.allocations import allocations
from helpers.engine_processes import Process
from helpers.parity import Case, build
from helpers.trainers import tiny_trainer
from torch import Tensor

from miles_k3.adapters.layout import AdapterTensor, adapter_layout
from miles_k3.adapters.shard import flat_views, held_layout
from miles_k3.adapters.transport import publish
from miles_k3.adapters.update import as_shard, make_update, verify_update
from miles_k3.errors import MilesError
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.lending import Lending
from miles_k3.rollout.sglang.neighbour import NeighbourEngine, SpeakingEngine
from miles_k3.rollout.sglang.span import held_experts
from miles_k3.trainer import adapter_exchange
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.types import AdapterConfig, AdapterUpdate, LentAdapter
from miles_k3.world import world_of

SMALL = 1024  # bytes of a bucket: many of them for the tiny model, and tensors in several


def share_of(rank: int, shares: int, experts: int) -> range:
    """The ranks of engines over `shares` GPUs, one engine after the other."""
    each, place = experts // shares, rank % shares
    return range(place * each, (place + 1) * each)


def whole_and_shard(rank: int, size: int, case: Case, shares: int) -> tuple[dict[str, Tensor], list[str]]:
    """This rank's whole export, and (hash of the whole export, of the shard's whole, of a bit-equal shard cut here)."""
    with patch.object(adapter_exchange, "BUCKET_BYTES", SMALL):
        trainer = build(case, rank)
        whole = trainer.export_adapter()
        experts = share_of(rank, shares, trainer.config.num_experts)
        shard = trainer.export_adapter(experts)
    layout = adapter_layout(trainer.config, shard.config)
    verify_update(whole, layout, max_rank=64, expected_version=None)
    verify_update(shard, layout, max_rank=64, expected_version=None, experts=experts)
    cut = as_shard(make_update(whole.version, whole.config, whole.tensors), layout, experts)
    assert shard.shard is not None
    assert cut.shard is not None
    assert torch.equal(shard.shard.flat, cut.shard.flat)
    assert shard.shard.sha256 == cut.shard.sha256
    return dict(whole.tensors), [whole.sha256, shard.sha256, cut.sha256]


def beyond_the_destination(
    rank: int, size: int, adapter_rank: int, parallel: Mapping[str, int], bucket_bytes: int
) -> tuple[int, int]:
    """(bytes of this rank's shard, bytes at most allocated beyond them while it was exported)."""
    trainer = tiny_trainer(adapter=AdapterConfig(rank=adapter_rank, alpha=1.0), section={"parallel": parallel})
    experts = share_of(rank, size, trainer.config.num_experts)
    with patch.object(adapter_exchange, "BUCKET_BYTES", bucket_bytes):
        trainer.export_adapter(experts)  # the tables of the checksums are made once
        with allocations() as found:
            update = trainer.export_adapter(experts)
    held = sum(t.numel() * t.element_size() for t in update.tensors.values())
    return held, found.peak - held


def _flipped_bit(trainer: MegatronTrainer, *, experts: bool = False) -> Any:
    """In the first rank's part of a factor that is split, of which the last rank has no copy; an expert's goes to
    nobody else."""
    places, done = adapter_exchange._places, []

    def damaged(bucket: Any, values: Tensor) -> Any:
        for rows, place in places(bucket, values):
            split = rows.part.dim is not None and rows.part.start == 0
            if split and (".experts." in rows.name) == experts and not done:
                place.view(-1).view(torch.uint8)[0] ^= 1
                done.append(rows)
            yield rows, place

    return patch.object(adapter_exchange, "_places", damaged)


def _flipped_bit_of_an_expert(trainer: MegatronTrainer) -> Any:
    return _flipped_bit(trainer, experts=True)


def _part_not_sent(trainer: MegatronTrainer) -> Any:
    from miles_k3.trainer import megatron

    pieces = megatron.exported_pieces

    def without_one(*arguments: Any) -> Any:
        found = pieces(*arguments)
        name = next(n for n, piece in found.items() if piece.owned and ".experts." in n)
        return {**found, name: replace(found[name], owned=False)}

    return patch.object(megatron, "exported_pieces", without_one)


def _gone_in_the_middle(trainer: MegatronTrainer) -> Any:
    broadcast, left = adapter_exchange._broadcast, [5]

    def end(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os._exit(3)
        return broadcast(*arguments)

    return patch.object(adapter_exchange, "_broadcast", end)


def _another_version(trainer: MegatronTrainer) -> Any:
    return patch.object(trainer, "_version", 7)


class Reader(Process):
    """An engine's process that reads what two ranks have lent it, whichever process that is in."""

    def __init__(self, layout: Mapping[str, AdapterTensor]) -> None:
        super().__init__(lambda verb: verb == "score")
        self._layout, self.found = layout, dict[str, Tensor]()

    def load(self, update: AdapterUpdate | LentAdapter) -> int:
        assert isinstance(update, LentAdapter)
        parts = []
        for shard in update.shards:
            ((opener, arguments),) = shard.once
            flat = opener(*arguments).view(torch.bfloat16)
            parts.append(flat_views(flat, held_layout(self._layout, shard.experts)))
        self.found = {
            name: torch.cat([part[name] for part in parts]) if t.per_expert else parts[-1][name].clone()
            for name, t in self._layout.items()
        }
        return super().load(update)


def hand_over(rank: int, size: int, case: Case, overrides: tuple[str, ...]) -> list[tuple[int, dict[str, Tensor]]]:
    """(version, what the engine's process has read) after each of two hand-overs, and after a restart; of a neighbour
    nothing is read."""
    trainer, recipe = build(case, rank), load_recipe("k3-4layer", overrides).recipe
    lending = Lending(recipe, trainer.config, world_of())
    processes = [Reader(adapter_layout(trainer.config, trainer.adapter)) for _ in range(2)]
    left, told = iter(processes), []
    engine: Any = NeighbourEngine(lending)
    if rank == 0:
        engine = SpeakingEngine(lambda: next(left), lending, name="engine", restarts=1, timeout_s=60.0)
    experts = held_experts(recipe, trainer.config, rank, size)
    for version in range(2):
        trainer._version = version
        publish(trainer.export_adapter(experts), engine)
        told.append((engine.adapter_version, processes[0].found))
    if rank == 0:
        processes[1].ends_in = lambda verb: False
        engine.score([[1, 2]])
        told.append((engine.adapter_version, processes[1].found))
    world_of().wait()  # what the other has lent ends with its process's call
    return told


FAULTS: dict[str, Callable[[MegatronTrainer], Any]] = {
    "damaged": _flipped_bit, "expert": _flipped_bit_of_an_expert, "lost": _part_not_sent, "gone": _gone_in_the_middle,
    "version": _another_version, "none": lambda _: nullcontext(),
}  # fmt: skip


def export_with(rank: int, size: int, case: Case, fault: str, experts: tuple[range, ...]) -> str:
    """What the last rank's fault makes each rank say; `experts`: what they ask for."""
    trainer = build(case, rank)
    with patch.object(adapter_exchange, "BUCKET_BYTES", SMALL), FAULTS[fault if rank == size - 1 else "none"](trainer):
        try:
            return str(trainer.export_adapter(experts[rank]).version)
        except MilesError as error:
            return f"{type(error).__name__}: {error}"
