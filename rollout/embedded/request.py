"""One request from arrival to completion, and the judgement of what callers send."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.protocols import OnTokens
from miles_k3.rollout.cache.contract import Lease
from miles_k3.rollout.embedded.text import Detokenizer, StopText, decode
from miles_k3.rollout.speculative.planner.history import History
from miles_k3.types import COLDEST, Completion, FinishReason, SamplingParams


class Stage(Enum):
    """Where a request stands."""

    WAITING = auto()  # holds no memory
    PREFILL = auto()  # its prompt is being computed
    FOLLOWING = auto()  # has memory, waits for a twin's prompt to be computed
    DECODE = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A snapshot of a request's state after `position` tokens, in a slot of its own."""

    position: int
    slot: int


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """The engine's own record of a request; only the scheduler and the engine change it."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    version: int
    stop_text: StopText | None = None
    on_tokens: OnTokens | None = None
    stage: Stage = Stage.WAITING
    order: int = 0  # of submission
    feed: tuple[int, ...] = ()  # what its prefill computes: the prompt, and what was sampled before it was retracted
    slot: int = 0
    seat: int = 0  # row of the page table
    pages: list[int] = field(default_factory=list)  # in order; the first may be others' as well
    num_cached: int = 0  # tokens whose KV and state are in the pools, or are being put there by a step in flight
    in_flight: int = 0  # tokens that steps in flight will sample
    followed: bool | None = None  # by a draft, which has the context in all of its pages then; None: not decided yet
    drafts: bool = True  # where it is followed: whether the step to come drafts for it
    history: History = field(default_factory=History)
    undrafted: bool = False  # whether its next token is decoded alone: a verify of it wasn't finite
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed: list[Tensor] = field(default_factory=list)  # int16 [tokens, M, K] each
    followers: list[Request] = field(default_factory=list)
    leader: Request | None = None  # while it follows
    lease: Lease | None = None  # pins what it reads of the prefix cache
    cached_pages: list[int] = field(default_factory=list)  # the cache's pages of its first tokens
    stops: list[int] = field(default_factory=list)  # prompt positions where a snapshot is due, ascending
    tracks: list[Track] = field(default_factory=list)  # snapshots of the growing answer, the newest last
    cut_at: int | None = None  # where a stop string begins in the text
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens it may put into the caches: the last one sampled is never fed."""
        return len(self.prompt) + self.params.max_new_tokens - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that is known of the sequence."""
        return (*self.prompt, *self.token_ids)

    @property
    def position(self) -> int:
        """Sequence position of the next token to be sampled by a step that is yet to start."""
        return len(self.prompt) + len(self.token_ids) + self.in_flight

    @property
    def is_full(self) -> bool:
        """Whether the steps in flight sample its last token."""
        return len(self.token_ids) + self.in_flight >= self.params.max_new_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Who comes first: higher priority, then earlier submission. Ascending."""
        return -self.params.priority, self.order

    @property
    def cache_key(self) -> int:
        """What the prefix cache files it under: pages with a draft's context apart from those without."""
        return cache_keys(self.version)[self.followed is False]

    @property
    def num_routed(self) -> int:
        """Tokens, from the first on, whose experts are known."""
        return sum(map(len, self.routed))

    def cut_routes(self, num_tokens: int) -> None:
        """Forget the experts of tokens that are going to be computed again."""
        if self.num_routed > num_tokens:
            self.routed = [torch.cat(self.routed)[:num_tokens]] if num_tokens else []

    def accept(self, token: int, logprob: float) -> FinishReason | None:
        """Append a sampled token; why the request ends with it, if it does."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.tell(1)
        return self._ends_with(token)

    def accept_block(self, tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[int, FinishReason | None]:
        """Append tokens as far as the request goes on: how many, and why it ends there, if it does. Tells nobody."""
        for count, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=1):
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            if reason := self._ends_with(token):
                return count, reason
        return len(tokens), None

    def tell(self, count: int) -> None:
        """Hand the last `count` tokens to whoever listens."""
        if self.on_tokens is not None:
            self.on_tokens(tuple(self.token_ids[-count:]), tuple(self.logprobs[-count:]))

    def _ends_with(self, token: int) -> FinishReason | None:
        if token in self.params.stop_token_ids:
            return FinishReason.STOP
        if self.stop_text is not None:
            self.cut_at = self.stop_text.find(self.token_ids)
            if self.cut_at is not None:
                return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) == self.params.max_new_tokens else None

    def completion(self, tokenizer: Detokenizer | None) -> Completion:
        """The answer. Its text ends before the stop string or stop token; `token_ids` keep all that was sampled."""
        assert self.finish_reason is not None
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            text=self._text(tokenizer),
            finish_reason=self.finish_reason,
            adapter_version=self.version,
            routed_experts=self._routed(),
            error=self.error,
        )

    def _text(self, tokenizer: Detokenizer | None) -> str:
        if tokenizer is None:
            return ""
        if self.stop_text is not None and self.cut_at is not None:
            return self.stop_text.text[: self.cut_at]
        ends_on_token = self.token_ids and self.token_ids[-1] in self.params.stop_token_ids
        return decode(tokenizer, self.token_ids[:-1] if ends_on_token else self.token_ids)

    def _routed(self) -> Tensor | None:
        """[tokens - 1, M, K], or None where it was not asked for or the request ended inside its prompt."""
        if not self.params.return_routed_experts or not self.routed:
            return None
        routed, fed = torch.cat(self.routed), len(self.prompt) + len(self.token_ids) - 1
        # A step in flight at its end has fed the last token too.
        return routed[:fed] if fed <= len(routed) <= fed + 1 else None


def cache_keys(version: int) -> tuple[int, int]:
    """Of an adapter version, -1 or more, with a draft's context and without: all of them apart from one another."""
    return version, -3 - version


def judge_params(params: SamplingParams, has_tokenizer: bool) -> None:
    """Raises EngineError on parameters that no request can be served with."""
    if params.temperature and not COLDEST <= params.temperature < math.inf:
        raise EngineError(
            f"temperature is {params.temperature}; expected 0 (greedy) or a finite number from {COLDEST:g} on"
        )
    if not 0 < params.top_p <= 1:
        raise EngineError(f"top_p is {params.top_p}; expected a number above 0 and at most 1 (1 keeps every token)")
    if params.top_k < 0:
        raise EngineError(f"top_k is {params.top_k}; expected 0 (keeps every token) or more")
    if params.max_new_tokens < 1:
        raise EngineError(f"max_new_tokens is {params.max_new_tokens}; expected at least 1")
    if not -(2**63) <= params.seed < 2**63:
        raise EngineError(f"seed is {params.seed}; expected a number of 64 bits, from -(2**63) to 2**63 - 1")
    if "" in params.stop:
        raise EngineError("a stop string is empty; it would end every answer at once")
    if params.stop and not has_tokenizer:
        raise EngineError("stop strings need a tokenizer, and this engine was made without; pass stop_token_ids")


def judge_tokens(token_ids: Sequence[int], vocab: int, what: str) -> tuple[int, ...]:
    """The ids as plain integers. Raises EngineError on an empty list or an id outside the vocabulary."""
    tokens = tuple(map(int, token_ids))
    if not tokens:
        raise EngineError(f"{what} is empty; expected at least one token")
    if min(tokens) < 0 or max(tokens) >= vocab:
        at = next(i for i, t in enumerate(tokens) if not 0 <= t < vocab)
        raise EngineError(
            f"{what} has token {tokens[at]} at position {at}; the model's vocabulary is 0..{vocab - 1}: "
            "is the tokenizer that of model.path?"
        )
    return tokens
