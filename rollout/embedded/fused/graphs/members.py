"""The requests of a recorded step: what every kind of step is told of them, and which graph is theirs.

Shapes: B requests and padding, T rows of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles_k3.adapters.store import BASE_SLOT, AdapterSlot, AdapterStore
from miles_k3.rollout.embedded.fused.graphs.inputs import Field, Values
from miles_k3.rollout.embedded.fused.graphs.recording import Recorder
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.rollout.embedded.model import EngineModel
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.embedded.sampler import SamplingBatch, signed_seed
from miles_k3.rollout.embedded.speculation import Speculator
from miles_k3.rollout.embedded.taps import Taps
from miles_k3.rollout.speculative.serving_draft import ServingDraft

LEAST_CONTEXT = 256  # tokens of the smallest graph that drafts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphParts:
    """What recorded steps run on. `max_pages` of a request."""

    model: EngineModel
    store: AdapterStore
    memory: RequestMemory
    speculator: Speculator | None
    recorder: Recorder
    max_running: int
    max_pages: int

    def taps(self, num_rows: int, members: Members) -> Taps | None:
        """Room for what the forward hands over; None where no draft follows any of these."""
        if self.speculator is None or not members.drafts:
            return None
        return Taps.empty(self.speculator.at.config.target_layer_ids, num_rows, self.model.weights.embed)

    @property
    def padding_page(self) -> int:
        """Row of the page that is nobody's and holds zeros. Inside the pool's `forward`."""
        return int(self.memory.pool.page_rows([0])[0])

    @property
    def padding_row(self) -> int:
        """Of its first token."""
        return self.padding_page * self.memory.page_size


def page_tier(parts: GraphParts, tokens: int) -> int:
    """Pages that a draft's graph looks at: all, where a kernel reads what there is only; else a power of two, so that
    growing answers seldom need another graph."""
    if parts.model.on_kernels:
        return parts.max_pages
    needed = parts.memory.pool.pages_for(max(tokens, LEAST_CONTEXT))
    return min(1 << (needed - 1).bit_length(), parts.max_pages)


def replayable(requests: Sequence[Request]) -> bool:
    """Whether their draws fit into a graph: top-k and top-p need a sort, which none holds."""
    return not any(r.params.temperature and (r.params.top_k or r.params.top_p < 1.0) for r in requests)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Members:
    """Adapter slots and drafts of some requests, and whose is which: a graph belongs to these, not to the versions.
    Requests that no draft follows have none."""

    requests: tuple[Request, ...]
    slots: tuple[AdapterSlot, ...]
    drafts: tuple[ServingDraft, ...]
    places: Values

    @classmethod
    def of(cls, parts: GraphParts, requests: Sequence[Request]) -> Members:
        """Waits, on the device, for slots that are being filled."""
        at = [parts.store.slot_index_of(r.version) for r in requests]
        used = sorted(set(at) - {BASE_SLOT})
        slots = tuple(parts.store.slots[index] for index in used)
        for slot in slots:
            slot.wait()
        place = {index: n for n, index in enumerate(used)}
        places = {"slots": np.array([place.get(index, -1) for index in at])}
        drafts: tuple[ServingDraft, ...] = ()
        if parts.speculator is not None:
            followed = np.array([r.followed is True for r in requests])
            versions = [r.version for r in requests if r.followed]
            drafts, of_followed = parts.speculator.drafts.used_by(versions)
            places["drafts"] = np.full(len(requests), -1)
            places["drafts"][followed] = of_followed
        return cls(requests=tuple(requests), slots=slots, drafts=drafts, places=places)

    @property
    def key(self) -> tuple[object, ...]:
        return tuple((s.index, s.scaling) for s in self.slots), self.drafts


def request_fields(count: int) -> dict[str, Field]:
    """`positions`: of the token that is drawn first. `slots` and `drafts`: places among a graph's own, or -1."""
    return {
        "positions": Field((count,), torch.int64),
        "seeds": Field((count,), torch.int64),
        "temperature": Field((count,), torch.float32, 1),
        "greedy": Field((count,), torch.int32),
        "slots": Field((count,), torch.int32, -1),
        "drafts": Field((count,), torch.int32, -1),
    }


def request_values(members: Members) -> Values:
    params = [r.params for r in members.requests]
    return {
        "positions": np.array([r.position for r in members.requests], dtype=np.int64),
        "seeds": np.array([signed_seed(p.seed) for p in params], dtype=np.int64),
        "temperature": np.array([p.temperature or 1.0 for p in params], dtype=np.float32),
        "greedy": np.array([p.temperature == 0 for p in params]),
        **members.places,
    }


def sampling_of(at: Mapping[str, Tensor], *, on_kernels: bool) -> SamplingBatch:
    temperature_B1 = at["temperature"].unsqueeze(1)
    return SamplingBatch(
        temperature_B1=temperature_B1, top_k_B1=torch.zeros_like(at["greedy"]).unsqueeze(1), top_p_B1=temperature_B1,
        seeds_B=at["seeds"], greedy_B=at["greedy"].bool(), filters=False, greedy=True,
        on_kernels=on_kernels,
    )  # fmt: skip
