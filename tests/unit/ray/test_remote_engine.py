"""RemoteEngine over processes that end when a test says so: each request is answered once, by the right version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from helpers.engine_processes import Process, engine_over, new_update, until

from miles_k3.adapters.transport import publish
from miles_k3.errors import AdapterError, EngineError
from miles_k3.types import AdapterConfig, AdapterUpdate, FinishReason, LentAdapter, LentShard, SamplingParams


def test_requests_under_way_are_issued_again_to_the_next_process() -> None:
    async def main() -> None:
        first, second = Process(), Process()
        engine = engine_over(first, second)
        engine.load_adapter(new_update(7))
        asked = [asyncio.ensure_future(engine.generate([1], SamplingParams(), request_id=f"r{i}")) for i in range(5)]
        await until(lambda: len(first.under_way) == 5)
        first.answer("r3")
        await asked[3]
        first.end()
        await until(lambda: len(second.under_way) == 4)
        assert sorted(second.under_way) == ["r0", "r1", "r2", "r4"], "what was answered is not asked again"
        assert second.verbs[:2] == ["start", "load"], "it has the adapter before it has requests"
        for name in list(second.under_way):
            second.answer(name)
        assert {(await a).adapter_version for a in asked} == {7}
        assert engine.stats()["restarts"] == 1

    asyncio.run(main())


def test_a_process_that_ends_while_it_is_started_counts_too() -> None:
    dies = Process(lambda verb: verb == "load")
    last = Process()
    engine = engine_over(Process(lambda verb: verb == "score"), dies, last)
    engine.load_adapter(new_update(0))
    engine.score([[1, 2, 3]])
    assert last.verbs == ["start", "load", "score"]
    assert engine.stats()["restarts"] == 2


def test_too_many_ends_are_an_error_that_says_why() -> None:
    engine = engine_over(*(Process(lambda verb: verb == "score") for _ in range(3)), restarts=2)
    with pytest.raises(EngineError, match=r"engine 0 has ended 3 times .*: killed by a test; .*engine_restarts 2"):
        engine.score([[1, 2]])
    with pytest.raises(EngineError, match="has ended 3 times"):
        asyncio.run(engine.generate([1], SamplingParams()))


def test_an_adapter_that_arrives_starts_the_count_anew() -> None:
    first, second, third = Process(), Process(), Process()
    engine = engine_over(first, second, third, restarts=1)
    first.end()
    engine.score([[1, 2]])
    engine.load_adapter(new_update(0))
    second.end()
    engine.score([[1, 2]])
    assert "score" in third.verbs


def test_a_process_that_ends_while_it_takes_an_adapter_is_replaced_and_the_next_one_gets_it() -> None:
    loads = iter([False, True])
    first, second = Process(lambda verb: verb == "load" and next(loads)), Process()
    engine = engine_over(first, second)
    publish(new_update(3), engine)
    publish(new_update(4), engine)
    assert engine.adapter_version == second.version == 4
    assert second.verbs == ["start", "load", "load"], "the one before, then the new one"


def test_a_refused_adapter_leaves_the_version() -> None:
    process = Process()
    engine = engine_over(process)
    engine.load_adapter(new_update(3))
    bad = new_update(4)
    object.__setattr__(bad, "sha256", "bad")
    with pytest.raises(AdapterError, match="damaged"):
        engine.load_adapter(bad)
    assert engine.adapter_version == 3


def test_a_sleeping_engine_sleeps_in_its_next_process() -> None:
    second = Process()
    engine = engine_over(Process(lambda verb: verb == "score"), second)
    engine.sleep()
    engine.score([[1, 2]])
    assert second.asleep
    engine.wake()
    assert not second.asleep


def test_a_hanging_process_is_ended_and_replaced() -> None:
    async def main() -> None:
        first, second = Process(), Process()
        engine = engine_over(first, second, timeout_s=0.1)
        first.hangs = True
        asked = asyncio.ensure_future(engine.generate([1], SamplingParams(), request_id="r"))
        await until(lambda: "r" in second.under_way)
        second.answer("r")
        assert (await asked).finish_reason is FinishReason.STOP
        assert not first.alive

    asyncio.run(main())


def test_a_slow_process_with_signs_of_life_is_left_alone() -> None:
    async def main() -> None:
        process = Process()
        engine = engine_over(process, timeout_s=0.02)
        asked = asyncio.ensure_future(engine.generate([1], SamplingParams(), request_id="r"))
        await until(lambda: process.verbs.count("stats") >= 3)
        process.answer("r")
        assert (await asked).token_ids == (1,)

    asyncio.run(main())


def test_one_request_asks_for_all_of_them() -> None:
    async def main() -> None:
        process = Process()
        engine = engine_over(process, timeout_s=0.05)
        asked = [asyncio.ensure_future(engine.generate([1], SamplingParams())) for _ in range(20)]
        await until(lambda: process.verbs.count("stats") >= 2)
        assert process.verbs.count("stats") <= 4
        for name in list(process.under_way):
            process.answer(name)
        await asyncio.gather(*asked)

    asyncio.run(main())


def test_aborted_requests_are_not_issued_again() -> None:
    async def main() -> None:
        first, second = Process(), Process()
        first.deaf = True  # it ends before it hears of it
        engine = engine_over(first, second)
        asked = asyncio.ensure_future(engine.generate([1], SamplingParams(), request_id="r"))
        await until(lambda: "r" in first.under_way)
        engine.abort("r")
        engine.abort("nobody's")
        first.end()
        assert (await asked).finish_reason is FinishReason.ABORT
        assert second.under_way == {}

    asyncio.run(main())


def test_a_cancelled_call_aborts_its_request() -> None:
    async def main() -> None:
        process = Process()
        engine = engine_over(process)
        asked = asyncio.ensure_future(engine.generate([1], SamplingParams(), request_id="r"))
        await until(lambda: "r" in process.under_way)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert process.verbs[-1] == "abort"

    asyncio.run(main())


@pytest.mark.parametrize("again", [(5, 6, 7), (5, 9, 7)])
def test_tokens_that_were_told_are_not_told_again(again: tuple[int, ...]) -> None:
    async def main() -> None:
        first, second = Process(), Process()
        engine, heard = engine_over(first, second), []

        def hear(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            heard.extend(zip(tokens, logprobs, strict=True))

        asked = asyncio.ensure_future(engine.generate([1], SamplingParams(), request_id="r", on_tokens=hear))
        await until(lambda: "r" in first.under_way)
        first.hearers["r"]((5,), (-0.5,))
        first.hearers["r"]((6,), (-0.6,))
        first.end()
        await until(lambda: "r" in second.under_way)
        second.hearers["r"](again[:1], (-0.5,))
        if again[1] != 6:
            with pytest.raises(EngineError, match="sampled other tokens than were told"):
                second.hearers["r"](again[1:], (-0.9, -0.7))
        else:
            second.hearers["r"](again[1:], (-0.6, -0.7))
            assert heard == [(5, -0.5), (6, -0.6), (7, -0.7)]
        second.answer("r")
        await asked

    asyncio.run(main())


def test_a_closed_engine_says_so() -> None:
    engine = engine_over(Process())
    engine.close()
    with pytest.raises(EngineError, match="engine 0 is closed"):
        engine.score([[1, 2]])


def test_the_next_process_drafts_as_the_last_did_and_goes_on_listening() -> None:
    """Weights are on the host and ordinary tensors; what a process heard ends with it."""
    first, second, third = Process(), Process(), Process()
    engine = engine_over(first, second, third)
    engine.load_adapter(new_update(0))
    weights = {"fc.weight": torch.ones(2, requires_grad=True)}
    engine.load_draft(weights, 1)
    engine.listen(100)
    assert first.given["load_draft"][1] == 1
    assert not first.given["load_draft"][0]["fc.weight"].requires_grad
    first.end()
    assert engine.heard() == ["heard"]
    assert second.verbs == ["start", "load", "load_draft", "listen", "heard"]
    assert (second.given["load_draft"], second.given["listen"]) == (first.given["load_draft"], (100,))
    second.end()
    engine.score([[1, 2]])
    assert third.verbs == ["start", "load", "load_draft", "score"]


def test_what_was_lent_is_read_again_from_the_hosts_copy() -> None:
    """A GPU's handle is for one process, once: the next process, or the same adapter tried again, gets the other."""
    read: list[str] = []

    class Reading(Process):
        def load(self, update: AdapterUpdate | LentAdapter) -> int:
            assert isinstance(update, LentAdapter)
            read.extend(opener(*arguments) for shard in update.shards for opener, arguments in shard.once)
            return super().load(update)

    shard = LentShard(experts=range(2), once=((str, ("gpu",)),) * 2, kept=(str, ("host",)))
    lent = LentAdapter(version=0, config=AdapterConfig(rank=2, alpha=4.0), sha256="", shards=(shard,))
    ends = Reading(lambda verb: verb == "load"), Reading(lambda verb: verb == "score")
    engine = engine_over(*ends, Reading())
    engine.load_adapter(lent)
    assert read == ["gpu", "gpu", "host", "host"], "the first process has ended in the midst of it"
    engine.score([[1, 2]])
    assert read[4:] == ["host", "host"]
