"""Verifies: one replay runs the forward over anchors and drafted tokens, judges, and moves states, pages and the
draft's context on by what stays; where all that is drafted is verified, it drafts before.

A graph belongs to a tier of requests and one of rows. Rows of all requests are packed; those behind them belong to one
request more, which has no slot, no page and no adapter. What stays of a request is known on the device but for stop
strings, and for more stop tokens than there is room for: these requests' states are moved on by the host, which reads
what was recorded of them before the next verify writes over it.

Shapes: R requests of the tier and B one more, T rows, G tokens of a block, P pages of a request, N stop tokens, M MoE
layers, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_k3.k3.ops.packed import Packed
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.embedded.batch import StepBatch, VerifyRows
from miles_k3.rollout.embedded.fused.graphs.context import DraftProbs, draft_blocks, write_context_
from miles_k3.rollout.embedded.fused.graphs.inputs import Fetched, Field, StaticInputs, Values, tiers_of
from miles_k3.rollout.embedded.fused.graphs.members import (
    GraphParts,
    Members,
    page_tier,
    replayable,
    request_fields,
    request_values,
    sampling_of,
)
from miles_k3.rollout.embedded.fused.graphs.recording import Recorded
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.embedded.speculation import Speculator
from miles_k3.rollout.speculative.acceptance import kept_positions

STOPS = 8  # stop tokens of a request that its graph compares with


class VerifyResults(NamedTuple):
    """`numbers_X`, float64: tokens, log-probabilities and whether they are finite, by row; accepted tokens and
    positions that stay, by request; then drafted tokens and confidences, block by block."""

    numbers_X: Tensor
    routed_TMK: Tensor
    taps_TW: Tensor | None
    x_TH: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tier: `pages` that the draft looks at, 0 where nothing is drafted in it."""

    requests: int
    rows: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launched:
    """A verify whose replay is queued. `firsts` and `lengths`: each request's rows."""

    shape: Shape
    results: VerifyResults
    numbers_X: Fetched
    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    late: NDArray[np.bool_]
    slots: NDArray[np.int64]
    writes: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Numbers:
    """`VerifyResults.numbers_X` on the host."""

    tokens_T: NDArray[np.int64]
    logprobs_T: NDArray[np.float64]
    finite_T: NDArray[np.bool_]
    accepted_R: NDArray[np.int64]
    kept_R: NDArray[np.int64]
    drafted_RG: NDArray[np.int64]
    confidence_RG: NDArray[np.float64]


def verify_fields(shape: Shape, block: int, max_pages: int, padding_page: int) -> dict[str, Field]:
    """Every row is the padding request's where nothing was given. `cu` names where requests begin, and the end."""
    b, t = shape.requests + 1, shape.rows
    return {
        **request_fields(b),
        "anchors": Field((b,), torch.int64),
        "contexts": Field((b,), torch.int64),
        "states": Field((b,), torch.int32, -1),
        "stops": Field((b, STOPS), torch.int64, -1),
        "late": Field((b,), torch.int32),
        "cu": Field((b + 1,), torch.int64, np.array([0] * b + [t])),
        "rows": Field((t,), torch.int64, shape.requests),
        "cols": Field((t,), torch.int64),
        "seen": Field((t,), torch.int32),
        "writes": Field((t,), torch.int64, -1),
        "table": Field((b, max_pages), torch.int32, padding_page),
        "drafted": Field((b, block), torch.int64),
    }


