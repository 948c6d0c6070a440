"""The engine on a thread of its own, and the way across.

The engine's event loop runs on that thread alone, so a long step delays nobody who talks to the server, and a reader
who doesn't read delays no step: tokens wait in their request's list, which its token limit bounds. Tokens cross in
batches: one wake-up of the server's loop for all that came since the last.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_k3.errors import EngineError
from miles_k3.types import AdapterUpdate, Completion, SamplingParams

if TYPE_CHECKING:
    from miles_k3.rollout.embedded.engine import EmbeddedEngine

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
# Streams are served at most once in this many seconds for each of them, so that a thousand streams share wake-ups
# instead of taking the interpreter from the engine at every step.
DELIVERY_S_PER_STREAM = 5e-4
LET_END_S = 5.0  # at most, for requests that closing the engine ended
MAX_DELIVERY_S = 0.2


class VersionGoneError(EngineError):
    """The version was replaced between the moment it was looked up and the moment the engine took the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What came since the last look. `completion` or `error` is set once the request has ended."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    completion: Completion | None = None
    error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self.completion is not None or self.error is not None


class Generation:
    """One request in the engine, seen from the server's loop. `ready` is set when there is news."""

    def __init__(self, backend: Backend, request_id: str, version: int, ready: asyncio.Event, *, streams: bool) -> None:
        self._backend, self.request_id, self.version = backend, request_id, version
        self._ready, self.streams = ready, streams
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self.ended = False

    def news(self) -> News:
        """Takes what there is; never waits."""
        tokens, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, []
        return News(tokens=tokens, logprobs=logprobs, completion=self._completion, error=self._error)

    def cancel(self) -> None:
        """End the request in the engine, if it runs still."""
        if not self.ended:
            self._backend.abort(self.request_id)

    # Called by the backend on the server's loop.
    def receive(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._tokens += tokens
        self._logprobs += logprobs
        self._ready.set()

    def end(self, completion: Completion | None, error: BaseException | None) -> None:
        self._completion, self._error, self.ended = completion, error, True
        if completion is not None and not self.streams:
            self._tokens, self._logprobs = list(completion.token_ids), list(completion.logprobs)
        self._ready.set()


class Backend:
    """An `EmbeddedEngine` and its thread. Public methods belong to the server's loop, which `start` must run on.

    `on_first_token(seconds since the request came)` and `on_gap(seconds, tokens)` are called on the engine's thread.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        *,
        on_first_token: Callable[[float], None] = lambda seconds: None,
        on_gap: Callable[[float, int], None] = lambda seconds, tokens: None,
    ) -> None:
        self._engine, self._on_first_token, self._on_gap = engine, on_first_token, on_gap
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._server: asyncio.AbstractEventLoop | None = None
        self._ids = itertools.count()
        self._serving: set[asyncio.Task[Completion]] = set()
        self._outbox: deque[Callable[[], None]] = deque()
        self._wake_up_due = False
        self._delivered_at = 0.0
        self.num_streams = 0
        self._alive_at = time.monotonic()

    # --- life ---------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._server = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Abort what runs, give the engine's memory back, end the thread."""
        await self.call(self._engine.close)
        ending = asyncio.run_coroutine_threadsafe(self._let_end(), self._loop)
        await asyncio.wrap_future(ending)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def turn_age_s(self) -> float:
        """Seconds since the engine's thread last had a moment between two steps."""
        return max(0.0, time.monotonic() - self._alive_at - HEARTBEAT_S)

    async def _let_end(self) -> None:
        """Requests that the engine has just ended still have to say so: their callers wait."""
        if self._serving:
            await asyncio.wait(self._serving, timeout=LET_END_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._beat()
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _beat(self) -> None:
        self._alive_at = time.monotonic()
        self._loop.call_later(HEARTBEAT_S, self._beat)

    # --- verbs --------------------------------------------------------------------------------------------------
    async def call[T](self, function: Callable[..., T], *args: Any) -> T:
        """Run `function` on the engine's thread between two steps."""

        async def run() -> T:
            return function(*args)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    async def stats(self) -> Mapping[str, float]:
        return await self.call(self._engine.stats)

    @property
    def max_rank(self) -> int:
        return self._engine.store.max_rank

    async def engine_version(self) -> int:
        return await self.call(lambda: self._engine.adapter_version)

    async def live_versions(self) -> set[int]:
        return set(await self.call(self._engine.store.live_versions))

    async def load(self, update: AdapterUpdate, *, pin: bool) -> None:
        """Raises AdapterError; nothing has changed then."""

        def load() -> None:
            self._engine.load_adapter(update)
            if pin:
                self._engine.store.acquire(update.version)

        await self.call(load)

    async def pin(self, version: int, pinned: bool) -> None:
        """A pinned version counts as in use, so its slot is never refilled."""
        store = self._engine.store
        await self.call(store.acquire if pinned else store.release, version)

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, version: int, ready: asyncio.Event, streams: bool
    ) -> Generation:
        """Hand a request over; returns at once. Without `streams` all tokens come with the end."""
        generation = Generation(self, f"http-{next(self._ids)}", version, ready, streams=streams)
        self._loop.call_soon_threadsafe(self._begin, generation, token_ids, params, time.perf_counter())
        return generation

    def abort(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._engine.abort, request_id)

    # --- on the engine's thread ---------------------------------------------------------------------------------
    def _begin(self, generation: Generation, token_ids: Sequence[int], params: SamplingParams, came_at: float) -> None:
        # Eager: the engine has the request when this returns, so that an abort that comes next finds it.
        serving = self._serve(generation, token_ids, params, came_at)
        task = asyncio.Task(serving, loop=self._loop, eager_start=True)
        self._serving.add(task)
        task.add_done_callback(lambda done: self._ended(generation, done))

    async def _serve(
        self, generation: Generation, token_ids: Sequence[int], params: SamplingParams, came_at: float
    ) -> Completion:
        if generation.version not in self._engine.store.live_versions():
            raise VersionGoneError(f"adapter version {generation.version} was unloaded before the request began")
        last = came_at

        def heard(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            nonlocal last
            now = time.perf_counter()
            if last == came_at:
                self._on_first_token(now - came_at)
            else:
                self._on_gap(now - last, len(tokens))
            last = now
            if generation.streams:
                self._post(lambda: generation.receive(tokens, logprobs))

        return await self._engine.generate(
            token_ids, params, request_id=generation.request_id, adapter_version=generation.version, on_tokens=heard
        )

    def _ended(self, generation: Generation, done: asyncio.Task[Completion]) -> None:
        self._serving.discard(done)
        error = asyncio.CancelledError("the engine was closed") if done.cancelled() else done.exception()
        completion = None if error is not None else done.result()
        self._post(lambda: generation.end(completion, error), at_once=True)

    def _post(self, letter: Callable[[], None], *, at_once: bool = False) -> None:
        self._outbox.append(letter)
        if self._wake_up_due or self._server is None:
            return
        self._wake_up_due = True
        try:
            self._server.call_soon_threadsafe(self._deliver_at_once if at_once else self._deliver_soon)
        except RuntimeError:  # the server's loop was closed: nobody reads any more
            log.debug("a letter of the engine found no server")

    # --- deliveries, on the server's loop -----------------------------------------------------------------------
    def _deliver_soon(self) -> None:
        assert self._server is not None
        spacing = min(MAX_DELIVERY_S, self.num_streams * DELIVERY_S_PER_STREAM)
        wait = self._delivered_at + spacing - self._server.time()
        if wait > 0:
            self._server.call_later(wait, self._deliver_at_once)
        else:
            self._deliver_at_once()

    def _deliver_at_once(self) -> None:
        assert self._server is not None
        self._delivered_at = self._server.time()
        self._wake_up_due = False
        while self._outbox:
            self._outbox.popleft()()
