"""One step of speculation through graphs: what `Speculator` does around an ordinary forward, around a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_k3.errors import EngineError
from miles_k3.rollout.embedded.fused.graphs.verify import Launched, VerifyGraphs
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.rollout.embedded.proposal import Judged, Proposal, Settled
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.embedded.sampler import SamplingBatch
from miles_k3.rollout.embedded.speculation import Speculator


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """A verify whose replay is queued. `proposal` None: it drafts itself, up to `limits_R` of each."""

    requests: tuple[Request, ...]
    limits_R: NDArray[np.int64]
    proposal: Proposal | None
    launched: Launched


class Rounds:
    """Of one engine."""

    def __init__(self, graphs: VerifyGraphs, speculator: Speculator, memory: RequestMemory) -> None:
        self._graphs, self._speculator, self._memory = graphs, speculator, memory

    def begin(self, requests: Sequence[Request], limits_R: NDArray[np.int64], sampling: SamplingBatch) -> Round | None:
        """Queue a verify of these requests; None where nothing is to be verified. Inside the pool's `forward`."""
        graphs, speculator, memory = self._graphs, self._speculator, self._memory
        if not limits_R.any():
            return None
        if speculator.planner.verifies_whole and speculator.drafts_ahead:
            speculator.note_states(memory, requests)
            return Round(
                requests=tuple(requests), limits_R=limits_R, proposal=None,
                launched=graphs.launch(requests, limits_R + 1, None),
            )  # fmt: skip
        proposal = speculator.propose(memory, requests, limits_R, sampling)
        if proposal is None:
            return None
        return self.verify(proposal)

    def verify(self, proposal: Proposal) -> Round:
        """Queue a verify of what was drafted before."""
        drafted_RG = np.zeros_like(proposal.confidence_RG, dtype=np.int64)
        for row, tokens in zip(drafted_RG, proposal.tokens, strict=True):
            row[: len(tokens)] = tokens
        return Round(
            requests=proposal.requests, limits_R=proposal.lengths, proposal=proposal,
            launched=self._graphs.launch(proposal.requests, proposal.lengths + 1, drafted_RG),
        )  # fmt: skip

    def end(self, begun: Round) -> list[Settled]:
        """Wait for it, and append what is committed. Raises EngineError where host and device don't agree on that."""
        graphs, speculator, memory = self._graphs, self._speculator, self._memory
        launched, proposal = begun.launched, begun.proposal
        numbers = graphs.read(launched)
        if proposal is None:
            drafts_R1 = (begun.limits_R > 0)[:, None]
            proposal = speculator.choose(
                begun.requests, begun.limits_R, numbers.drafted_RG * drafts_R1, numbers.confidence_RG * drafts_R1,
                whole=True,
            )  # fmt: skip
            assert proposal is not None  # a block was drafted
        found = Judged(
            accepted=numbers.accepted_R.tolist(),
            tokens=numbers.tokens_T.tolist(),
            logprobs=numbers.logprobs_T.tolist(),
            finite=numbers.finite_T.tolist(),
        )
        settled = speculator.accept(proposal, found, launched.firsts.tolist())
        kept = [s.count for s in settled]
        if ((numbers.kept_R != kept) & ~launched.late).any():
            raise EngineError(f"requests take {kept} tokens of a verify, its graph {numbers.kept_R.tolist()}: a bug")
        graphs.keep_late(launched, kept)
        speculator.note_commit(memory, begun.requests, kept, launched.firsts.tolist())
        speculator.move_on(begun.requests, kept, launched.lengths.tolist())
        return settled
