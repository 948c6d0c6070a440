"""What the engine is told about speculation, and what passes between drafting, verifying and filing.

Shapes: R requests, G tokens of a block, T tokens of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_k3.k3.draft_config import DraftConfig
from miles_k3.rollout.embedded.batch import Drafted
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.speculative.acceptance import AcceptMode, Committed
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Speculative:
    """How an engine speculates. `weights` by published name.

    `num_draft_tokens`: at most so many of a block are verified; None: all. `verify_tokens`: positions of one verify,
    of all requests together; 0: as many as there may be. `profile`: what they cost, for `trim`, which verifies all
    without it. `supposed_acceptance`: pretend that each drafted token is accepted with this chance, for measuring only.
    """

    config: DraftConfig
    weights: Mapping[str, Tensor]
    mode: PlanMode = PlanMode.VERIFY_ALL
    accept: AcceptMode = AcceptMode.COUPLED
    num_draft_tokens: int | None = None
    verify_tokens: int = 0
    profile: CostProfile | None = None
    supposed_acceptance: float | None = None

    @property
    def longest(self) -> int:
        """Positions of one request in a verify, at most."""
        size = self.config.block_size
        return 1 + min(size, size if self.num_draft_tokens is None else self.num_draft_tokens)

    def positions(self, max_running: int) -> int:
        """Positions of a verify, at most."""
        return min(self.verify_tokens or max_running * self.longest, max_running * self.longest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """What a step verifies of each request: some of its drafted tokens, or none. `useful_R`: how many it could keep.
    `probs_RGV` (rejection only): what the tokens of each block were drawn from."""

    requests: tuple[Request, ...]
    tokens: tuple[tuple[int, ...], ...]
    confidence_RG: NDArray[np.float64]
    useful_R: NDArray[np.int64]
    probs_RGV: Tensor | None
    drafted: Drafted

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(t) for t in self.tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What a verify committed of one request: `count` tokens, 0 where it has to be decoded again alone."""

    request: Request
    count: int
    reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A judgement on the host."""

    accepted: list[int]
    tokens: list[int]
    logprobs: list[float]
    finite: list[bool]

    @classmethod
    def of(cls, c: Committed) -> Judged:
        tokens, logprobs, finite = torch.stack(
            [c.tokens_T.double(), c.logprobs_T.double(), c.finite_T.double()]
        ).tolist()
        return cls(
            accepted=c.accepted_B.tolist(), tokens=[int(t) for t in tokens], logprobs=logprobs,
            finite=[bool(f) for f in finite],
        )  # fmt: skip

    def of_request(self, b: int, first: int) -> tuple[list[int], list[float], bool]:
        """Committed tokens of request b, whose first row is `first`, and whether all of its rows are finite."""
        rows = slice(first, first + self.accepted[b] + 1)
        return self.tokens[rows], self.logprobs[rows], all(self.finite[rows])


def capped(limits_R: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Limits whose sum is at most `total`, the highest lowered first."""
    level = int(limits_R.max(initial=0))
    while level and int(np.minimum(limits_R, level).sum()) > total:
        level -= 1
    return np.minimum(limits_R, level)


def up_to_stop(tokens_RG: NDArray[np.int64], requests: Sequence[Request]) -> NDArray[np.int64]:
    """Of each block, the tokens before the first one that would end its request: [R]."""
    ends = []
    for row, request in zip(tokens_RG.tolist(), requests, strict=True):
        stop = request.params.stop_token_ids
        ends.append(next((k for k, token in enumerate(row) if token in stop), len(row)))
    return np.array(ends, dtype=np.int64)
