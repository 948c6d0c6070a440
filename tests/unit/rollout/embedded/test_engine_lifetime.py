"""A request's end before its time, event loops that come and go, sleep and close."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from helpers.engines import GREEDY, adapter_update, ask, assert_idle, make_engine, random_prompts, tokens_of

from miles_k3.errors import EngineError
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.types import Completion, FinishReason, SamplingParams

PROMPTS = random_prompts(12, seed=21)
ENDLESS = SamplingParams(max_new_tokens=60, seed=1)


# --- abort and cancellation -----------------------------------------------------------------------------------------
def start(engine: EmbeddedEngine, params: SamplingParams) -> list[asyncio.Task[Completion]]:
    """Three requests with ids "0", "1" and "2"."""
    return [asyncio.ensure_future(engine.generate(p, params, request_id=str(i))) for i, p in enumerate(PROMPTS[:3])]


def test_abort_gives_what_there_is_and_frees_at_once() -> None:
    engine = make_engine()
    whole = ask(engine, PROMPTS[:3], ENDLESS)

    async def run() -> list[Completion]:
        tasks = [
            asyncio.ensure_future(engine.generate(p, ENDLESS, request_id=str(i))) for i, p in enumerate(PROMPTS[:3])
        ]
        while engine.stats()["generated_tokens"] < 180 + 15:
            await asyncio.sleep(0)
        free = engine.stats()["free_pages"]
        engine.abort("1")
        engine.abort("1")
        engine.abort("nobody")
        assert engine.stats()["free_pages"] > free
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert [a.finish_reason for a in answers] == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH]
    assert 0 < len(answers[1].token_ids) < 60
    assert answers[1].token_ids == whole[1].token_ids[: len(answers[1].token_ids)]
    assert answers[0].token_ids == whole[0].token_ids
    assert_idle(engine)


def test_abort_while_waiting() -> None:
    engine = make_engine(max_running=1)

    async def run() -> list[Completion]:
        tasks = [
            asyncio.ensure_future(engine.generate(p, GREEDY, request_id=str(i))) for i, p in enumerate(PROMPTS[:3])
        ]
        await asyncio.sleep(0)
        engine.abort("2")
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert answers[2].finish_reason is FinishReason.ABORT
    assert answers[2].token_ids == ()
    assert all(len(a.token_ids) == 8 for a in answers[:2])
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("verb", ["abort 0", "abort 1", "close"])
def test_on_tokens_may_abort_what_ends_in_the_same_step(verb: str, overlap: bool) -> None:
    """Two requests end together; the second one's callback aborts the first, which has ended, or itself."""
    engine, told = make_engine(overlap=overlap), []

    def hear(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        told.extend(tokens)
        if len(told) == GREEDY.max_new_tokens:
            engine.close() if verb == "close" else engine.abort(verb.removeprefix("abort "))

    async def run() -> list[Completion]:
        first = asyncio.ensure_future(engine.generate(PROMPTS[0], GREEDY, request_id="0"))
        await asyncio.sleep(0)
        return [await engine.generate(PROMPTS[0], GREEDY, request_id="1", on_tokens=hear), await first]

    last, first = asyncio.run(run())
    assert first.finish_reason is FinishReason.LENGTH
    assert last.finish_reason is (FinishReason.LENGTH if verb == "abort 0" else FinishReason.ABORT)
    assert first.token_ids == last.token_ids == tuple(told)
    assert_idle(engine)


def test_cancelling_generate_aborts_the_request() -> None:
    engine = make_engine()

    async def run() -> Completion:
        doomed = asyncio.ensure_future(engine.generate(PROMPTS[0], ENDLESS))
        other = asyncio.ensure_future(engine.generate(PROMPTS[1], GREEDY))
        while not engine.stats()["decode_steps"]:
            await asyncio.sleep(0)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert engine.stats()["running"] == 1
        return await other

    assert len(asyncio.run(run()).token_ids) == 8
    assert_idle(engine)


def test_a_timeout_around_generate() -> None:
    engine = make_engine()

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(PROMPTS[0], ENDLESS), timeout=0.01)

    asyncio.run(run())
    assert_idle(engine)


def test_an_id_can_be_used_again_at_once() -> None:
    """A caller that sees the id free takes it before the first owner has noticed its end."""
    engine = make_engine()

    async def again() -> Completion:
        while "x" in engine._requests:
            await asyncio.sleep(0)
        return await engine.generate(PROMPTS[1], GREEDY, request_id="x")

    async def run() -> list[Completion]:
        first = asyncio.ensure_future(engine.generate(PROMPTS[0], GREEDY, request_id="x"))
        await asyncio.sleep(0)
        return list(await asyncio.gather(again(), first))

    assert [a.finish_reason for a in asyncio.run(run())] == [FinishReason.LENGTH] * 2
    assert_idle(engine)


