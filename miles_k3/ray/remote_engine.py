"""RemoteEngine: an engine in a process of its own is just another Engine, also when that process ends in between.

This file knows neither Ray nor any other way to run a process; see `EngineProcess`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from miles_k3.errors import EngineError
from miles_k3.protocols import OnTokens
from miles_k3.types import AdapterUpdate, Completion, FinishReason, LentAdapter, SamplingParams

if TYPE_CHECKING:
    import torch

    from miles_k3.rollout.speculative.blocks import Example

log = logging.getLogger(__name__)
BASE_VERSION = -1


class EngineGoneError(EngineError):
    """The engine's process has ended, or was ended because it gave no sign of life. Its words say why."""


class EngineProcess(Protocol):
    """One process with an Engine in it, from its start to its end. Every verb raises EngineGoneError after that, and
    otherwise what the engine raised."""

    def call(self, verb: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The engine's `verb`. Raises TimeoutError when there is no answer in time."""
        ...

    async def acall(self, verb: str, *arguments: Any) -> Any:
        """The same, awaited; any number at once."""
        ...

    async def stream(self, on_tokens: OnTokens, *arguments: Any) -> Completion:
        """The engine's `generate`, awaited; `on_tokens` hears of what has been sampled while it goes on."""
        ...

    def tell(self, verb: str, *arguments: Any) -> None:
        """The same as `call` without an answer; returns at once, and never raises."""
        ...

    def load(self, update: AdapterUpdate | LentAdapter) -> int:
        """Bring an adapter over and load it; the version that the engine then serves."""
        ...

    def end(self) -> None:
        """End the process at once. Nothing where it has ended."""
        ...


class RemoteEngine:
    """Implements `protocols.Engine` over an EngineProcess, and over the next one when that ends.

    A new process is given the newest adapter before anything else, and the requests that were under way are issued
    again, each with its own seed and version: nobody but the log can tell. `restarts` bounds the processes that may
    end between two adapters; `timeout_s` is how long one may show no sign of life before it is ended.

    `start` begins a process without waiting for it. Requests must come from one event loop at a time.
    """

    def __init__(self, start: Callable[[], EngineProcess], *, name: str, restarts: int, timeout_s: float) -> None:
        self.name = name
        self._start, self._restarts, self._timeout_s = start, restarts, timeout_s
        self._lock = threading.Lock()  # held while a process is replaced
        self._newest: AdapterUpdate | LentAdapter | None = (
            None  # on the host, for the next process, as all that follows
        )
        self._draft: tuple[dict[str, torch.Tensor], int] | None = None
        self._listening: int | None = None
        self._version = BASE_VERSION
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._ids = itertools.count()
        self._ended = self._ended_since = 0  # processes, ever and since the newest adapter
        self._asleep = False
        self._closed: str | None = None  # why no more is to be had of it
        self._heard = time.monotonic()
        self._process = start()

    def ready(self) -> RemoteEngine:
        """Wait until the engine has loaded its model. Raises what kept it from doing so."""
        self._call("start", waits=True)
        return self

    @property
    def adapter_version(self) -> int:
        """The version that the engine said it serves."""
        return self._version

    # --- requests -----------------------------------------------------------------------------------------------
    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        adapter_version: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Like Engine.generate. Raises EngineError, too, where `on_tokens` has heard of tokens that the next process
        did not sample again."""
        self._refuse_closed()
        request_id = request_id or f"remote-{next(self._ids)}"
        if request_id in self._running:
            raise EngineError(f"request id {request_id!r} is in use; choose another or leave it out")
        version = self._version if adapter_version is None else adapter_version
        arguments = (tuple(token_ids), params, request_id, version)
        told = None if on_tokens is None else _Told(on_tokens)
        self._running.add(request_id)
        try:
            while True:
                if request_id in self._aborted:  # it ended with its process, before it could say what it had
                    return _nothing(version)
                process = self._process
                try:
                    if told is None:
                        return await self._watched(process, process.acall("generate", *arguments))
                    return await self._watched(process, process.stream(told.again(), *arguments))
                except EngineGoneError as gone:
                    await asyncio.to_thread(self._replace, process, gone)
        except BaseException:  # cancelled, or what `on_tokens` raised: nobody waits for the answer
            self.abort(request_id)
            raise
        finally:
            self._running.discard(request_id)
            self._aborted.discard(request_id)

    async def _watched(self, process: EngineProcess, answer: Awaitable[Completion]) -> Completion:
        """The answer; where nothing at all comes from the process for too long, it is ended."""
        answer = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait({answer}, timeout=self._timeout_s))[0]:
                await self._look_after(process)
            self._heard = time.monotonic()
            return await answer
        finally:
            answer.cancel()

    async def _look_after(self, process: EngineProcess) -> None:
        """Ask for a sign of life, unless there was one or another request asks."""
        if time.monotonic() - self._heard < self._timeout_s:
            return
        self._heard = time.monotonic()
        try:
            await asyncio.wait_for(process.acall("stats"), self._timeout_s)
        except TimeoutError:
            process.end()
            raise EngineGoneError(f"it gave no sign of life for {self._timeout_s:g} s and was ended") from None

    def abort(self, request_id: str) -> None:
        """End a request. Unknown ids are ignored."""
        if request_id in self._running:
            self._aborted.add(request_id)
            self._process.tell("abort", request_id)

    # --- scoring, adapters and memory -----------------------------------------------------------------------------
    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        return self._call("score", [tuple(s) for s in sequences], temperature)

    def load_adapter(self, update: AdapterUpdate | LentAdapter) -> None:
        """All or nothing. The update is kept, on the host, until the next one: a new process needs it."""
        self._refuse_closed()
        while True:
            process = self._process
            try:
                self._version = process.load(update)
                break
            except EngineGoneError as gone:
                self._replace(process, gone)
                update = _on_host(update)
        self._newest, self._ended_since = _on_host(update), 0

    # --- a draft that is trained elsewhere --------------------------------------------------------------------------
    def listen(self, num_tokens: int) -> None:
        """Like EmbeddedEngine.listen. What was heard by a process that ends is lost; the next one goes on listening."""
        self._listening = num_tokens
        self._call("listen", num_tokens)

    def heard(self) -> list[Example]:
        """The end of `listen`."""
        found = self._call("heard")
        self._listening = None
        return found

    def load_draft(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Like EmbeddedEngine.load_draft. The draft is kept, on the host, until the next one."""
        self._draft = {name: tensor.detach().cpu() for name, tensor in weights.items()}, version
        self._call("load_draft", *self._draft)

    def sleep(self) -> None:
        self._call("sleep")
        self._asleep = True

    def wake(self) -> None:
        self._call("wake")
        self._asleep = False

    def stats(self) -> Mapping[str, float]:
        """The engine's, and how often its process was started again."""
        return {**self._call("stats"), "restarts": self._ended}

    def close(self) -> None:
        """End the engine's process."""
        self._closed = self._closed or f"{self.name} is closed; make a new one"
        self._process.end()

    def _call(self, verb: str, *arguments: Any, waits: bool = False) -> Any:
        self._refuse_closed()
        while True:
            process = self._process
            try:
                return process.call(verb, *arguments, timeout_s=None if waits else self._timeout_s)
            except TimeoutError:
                process.end()
                gone = EngineGoneError(f"{verb} took longer than {self._timeout_s:g} s, so it was ended")
                self._replace(process, gone)
            except EngineGoneError as gone:
                self._replace(process, gone)

    # --- the next process -----------------------------------------------------------------------------------------
    def _replace(self, ended: EngineProcess, reason: EngineGoneError) -> None:
        """Put a new process, as far as the old one was, in the place of `ended`, unless that has been done.

        Raises EngineError when too many have ended.
        """
        with self._lock:
            while self._process is ended and not self._closed:
                self._count(reason)
                log.warning(
                    "%s has ended (%s); it is started again with adapter v%d, and %d requests are issued again",
                    self.name, reason, self._version, len(self._running),
                )  # fmt: skip
                ended.end()  # it may only have been out of reach
                process = self._start()
                try:
                    self._restore(process)
                except EngineGoneError as gone:
                    process.end()
                    reason = gone
                    continue
                self._heard = time.monotonic()
                self._process = process
        self._refuse_closed()

    def _count(self, reason: EngineGoneError) -> None:
        self._ended, self._ended_since = self._ended + 1, self._ended_since + 1
        if self._ended_since > self._restarts:
            self._closed = (
                f"{self.name} has ended {self._ended_since} times since its last adapter, now because: {reason}; the "
                f"run may go on from its last checkpoint once that is mended (cluster.engine_restarts {self._restarts})"
            )
            self._refuse_closed()

    def _restore(self, process: EngineProcess) -> None:
        process.call("start")
        if self._newest is not None:
            process.load(self._newest)
        if self._draft is not None:
            process.call("load_draft", *self._draft)
        if self._listening is not None:
            process.call("listen", self._listening)
        if self._asleep:
            process.call("sleep")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError(self._closed)


class _Told:
    """What `on_tokens` has heard of a request, which may be issued again."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._tokens: list[int] = []

    def again(self) -> OnTokens:
        """For the next process: tokens that were told are compared, and told no second time."""
        came = 0

        def hear(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            nonlocal came
            known = self._tokens[came : came + len(tokens)]
            came += len(tokens)
            if list(tokens[: len(known)]) != known:
                raise EngineError(
                    "the engine's process ended in the midst of a stream, and the next one sampled other tokens than "
                    "were told; ask again"
                )
            if fresh := tokens[len(known) :]:
                self._tokens += fresh
                self._on_tokens(fresh, logprobs[len(known) :])

        return hear


def _nothing(version: int) -> Completion:
    return Completion(token_ids=(), logprobs=(), text="", finish_reason=FinishReason.ABORT, adapter_version=version)


def _on_host(update: AdapterUpdate | LentAdapter) -> AdapterUpdate | LentAdapter:
    """What a process can be given at any time, and again."""
    if isinstance(update, LentAdapter):
        assert all(shard.kept is not None for shard in update.shards), "lent without a copy to read again"
        kept = tuple(dataclasses.replace(s, once=(s.kept,) * len(s.once)) for s in update.shards)
        return dataclasses.replace(update, shards=kept)
    return dataclasses.replace(update, tensors={name: tensor.cpu() for name, tensor in update.tensors.items()})
