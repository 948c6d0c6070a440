"""Decode steps: one replay runs the forward, the head, the draws and a draft's context of a whole batch.

Shapes: B requests, T the tier, P pages a request, M MoE layers, K chosen experts, W tap width, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles_k3.rollout.embedded.batch import DecodeBatch, StateRows, StepBatch
from miles_k3.rollout.embedded.fused.graphs.context import write_context_
from miles_k3.rollout.embedded.fused.graphs.inputs import Field, StaticInputs, Values, tiers_of
from miles_k3.rollout.embedded.fused.graphs.members import (
    GraphParts,
    Members,
    replayable,
    request_fields,
    request_values,
    sampling_of,
)
from miles_k3.rollout.embedded.fused.graphs.recording import Recorded
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.embedded.sampler import sample


class DecodeResults(NamedTuple):
    """`taps_TW` and `x_TH`, what the output head reads, where hidden states are kept."""

    tokens_T: Tensor
    drawn_3T: Tensor
    routed_TMK: Tensor
    taps_TW: Tensor | None
    x_TH: Tensor | None


def decode_fields(tier: int, max_pages: int) -> dict[str, Field]:
    return {
        **request_fields(tier),
        "tokens": Field((tier,), torch.int64),
        "states": Field((tier,), torch.int32, -1),
        "lengths": Field((tier,), torch.int32),
        "writes": Field((tier,), torch.int64, -1),
        "table": Field((tier, max_pages), torch.int32),
    }


class DecodeGraphs:
    """Records graphs at their first use and replays them. Everything runs on the caller's stream."""

    def __init__(self, parts: GraphParts) -> None:
        self._parts, self.tiers = parts, tiers_of(parts.max_running)
        self._inputs: dict[int, StaticInputs] = {}
        self._recorded: dict[tuple[object, ...], Recorded[DecodeResults]] = {}

    def forget(self) -> None:
        """Drop every graph: the cache's memory is about to go, and its addresses with it."""
        self._recorded.clear()
        self._inputs.clear()

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether these can decode in one replay."""
        return 0 < len(requests) <= self.tiers[-1] and replayable(requests)

    def prepare(self, requests: Sequence[Request]) -> tuple[Tensor, Recorded[DecodeResults]]:
        """Fill the batch: (the tokens to be fed, on the device, 0 where they are still in flight; the graph).

        Inside the pool's `forward`.
        """
        p, members = self._parts, Members.of(self._parts, requests)
        tier = next(t for t in self.tiers if t >= len(requests))
        if tier not in self._inputs:
            self._inputs[tier] = StaticInputs(decode_fields(tier, p.max_pages), p.memory.pool.device)
        inputs, keeps = self._inputs[tier], p.speculator is not None and p.speculator.keeper is not None
        key = (tier, keeps, *members.key)
        if key not in self._recorded:
            inputs.fill({})
            self._recorded[key] = p.recorder.record(
                partial(self._step, inputs.on_device, members, p.padding_row, keeps)
            )
        inputs.fill(self._values(members))
        return inputs.on_device["tokens"], self._recorded[key]

    def _values(self, members: Members) -> Values:
        requests, memory = members.requests, self._parts.memory
        contexts_B = torch.tensor([r.num_cached for r in requests])
        return {
            **request_values(members),
            "tokens": np.array([0 if r.in_flight else r.token_ids[-1] for r in requests], dtype=np.int64),
            "states": memory.pool.slot_rows([r.slot for r in requests]).numpy(),
            "lengths": contexts_B.numpy() + 1,
            "writes": memory.token_rows(requests, torch.arange(len(requests)), contexts_B).numpy(),
            "table": memory.page_rows(requests, int(contexts_B.max()) + 1).numpy(),
        }

    def _step(self, at: dict[str, Tensor], members: Members, padding: int, keeps: bool) -> DecodeResults:
        p, pool = self._parts, self._parts.memory.pool
        batch = StepBatch(
            tokens_T=at["tokens"], num_decodes=at["tokens"].shape[0], chunks=None, pool=pool, write_T=at["writes"],
            decode=DecodeBatch(
                states=StateRows(rows_B=at["states"], span=None), table_BP=at["table"], lengths_B=at["lengths"],
                page_size=p.memory.page_size,
            ),
        )  # fmt: skip
        adapters = StepAdapters.by_token(members.slots, at["slots"]) if members.slots else StepAdapters()
        taps = p.taps(len(at["tokens"]), members)
        residual, routed_TMK = p.model.hidden(batch, adapters, capture=True, taps=taps)
        x_TH = p.model.final(residual, taps=taps)
        if taps is not None:
            positions_T = at["lengths"].long() - 1
            write_context_(pool, members.drafts, at["drafts"], taps.rows_TW, positions_T, at["writes"], padding)
        assert routed_TMK is not None
        sampling = sampling_of(at, on_kernels=p.model.on_kernels)
        tokens, logprobs, finite = sample(p.model.head(x_TH), sampling, at["positions"])
        drawn_3T = torch.stack([tokens.double(), logprobs.double(), finite.double()])
        kept = (None, None) if taps is None or not keeps else (taps.rows_TW, x_TH)
        return DecodeResults(tokens, drawn_3T, routed_TMK, *kept)