class VerifyGraphs:
    """Records graphs at their first use and replays them. Everything runs on the caller's stream."""

    def __init__(self, parts: GraphParts, speculator: Speculator) -> None:
        self._parts, self._speculator = parts, speculator
        self.request_tiers, self.row_tiers = tiers_of(parts.max_running), tiers_of(speculator.num_positions)
        self._block, self._pool = speculator.at.config.block_size, parts.memory.pool
        self._inputs: dict[tuple[int, int], StaticInputs] = {}
        self._recorded: dict[tuple[object, ...], Recorded[VerifyResults]] = {}

    def forget(self) -> None:
        """Drop every graph: memory is about to go, and its addresses with it."""
        self._recorded.clear()
        self._inputs.clear()

    @property
    def takes_any(self) -> bool:
        """Under rejection where the draft's distributions, a row of the vocabulary for each token of a block, fit."""
        return self._speculator.is_recordable

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether a verify of these can be one replay."""
        return self.takes_any and 0 < len(requests) <= self.request_tiers[-1] and replayable(requests)

    def launch(
        self, requests: Sequence[Request], lengths_R: NDArray[np.int64], drafted_RG: NDArray[np.int64] | None
    ) -> Launched:
        """Queue a verify of so many positions of each request, anchors included; without tokens, draft them first.

        Inside the pool's `forward`.
        """
        p, members = self._parts, Members.of(self._parts, requests)
        longest = max(r.num_cached for r in requests)
        shape = Shape(
            requests=_tier(self.request_tiers, len(requests)), rows=_tier(self.row_tiers, int(lengths_R.sum())),
            pages=0 if drafted_RG is not None else page_tier(p, longest),
        )  # fmt: skip
        at = shape.requests, shape.rows
        if at not in self._inputs:
            fields = verify_fields(shape, self._block, p.max_pages, p.padding_page)
            self._inputs[at] = StaticInputs(fields, self._pool.device)
        inputs, keeps = self._inputs[at], self._speculator.keeper is not None
        key = (shape, keeps, *members.key)
        if key not in self._recorded:
            inputs.fill({})
            step = partial(self._step, inputs.on_device, shape, members, p.padding_row, keeps)
            self._recorded[key] = p.recorder.record(step)
        values = self._values(members, lengths_R, shape)
        inputs.fill({**values, **({} if drafted_RG is None else {"drafted": drafted_RG})})
        self._recorded[key].replay()
        return self._sent(shape, self._recorded[key].left, values, lengths_R)

    def _values(self, members: Members, lengths_R: NDArray[np.int64], shape: Shape) -> Values:
        requests, memory = members.requests, self._parts.memory
        count, total = len(requests), int(lengths_R.sum())
        contexts_R = np.array([r.num_cached for r in requests])
        firsts_R = np.cumsum(lengths_R) - lengths_R
        rows_T = np.repeat(np.arange(count), lengths_R)
        cols_T = np.arange(total) - firsts_R[rows_T]
        positions_T = contexts_R[rows_T] + cols_T
        stops = [r.params.stop_token_ids for r in requests]
        return {
            **request_values(members),
            "anchors": np.array([r.token_ids[-1] for r in requests]),
            "contexts": contexts_R,
            "states": memory.pool.slot_rows([r.slot for r in requests]).numpy(),
            "stops": np.array([[*s[:STOPS], *[-1] * (STOPS - len(s))] for s in stops]),
            "late": np.array([
                r.stop_text is not None or len(s) > STOPS for r, s in zip(requests, stops, strict=True)
            ]),
            "cu": np.array([*firsts_R, *[total] * (shape.requests + 1 - count), shape.rows]),
            "rows": rows_T,
            "cols": cols_T,
            "seen": positions_T + 1,
            "writes": memory.token_rows(requests, torch.from_numpy(rows_T), torch.from_numpy(positions_T)).numpy(),
            "table": memory.page_rows(requests, int(positions_T.max()) + 1).numpy(),
        }  # fmt: skip

    def _step(self, at: dict[str, Tensor], shape: Shape, members: Members, padding: int, keeps: bool) -> VerifyResults:
        p, pool, replay = self._parts, self._pool, self._speculator.replay
        assert replay is not None  # awake
        packed = Packed(at["cu"], at["rows"], at["cols"], shape.requests + 1, shape.rows)
        drafted_BG, confidence_BG = at["drafted"], at["drafted"].double()
        probs = DraftProbs.of(self._speculator, torch.arange(shape.requests + 1, device=pool.device))
        if shape.pages:
            drafted_BG, confidence_BG = draft_blocks(
                pool, members.drafts, at, shape.pages, probs, on_kernels=p.model.on_kernels
            )
        before_T = drafted_BG[packed.rows_T, (packed.cols_T - 1).clamp(min=0)]
        batch = StepBatch(
            tokens_T=torch.where(packed.cols_T == 0, at["anchors"][packed.rows_T], before_T), num_decodes=shape.rows,
            decode=None, chunks=None, pool=pool, write_T=at["writes"], recorded=VerifyRows(
                slots_B=at["states"], cu_B1=at["cu"], table_TP=at["table"].index_select(0, packed.rows_T),
                seen_T=at["seen"], replay=replay,
            ),
        )  # fmt: skip
        slot_T = at["slots"][packed.rows_T]
        adapters = StepAdapters.by_token(members.slots, slot_T) if members.slots else StepAdapters()
        taps = p.taps(shape.rows, members)
        assert taps is not None  # what is drafted is followed
        residual, routed_TMK = p.model.hidden(batch, adapters, capture=True, taps=taps)
        x_TH = p.model.final(residual, taps=taps)
        draft_T, positions_T = at["drafts"][packed.rows_T], at["seen"].long() - 1
        write_context_(pool, members.drafts, draft_T, taps.rows_TW, positions_T, at["writes"], padding)
        cols_T = packed.cols_T.clamp(max=self._block - 1)
        sampling = sampling_of(at, on_kernels=p.model.on_kernels)
        judged = self._speculator.judge(
            p.model.head(x_TH), drafted_BG[packed.rows_T, cols_T], packed, sampling, at["positions"],
            None if probs is None else probs.buffer_NGV[packed.rows_T, cols_T],
        )  # fmt: skip
        kept_B = kept_positions(judged, packed, at["stops"])
        now_B = torch.where(at["late"] != 0, 0, kept_B)
        replay.fold_rows_(pool.states, pool.windows, at["states"], at["cu"][:-1], now_B)
        stay_T = (packed.cols_T < now_B[packed.rows_T]) | (at["late"][packed.rows_T] != 0) | (at["writes"] < 0)
        clear_(pool, torch.where(stay_T, padding, at["writes"]))
        numbers = (
            judged.tokens_T, judged.logprobs_T, judged.finite_T, judged.accepted_B, kept_B, drafted_BG, confidence_BG
        )  # fmt: skip
        assert routed_TMK is not None
        kept = (taps.rows_TW, x_TH) if keeps else (None, None)
        return VerifyResults(torch.cat([n.double().flatten() for n in numbers]), routed_TMK, *kept)

    def _sent(self, shape: Shape, left: VerifyResults, values: Values, lengths_R: NDArray[np.int64]) -> Launched:
        return Launched(
            shape=shape, results=left, numbers_X=Fetched.of(left.numbers_X), firsts=values["cu"][: len(lengths_R)],
            lengths=lengths_R, late=values["late"], slots=values["states"], writes=values["writes"],
        )  # fmt: skip

    def read(self, launched: Launched) -> Numbers:
        """Wait for a verify."""
        b, t, g = launched.shape.requests + 1, launched.shape.rows, self._block
        x, count = launched.numbers_X.wait(), len(launched.lengths)
        ends = np.cumsum([t, t, t, b, b, b * g])
        tokens, logprobs, finite, accepted, kept, drafted, confidence = np.split(x, ends)
        return Numbers(
            tokens_T=tokens.astype(np.int64), logprobs_T=logprobs, finite_T=finite > 0,
            accepted_R=accepted[:count].astype(np.int64), kept_R=kept[:count].astype(np.int64),
            drafted_RG=drafted.reshape(b, g)[:count].astype(np.int64), confidence_RG=confidence.reshape(b, g)[:count],
        )  # fmt: skip

    def keep_late(self, launched: Launched, kept: Sequence[int]) -> None:
        """Move on the states that the graph left to the host, before another verify. Inside `forward`."""
        late, device = np.flatnonzero(launched.late).tolist(), self._pool.device
        if not late:
            return
        replay = self._speculator.replay
        assert replay is not None
        counts = [kept[i] for i in late]
        slots, firsts = launched.slots[late].tolist(), launched.firsts[late].tolist()
        replay.fold_rows_(
            self._pool.states, self._pool.windows, put(slots, device), put(firsts, device), put(counts, device)
        )
        gone = [
            launched.writes[launched.firsts[i] + count : launched.firsts[i] + launched.lengths[i]]
            for i, count in zip(late, counts, strict=True)
        ]
        clear_(self._pool, put(np.concatenate(gone).tolist(), device).long())


def clear_(pool: BlockPool, rows_N: Tensor) -> None:
    """Zeros in these rows of the pages of every layer and of the draft."""
    for part in (pool.kv, pool.draft):
        part.flatten(1, 2).index_fill_(1, rows_N, 0.0)


def _tier(tiers: Sequence[int], count: int) -> int:
    return next(t for t in tiers if t >= count)
