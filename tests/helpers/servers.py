"""Rollout servers on a thread of the test's own process, and engines for them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import batched
from pathlib import Path
from typing import Any

import torch
from helpers.tiny import tiny_adapter

from miles_k3.adapters.peft_io import save_peft
from miles_k3.adapters.store import AdapterStore
from miles_k3.adapters.update import make_update
from miles_k3.k3.config import K3Config
from miles_k3.k3.weights import ResidentBase, load_base
from miles_k3.protocols import OnTokens
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.server.run import Process, address_of, bind
from miles_k3.rollout.server.state import Server, ServerOptions
from miles_k3.serving import make_server
from miles_k3.tokenizer import load_tokenizer
from miles_k3.types import AdapterConfig, Completion, FinishReason, SamplingParams

TINY = Path(__file__).parents[2] / "assets" / "tiny-k3"
MODEL = "tiny-k3"
PATIENCE_S = 60.0


@cache
def tokenizer() -> Any:
    return load_tokenizer(str(TINY))


@cache
def tiny_k3() -> tuple[K3Config, ResidentBase]:
    config = K3Config.from_folder(str(TINY))
    return config, load_base(str(TINY), config, dtype=torch.float32, device=torch.device("cpu"))


def tiny_engine(**options: Any) -> EmbeddedEngine:
    """The shipped tiny K3; `options` are the engine's."""
    config, base = tiny_k3()
    settings = {
        "max_lora_rank": 8, "adapter_slots": 3, "max_running": 32, "max_sequence_tokens": 512, "prefix_cache": "radix",
        **options,
    }  # fmt: skip
    return EmbeddedEngine(base, config, tokenizer=tokenizer(), **settings)


def save_tiny_adapter(folder: Path, seed: int, *, rank: int = 4) -> Path:
    """A PEFT folder for the tiny K3, of factors drawn with `seed`."""
    (model, _), config = tiny_k3(), AdapterConfig(rank=rank, alpha=8.0)
    save_peft(folder, make_update(0, config, tiny_adapter(model, config, seed=seed)), MODEL)
    return folder


class ScriptedEngine:
    """Says what it was told to, a token at a time, whatever it is asked: `script` in text. Counts as an engine."""

    def __init__(
        self, script: str, *, max_running: int = 32, pause: threading.Event | None = None, burst: int = 1
    ) -> None:
        """`pause`: it says nothing before this is set. `burst`: tokens at a time."""
        self.config, _ = tiny_k3()
        self.max_sequence_tokens, self.adapter_version = 4096, -1
        self.max_running = max_running
        self.store = AdapterStore(self.config, max_rank=4, dtype=torch.float32)
        self.tokens = [*tokenizer().encode(script, add_special_tokens=False), self.config.eos_token_id]
        self.pause, self.burst, self.running = pause, burst, {}
        self.asked: list[tuple[Sequence[int], SamplingParams]] = []

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, request_id: str, adapter_version: int,
        on_tokens: OnTokens,
    ) -> Completion:  # fmt: skip
        self.asked.append((token_ids, params))
        self.running[request_id] = ended = asyncio.Event()
        said: list[int] = []
        try:
            while self.pause is not None and not self.pause.is_set() and not ended.is_set():
                await asyncio.sleep(0.001)
            for tokens in batched(self.tokens[: params.max_new_tokens], self.burst):
                if ended.is_set():
                    break
                said += tokens
                on_tokens(tokens, (-0.5,) * len(tokens))
                await asyncio.sleep(0)
        finally:
            del self.running[request_id]
        whole = said == self.tokens
        reason = FinishReason.ABORT if ended.is_set() else FinishReason.STOP if whole else FinishReason.LENGTH
        return Completion(
            token_ids=tuple(said), logprobs=(-0.5,) * len(said), text="", finish_reason=reason,
            adapter_version=adapter_version,
        )  # fmt: skip

    def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self.running[request_id].set()

    def stats(self) -> dict[str, float]:
        return {"running": len(self.running), "waiting": 0, "free_pages": 0}

    def close(self) -> None:
        for ended in self.running.values():
            ended.set()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Running:
    """A server that listens at `url`; `process` and `server` belong to its thread."""

    url: str
    server: Server
    process: Process
    loop: asyncio.AbstractEventLoop
    ended: threading.Event

    def do(self, function: Any, *args: Any) -> Any:
        """Call something on the server's loop and wait for what it gives."""

        async def run() -> Any:
            result = function(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def engine_stats(self) -> dict[str, float]:
        return dict(self.do(self.server.backend.stats))


@contextmanager
def running_server(
    engine: Any, *, drain_s: float = 30.0, send_buffer_bytes: int | None = None, **options: Any
) -> Iterator[Running]:
    """A server around `engine`; `options` are its `ServerOptions`. Ended, with the engine, afterwards."""
    bound = bind("127.0.0.1", 0)
    if send_buffer_bytes is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    begun: list[Running] = []
    started, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        server = make_server(engine, tokenizer(), replace(ServerOptions(model_id=MODEL), **options))
        server.backend.start()
        process = Process(server, drain_s=drain_s, started=started.set)
        loop = asyncio.get_running_loop()
        begun.append(Running(url=address_of(bound), server=server, process=process, loop=loop, ended=ended))
        try:
            await process.serve(sockets=[bound])
        finally:
            server.chat.close()
            await server.backend.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            started.set()
            ended.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    assert started.wait(PATIENCE_S)
    assert begun, "the server did not start"
    [running] = begun
    try:
        yield running
    finally:
        if not ended.is_set():
            running.loop.call_soon_threadsafe(running.process.drain, "end of test")
        assert ended.wait(PATIENCE_S)
        thread.join(PATIENCE_S)
