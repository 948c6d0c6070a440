"""What an engine's verify and draft cost, measured on the engine itself before it serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from miles_k3.errors import EngineError
from miles_k3.rollout.embedded.batch import Drafted, step_batch
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.fused.graphs import StepGraphs
from miles_k3.rollout.embedded.proposal import Proposal
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.embedded.sampler import SamplingBatch, sample
from miles_k3.rollout.embedded.scheduler import Step
from miles_k3.rollout.speculative.planner.calibration import Calibration
from miles_k3.rollout.speculative.planner.cost import UNPADDED, CostProfile, Tiers, measure_costs
from miles_k3.types import SamplingParams

CONTEXT = 64  # tokens that each request has cached


def measure_engine(engine: EmbeddedEngine, loads: Sequence[int] | None = None, *, repeats: int = 3) -> CostProfile:
    """Seconds of verifies and of drafting at `loads` requests; None: 1, 4, 16, ... as far as memory goes.

    Of the newest adapter, with caches that hold zeros. Raises EngineError where the engine doesn't speculate or has
    requests.
    """
    speculator = engine.speculator
    if speculator is None or engine.scheduler.has_work:
        raise EngineError("costs are measured on an engine that speculates and has no requests")
    context = max(1, min(CONTEXT, engine.max_sequence_tokens - speculator.at.longest))
    most = _most_requests(engine, context)
    found = loads or [*(4**n for n in range(12) if 4**n < most), most]
    scratch = _Scratch(engine, min(most, max(found)), context)
    planner = speculator.planner
    counters, calibration, audit = speculator.counters.copy(), planner.calibration, speculator.audit
    profile, planner.profile = planner.profile, None  # whole blocks are verified without one
    speculator.audit = None  # which compares states on the host, and isn't part of what a served step costs
    planner.calibration = Calibration(block_size=calibration.block_size)
    try:
        with torch.inference_mode():
            profile = measure_costs(
                scratch.verify, scratch.draft, [n for n in found if n <= most], speculator.at.longest - 1,
                repeats=repeats, clock=engine.runner.clock, tiers=_tiers(engine),
                whole=scratch.whole if scratch.drafts_ahead else None,
            )  # fmt: skip
        return replace(profile, engine=in_words(engine))
    finally:
        scratch.close()
        speculator.counters, speculator.audit = counters, audit
        planner.calibration, planner.profile = calibration, profile


def in_words(engine: EmbeddedEngine) -> str:
    """What costs depend on, for who names a file of them."""
    c, device = engine.config, engine.pool.device
    drafting = ""
    if engine.speculator is not None:
        at, draft = engine.speculator.at, engine.speculator.at.config
        drafting = (
            f"; a draft of {draft.num_hidden_layers} layers, blocks of {draft.block_size}, {at.accept} acceptance"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    dtype = str(engine.runner.model.weights.embed.dtype).removeprefix("torch.")
    where = f"{dtype} on {name}{'' if _tiers(engine) is UNPADDED else ', recorded steps'}"
    return f"{c.num_hidden_layers} layers of {c.hidden_size}, {c.num_experts} experts{drafting}; {where}"


def _tiers(engine: EmbeddedEngine) -> Tiers:
    """What recorded steps are padded to."""
    verify = None if engine.runner.graphs is None else engine.runner.graphs.verify
    if verify is None or not verify.takes_any:
        return UNPADDED
    return Tiers(requests=tuple(verify.request_tiers), positions=tuple(verify.row_tiers))


def _most_requests(engine: EmbeddedEngine, context: int) -> int:
    assert engine.speculator is not None
    longest = engine.speculator.at.longest
    pages = engine.pool.pages_for(context + longest)
    most = min(engine.max_running, max(1, engine.speculator.num_positions // longest))
    while most > 1 and not engine.pool.fits(slots=most, pages=most * pages):
        most -= 1
    return most


class _Scratch:
    """Requests that hold memory and belong to nobody. Their tokens are drawn: equal ones would all go through the same
    few experts, and a step would cost a fraction of what it does."""

    def __init__(self, engine: EmbeddedEngine, count: int, context: int) -> None:
        self.engine, self.memory, self.runner = engine, engine.memory, engine.runner
        self.random = np.random.default_rng(0)
        assert engine.speculator is not None
        self.speculator, self.context = engine.speculator, context
        pages = engine.pool.pages_for(context + self.speculator.at.longest)
        self.requests = [self._request(i, context, pages) for i in range(count)]
        self.sampling = SamplingBatch.of(
            [r.params for r in self.requests],
            engine.config.vocab_size,
            engine.pool.device,
            on_kernels=engine.runner.model.on_kernels,
        )
        engine.pool.flush()

    def _request(self, i: int, context: int, pages: int) -> Request:
        request = Request(
            id=f"scratch-{i}", prompt=(0,) * context, params=SamplingParams(seed=i),
            token_ids=[int(self.random.integers(self.engine.config.vocab_size))], num_cached=context,
            version=self.engine.adapter_version, followed=True,
        )  # fmt: skip
        self.memory.take(request, pages)
        return request

    def close(self) -> None:
        for request in self.requests:
            self.memory.give(request)
        self.engine.pool.flush()

    def verify(self, count: int, each: int) -> None:
        """A step of the engine that feeds `each` positions of `count` requests on average. A graph keeps what it would;
        of other steps all is kept."""
        requests = self.requests[:count]
        proposal = None if each == 1 else self._proposal(requests, each)
        graphs = self.runner.graphs
        if graphs is not None and graphs.takes(requests, None if proposal is None else proposal.lengths):
            self._replay(graphs, requests, proposal)
        else:
            self._launch(requests, proposal)
        self._as_before(requests)

    def _as_before(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.token_ids, request.logprobs, request.num_cached = request.token_ids[:1], [0.0], self.context
        self._wait()

    @property
    def drafts_ahead(self) -> bool:
        """Whether a replay drafts what it verifies."""
        graphs = self.runner.graphs
        return graphs is not None and graphs.verify is not None and graphs.verify.takes_any

    def whole(self, count: int) -> None:
        """A step that drafts whole blocks and verifies them in one replay."""
        requests, graphs = self.requests[:count], self.runner.graphs
        assert graphs is not None
        assert graphs.rounds is not None
        limits_R = np.full(count, self.speculator.at.longest - 1, dtype=np.int64)
        with self.memory.pool.forward():
            begun = graphs.rounds.begin(requests, limits_R, self._rows(count))
            assert begun is not None
            graphs.rounds.end(begun)
        self._as_before(requests)

    def _replay(self, graphs: StepGraphs, requests: Sequence[Request], proposal: Proposal | None) -> None:
        with self.memory.pool.forward():
            if proposal is not None and graphs.rounds is not None:
                graphs.rounds.end(graphs.rounds.verify(proposal))
            else:
                _, recorded = graphs.decode.prepare(requests)
                recorded.replay()
                recorded.left.drawn_3T.tolist()

    def _launch(self, requests: Sequence[Request], proposal: Proposal | None) -> None:
        pool, runner = self.memory.pool, self.runner
        sampling = self._rows(len(requests))
        drafted = None if proposal is None else proposal.drafted
        with pool.forward():
            batch = step_batch(self.memory, requests, [], drafted=drafted, positions=True)
            x_TH, _ = runner._forward(batch, Step(decodes=tuple(requests)), proposal)
            logits_TV = runner.model.head(x_TH)
            if proposal is None:
                sample(logits_TV, sampling, self._positions(requests))[0].tolist()
            else:
                drafted_T = torch.tensor([t for tokens in proposal.tokens for t in (*tokens, 0)], device=pool.device)
                logits_TV.scatter_(1, drafted_T.unsqueeze(1), 1e4)  # all of it is accepted
                self.speculator.settle(self.memory, batch, proposal, logits_TV, sampling)

    def _proposal(self, requests: Sequence[Request], each: int) -> Proposal:
        assert self.speculator.replay is not None
        size = self.speculator.at.config.block_size
        vocab, lengths = self.speculator.at.config.vocab_size, ragged(len(requests), each, self.speculator.at.longest)
        drawn = iter(self.random.integers(vocab, size=sum(lengths)).tolist())
        tokens = tuple(tuple(islice(drawn, n - 1)) for n in lengths)
        probs = self.speculator.room_for_probs(len(requests))
        if probs is not None:
            probs.fill_(1 / vocab)
        return Proposal(
            requests=tuple(requests), tokens=tokens, confidence_RG=np.ones((len(requests), size)), probs_RGV=probs,
            useful_R=np.array([len(t) for t in tokens]), drafted=Drafted(tokens=tokens, replay=self.speculator.replay),
        )  # fmt: skip

    def _positions(self, requests: Sequence[Request]) -> torch.Tensor:
        return torch.tensor([r.position for r in requests], device=self.memory.pool.device)

    def draft(self, count: int) -> None:
        """A block for each of `count` requests."""
        limits = np.full(count, self.speculator.at.longest - 1, dtype=np.int64)
        with self.memory.pool.forward():
            self.speculator.propose(self.memory, self.requests[:count], limits, self._rows(count))
        self._wait()

    def _rows(self, count: int) -> SamplingBatch:
        return self.sampling.rows(torch.arange(count, device=self.memory.pool.device))

    def _wait(self) -> None:
        if self.memory.pool.device.type == "cuda":
            torch.cuda.synchronize()


def ragged(count: int, mean: int, longest: int) -> list[int]:
    """Lengths of `count` requests, 1 to `longest`, as different as a plan's: `mean` on average, and exactly so."""
    high = min(longest, 2 * mean - 1)
    low = 2 * mean - high
    lengths = [low + (high - low) * i // max(1, count - 1) for i in range(count)]
    missing = mean * count - sum(lengths)
    order = sorted(range(count), key=lambda i: lengths[i])
    while missing:
        step = 1 if missing > 0 else -1
        for i in order if step > 0 else reversed(order):
            if missing and 1 <= lengths[i] + step <= longest:
                lengths[i] += step
                missing -= step
    return lengths
