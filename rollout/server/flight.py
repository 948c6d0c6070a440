"""One HTTP request's generations, from admission to the last token, also when the client goes away in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from miles_k3.rollout.server.backend import Backend, Generation, News, VersionGoneError
from miles_k3.rollout.server.errors import ApiError, error_body
from miles_k3.rollout.server.gate import Gate, Ticket
from miles_k3.types import FinishReason, SamplingParams

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # in the metrics only: nobody is there to read it


class Flight:
    """Several generations of one request. Exactly one `land` ends it, and gives back what it holds."""

    def __init__(self, backend: Backend, flights: set[Flight], ticket: Ticket, *, streams: bool) -> None:
        self._backend, self._flights, self._ticket, self.streams = backend, flights, ticket, streams
        self._ready = asyncio.Event()
        self.generations: list[Generation] = []
        self._landed = False
        flights.add(self)
        backend.num_streams += streams

    @classmethod
    def begin(
        cls, backend: Backend, gate: Gate, flights: set[Flight],
        requests: Sequence[tuple[Sequence[int], SamplingParams]], *, version: int, streams: bool,
    ) -> Flight:  # fmt: skip
        """Start a generation for each (prompt, parameters). Raises ApiError when the gate is closed or full."""
        flight = cls(backend, flights, gate.enter(len(requests)), streams=streams)
        for token_ids, params in requests:
            flight.generations.append(
                backend.generate(token_ids, params, version=version, ready=flight._ready, streams=streams)
            )
        return flight

    async def news(self) -> AsyncIterator[tuple[int, News]]:
        """(index of the generation, what came of it), until all have ended. Raises ApiError when one failed."""
        open_ones = dict(enumerate(self.generations))
        while open_ones:
            await self._ready.wait()
            self._ready.clear()
            for index, generation in list(open_ones.items()):
                news = generation.news()
                if news.ended:
                    del open_ones[index]
                    _refuse_failed(news)
                if news.tokens or news.ended:
                    yield index, news

    def abort(self) -> None:
        """End the generations early; their news still come, with FinishReason.ABORT."""
        for generation in self.generations:
            generation.cancel()

    def land(self) -> None:
        """The request is over, one way or the other."""
        if self._landed:
            return
        self._landed = True
        self.abort()
        self._flights.discard(self)
        self._backend.num_streams -= self.streams
        self._ticket.leave()


def _refuse_failed(news: News) -> None:
    if isinstance(news.error, VersionGoneError):
        raise ApiError(404, str(news.error), code="adapter_not_found", param="model")
    if news.error is not None:
        raise ApiError(500, f"the engine failed: {news.error}", code="engine_failed")
    if news.completion is not None and news.completion.finish_reason is FinishReason.ERROR:
        raise ApiError(500, f"the engine failed: {news.completion.error}", code="engine_failed")


async def answer_or_gone(request: Request, flight: Flight, answer: Awaitable[Response]) -> Response:
    """Wait for a whole answer, but not for longer than the client does."""
    answering = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else Response(status_code=CLIENT_GONE)
    finally:
        for task in (answering, watching):
            task.cancel()
        flight.land()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Stream(EventSourceResponse):
    """Server-sent events of one flight. `events` yields JSON-able objects, or text as it is.

    An error in the middle becomes an event, since the status has been sent. `reader_timeout_s`: a client that reads
    nothing for so long is dropped.
    """

    def __init__(
        self, flight: Flight, events: AsyncIterator[Mapping[str, Any] | str], dump: Callable[[Any], str], *,
        reader_timeout_s: float,
    ) -> None:  # fmt: skip
        self._flight = flight
        super().__init__(_sent(events, dump), sep="\n", send_timeout=reader_timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            # The server closes what has no end; the system drops it when it stays unread (TCP_USER_TIMEOUT).
            log.info("a reader took nothing for %g s and was dropped", self.send_timeout)
        finally:
            self._flight.land()


async def _sent(
    events: AsyncIterator[Mapping[str, Any] | str], dump: Callable[[Any], str]
) -> AsyncIterator[ServerSentEvent]:
    try:
        async for event in events:
            yield ServerSentEvent(event if isinstance(event, str) else dump(event), sep="\n")
    except ApiError as error:
        body = error_body(error.status_code, error.message, code=error.code, param=error.param)
        yield ServerSentEvent(dump(body), sep="\n")
