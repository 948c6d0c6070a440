"""Engine processes that a test ends when it likes, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from miles_k3.adapters.update import make_update
from miles_k3.errors import AdapterError
from miles_k3.protocols import OnTokens
from miles_k3.ray.remote_engine import EngineGoneError, RemoteEngine
from miles_k3.types import AdapterConfig, AdapterUpdate, Completion, FinishReason, LentAdapter


def new_update(version: int) -> AdapterUpdate:
    """A tiny adapter; the processes here take any."""
    return make_update(version, AdapterConfig(rank=2, alpha=4.0), {"a": torch.full((3,), float(version))})


class Process:
    """An engine in a process, as its owner sees it. `ends_in(verb)`: called before each verb; True ends the process."""

    def __init__(self, ends_in: Callable[[str], bool] = lambda verb: False) -> None:
        self.ends_in, self.verbs = ends_in, []
        self.alive, self.version, self.asleep = True, -1, False
        self.given: dict[str, tuple[Any, ...]] = {}
        self.under_way: dict[str, asyncio.Future] = {}
        self.hearers: dict[str, OnTokens] = {}
        self.hangs = self.deaf = False  # answers nothing; hears of no abort

    def _judge(self, verb: str) -> None:
        self.verbs.append(verb)
        if self.alive and self.ends_in(verb):
            self.end()
        if not self.alive:
            raise EngineGoneError("killed by a test")

    def call(self, verb: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        self._judge(verb)
        self.given[verb] = arguments
        if self.hangs and timeout_s is not None:
            raise TimeoutError
        self.asleep = {"sleep": True, "wake": False}.get(verb, self.asleep)
        return {"stats": {"running": 0.0}, "score": [torch.zeros(2)], "heard": ["heard"]}.get(verb)

    async def acall(self, verb: str, *arguments: Any) -> Any:
        self._judge(verb)
        if self.hangs:
            await asyncio.Event().wait()
        if verb == "stats":
            return {}
        _, _, request_id, version = arguments
        assert version in (self.version, -1), "an engine refuses a version that it does not have"
        self.under_way[request_id] = asyncio.get_running_loop().create_future()
        return await self.under_way[request_id]

    async def stream(self, on_tokens: OnTokens, *arguments: Any) -> Completion:
        self._judge("stream")
        *_, request_id, _ = arguments
        self.hearers[request_id] = on_tokens
        self.under_way[request_id] = asyncio.get_running_loop().create_future()
        return await self.under_way[request_id]

    def tell(self, verb: str, *arguments: Any) -> None:
        (request_id,) = arguments
        self.verbs.append(verb)
        if request_id in self.under_way and self.alive and not self.deaf:
            self.answer(request_id, FinishReason.ABORT)

    def answer(self, request_id: str, reason: FinishReason = FinishReason.STOP) -> None:
        future = self.under_way.pop(request_id)
        if not future.done():  # its caller was cancelled
            future.set_result(Completion(
                token_ids=(1,), logprobs=(-0.5,), text="x", finish_reason=reason, adapter_version=self.version
            ))  # fmt: skip

    def load(self, update: AdapterUpdate | LentAdapter) -> int:
        self._judge("load")
        if update.sha256 == "bad":
            raise AdapterError("damaged")
        self.version = update.version
        return self.version

    def end(self) -> None:
        self.alive = False
        for future in self.under_way.values():
            if not future.done():
                future.get_loop().call_soon_threadsafe(future.set_exception, EngineGoneError("killed by a test"))
        self.under_way = {}


def engine_over(*processes: Process, restarts: int = 3, timeout_s: float = 60.0) -> RemoteEngine:
    """An engine whose first process is the first of them, and so on."""
    left = iter(processes)
    return RemoteEngine(lambda: next(left), name="engine 0", restarts=restarts, timeout_s=timeout_s).ready()


async def until(condition: Callable[[], bool]) -> None:
    """Give the other tasks turns until it is so."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)
