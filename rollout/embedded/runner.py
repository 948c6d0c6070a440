"""Executes the scheduler's steps: builds the batch, runs the forward, samples, and files the results.

Shapes: B requests, T tokens, M MoE layers, K chosen experts, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from miles_k3.adapters.store import AdapterStore
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.cache.pools import LatentPages, StateSlots
from miles_k3.rollout.embedded.batch import Chunk, chunk_batch, decode_batch
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.model import EngineModel
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.embedded.sampler import SamplingBatch, sample
from miles_k3.rollout.embedded.scheduler import Scheduler, Step
from miles_k3.types import FinishReason

LOGIT_ELEMENTS = 1 << 25  # logits held at once while scoring
COUNTERS = (
    "prompt_tokens",  # computed
    "shared_prompt_tokens",  # taken over from a twin's prompt
    "generated_tokens",
    "prefill_steps",
    "decode_steps",
    *(f"finished_{reason}" for reason in FinishReason),
)


class Runner:
    """Owns nothing but counters; `step` is the only way that requests move on."""

    def __init__(
        self, model: EngineModel, store: AdapterStore, slots: StateSlots, pages: LatentPages, scheduler: Scheduler
    ) -> None:
        self.model, self.store, self.scheduler = model, store, scheduler
        self.slots, self.pages, self.device = slots, pages, slots.device
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.seconds: dict[str, float] = {"prefill_s": 0.0, "decode_s": 0.0}
        self._sampling: tuple[tuple[Request, ...], SamplingBatch] | None = None

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One prompt step or one decode step; the requests that ended in it."""
        start = time.perf_counter()
        step = self.scheduler.plan()
        done = self._prefill(step) if step.chunks else self._decode(step.decodes)
        phase = "prefill" if step.chunks else "decode"
        self.counters[f"{phase}_steps"] += 1
        self.seconds[f"{phase}_s"] += time.perf_counter() - start
        return done

    # --- prompts ------------------------------------------------------------------------------------------------
    def _prefill(self, step: Step) -> list[Request]:
        requests = [request for request, _ in step.chunks]
        counts = [count for _, count in step.chunks]
        chunks = [
            Chunk(tokens=r.feed[r.num_cached : r.num_cached + n], context=r.num_cached, slot=r.slot, version=r.version)
            for r, n in step.chunks
        ]
        batch = chunk_batch(chunks, (self.slots, self.pages), self.device)
        adapters = StepAdapters.of(self.store, [r.version for r in requests], counts, self.device)
        wants_routes = [any(m.params.return_routed_experts for m in (r, *r.followers)) for r in requests]
        residual, routed = self.model.hidden(batch, adapters, capture=any(wants_routes))
        if routed is not None:
            self._file_routes(requests, wants_routes, routed.split(counts))
        self.counters["prompt_tokens"] += sum(counts)
        members: list[Request] = []
        rows: list[int] = []
        for row, (request, count) in enumerate(step.chunks):
            request.num_cached += count
            if self.scheduler.prefixes is not None:
                self.scheduler.prefixes.reached(request)
            if request.num_cached == len(request.feed):
                group = self.scheduler.prompt_done(request)
                self._fork(group)
                members += group
                rows += [row] * len(group)
        if not members:
            return []
        logits = self.model.logits(residual, batch.last_B.index_select(0, put(rows, self.device)))
        return self._sample(members, logits)

    def _fork(self, group: Sequence[Request]) -> None:
        """Give the followers their leader's state, window, and its last page where the prompt ends inside one."""
        leader, *followers = group
        if not followers:
            return
        pages = self.pages
        self.counters["shared_prompt_tokens"] += len(followers) * len(leader.feed)
        targets = [f.slot for f in followers]
        self.slots.copy([leader.slot] * len(followers), targets)
        full, rest = divmod(len(leader.feed), pages.page_size)
        if rest:
            page = pages.pages_of(leader.slot)[full]
            pages.copy([page] * len(followers), [pages.pages_of(slot)[full] for slot in targets])

    # --- decoding -----------------------------------------------------------------------------------------------
    def _decode(self, requests: Sequence[Request]) -> list[Request]:
        if not requests:
            return []
        batch = decode_batch(
            [r.token_ids[-1] for r in requests],
            [r.num_cached for r in requests],
            [r.slot for r in requests],
            self.slots,
            self.pages,
        )
        adapters = StepAdapters.of(self.store, [r.version for r in requests], [1] * len(requests), self.device)
        wants_routes = [r.params.return_routed_experts for r in requests]
        residual, routed = self.model.hidden(batch, adapters, capture=any(wants_routes))
        if routed is not None:
            self._file_routes(requests, wants_routes, routed.split(1))
        for request in requests:
            request.num_cached += 1
        return self._sample(requests, self.model.logits(residual))

    def _file_routes(self, requests: Sequence[Request], wanted: Sequence[bool], parts: Sequence[Tensor]) -> None:
        for request, wants, part in zip(requests, wanted, parts, strict=True):
            if wants:
                request.routed.append(part.cpu())

    # --- sampling -----------------------------------------------------------------------------------------------
    def _sample(self, requests: Sequence[Request], logits_BV: Tensor) -> list[Request]:
        """Draw a token for each request and end those that are done with it."""
        positions_B = put([r.position for r in requests], self.device)
        tokens, logprobs, finite = sample(logits_BV, self._sampling_batch(requests), positions_B)
        # One transfer: float64 holds token ids and fp32 numbers exactly.
        drawn = torch.stack([tokens.double(), logprobs.double(), finite.double()]).tolist()
        done = []
        for request, token, logprob, is_finite in zip(requests, *drawn, strict=True):
            if not is_finite:
                reason, error = FinishReason.ERROR, _non_finite(request)
            else:
                reason, error = request.accept(int(token), logprob), None
                self.counters["generated_tokens"] += 1
            if reason is not None:
                self.scheduler.finish(request, reason, error)
                done.append(request)
        return done

    def _sampling_batch(self, requests: Sequence[Request]) -> SamplingBatch:
        """The parameters as tensors, kept while the batch stays the same."""
        members = tuple(requests)
        if self._sampling is None or self._sampling[0] != members:
            vocab = self.model.config.vocab_size
            self._sampling = members, SamplingBatch.of([r.params for r in requests], vocab, self.device)
        return self._sampling[1]

    # --- scoring ------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]], version: int, temperature: float) -> list[Tensor]:
        """Log-probabilities of tokens 1.. of each sequence, without caches; fp32 on the host."""
        chunks = [Chunk(tokens=s[:-1], context=0, slot=0, version=version) for s in sequences]
        batch = chunk_batch(chunks, None, self.device)
        counts = [len(c.tokens) for c in chunks]
        adapters = StepAdapters.of(self.store, [version] * len(counts), counts, self.device)
        residual, _ = self.model.hidden(batch, adapters)
        targets_T = put([t for s in sequences for t in s[1:]], self.device)
        parts = []
        for rows in torch.arange(len(targets_T), device=self.device).split(
            max(1, LOGIT_ELEMENTS // self.model.config.vocab_size)
        ):
            logits = self.model.logits(residual, rows).div_(temperature)
            parts.append(logits.log_softmax(-1).gather(1, targets_T[rows].unsqueeze(1)).squeeze(1))
        return list(torch.cat(parts).cpu().split(counts))


def _non_finite(request: Request) -> str:
    return (
        f"the logits for position {request.position} are not finite (adapter v{request.version}); "
        "the request ends here, its cache memory is zeroed before it is used again"
    )
