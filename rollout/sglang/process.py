"""An SGLang engine as an `EngineProcess`, so that RemoteEngine starts another when its processes end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from miles_k3.protocols import OnTokens
from miles_k3.ray.remote_engine import EngineGoneError
from miles_k3.rollout.sglang.backend import SglangGoneError
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.types import AdapterUpdate, Completion, LentAdapter


class SglangProcess:
    """One SGLang from its start to its end. `start` makes the engine; it takes minutes, and is called once."""

    def __init__(self, start: Callable[[], SglangEngine]) -> None:
        self._start, self._engine, self._lock = start, None, threading.Lock()

    def call(self, verb: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """`timeout_s` is not kept to here: whoever waits looks after SGLang's processes all the while."""
        del timeout_s
        try:
            if verb == "start":
                self._started()
                return None
            engine = self._started()
            if verb == "score":
                sequences, temperature = arguments
                return engine.score(sequences, temperature=temperature)
            return getattr(engine, verb)(*arguments)
        except SglangGoneError as gone:
            raise EngineGoneError(str(gone)) from gone

    async def acall(self, verb: str, *arguments: Any) -> Any:
        if verb != "generate":
            return self.call(verb, *arguments)
        return await self._generate(None, *arguments)

    async def stream(self, on_tokens: OnTokens, *arguments: Any) -> Completion:
        return await self._generate(on_tokens, *arguments)

    async def _generate(self, on_tokens: OnTokens | None, *arguments: Any) -> Completion:
        tokens, params, request_id, version = arguments
        try:
            return await self._started().generate(
                tokens, params, request_id=request_id, adapter_version=version, on_tokens=on_tokens
            )
        except SglangGoneError as gone:
            raise EngineGoneError(str(gone)) from gone

    def tell(self, verb: str, *arguments: Any) -> None:
        if self._engine is not None:
            getattr(self._engine, verb)(*arguments)

    def load(self, update: AdapterUpdate | LentAdapter) -> int:
        self.call("load_adapter", update)
        return self._started().adapter_version

    def end(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _started(self) -> SglangEngine:
        with self._lock:
            if self._engine is None:
                self._engine = self._start()
            return self._engine
