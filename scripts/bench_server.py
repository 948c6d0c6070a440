#!/usr/bin/env python3
"""Throughput and latency of the rollout server at several numbers of clients, on the tiny K3.

The server is a process of its own, started as a user would; this process is all the clients. Each client asks again as
soon as it has its answer, and reads server-sent events as they come. The engine by itself, asked for the same by
coroutines in one process, is the yardstick. Prints a Markdown table.

    python scripts/bench_server.py                       # about five minutes on two cores
    python scripts/bench_server.py --clients 1 16 --repeats 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

MODEL = Path(__file__).resolve().parents[1] / "assets" / "tiny-k3"
PATIENCE_S = 300


@dataclass(slots=True)
class Load:
    """What one number of clients measured; seconds a request."""

    clients: int
    seconds: float = 0.0
    tokens: int = 0
    failed: int = 0
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


def question(i: int) -> str:
    return f"State the final answer to the following arithmetic problem: {i % 90 + 3} + {i % 83} ="


@contextmanager
def server(max_running: int) -> Iterator[str]:
    command = [
        sys.executable, "-m", "miles_k3", "serve", "--model", str(MODEL), "--port", "0",
        "--max-running", str(max_running), "--max-queue", "4096",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if match := re.search(r"serving .* on (http://\S+)", line):
                yield match[1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


async def ask(address: tuple[str, int], i: int, tokens: int, load: Load) -> None:
    """One streaming chat over a connection of its own."""
    body = json.dumps({
        "model": MODEL.name, "messages": [{"role": "user", "content": question(i)}], "max_tokens": tokens, "seed": i,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    began, first, usage = time.perf_counter(), None, None
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if first is None and event["choices"] and "role" not in event["choices"][0]["delta"]:
                    first = time.perf_counter() - began
                usage = event["usage"] or usage
    finally:
        writer.close()
    if usage is None or first is None:
        load.failed += 1
        return
    load.tokens += usage["completion_tokens"]
    load.first.append(first)
    load.whole.append(time.perf_counter() - began)


async def watch_health(address: tuple[str, int], load: Load) -> None:
    while True:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.read()
        writer.close()
        load.health.append(time.perf_counter() - began)
        await asyncio.sleep(0.1)


async def through_http(url: str, clients: int, requests: int, tokens: int) -> Load:
    split = urlsplit(url)
    address, load = (split.hostname or "", split.port or 0), Load(clients)
    numbers = iter(range(requests))

    async def client() -> None:
        for i in numbers:
            await ask(address, i, tokens, load)

    watching = asyncio.ensure_future(watch_health(address, load))
    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    load.seconds = time.perf_counter() - began
    watching.cancel()
    return load


def engine_alone(clients: int, requests: int, tokens: int, max_running: int) -> float:
    """Tokens/s of the engine asked directly; in a process of its own, so that nothing is warm that shouldn't be."""
    command = [sys.executable, __file__, "--engine-alone", *map(str, (clients, requests, tokens, max_running))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def run_engine(clients: int, requests: int, tokens: int, max_running: int) -> None:
    import torch

    from miles_k3.k3.config import K3Config
    from miles_k3.k3.weights import load_base
    from miles_k3.rollout.embedded.engine import EmbeddedEngine
    from miles_k3.tokenizer import load_tokenizer
    from miles_k3.types import SamplingParams

    config, tokenizer = K3Config.from_folder(str(MODEL)), load_tokenizer(str(MODEL))
    base = load_base(str(MODEL), config, dtype=torch.float32, device=torch.device("cpu"))
    engine = EmbeddedEngine(
        base, config, tokenizer=tokenizer, max_running=max_running, num_pages=max_running * 64, reserve_tokens=64,
        max_sequence_tokens=8192, prefix_cache="radix",
    )  # fmt: skip
    numbers = iter(range(requests))

    async def client() -> None:
        for i in numbers:
            chat = [{"role": "user", "content": question(i)}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            await engine.generate(ids, SamplingParams(max_new_tokens=tokens, seed=i))

    async def everyone() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    began = time.perf_counter()
    asyncio.run(everyone())
    print(requests * tokens / (time.perf_counter() - began))


def quantile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 128, 1000])
    parser.add_argument("--requests", type=int, help="of each; default: 20 for one client, more for more")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine-alone", type=int, nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine_alone:
        run_engine(*args.engine_alone)
        return
    print(f"{os.cpu_count()} cores, load average before {os.getloadavg()[0]:.1f}, {args.tokens} tokens an answer")
    print("| clients | requests | tokens/s (repeats) | engine alone | first token p50 / p99 | whole p50 / p99 | "
          "/health p50 / max | failed |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for clients in args.clients:
        requests: int = args.requests or (20 if clients == 1 else max(2 * clients, 160))
        alone = [engine_alone(clients, requests, args.tokens, args.max_running) for _ in range(args.repeats)]
        with server(args.max_running) as url:
            asyncio.run(through_http(url, min(clients, 4), 8, 4))  # the first requests find nothing compiled or cached
            loads = [asyncio.run(through_http(url, clients, requests, args.tokens)) for _ in range(args.repeats)]
        rates = [load.tokens / load.seconds for load in loads]
        first, whole, health = ([v for load in loads for v in getattr(load, k)] for k in ("first", "whole", "health"))
        print(
            f"| {clients} | {requests} | {statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f}) | "
            f"{statistics.median(alone):.0f} ({min(alone):.0f}-{max(alone):.0f}) | "
            f"{quantile(first, 0.5):.3f} / {quantile(first, 0.99):.3f} s | "
            f"{quantile(whole, 0.5):.3f} / {quantile(whole, 0.99):.3f} s | "
            f"{quantile(health, 0.5):.3f} / {max(health):.3f} s | {sum(load.failed for load in loads)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
