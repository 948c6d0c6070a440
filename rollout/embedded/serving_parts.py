"""What an engine serves with, put together at its start and again after a step that failed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_k3.adapters.store import AdapterStore
from miles_k3.rollout.cache.layout import Layout
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.cache.split import SplitPool
from miles_k3.rollout.cache.unified import UnifiedPool
from miles_k3.rollout.embedded.fused.graphs import GraphParts, Recorder, StepGraphs
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.rollout.embedded.model import EngineModel
from miles_k3.rollout.embedded.prefix import Prefixes
from miles_k3.rollout.embedded.runner import Runner
from miles_k3.rollout.embedded.scheduler import Scheduler
from miles_k3.rollout.embedded.speculation import Speculator


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingParts:
    """Memory, books and runner, empty."""

    pool: BlockPool
    memory: RequestMemory
    prefixes: Prefixes | None
    scheduler: Scheduler
    runner: Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What they are made from: the engine's own options, judged."""

    layout: Layout
    device: torch.device
    num_slots: int
    num_pages: int
    max_running: int
    pages_per_request: int
    cache_pool: str
    prefix_cache: str
    min_tokens: int
    track_interval: int
    prefill_chunk_tokens: int
    share_prompts: bool
    reserve_tokens: int | None
    overlap: bool
    cuda_graphs: bool

    def build(self, model: EngineModel, store: AdapterStore, speculator: Speculator | None) -> ServingParts:
        """All anew; model, adapters and drafts stay."""
        make = UnifiedPool.holding if self.cache_pool == "unified" else SplitPool
        pool = make(self.layout, self.num_slots, self.num_pages, self.device)
        memory = RequestMemory(pool, max_running=self.max_running, max_pages=self.pages_per_request)
        prefixes = Prefixes.over(
            self.prefix_cache, memory, min_tokens=self.min_tokens, track_interval=self.track_interval
        )
        scheduler = Scheduler(
            memory, prefill_chunk_tokens=self.prefill_chunk_tokens, share_prompts=self.share_prompts,
            prefixes=prefixes, reserve_tokens=self.reserve_tokens,
            decode_tokens=1 if speculator is None else speculator.at.longest,
            follows=None if speculator is None else speculator.planner.should_follow,
        )  # fmt: skip
        graphs = None
        if self.cuda_graphs:
            graphs = StepGraphs(GraphParts(
                model=model, store=store, memory=memory, speculator=speculator, recorder=Recorder(),
                max_running=self.max_running, max_pages=self.pages_per_request,
            ))  # fmt: skip
        runner = Runner(
            model, store, memory, scheduler, overlap=self.overlap, speculator=speculator, graphs=graphs
        )  # fmt: skip
        return ServingParts(pool=pool, memory=memory, prefixes=prefixes, scheduler=scheduler, runner=runner)
