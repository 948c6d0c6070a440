"""Drafting alone, where how much is verified is chosen by what was drafted: one replay a draft, one copy to the host.

Shapes: R requests of the tier, G tokens of a block, P pages of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_k3.rollout.embedded.fused.graphs.context import DraftProbs, draft_blocks
from miles_k3.rollout.embedded.fused.graphs.inputs import Fetched, Field, StaticInputs, tiers_of
from miles_k3.rollout.embedded.fused.graphs.members import (
    GraphParts,
    Members,
    page_tier,
    replayable,
    request_fields,
    request_values,
)
from miles_k3.rollout.embedded.fused.graphs.recording import Recorded
from miles_k3.rollout.embedded.request import Request


class DraftResults(NamedTuple):
    """float64: tokens, then confidences."""

    numbers_2RG: Tensor


def draft_fields(tier: int, max_pages: int, padding_page: int, nobody: int) -> dict[str, Field]:
    return {
        "places": Field((tier,), torch.int64, nobody),
        **request_fields(tier),
        "anchors": Field((tier,), torch.int64),
        "contexts": Field((tier,), torch.int64),
        "table": Field((tier, max_pages), torch.int32, padding_page),
    }


class DraftGraphs:
    """Records graphs at their first use and replays them. Everything runs on the caller's stream."""

    def __init__(self, parts: GraphParts) -> None:
        self._parts, self._tiers = parts, tiers_of(parts.max_running)
        self._inputs: dict[int, StaticInputs] = {}
        self._recorded: dict[tuple[object, ...], Recorded[DraftResults]] = {}

    def forget(self) -> None:
        self._recorded.clear()
        self._inputs.clear()

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether one replay drafts for these."""
        speculator = self._parts.speculator
        if speculator is None or not speculator.is_recordable:
            return False
        return 0 < len(requests) <= self._tiers[-1] and replayable(requests)

    def draft(self, requests: Sequence[Request], at_R: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Tokens [R, G] and confidences of one block each, on the host, when it has them. `at_R`: the requests' places
        in the step, for their distributions under rejection. Inside `forward`."""
        p, members = self._parts, Members.of(self._parts, requests)
        tier = next(t for t in self._tiers if t >= len(requests))
        pages = page_tier(p, max(r.num_cached for r in requests))
        if tier not in self._inputs:
            fields = draft_fields(tier, p.max_pages, p.padding_page, p.max_running)
            self._inputs[tier] = StaticInputs(fields, p.memory.pool.device)
        inputs, key = self._inputs[tier], (tier, pages, members.drafts)
        if key not in self._recorded:
            inputs.fill({})
            self._recorded[key] = p.recorder.record(partial(self._step, inputs.on_device, pages, members))
        contexts = np.array([r.num_cached for r in requests])
        inputs.fill({
            **request_values(members),
            "anchors": np.array([r.token_ids[-1] for r in requests]),
            "contexts": contexts,
            "table": p.memory.page_rows(requests, max(1, int(contexts.max()))).numpy(),
        })  # fmt: skip
        inputs.on_device["places"][: len(requests)].copy_(at_R)
        self._recorded[key].replay()
        numbers_2RG = Fetched.of(self._recorded[key].left.numbers_2RG).wait()
        tokens_RG, confidence_RG = numbers_2RG[:, : len(requests)]
        return tokens_RG.astype(np.int64), confidence_RG.copy()

    def _step(self, at: dict[str, Tensor], pages: int, members: Members) -> DraftResults:
        p = self._parts
        assert p.speculator is not None
        probs = DraftProbs.of(p.speculator, at["places"])
        tokens_RG, confidence_RG = draft_blocks(
            p.memory.pool, members.drafts, at, pages, probs, on_kernels=p.model.on_kernels
        )
        return DraftResults(torch.stack([tokens_RG.double(), confidence_RG.double()]))
