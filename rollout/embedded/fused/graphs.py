"""Decode steps as CUDA graphs: one replay runs the forward, the head and the draws of a whole batch.

A graph belongs to a tier, the padded number of requests, and to the adapter slots that its requests use. It reads its
batch from tensors that stay where they are and are filled by one copy; adapters are read from their slots, so a swap
into a slot needs no new graph. Padding rows have no state, no page and no adapter: they write nothing.

Shapes: B requests, T the tier, P pages a request, M MoE layers, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_k3.adapters.store import BASE_SLOT, AdapterSlot, AdapterStore
from miles_k3.rollout.embedded.batch import DecodeBatch, StateRows, StepBatch
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.rollout.embedded.model import EngineModel
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.embedded.sampler import SamplingBatch, sample, signed_seed

FIELDS = {
    "tokens": torch.int64, "positions": torch.int64, "seeds": torch.int64, "states": torch.int32,
    "lengths": torch.int32, "writes": torch.int32, "slots": torch.int32, "temperature": torch.float32,
    "greedy": torch.int32,
}  # fmt: skip
PADDING = {"states": -1, "writes": -1, "slots": -1, "temperature": 1}


def tiers_of(max_running: int) -> list[int]:
    """Batch sizes that are recorded: padding is at most half of what runs."""
    steps = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256]
    steps += range(320, max_running, 64)
    return [t for t in steps if t < max_running] + [max_running]


class BatchInputs:
    """What a tier's graphs read: fields and a page table, views of one buffer that one copy fills."""

    def __init__(self, tier: int, max_pages: int, device: torch.device) -> None:
        shapes = {**dict.fromkeys(FIELDS, (tier,)), "table": (tier, max_pages)}
        dtypes = {**FIELDS, "table": torch.int32}
        places, size = {}, 0
        for name, shape in shapes.items():
            num_bytes = int(np.prod(shape)) * dtypes[name].itemsize
            places[name] = slice(size, size + num_bytes)
            size += -(-num_bytes // 16) * 16  # kernels read 16 bytes at a time
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

        def views(buffer: Tensor) -> dict[str, Tensor]:
            return {n: buffer[places[n]].view(dtypes[n]).view(shapes[n]) for n in shapes}

        self.on_device = views(self._device)
        self._on_host = [{n: v.numpy() for n, v in views(h).items()} for h in self._hosts]

    def fill(self, values: dict[str, np.ndarray]) -> None:
        """Values of the first B rows; the others become padding. The host buffer in flight is left alone."""
        self._turn = 1 - self._turn
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        for name, view in self._on_host[self._turn].items():
            given = values.get(name)
            count = 0 if given is None else given.shape[0]
            view[count:] = PADDING.get(name, 0)
            if given is not None and given.ndim == 1:
                view[:count] = given
            elif given is not None:
                view[:count, : given.shape[1]] = given
                view[:count, given.shape[1] :] = 0
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        if self._device.is_cuda:
            event = self._copied[self._turn] = torch.cuda.Event()
            event.record()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """A graph and what it leaves behind: valid until another replay."""

    replay: Callable[[], None]
    tokens_T: Tensor
    drawn_3T: Tensor
    routed_TMK: Tensor


class DecodeGraphs:
    """Records graphs at their first use and replays them. Everything runs on the caller's stream."""

    def __init__(self, model: EngineModel, store: AdapterStore, memory: RequestMemory, *, max_running: int,
                 max_pages: int) -> None:  # fmt: skip
        self._model, self._store, self._memory = model, store, memory
        self._pool, self._device, self._max_pages = memory.pool, memory.pool.device, max_pages
        self.tiers = tiers_of(max_running)
        self._inputs: dict[int, BatchInputs] = {}
        self._recorded: dict[tuple[int, tuple[tuple[int, float], ...]], Recorded] = {}
        self._graph_memory: Any = None  # one for all graphs: they run one after another

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def forget(self) -> None:
        """Drop every graph: the cache's memory is about to go, and its addresses with it."""
        self._recorded.clear()
        self._inputs.clear()

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether these can decode in one replay: top-k and top-p need a sort that no graph holds."""
        return 0 < len(requests) <= self.tiers[-1] and not any(
            r.params.temperature and (r.params.top_k or r.params.top_p < 1.0) for r in requests
        )

    def prepare(self, requests: Sequence[Request]) -> tuple[Tensor, Recorded]:
        """Fill the batch: (the tokens to be fed, on the device, 0 where they are still in flight; the graph)."""
        used = sorted({self._store.slot_index_of(r.version) for r in requests} - {BASE_SLOT})
        slots = [self._store.slots[index] for index in used]
        for slot in slots:
            slot.wait()
        tier = next(t for t in self.tiers if t >= len(requests))
        if tier not in self._inputs:
            self._inputs[tier] = BatchInputs(tier, self._max_pages, self._device)
        inputs, key = self._inputs[tier], (tier, tuple((s.index, s.scaling) for s in slots))
        if key not in self._recorded:
            inputs.fill({})
            self._recorded[key] = self._record(inputs, slots)
        inputs.fill(self._values(requests, used))
        return inputs.on_device["tokens"], self._recorded[key]

    def _values(self, requests: Sequence[Request], used: list[int]) -> dict[str, np.ndarray]:
        contexts_B = torch.tensor([r.num_cached for r in requests])
        memory, params = self._memory, [r.params for r in requests]
        place = {index: n for n, index in enumerate(used)}
        return {
            "tokens": np.array([0 if r.in_flight else r.token_ids[-1] for r in requests], dtype=np.int64),
            "positions": np.array([r.position for r in requests], dtype=np.int64),
            "seeds": np.array([signed_seed(p.seed) for p in params], dtype=np.int64),
            "states": self._pool.slot_rows([r.slot for r in requests]).numpy(),
            "lengths": contexts_B.numpy() + 1,
            "writes": memory.token_rows(requests, torch.arange(len(requests)), contexts_B).numpy(),
            "slots": np.array([place.get(self._store.slot_index_of(r.version), -1) for r in requests]),
            "temperature": np.array([p.temperature or 1.0 for p in params], dtype=np.float32),
            "greedy": np.array([p.temperature == 0 for p in params]),
            "table": memory.page_rows(requests, int(contexts_B.max()) + 1).numpy(),
        }

    def _record(self, inputs: BatchInputs, slots: list[AdapterSlot]) -> Recorded:
        """On padding rows alone, so nothing that anybody holds is touched."""
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(priority=-1)  # of its branches, the one that others wait for longest
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(inputs, slots)  # kernels are compiled and libraries take their memory outside of the graph
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=stream, capture_error_mode="thread_local"):
            tokens_T, drawn_3T, routed_TMK = self._step(inputs, slots)
        return Recorded(replay=graph.replay, tokens_T=tokens_T, drawn_3T=drawn_3T, routed_TMK=routed_TMK)

    def _step(self, inputs: BatchInputs, slots: list[AdapterSlot]) -> tuple[Tensor, Tensor, Tensor]:
        at = inputs.on_device
        batch = StepBatch(
            tokens_T=at["tokens"], num_decodes=at["tokens"].shape[0], chunks=None, pool=self._pool,
            write_T=at["writes"], decode=DecodeBatch(
                states=StateRows(rows_B=at["states"], span=None), table_BP=at["table"], lengths_B=at["lengths"],
                page_size=self._memory.page_size,
            ),
        )  # fmt: skip
        adapters = StepAdapters.by_token(slots, at["slots"]) if slots else StepAdapters()
        residual, routed_TMK = self._model.hidden(batch, adapters, capture=True)
        assert routed_TMK is not None
        top_k = torch.zeros_like(at["greedy"]).unsqueeze(1)  # of no use: nothing here is filtered
        sampling = SamplingBatch(
            temperature_B1=at["temperature"].unsqueeze(1), top_k_B1=top_k, top_p_B1=at["temperature"].unsqueeze(1),
            seeds_B=at["seeds"], greedy_B=at["greedy"].bool(), filters=False, greedy=True,
        )  # fmt: skip
        tokens, logprobs, finite = sample(self._model.logits(residual), sampling, at["positions"])
        return tokens, torch.stack([tokens.double(), logprobs.double(), finite.double()]), routed_TMK
