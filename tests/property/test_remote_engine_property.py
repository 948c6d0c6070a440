"""However often an engine's process ends, each request is answered once, and by the version it was asked of."""

from __future__ import annotations

import asyncio

from helpers.engine_processes import Process, engine_over, new_update, until
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_k3.types import SamplingParams

REQUESTS = 6


@settings(deadline=None, max_examples=60)
@given(data=st.data(), ends=st.integers(0, 4))
def test_each_request_is_answered_once(data: st.DataObject, ends: int) -> None:
    answered: list[str] = []

    async def main() -> None:
        processes = [Process() for _ in range(ends + 1)]
        engine = engine_over(*processes, restarts=ends)
        engine.load_adapter(new_update(3))
        names = [f"r{i}" for i in range(REQUESTS)]
        asked = [asyncio.ensure_future(engine.generate([1], SamplingParams(), request_id=name)) for name in names]
        for process in processes:
            await until(lambda process=process: len(process.under_way) == sum(not a.done() for a in asked))
            last = process is processes[-1]
            count = len(process.under_way) if last else data.draw(st.integers(0, len(process.under_way)))
            for name in data.draw(st.permutations(sorted(process.under_way)))[:count]:
                answered.append(name)
                process.answer(name)
            if not last:
                process.end()  # answers that are on their way are not lost, and not asked for again
                await until(lambda: sum(a.done() for a in asked) == len(answered))
        completions = [await a for a in asked]
        assert [c.adapter_version for c in completions] == [3] * REQUESTS
        assert sorted(answered) == names
        assert len(processes[0].verbs) >= REQUESTS

    asyncio.run(main())
