"""An engine on plain torch that takes the padded batches of recorded steps, where a replay runs the step again.

Everything but the kernels is what a GPU records. The forward runs on the real rows, as the plain engine's would; what
it gives of padding is NaN, and whatever lets that through shows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from helpers.fused_engines import reexecuted
from helpers.no_sync import apart
from torch import Tensor

from miles_k3.k3.ops.residual_bank import ResidualBank
from miles_k3.rollout.embedded.batch import DecodeBatch, StateRows, StepBatch, VerifyBatch, VerifyRows
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.model import EngineModel
from miles_k3.rollout.embedded.scheduler import Step
from miles_k3.rollout.embedded.taps import Taps
from miles_k3.rollout.speculative.replay import ReplayBuffer
from miles_k3.rollout.speculative.verify import VerifySteps

CPU = torch.device("cpu")


def recording(engine: EmbeddedEngine) -> EmbeddedEngine:
    """The same engine, a plain one, with steps that are "recorded"."""
    engine._model.__class__ = PaddedModel
    if engine.speculator is not None:
        at = engine.speculator.replay
        assert at is not None
        engine.speculator.replay = PlainFold(**{f.name: getattr(at, f.name) for f in fields(at)})
    reexecuted(engine)
    _count(engine)
    return engine


def _count(engine: EmbeddedEngine) -> None:
    """How steps ran, for `replays`."""
    runner, found = engine.runner, Counter[str]()
    launch, replay, verify = runner._launch, runner._replay, runner._replay_verify

    def launched(step: Step, settled: Any) -> Any:
        before = found["replay"]
        out = launch(step, settled)
        found["others"] += not step.chunks and not step.ready and found["replay"] == before
        return out

    def replayed(*args: Any) -> Any:
        found["replay"] += 1
        return replay(*args)

    def verified(*args: Any) -> Any:
        out = verify(*args)
        found["verify"] += out is not None
        return out

    runner._launch, runner._replay, runner._replay_verify = launched, replayed, verified  # type: ignore[method-assign]
    runner.found = found  # type: ignore[attr-defined]


def replays(engine: EmbeddedEngine) -> Counter[str]:
    """Steps without prompts: replayed, of these with a verify, and launched kernel by kernel ("others")."""
    return engine.runner.found  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainFold(ReplayBuffer):
    """Whose fold of what only the device knows is the plain one."""

    @apart
    def fold_rows_(self, states: Tensor, windows: Tensor, slots_B: Tensor, firsts_B: Tensor, kept_B: Tensor) -> None:
        real = (slots_B >= 0).nonzero().flatten().tolist()
        for b in real:
            steps = VerifySteps.of([max(1, int(kept_B[b]))], windows.shape[2] + 1)
            rows = slice(int(firsts_B[b]), None)
            part = ReplayBuffer(
                raw_TLD=self.raw_TLD[rows], k_TLNK=self.k_TLNK[rows], v_TLNV=self.v_TLNV[rows],
                g_TLNK=self.g_TLNK[rows], beta_TLN=self.beta_TLN[rows],
            )  # fmt: skip
            part.fold_(states, windows, [int(slots_B[b])], [int(kept_B[b])], steps)


class PaddedModel(EngineModel):
    @apart
    def hidden(
        self, batch: StepBatch, adapters: StepAdapters, *, capture: bool = False, taps: Taps | None = None
    ) -> tuple[ResidualBank, Tensor | None]:
        if batch.recorded is None and (batch.decode is None or batch.decode.states.span is not None or not capture):
            return super().hidden(batch, adapters, capture=capture, taps=taps)
        assert batch.write_T is not None
        real_T = batch.write_T >= 0
        if not real_T.any():  # what a graph is recorded on
            return self._padding(batch, real_T, taps)
        rows = None if taps is None else replace(taps, rows_TW=taps.rows_TW[real_T])
        part, routed = super().hidden(_without_padding(batch, real_T), _of(adapters, real_T), capture=True, taps=rows)
        assert routed is not None
        x_TH = self.final(part, taps=rows)
        if taps is not None and rows is not None:
            taps.rows_TW[:] = torch.nan
            taps.rows_TW[real_T] = rows.rows_TW
        return Finished(_padded(x_TH, real_T)), _padded(routed, real_T)

    def _padding(self, batch: StepBatch, real_T: Tensor, taps: Taps | None) -> tuple[ResidualBank, Tensor | None]:
        if taps is not None:
            taps.rows_TW[:] = torch.nan
        c, embed = self.config, self.weights.embed
        routed = torch.zeros(len(real_T), sum(m is not None for m in self.moes), c.num_experts_per_token)
        return Finished(_padded(embed[:0], real_T)), routed.to(torch.int16)

    def final(self, residual: ResidualBank, rows: Tensor | None = None, taps: Taps | None = None) -> Tensor:
        return residual.x_TH if isinstance(residual, Finished) else super().final(residual, rows, taps)

    @apart
    def head(self, x_BH: Tensor) -> Tensor:
        """Products round by their number of rows: only real ones are multiplied."""
        real_B = x_BH.isfinite().all(-1)
        return super().head(x_BH) if real_B.all() else _padded(super().head(x_BH[real_B]), real_B)


class Finished(ResidualBank):
    """What the output head reads, already."""

    def __init__(self, x_TH: Tensor) -> None:
        self.x_TH = x_TH


def _padded(x: Tensor, real_T: Tensor) -> Tensor:
    fill: Any = torch.nan if x.is_floating_point() else -7
    out = x.new_full((len(real_T), *x.shape[1:]), fill)
    out[real_T] = x
    return out


def _of(adapters: StepAdapters, real_T: Tensor) -> StepAdapters:
    assert adapters.slot_T is not None or not adapters.parts
    if adapters.slot_T is None:
        return adapters
    return StepAdapters.by_token([slot for slot, _ in adapters.parts], adapters.slot_T[real_T])


def _without_padding(batch: StepBatch, real_T: Tensor) -> StepBatch:
    assert batch.write_T is not None
    common: dict[str, Any] = {
        "tokens_T": batch.tokens_T[real_T], "num_decodes": int(real_T.sum()), "chunks": None, "pool": batch.pool,
        "write_T": batch.write_T[real_T],
    }  # fmt: skip
    if batch.decode is not None:
        d = batch.decode
        rows = StateRows.of(d.states.rows_B[real_T].long(), CPU)
        decode = DecodeBatch(
            states=rows, table_BP=_pages(d.table_BP[real_T], d.lengths_B[real_T], d.page_size),
            lengths_B=d.lengths_B[real_T], page_size=d.page_size,
        )  # fmt: skip
        return StepBatch(decode=decode, **common)
    assert batch.recorded is not None
    assert batch.pool is not None
    return StepBatch(decode=None, verify=_verify(batch.recorded, batch.pool.page_size), **common)


def _verify(at: VerifyRows, page_size: int) -> VerifyBatch:
    cu = at.cu_B1.tolist()
    members = [b for b, slot in enumerate(at.slots_B.tolist()) if slot >= 0]
    assert all(cu[b] < cu[b + 1] for b in members)
    lengths, firsts = [cu[b + 1] - cu[b] for b in members], [cu[b] for b in members]
    steps = VerifySteps.of(lengths, 4)
    slots_B, seen_B = at.slots_B[members].long(), at.seen_T[firsts]
    longest = torch.tensor([int(at.seen_T[cu[b + 1] - 1]) for b in members])
    return VerifyBatch(
        steps=steps, slots_B=slots_B, ordered_B=slots_B[list(steps.order)],
        table_BP=_pages(at.table_TP[firsts], longest, page_size), contexts=tuple((seen_B - 1).tolist()),
        page_size=page_size, replay=at.replay,
    )  # fmt: skip


def _pages(table_BP: Tensor, lengths_B: Tensor, page_size: int) -> Tensor:
    return table_BP[:, : -(-int(lengths_B.max()) // page_size)]
