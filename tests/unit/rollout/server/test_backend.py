"""The way to the engine's thread and back, without HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from helpers.servers import PATIENCE_S, ScriptedEngine

from miles_k3.rollout.server.backend import Backend, Generation, News, VersionGoneError
from miles_k3.types import FinishReason, SamplingParams

PARAMS = SamplingParams(max_new_tokens=100)


def with_backend(engine: Any, use: Callable[[Backend], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        backend = Backend(engine)
        backend.start()
        try:
            await asyncio.wait_for(use(backend), PATIENCE_S)
        finally:
            await backend.close()

    asyncio.run(run())


async def end_of(generation: Generation, ready: asyncio.Event) -> News:
    tokens: list[int] = []
    while True:
        await ready.wait()
        ready.clear()
        news = generation.news()
        tokens += news.tokens
        if news.ended:
            return News(
                tokens=tokens, logprobs=news.logprobs, completion=news.completion, error=news.error
            )  # fmt: skip


def test_an_abort_that_comes_with_its_request_finds_it() -> None:
    """The engine's thread was in a long step when both came, so it takes them up in one turn."""
    engine = ScriptedEngine("never said", pause=threading.Event())

    async def use(backend: Backend) -> None:
        entered, leave = threading.Event(), threading.Event()

        def step() -> None:
            entered.set()
            leave.wait(PATIENCE_S)

        stepping = asyncio.ensure_future(backend.call(step))
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        ready = asyncio.Event()
        generation = backend.generate([1], PARAMS, version=-1, ready=ready, streams=True)
        generation.cancel()
        leave.set()
        await stepping
        news = await end_of(generation, ready)
        assert news.completion is not None
        assert news.completion.finish_reason is FinishReason.ABORT
        assert not engine.running

    with_backend(engine, use)


def test_a_version_that_went_away_in_between() -> None:
    async def use(backend: Backend) -> None:
        ready = asyncio.Event()
        news = await end_of(backend.generate([1], PARAMS, version=7, ready=ready, streams=False), ready)
        assert isinstance(news.error, VersionGoneError)

    with_backend(ScriptedEngine("x"), use)


def test_tokens_arrive_in_order_and_once_streaming_or_not() -> None:
    engine = ScriptedEngine("a b c d e f g h")

    async def use(backend: Backend) -> None:
        for streams in (True, False):
            backend.num_streams = 1000 * streams  # deliveries are then far apart
            ready = asyncio.Event()
            news = await end_of(backend.generate([1], PARAMS, version=-1, ready=ready, streams=streams), ready)
            assert news.tokens == engine.tokens

    with_backend(engine, use)


def test_closing_ends_what_runs() -> None:
    engine = ScriptedEngine("never said", pause=threading.Event())

    generations: list[Generation] = []

    async def use(backend: Backend) -> None:
        generations.append(backend.generate([1], PARAMS, version=-1, ready=asyncio.Event(), streams=True))
        while not engine.running:
            await asyncio.sleep(0.001)

    with_backend(engine, use)
    assert not engine.running
    assert generations[0].ended, "who waits for it is told"
