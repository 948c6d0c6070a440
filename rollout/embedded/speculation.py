"""Speculation in the engine: what is drafted for the decoding requests, how much of it is verified, what is kept.

A step with a verify is settled before the next is planned, since nobody knows before how far its requests come. What it
commits is judged on the host's side of the step: stop tokens, stop strings and limits cut inside a block, and only what
is left of it moves states, windows and pages on. The draft's keys and values lie in the pages of the tokens that they
are about, so that sharing, restoring, moving and evicting pages takes them along.

Shapes: R requests, G tokens of a block, T tokens of a step, V vocabulary, C numbers of a draft's keys and values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_k3.k3.ops.packed import Packed
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.cache.layout import Layout
from miles_k3.rollout.embedded.batch import Drafted, StepBatch
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.rollout.embedded.model import EngineModel
from miles_k3.rollout.embedded.proposal import Judged, Proposal, Settled, Speculative, capped, up_to_stop
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.embedded.sampler import SamplingBatch, sample
from miles_k3.rollout.embedded.scheduler import Scheduler, Step
from miles_k3.rollout.embedded.taps import Taps
from miles_k3.rollout.speculative.acceptance import AcceptMode, Committed, draft_seeds, judge, policy_probs, supposed
from miles_k3.rollout.speculative.audit import CommitAudit
from miles_k3.rollout.speculative.draft_versions import DraftVersions
from miles_k3.rollout.speculative.planner.calibration import Calibration
from miles_k3.rollout.speculative.planner.planner import Planner
from miles_k3.rollout.speculative.replay import ReplayBuffer
from miles_k3.rollout.speculative.serving_draft import ServingDraft
from miles_k3.rollout.speculative.state_keeper import StateKeeper
from miles_k3.types import FinishReason

if TYPE_CHECKING:  # Triton is not everywhere
    from miles_k3.rollout.embedded.fused.graphs.draft import DraftGraphs

MOST_PROBS = 2 << 30  # bytes of drafted tokens' distributions that recorded steps may keep
COUNTERS = (
    "verify_steps",
    "drafted_tokens",  # and verified
    "accepted_tokens",  # of those, as far as their answers went
)


class Speculator:
    """Owns the drafts, the planner, the replay buffer and the counters; requests and memory are the engine's."""

    def __init__(self, at: Speculative, model: EngineModel, layout: Layout, max_running: int) -> None:
        target = model.weights
        self.at, self._model, self._layout = replace(at, weights={}), model, layout  # `drafts` has copies
        self.num_positions, self._device = at.positions(max_running), target.embed.device
        self.drafts = DraftVersions(at.config, at.weights, target.embed, target.head, target.embed.dtype)
        self.planner = Planner(at.mode, at.accept, Calibration(block_size=at.config.block_size), at.profile)
        self.counters: Counter[str] = Counter(
            dict.fromkeys((*COUNTERS, *(f"verifies_accepting_{n}" for n in range(at.longest))), 0)
        )
        self.replay: ReplayBuffer | None = None
        self.probs_NGV: Tensor | None = None  # under rejection, where recorded steps read and write it
        self._max_running = max_running
        self.keeper: StateKeeper | None = None  # while somebody wants the rollouts' hidden states
        self.audit: CommitAudit | None = None  # set one to have every commit checked
        self._drafts = False  # whether the step under way drafts a block
        self.draft_graphs: DraftGraphs | None = None
        self.drafts_ahead = True  # a graph may draft what it verifies; false where somebody stands in for `_draft`
        self.wake()

    # --- memory -------------------------------------------------------------------------------------------------
    def sleep(self) -> None:
        """Give the buffers' memory back."""
        self.replay = self.probs_NGV = None

    def wake(self) -> None:
        """Take it again."""
        if self.replay is None:
            self.replay = ReplayBuffer.for_layout(
                self._layout, self.num_positions, self._device, on_kernels=self._model.on_kernels
            )
        self.use_graphs(self.draft_graphs)

    def use_graphs(self, draft_graphs: DraftGraphs | None) -> None:
        """Steps are recorded from here on, or launched (None)."""
        self.draft_graphs, self.drafts.keeps_memory = draft_graphs, draft_graphs is not None
        if draft_graphs is None or not (self._rejects and self.is_recordable):
            self.probs_NGV = None
        elif self.probs_NGV is None:
            self.probs_NGV = torch.zeros(*self._probs_shape, device=self._device)

    @property
    def _rejects(self) -> bool:
        return self.at.accept is AcceptMode.REJECTION

    @property
    def _probs_shape(self) -> tuple[int, int, int]:
        """Of the distributions of a step's blocks: all requests', and one more's for padding."""
        return self._max_running + 1, self.at.config.block_size, self.at.config.vocab_size

    @property
    def is_recordable(self) -> bool:
        """Whether recorded steps may draft and verify: under rejection the distributions stay in memory."""
        return not self._rejects or math.prod(self._probs_shape) * torch.float32.itemsize <= MOST_PROBS

    def room_for_probs(self, count: int) -> Tensor | None:
        """For what a step's drafted tokens are drawn from [count, G, V]; None where nobody asks."""
        if not self._rejects:
            return None
        if self.probs_NGV is not None:
            return self.probs_NGV[:count]
        return torch.zeros(count, *self._probs_shape[1:], device=self._device)

    @property
    def num_bytes(self) -> int:
        """Of the replay buffer, and of the distributions that recorded steps keep."""
        kept = 0 if self.probs_NGV is None else self.probs_NGV.numel() * self.probs_NGV.element_size()
        return kept + (0 if self.replay is None else self.replay.num_bytes)

    def stats(self) -> Mapping[str, int]:
        """Counts since the start: drafted tokens that were verified, those of them that were accepted, and how many
        verifies of a request accepted so many; and what is held now."""
        return {**self.counters, "replay_bytes": self.num_bytes, "drafts": len(self.drafts)}

    # --- before the forward -------------------------------------------------------------------------------------
    def wants(self, requests: Sequence[Request]) -> bool:
        """Whether drafting pays for any of these, by what is known beforehand; for whom is noted with them."""
        followed = [r for r in requests if r.followed]
        members_F = self.planner.members(len(requests), [r.history for r in followed]).tolist()
        for request, drafts in zip(followed, members_F, strict=True):
            request.drafts = drafts
        return any(members_F)

    def limits(self, scheduler: Scheduler, requests: Sequence[Request]) -> NDArray[np.int64]:
        """How many tokens may be drafted behind each request's own next one: as many as it may still have, as its
        pages hold, and as lead to the next snapshot of its state, which can be copied where it stands only."""
        prefixes, most = scheduler.prefixes, []
        for request in requests:
            positions = min(self.at.longest, request.params.max_new_tokens - len(request.token_ids))
            if prefixes is not None:
                positions = min(positions, prefixes.to_next_track(request))
            none = request.undrafted or not request.followed or not request.drafts
            most.append(0 if none else scheduler.room(request, positions) - 1)
            request.undrafted = False
        limits_R = capped(np.array(most, dtype=np.int64), self.num_positions - len(requests))
        self._drafts = bool(limits_R.any())
        return limits_R

    def propose(
        self, memory: RequestMemory, requests: Sequence[Request], limits_R: NDArray[np.int64], sampling: SamplingBatch
    ) -> Proposal | None:
        """Draft, and choose what is verified; None where nothing is. Inside the pool's `forward`."""
        members = [i for i, most in enumerate(limits_R.tolist()) if most]
        if not members:
            return None
        size = self.at.config.block_size
        tokens_RG = np.zeros((len(requests), size), dtype=np.int64)
        confidence_RG = np.zeros((len(requests), size))
        probs_RGV = self.room_for_probs(len(requests))
        for model, group in self.drafts.groups([requests[i].version for i in members]):
            chosen = [members[i] for i in group]
            at_S = put(chosen, self._device)
            drafted = self._draft(model, memory, [requests[i] for i in chosen], sampling.rows(at_S), probs_RGV, at_S)
            tokens_RG[chosen], confidence_RG[chosen] = drafted
        proposal = self.choose(requests, limits_R, tokens_RG, confidence_RG, probs_RGV)
        if proposal is not None:
            self.note_states(memory, requests)
        return proposal

    def note_states(self, memory: RequestMemory, requests: Sequence[Request]) -> None:
        """Ahead of a verify, for the audit."""
        if self.audit is not None:
            self.audit.before(memory.pool, _rows(memory, requests))

    def note_commit(
        self, memory: RequestMemory, requests: Sequence[Request], kept: Sequence[int], firsts: Sequence[int]
    ) -> None:
        """Behind it. `firsts`: each request's first row."""
        if self.audit is not None and self.replay is not None:
            self.audit.after(memory.pool, _rows(memory, requests), kept, firsts, self.replay)

    def choose(
        self, requests: Sequence[Request], limits_R: NDArray[np.int64], tokens_RG: NDArray[np.int64],
        confidence_RG: NDArray[np.float64], probs_RGV: Tensor | None = None, *, whole: bool = False,
    ) -> Proposal | None:  # fmt: skip
        """What is verified of drafted blocks; None: nothing. `whole`: all of them is under way."""
        rejects, all_of_it = self._rejects, whole or self.planner.verifies_all
        if self.at.supposed_acceptance is not None:
            confidence_RG = np.full_like(confidence_RG, self.at.supposed_acceptance)
        # Under rejection no budget may depend on what was drafted; whatever is behind a stop token is never committed.
        # Else what is accepted before a stop token gives it, as the policy's own token, and it isn't worth its row:
        # where all is verified no other token of the policy comes behind it.
        before_R = up_to_stop(tokens_RG, requests)
        useful_R = np.minimum(limits_R, before_R + (rejects or all_of_it))
        known_R = limits_R if rejects else np.minimum(limits_R, before_R)
        self.planner.calibration.observe_room(known_R[limits_R > 0])
        verified_R = useful_R if all_of_it else np.minimum(self.planner.plan(confidence_RG, known_R), useful_R)
        if not verified_R.any():
            return None
        tokens = tuple(tuple(row[:n].tolist()) for row, n in zip(tokens_RG, verified_R.tolist(), strict=True))
        assert self.replay is not None  # awake
        return Proposal(
            requests=tuple(requests), tokens=tokens, confidence_RG=confidence_RG, useful_R=useful_R,
            probs_RGV=probs_RGV, drafted=Drafted(tokens=tokens, replay=self.replay),
        )  # fmt: skip

    def _draft(
        self, model: ServingDraft, memory: RequestMemory, requests: Sequence[Request], sampling: SamplingBatch,
        probs_RGV: Tensor | None, at_S: Tensor,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
        """Tokens [S, G] and confidences of one block each, on the host."""
        if self.draft_graphs is not None and self.draft_graphs.takes(requests):
            return self.draft_graphs.draft(requests, at_S)
        anchors = [r.num_cached for r in requests]
        table_SP = put(memory.page_rows(requests, max(anchors)), self._device)
        context = model.context_in(memory.pool.draft[0], table_SP, on_kernels=self._model.on_kernels)
        positions_S = put([r.position for r in requests], self._device)
        drawing = replace(sampling, seeds_B=draft_seeds(self.at.accept, sampling.seeds_B))
        block = model.draft(
            put([r.token_ids[-1] for r in requests], self._device), put(anchors, self._device), context,
            choose=lambda logits_SV, k: sample(logits_SV, drawing, positions_S + k)[0],
        )  # fmt: skip
        if probs_RGV is not None:
            for k in range(block.tokens_SG.shape[1]):
                finite_S = torch.isfinite(block.logits_SGV[:, k].sum(-1))
                probs_RGV[at_S, k] = policy_probs(block.logits_SGV[:, k], drawing, finite_S)
        sure = block.confidence_SG
        sure_SG = torch.ones(block.tokens_SG.shape) if sure is None else sure.nan_to_num(0.0).clamp(0.0, 1.0).cpu()
        return block.tokens_SG.cpu().numpy(), sure_SG.double().numpy()

    # --- behind the forward -------------------------------------------------------------------------------------
    def taps(self, batch: StepBatch) -> Taps:
        """Room for what the forward of a step hands over."""
        return Taps.empty(self.at.config.target_layer_ids, len(batch.tokens_T), self._model.weights.embed)

    def write_context(self, batch: StepBatch, taps: Taps, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """The draft's keys and values of a step's tokens, `counts[i]` of each request, as far as a draft follows it."""
        assert batch.pool is not None
        assert batch.write_T is not None
        assert batch.positions_T is not None
        rows_RC = batch.pool.draft[0].flatten(0, 1)
        members = [i for i, request in enumerate(requests) if request.followed]
        for model, group in self.drafts.groups([requests[i].version for i in members]):
            taken = slice(None)
            if len(group) < len(requests):
                owners_T = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
                own = torch.tensor([members[i] for i in group])
                taken = put(torch.isin(owners_T, own).nonzero().squeeze(1), self._device)
            numbers_TC = model.context_rows(taps.rows_TW[taken], batch.positions_T[taken])
            rows_RC.index_copy_(0, batch.write_T[taken], numbers_TC.to(rows_RC.dtype))

    def keep(self, requests: Sequence[Request], counts: Sequence[int], taps: Taps, x_DH: Tensor) -> None:
        """Hidden states of a step for `keeper`; decoding requests come first, `x_DH` are their last ones."""
        if self.keeper is None:
            return
        first = 0
        for request, count, taps_TW in zip(requests, counts, taps.rows_TW.split(list(counts)), strict=True):
            if not request.followed:
                self.keeper.drop(request)
            elif first < len(x_DH):
                self.keeper.decoded(request, taps_TW, x_DH[first : first + count])
            else:
                self.keeper.chunk(request, taps_TW)
            first += count

    def settle(
        self, memory: RequestMemory, batch: StepBatch, proposal: Proposal, logits_TV: Tensor, sampling: SamplingBatch
    ) -> list[Settled]:
        """Judge, append what is committed to the requests, and move their caches on by it. Inside `forward`."""
        assert batch.verify is not None
        packed = batch.verify.steps.packed
        found = self._judge(proposal, logits_TV, packed, sampling)
        settled = self.accept(proposal, found, packed.cu_seqlens.tolist())
        self._commit(memory, batch, proposal.requests, [s.count for s in settled])
        return settled

    def accept(self, proposal: Proposal, found: Judged, firsts: Sequence[int]) -> list[Settled]:
        """Append what is committed to the requests, whose first rows are `firsts`, and learn from it."""
        settled, accepted_R = [], np.zeros(len(proposal.requests), dtype=np.int64)
        sound_R = np.ones(len(proposal.requests), dtype=bool)
        for b, (request, first) in enumerate(zip(proposal.requests, firsts, strict=False)):
            tokens, logprobs, is_finite = found.of_request(b, first)
            accepted_R[b], sound_R[b] = min(len(tokens) - 1, len(proposal.tokens[b])), is_finite
            count, reason = 0, None
            if is_finite:
                count, reason = request.accept_block(tokens, logprobs)
                self._count(min(len(tokens) - 1, count), len(proposal.tokens[b]))
            elif proposal.tokens[b]:
                request.undrafted = True  # a drafted token may have brought it: plain decoding will say
            else:
                reason = FinishReason.ERROR
            settled.append(Settled(request=request, count=count, reason=reason))
        histories = [r.history for r, is_sound in zip(proposal.requests, sound_R, strict=True) if is_sound]
        self.planner.judged(
            histories, proposal.confidence_RG[sound_R], proposal.useful_R[sound_R], proposal.lengths[sound_R],
            accepted_R[sound_R],
        )  # fmt: skip
        self.counters["verify_steps"] += 1
        return settled

    def learn(self, step: Step, settled: Sequence[Settled] | None, seconds: float) -> None:
        """What a step brought; None: nothing was drafted in it. One that drafts beside prompts says nothing."""
        requests, drafted = step.decodes, settled is not None and self._drafts
        followed = sum(r.followed is True for r in requests)
        if step.chunks and not drafted:
            followed += sum(r.followed is True for r, _ in step.chunks)
            uniform = followed in (0, len(requests) + len(step.chunks))
            prompts = [(r.history, count) for r, count in step.chunks]
            self.planner.observe_prompts(
                prompts, len(requests), seconds, followed=followed > 0 if uniform else None
            )  # fmt: skip
        if step.chunks or step.ready or not requests:
            return
        tokens = [s.count for s in settled] if settled else [1] * len(requests)
        self.planner.observe([r.history for r in requests], tokens, followed, seconds, drafted=drafted)

    def ended(self, requests: Sequence[Request], scheduler: Scheduler) -> None:
        """These have in one step, and what runs and waits is left."""
        ends = [(r.history, len(r.token_ids)) for r in requests]
        self.planner.ended(ends, scheduler.num_running, bool(scheduler.waiting))

    def _judge(self, proposal: Proposal, logits_TV: Tensor, packed: Packed, sampling: SamplingBatch) -> Judged:
        drafted_T = put([t for block in proposal.tokens for t in (*block, 0)], self._device)
        positions_B = put([r.position for r in proposal.requests], self._device)
        probs_TV = None
        if proposal.probs_RGV is not None:
            columns_T = packed.cols_T.clamp(max=self.at.config.block_size - 1)
            probs_TV = proposal.probs_RGV[packed.rows_T, columns_T]
        return Judged.of(self.judge(logits_TV, drafted_T, packed, sampling, positions_B, probs_TV))

    def judge(
        self, logits_TV: Tensor, drafted_T: Tensor, packed: Packed, sampling: SamplingBatch, positions_B: Tensor,
        probs_TV: Tensor | None,
    ) -> Committed:  # fmt: skip
        """What is accepted of drafted tokens, by this engine's rule; nothing is read back."""
        found = judge(logits_TV, drafted_T, packed, sampling, positions_B, mode=self.at.accept, draft_probs_TV=probs_TV)
        chance = self.at.supposed_acceptance
        if chance is None:
            return found
        return supposed(found, drafted_T, packed, sampling.seeds_B, positions_B, chance)

    def _count(self, accepted: int, drafted: int) -> None:
        self.counters["drafted_tokens"] += drafted
        self.counters["accepted_tokens"] += accepted
        if drafted:
            self.counters[f"verifies_accepting_{accepted}"] += 1

    def _commit(self, memory: RequestMemory, batch: StepBatch, requests: Sequence[Request], kept: list[int]) -> None:
        """Fold what is kept into the states and windows; leave no trace of the rest in the pages."""
        assert batch.verify is not None
        assert batch.write_T is not None
        pool, steps = memory.pool, batch.verify.steps
        rows, replay = _rows(memory, requests), batch.verify.replay
        replay.fold_(pool.states, pool.windows, rows, kept, steps)
        self.note_commit(memory, requests, kept, steps.packed.cu_seqlens.tolist())
        gone_T = steps.packed.cols_T >= put(kept, self._device)[steps.packed.rows_T]
        gone = batch.write_T[: len(gone_T)][gone_T]
        for part in (pool.kv, pool.draft):
            part.flatten(1, 2).index_fill_(1, gone, 0.0)
        self.move_on(requests, kept, steps.lengths)

    def move_on(self, requests: Sequence[Request], kept: Sequence[int], lengths: Sequence[int]) -> None:
        """The requests' books: so many of the verified positions are cached now."""
        for request, count, length in zip(requests, kept, lengths, strict=True):
            request.num_cached += count
            if self.keeper is not None:
                self.keeper.kept(request, count)
            if request.params.return_routed_experts and count < length:
                request.routed[-1] = request.routed[-1][:count]


def _rows(memory: RequestMemory, requests: Sequence[Request]) -> list[int]:
    return memory.pool.slot_rows([r.slot for r in requests]).tolist()
