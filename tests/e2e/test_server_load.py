"""A thousand clients at once, some of which read slowly or leave: everyone gets an answer and nothing is leaked."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from helpers.engines import assert_idle
from helpers.http_load import last_event, post
from helpers.servers import MODEL, PATIENCE_S, Running, ScriptedEngine, running_server, tiny_engine

pytestmark = pytest.mark.slow

CLIENTS = 1000


def settled(running: Running) -> None:
    """Wait until nobody is in and nothing is held."""
    limit = time.monotonic() + PATIENCE_S
    while running.server.gate.in_flight or running.server.flights or running.server.backend.num_streams:
        assert time.monotonic() < limit, running.server.flights
        time.sleep(0.02)


def body(i: int, **changes: Any) -> dict[str, Any]:
    text = f"State the final answer to the following arithmetic problem: {i} + {i % 7} ="
    return {"model": MODEL, "prompt": text, "max_tokens": 4 + i % 13, "seed": i, "ignore_eos": True, **changes}


async def ask(url: str, i: int, outcomes: Counter[str]) -> None:
    """Every kind of client in turn: patient, streaming, slow, leaving while it waits, leaving in mid-stream."""
    kind = ("whole", "stream", "slow", "leaves early", "leaves late")[i % 5]
    changes = {} if kind in ("whole", "leaves early") else {"stream": True}
    if kind == "leaves early":
        try:
            async with asyncio.timeout(0.05 + (i % 10) / 20), post(url, "/v1/completions", body(i)) as reply:
                await reply.text()
        except TimeoutError:
            outcomes["left"] += 1
        return
    async with post(url, "/v1/completions", body(i, **changes), buffer_bytes=256) as reply:
        assert reply.status == 200
        if kind == "leaves late":
            await reply.reader.readline()
            outcomes["left"] += 1
            return
        if kind == "slow":
            await asyncio.sleep(1 + i % 3)
        text = await reply.text()
    whole = '"finish_reason":"length"' in text if kind == "whole" else last_event(text) == "[DONE]"
    outcomes["answered" if whole else f"cut: {text[-200:]}"] += 1


def test_a_thousand_clients_leak_nothing() -> None:
    engine = tiny_engine(max_running=64, max_sequence_tokens=128, prefix_cache="off")
    with running_server(engine) as running:
        asked: Counter[str] = Counter()
        delays: list[float] = []
        stop = threading.Event()

        def watch_health() -> None:
            with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client:
                while not stop.wait(0.1):
                    began = time.monotonic()
                    assert client.get("/health").status_code == 200
                    delays.append(time.monotonic() - began)

        async def storm() -> None:
            async with asyncio.TaskGroup() as group:
                for i in range(CLIENTS):
                    group.create_task(ask(running.url, i, asked))

        for _ in range(2):
            watcher = threading.Thread(target=watch_health)
            stop.clear()
            watcher.start()
            asyncio.run(asyncio.wait_for(storm(), 400))
            stop.set()
            watcher.join()
            settled(running)
            running.do(running.server.backend.call, assert_idle, engine)
        assert asked["answered"] >= 2 * CLIENTS * 3 // 5
        assert set(asked) <= {"answered", "left"}, asked
        delays.sort()
        print(f"{asked}; /health: median {delays[len(delays) // 2]:.3f} s, longest {delays[-1]:.3f} s")
        assert delays[len(delays) // 2] < 1.0
        # Requests, streams and generations are gone, not only ended.
        gc.collect()
        kept = Counter(
            type(o).__name__ for o in gc.get_objects() if type(o).__name__ in ("Flight", "Generation", "Stream")
        )
        assert sum(kept.values()) <= 5, kept


def test_readers_that_dont_read_slow_nobody_down() -> None:
    """A thousand of them hold their streams open; the engine is done with them, and works for others at its own pace.

    With log-probabilities an answer is larger than all buffers between the server and its reader.
    """
    engine = ScriptedEngine("a long answer, word by word. " * 200, max_running=2 * CLIENTS, burst=500)
    long = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1500, "stream": True}
    long["logprobs"] = True
    with running_server(engine, reader_timeout_s=400.0, send_buffer_bytes=4096) as running:

        async def alone() -> float:
            began = time.monotonic()
            async with post(running.url, "/generate", {"input_ids": [1]}) as reply:
                assert '"finish_reason":"length"' in await reply.text()
            return time.monotonic() - began

        async def stuck(all_in: asyncio.Barrier, leave: asyncio.Event) -> None:
            async with post(running.url, "/v1/chat/completions", long, buffer_bytes=2048) as reply:
                assert reply.status == 200
                await all_in.wait()
                await leave.wait()

        async def together() -> tuple[float, int]:
            leave, all_in = asyncio.Event(), asyncio.Barrier(CLIENTS + 1)
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(stuck(all_in, leave))
                await all_in.wait()
                while engine.running or await busy(running):
                    await asyncio.sleep(0.05)
                beside = await alone()
                open_streams = len(running.server.flights)
                leave.set()
            return beside, open_streams

        first = asyncio.run(alone())
        beside, open_streams = asyncio.run(asyncio.wait_for(together(), 300))
        print(f"alone {first:.3f} s, beside {open_streams} open streams {beside:.3f} s")
        settled(running)
        assert open_streams >= CLIENTS
        assert beside < first + 1.0


async def busy(running: Running) -> bool:
    """Whether the server's loop has much to do: it takes its time to answer."""
    began = time.monotonic()
    await asyncio.to_thread(running.do, lambda: None)
    return time.monotonic() - began > 0.05


def test_a_reader_that_never_reads_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = ScriptedEngine("x" * 3000, burst=100)
    big = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 4000, "n": 16, "logprobs": 0}
    with running_server(engine, reader_timeout_s=3.0) as running:

        async def stuck() -> None:
            async with post(running.url, "/v1/completions", big, buffer_bytes=2048):
                while running.server.flights or running.process.server_state.connections:
                    await asyncio.sleep(0.02)

        asyncio.run(asyncio.wait_for(stuck(), PATIENCE_S))
        settled(running)
    assert "a reader took nothing for 3 s and was dropped" in caplog.text
    assert "Traceback" not in caplog.text
