"""What every route works with."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_k3.k3.config import K3Config
from miles_k3.rollout.server.adapters import Adapters
from miles_k3.rollout.server.backend import Backend
from miles_k3.rollout.server.chat import Chat
from miles_k3.rollout.server.errors import ApiError
from miles_k3.rollout.server.flight import Flight
from miles_k3.rollout.server.gate import Gate
from miles_k3.rollout.server.metrics import Metrics
from miles_k3.rollout.server.schemas import SamplingBody
from miles_k3.rollout.tasks.common import stable_hash
from miles_k3.types import SamplingParams

STATS_AGE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Limits of the server. Bytes are those of a request's body."""

    model_id: str
    api_keys: tuple[str, ...] = ()
    max_queue: int = 1024
    max_body_bytes: int = 4 << 20
    max_upload_bytes: int = 8 << 30
    default_max_tokens: int = 256
    reader_timeout_s: float = 60.0
    adapter_root: Path = field(default_factory=Path.cwd)


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """The parts of a running server, all on its event loop."""

    options: ServerOptions
    config: K3Config
    max_sequence_tokens: int
    num_pages: int
    backend: Backend
    chat: Chat
    gate: Gate
    adapters: Adapters
    metrics: Metrics
    flights: set[Flight] = field(default_factory=set)
    ready: bool = False
    _stats: Mapping[str, float] = field(default_factory=dict)
    _stats_at: float = float("-inf")

    async def stats(self) -> Mapping[str, float]:
        """The engine's numbers, at most STATS_AGE_S old unless a step takes longer."""
        if time.monotonic() - self._stats_at > STATS_AGE_S:
            self._stats, self._stats_at = await self.backend.stats(), time.monotonic()
        return self._stats

    def begin(self, requests: Sequence[tuple[Sequence[int], SamplingParams]], *, version: int, streams: bool) -> Flight:
        return Flight.begin(self.backend, self.gate, self.flights, requests, version=version, streams=streams)

    def sampling(self, body: SamplingBody, max_tokens: int) -> list[SamplingParams]:
        """One for each of the `n` answers. The first draws with the given seed itself, the others with its followers'
        hashes."""
        seed = secrets.randbits(63) if body.seed is None else body.seed
        return [
            SamplingParams(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=body.top_k or 0,
                max_new_tokens=max_tokens,
                stop_token_ids=() if body.ignore_eos else (self.config.eos_token_id,),
                stop=body.stops,
                seed=seed if i == 0 else stable_hash("choice", seed, i),
            )
            for i in range(body.n or 1)
        ]

    def judge_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """Raises ApiError 400 for a prompt that the model can't take."""
        if not token_ids:
            raise ApiError(400, f"{param} has no tokens; expected at least one", param=param)
        if max(token_ids) >= self.config.vocab_size:
            raise ApiError(
                400,
                f"{param} has token {max(token_ids)}; the model's vocabulary is 0..{self.config.vocab_size - 1}",
                param=param,
            )

    def max_new_tokens(self, prompt_tokens: int, asked: int | None, param: str) -> int:
        """What was asked for, or what is left up to the default. Raises ApiError 400 when it doesn't fit."""
        left = self.max_sequence_tokens - prompt_tokens
        if left < 1 or (asked is not None and asked > left):
            wanted = f"{prompt_tokens} of the prompt and {asked or 'at least 1'} of {param}"
            raise ApiError(
                400,
                f"sequences are limited to {self.max_sequence_tokens} tokens, this request has {wanted}; shorten the "
                f"prompt or lower {param}",
                code="context_length_exceeded",
                param=param,
            )
        return asked if asked is not None else min(left, self.options.default_max_tokens)


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