# --- event loops ----------------------------------------------------------------------------------------------------
def test_several_loops_in_turn() -> None:
    engine = make_engine()
    first = tokens_of(ask(engine, PROMPTS))
    assert tokens_of(ask(engine, PROMPTS)) == first


def test_a_loop_that_ended_with_requests_in_flight() -> None:
    """asyncio.run cancels what is left; the next one finds the engine clean."""
    engine = make_engine()

    async def leave() -> None:
        asyncio.ensure_future(engine.generate(PROMPTS[0], ENDLESS))  # noqa: RUF006
        while not engine.stats()["decode_steps"]:
            await asyncio.sleep(0)

    asyncio.run(leave())
    assert_idle(engine)
    assert len(ask(engine, PROMPTS[:1])[0].token_ids) == 8


def test_a_loop_that_was_abandoned() -> None:
    """A loop that nobody runs any more, with a request that was never cancelled."""
    engine, loop = make_engine(), asyncio.new_event_loop()
    task = loop.create_task(engine.generate(PROMPTS[0], ENDLESS))
    loop.run_until_complete(asyncio.sleep(0))
    assert engine.stats()["waiting"] + engine.stats()["running"] == 1
    assert len(ask(engine, PROMPTS[1:2])[0].token_ids) == 8
    assert_idle(engine)
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


def test_other_tasks_get_their_turn_between_steps() -> None:
    engine, turns = make_engine(), []

    async def count() -> None:
        while True:
            turns.append(engine.stats()["decode_steps"])
            await asyncio.sleep(0)

    async def run() -> None:
        counter = asyncio.ensure_future(count())
        await engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=20))
        counter.cancel()

    asyncio.run(run())
    assert len(set(turns)) >= 19


def test_a_failing_step_fails_its_requests_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def fail() -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "step", fail)
        with pytest.raises(EngineError, match="out of memory"):
            ask(engine, PROMPTS[:2])
    assert_idle(engine)
    assert len(ask(engine, PROMPTS[:1])[0].token_ids) == 8


def test_a_request_that_comes_right_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the driver's end is known: the failed requests hear of it, and the new one is served by new books."""
    engine, late = make_engine(), []
    expected = ask(engine, PROMPTS[:1])

    async def run() -> list[Completion | BaseException]:
        def fail() -> None:
            late.append(asyncio.ensure_future(engine.generate(PROMPTS[0], GREEDY)))
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine.runner, "step", fail)
        asking = asyncio.gather(*(engine.generate(p, GREEDY) for p in PROMPTS[:2]), return_exceptions=True)
        failed = await asyncio.wait_for(asking, 60)
        return [*failed, await asyncio.wait_for(late[0], 60)]

    *failed, served = asyncio.run(run())
    assert all(isinstance(f, EngineError) and isinstance(f.__cause__, RuntimeError) for f in failed)
    assert isinstance(served, Completion)
    assert served.token_ids == expected[0].token_ids
    assert_idle(engine)


# --- sleep and close ------------------------------------------------------------------------------------------------
def test_sleep_gives_memory_back_and_wake_goes_on() -> None:
    engine = make_engine()
    expected, scored = tokens_of(ask(engine, PROMPTS)), engine.score(PROMPTS[:1])[0]
    assert engine.stats()["cache_bytes"] > 0
    engine.sleep()
    engine.sleep()
    assert engine.stats()["cache_bytes"] == 0
    with pytest.raises(EngineError, match=r"generate while the engine sleeps; call wake\(\)"):
        ask(engine, PROMPTS[:1])
    with pytest.raises(EngineError, match=r"load_adapter while the engine sleeps; call wake\(\)"):
        engine.load_adapter(adapter_update(0))
    assert torch.equal(engine.score(PROMPTS[:1])[0], scored)
    engine.wake()
    engine.wake()
    assert tokens_of(ask(engine, PROMPTS)) == expected


def test_sleep_is_refused_while_requests_run() -> None:
    engine = make_engine()

    async def run() -> Completion:
        task = asyncio.ensure_future(engine.generate(PROMPTS[0], GREEDY))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests run or wait"):
            engine.sleep()
        return await task

    assert len(asyncio.run(run()).token_ids) == 8
    engine.sleep()


def test_close_aborts_and_stays_closed() -> None:
    engine = make_engine()

    async def run() -> Completion:
        task = asyncio.ensure_future(engine.generate(PROMPTS[0], ENDLESS))
        while not engine.stats()["decode_steps"]:
            await asyncio.sleep(0)
        engine.close()
        return await task

    assert asyncio.run(run()).finish_reason is FinishReason.ABORT
    assert engine.stats()["cache_bytes"] == 0
    for verb in (lambda: ask(engine, PROMPTS[:1]), engine.wake, lambda: engine.load_adapter(adapter_update(0))):
        with pytest.raises(EngineError, match="closed"):
            verb()
