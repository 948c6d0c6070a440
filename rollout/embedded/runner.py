"""Executes the scheduler's steps: builds the batch, queues the forward and the draws, and files the results.

Shapes: B requests, T tokens, M MoE layers, K chosen experts, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_k3.adapters.store import AdapterStore
from miles_k3.errors import EngineError
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.embedded.batch import StepBatch, step_batch
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.rollout.embedded.model import EngineModel
from miles_k3.rollout.embedded.proposal import Proposal, Settled
from miles_k3.rollout.embedded.request import Request, Stage
from miles_k3.rollout.embedded.sampler import SamplingBatch, sample
from miles_k3.rollout.embedded.scheduler import Scheduler, Step
from miles_k3.rollout.embedded.speculation import Speculator
from miles_k3.rollout.embedded.taps import Taps
from miles_k3.types import FinishReason

if TYPE_CHECKING:  # Triton is not everywhere
    from miles_k3.rollout.embedded.fused.graphs import StepGraphs
    from miles_k3.rollout.embedded.fused.graphs.decode import DecodeResults
    from miles_k3.rollout.embedded.fused.graphs.verify import VerifyResults

COUNTERS = (
    "prompt_tokens",  # computed
    "shared_prompt_tokens",  # taken over from a twin's prompt
    "generated_tokens",
    "discarded_tokens",  # sampled by a step that was in flight when their request ended
    "prefill_steps",  # with chunks of prompts; steps that decode as well count twice
    "decode_steps",
    *(f"finished_{reason}" for reason in FinishReason),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InFlight:
    """A step whose kernels are queued. `drawn_3B` on the host: tokens, log-probabilities, finite; whole after `event`.

    float64 holds token ids and fp32 numbers exactly. `step` None: who waits for it waits for an earlier one as well.
    """

    step: Step | None
    requests: tuple[Request, ...]
    tokens_B: Tensor
    drawn_3B: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> list[list[float]]:
        if self.event is not None:
            self.event.synchronize()
        return self.drawn_3B.tolist()


class Runner:
    """Owns nothing but counters and the step in flight; `step` is the only way that requests move on.

    With `overlap` a step is planned and queued while the one before still runs: decoding requests feed tokens that only
    the device knows, and one that ends is found out a step later, whose token is then discarded. What is sampled is the
    same, since a draw depends on its request and position alone. With a `speculator` steps that draft are settled
    before the next is planned.
    """

    def __init__(
        self,
        model: EngineModel,
        store: AdapterStore,
        memory: RequestMemory,
        scheduler: Scheduler,
        *,
        overlap: bool,
        speculator: Speculator | None = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        self.model, self.store, self.scheduler, self.memory = model, store, scheduler, memory
        self.pool, self.device, self.overlap = memory.pool, memory.pool.device, overlap
        self.speculator = speculator
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.seconds: dict[str, float] = {"prefill_s": 0.0, "decode_s": 0.0}
        self.clock: Callable[[], float] = time.perf_counter
        self.use_graphs(graphs)
        self._in_flight: InFlight | None = None
        self._unwaited = False  # whether nobody waits for the step before
        self._sampling: tuple[tuple[Request, ...], SamplingBatch] | None = None

    def use_graphs(self, graphs: StepGraphs | None) -> None:
        """Replay what they take; None: every step is launched kernel by kernel."""
        self.graphs = graphs
        if self.speculator is not None:
            self.speculator.use_graphs(None if graphs is None else graphs.draft)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Queue the next step and file the results of the one before (without overlap, its own); who ended."""
        start = self.clock()
        drafts = self.speculator is not None and self.speculator.wants(self.scheduler.decoding)
        thought = self.clock() - start
        done = self.collect() if drafts else []
        began, num_recorded = self.clock(), 0 if self.graphs is None else self.graphs.num_recorded
        step = self.scheduler.plan()
        timed = self._timed(step, drafts)
        if not (step.has_work or self._in_flight or done):
            raise EngineError(f"{len(self.scheduler.waiting)} requests wait and none can run: a bug in the scheduler")
        settled: list[Settled] = []
        queued = self._launch(step, settled if drafts else None) if step.has_work else None
        self._unwaited = self.device.type != "cpu" and step.has_work and queued is None and not settled
        done += self.collect()
        self._in_flight = queued
        done += self._file(settled)
        if not self.overlap or (drafts and not settled):
            done += self.collect()
        if self.graphs is not None and self.graphs.num_recorded != num_recorded:
            timed = None  # recording takes its time
        if self.speculator is not None and timed is not None:
            self.speculator.learn(timed, settled if drafts else None, thought + self.clock() - began)
        if self.speculator is not None and done:
            self.speculator.ended(done, self.scheduler)
        phase = "prefill_s" if step.chunks else "decode_s"
        self.counters["prefill_steps"] += bool(step.chunks)
        self.counters["decode_steps"] += bool(step.decodes)
        self.seconds[phase] += self.clock() - start
        return done

    def _timed(self, step: Step, drafts: bool) -> Step | None:
        """Whose work a call of `step` takes the time of: with kernels that run on, the step's before."""
        if self.device.type == "cpu" or drafts or not self.overlap:
            return None if self._unwaited else step
        return None if self._in_flight is None else self._in_flight.step

    # --- queueing -----------------------------------------------------------------------------------------------
    def _launch(self, step: Step, settled: list[Settled] | None) -> InFlight | None:
        """Run the forward of a step and draw its tokens; None if no prompt ends in it and nobody decodes.

        `settled`, where drafting is wanted, gets what a verify commits: its requests draw nothing more.
        """
        limits = None
        if settled is not None and self.speculator is not None:
            limits = self.speculator.limits(self.scheduler, step.decodes)
        self.pool.flush()
        if self.graphs is not None and not (step.chunks or step.ready) and self.graphs.takes(step.decodes, limits):
            return self._replay(self.graphs, step, limits, settled)
        x_BH, members = [], []
        if step.decodes or step.chunks:
            with self.pool.forward():
                proposal = None if limits is None else self._propose(step, limits)
                drafted, taps = None if proposal is None else proposal.drafted, self.speculator is not None
                batch = step_batch(self.memory, step.decodes, step.chunks, drafted=drafted, positions=taps)
                self._feed_in_flight(batch.tokens_T, step.decodes)
                x_DH, x_CH = self._forward(batch, step, proposal)
                if proposal is not None and settled is not None:
                    settled += self._settle(batch, proposal, x_DH)
            if proposal is None:
                members += step.decodes
                x_BH.append(x_DH)
            moved = self._moved(step, None if proposal is None else settled)
            ended, rows = self._advance(step, moved, x_CH)
            members += ended
            x_BH.append(x_CH.index_select(0, put(rows, self.device)) if rows else x_CH[:0])
        members += [request for request, _ in step.ready]
        x_BH += [ending.x_H.unsqueeze(0) for _, ending in step.ready]
        return self._draw(step, members, torch.cat(x_BH)) if members else None

    def _replay(
        self, graphs: StepGraphs, step: Step, limits: NDArray[np.int64] | None, settled: list[Settled] | None
    ) -> InFlight | None:
        """A step of decoding requests alone, recorded: a verify where something is drafted."""
        requests, count = step.decodes, len(step.decodes)
        with self.pool.forward():
            if limits is not None and settled is not None and (found := self._replay_verify(graphs, requests, limits)):
                settled += found
                self._advance(step, self._moved(step, settled), self.model.weights.embed[:0])
                return None
            tokens_T, recorded = graphs.decode.prepare(requests)
            self._feed_in_flight(tokens_T, requests)
            recorded.replay()
        left = recorded.left
        self._file_recorded(requests, [1] * count, left)
        self._advance(step, self._moved(step, None), left.drawn_3T)
        return self._sent(step, requests, left.tokens_T[:count], left.drawn_3T[:, :count])

    def _replay_verify(
        self, graphs: StepGraphs, requests: Sequence[Request], limits: NDArray[np.int64]
    ) -> list[Settled] | None:
        """None where nothing is verified."""
        if self.speculator is None or graphs.rounds is None:
            return None
        begun = graphs.rounds.begin(requests, limits, self._sampling_batch(requests))
        if begun is None:
            return None
        self._file_recorded(requests, begun.launched.lengths.tolist(), begun.launched.results)
        return graphs.rounds.end(begun)

    def _file_recorded(
        self, requests: Sequence[Request], counts: list[int], left: DecodeResults | VerifyResults
    ) -> None:
        """What a graph leaves beside its tokens, of so many rows of each request."""
        total, wanted = sum(counts), [r.params.return_routed_experts for r in requests]
        if any(wanted):
            self._file_routes(requests, wanted, left.routed_TMK[:total].split(counts))
        if self.speculator is not None and left.taps_TW is not None and left.x_TH is not None:
            taps = Taps(layers=tuple(self.speculator.at.config.target_layer_ids), rows_TW=left.taps_TW[:total])
            self.speculator.keep(requests, counts, taps, left.x_TH[:total])

    def _feed_in_flight(self, tokens_T: Tensor, decodes: Sequence[Request]) -> None:
        """Put tokens that the step in flight is sampling where they are fed."""
        if self._in_flight is None:
            return
        at = {request: i for i, request in enumerate(self._in_flight.requests)}
        pairs = [(row, at[request]) for row, request in enumerate(decodes) if request.in_flight]
        if pairs:
            targets, sources = torch.tensor(pairs).t()
            drawn = self._in_flight.tokens_B.index_select(0, put(sources, self.device))
            tokens_T.index_copy_(0, put(targets, self.device), drawn)

    def _forward(self, batch: StepBatch, step: Step, proposal: Proposal | None) -> tuple[Tensor, Tensor]:
        """What the output head reads: of each decoding request's tokens, and of each chunk's last one."""
        requests = [*step.decodes, *(request for request, _ in step.chunks)]
        counts = [1] * len(step.decodes) if proposal is None else [1 + len(tokens) for tokens in proposal.tokens]
        counts += [count for _, count in step.chunks]
        versions = [r.version for r in requests]
        adapters = StepAdapters.of(self.store, versions, counts, self.device)
        wanted = [any(m.params.return_routed_experts for m in (r, *r.followers)) for r in requests]
        taps = None
        if self.speculator is not None and any(r.followed for r in requests):
            taps = self.speculator.taps(batch)
        residual, routed = self.model.hidden(batch, adapters, capture=any(wanted), taps=taps)
        if routed is not None:
            self._file_routes(requests, wanted, routed.split(counts))
        rows = None
        if batch.chunks is not None:
            decoding_D = torch.arange(batch.num_decodes, device=self.device)
            rows = torch.cat([decoding_D, batch.chunks.last_B + batch.num_decodes])
        x_BH = self.model.final(residual, rows, taps)
        if self.speculator is not None and taps is not None:
            self.speculator.write_context(batch, taps, requests, counts)
            self.speculator.keep(requests, counts, taps, x_BH[: batch.num_decodes])
        return x_BH[: batch.num_decodes], x_BH[batch.num_decodes :]

    def _advance(self, step: Step, moved: Sequence[Request], x_CH: Tensor) -> tuple[list[Request], list[int]]:
        """Count the chunks' tokens as cached and take the snapshots that are due, of `moved` too: requests whose prompt
        is computed, followers included, and the chunk that each one samples from."""
        prefixes, ended, rows = self.scheduler.prefixes, [], []
        if prefixes is not None:
            prefixes.track(moved)
        for row, (request, count) in enumerate(step.chunks):
            self.counters["prompt_tokens"] += count
            request.num_cached += count
            if request.num_cached < len(request.feed):
                if prefixes is not None:
                    prefixes.reached(request)
                continue
            if prefixes is not None:
                prefixes.prompt_ended(request, x_CH[row])
            group = self.scheduler.prompt_done(request)
            if self.speculator is not None and self.speculator.keeper is not None:
                self.speculator.keeper.fork(request, group[1:])
            self.counters["shared_prompt_tokens"] += (len(group) - 1) * len(request.feed)
            ended += group
            rows += [row] * len(group)
        return ended, rows

    def _draw(self, step: Step, requests: Sequence[Request], x_BH: Tensor) -> InFlight:
        positions_B = put([r.position for r in requests], self.device)
        tokens_B, logprobs_B, finite_B = sample(self.model.head(x_BH), self._sampling_batch(requests), positions_B)
        drawn_3B = torch.stack([tokens_B.double(), logprobs_B.double(), finite_B.double()])
        return self._sent(step, requests, tokens_B, drawn_3B)

    def _sent(self, step: Step, requests: Sequence[Request], tokens_B: Tensor, drawn_3B: Tensor) -> InFlight:
        """What was drawn is on its way to the host."""
        event, drawn_3B = None, drawn_3B.to("cpu", non_blocking=True, copy=True)  # a graph's own is soon written over
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        for request in requests:
            request.in_flight += 1
        return InFlight(
            step=None if self._unwaited else step, requests=tuple(requests), tokens_B=tokens_B, drawn_3B=drawn_3B,
            event=event,
        )  # fmt: skip

    def _file_routes(self, requests: Sequence[Request], wanted: Sequence[bool], parts: Sequence[Tensor]) -> None:
        """Copies to the host; they are whole when the step's tokens are."""
        for request, wants, part in zip(requests, wanted, parts, strict=True):
            if wants:
                request.routed.append(part.to("cpu", non_blocking=True, copy=True))

    def _sampling_batch(self, requests: Sequence[Request]) -> SamplingBatch:
        """The parameters as tensors, kept while the batch stays the same."""
        members = tuple(requests)
        if self._sampling is None or self._sampling[0] != members:
            vocab = self.model.config.vocab_size
            self._sampling = (
                members,
                SamplingBatch.of([r.params for r in requests], vocab, self.device, on_kernels=self.model.on_kernels),
            )
        return self._sampling[1]

    # --- speculation --------------------------------------------------------------------------------------------
    def _propose(self, step: Step, limits: NDArray[np.int64]) -> Proposal | None:
        assert self.speculator is not None
        if not step.decodes:
            return None
        return self.speculator.propose(self.memory, step.decodes, limits, self._sampling_batch(step.decodes))

    def _settle(self, batch: StepBatch, proposal: Proposal, x_TH: Tensor) -> list[Settled]:
        assert self.speculator is not None
        sampling = self._sampling_batch(proposal.requests)
        return self.speculator.settle(self.memory, batch, proposal, self.model.head(x_TH), sampling)

    def _moved(self, step: Step, settled: Sequence[Settled] | None) -> list[Request]:
        """Decoding requests whose state has moved on; those of a verify are counted already."""
        if settled is not None:
            return [s.request for s in settled if s.count]
        for request in step.decodes:
            request.num_cached += 1
        return list(step.decodes)

    def _file(self, settled: Sequence[Settled]) -> list[Request]:
        """Tell callers of what a verify committed; the requests that ended with it."""
        done = []
        for s in settled:
            if s.request.stage is Stage.DONE:
                self.counters["discarded_tokens"] += s.count
                continue
            self.counters["generated_tokens"] += s.count
            if s.count:
                s.request.tell(s.count)
            if s.reason is not None and s.request.stage is not Stage.DONE:  # its `on_tokens` may have aborted it
                error = _non_finite(s.request) if s.reason is FinishReason.ERROR else None
                self.scheduler.finish(s.request, s.reason, error)
                done.append(s.request)
        return done

    # --- results ------------------------------------------------------------------------------------------------
    def collect(self) -> list[Request]:
        """Wait for the step in flight and give its tokens to their requests; those that ended."""
        flying, self._in_flight = self._in_flight, None
        if flying is None:
            return []
        done = []
        for request, token, logprob, is_finite in zip(flying.requests, *flying.wait(), strict=True):
            request.in_flight -= 1
            if request.stage is Stage.DONE:
                self.counters["discarded_tokens"] += 1
                continue
            if not is_finite:
                reason, error = FinishReason.ERROR, _non_finite(request)
            else:
                reason, error = request.accept(int(token), logprob), None
                self.counters["generated_tokens"] += 1
            if reason is not None and request.stage is not Stage.DONE:  # its `on_tokens` may have aborted it
                self.scheduler.finish(request, reason, error)
                done.append(request)
        return done


def _non_finite(request: Request) -> str:
    return (
        f"the logits for position {request.position - request.in_flight} are not finite (adapter v{request.version}); "
        "the request ends here, its cache memory is zeroed before it is used again"
    )
