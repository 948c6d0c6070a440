"""SGLang's engine as ranks have it: the one that speaks for it, and its neighbours, on whose GPUs it lies too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from miles_k3.errors import EngineError
from miles_k3.ray.remote_engine import EngineProcess, RemoteEngine
from miles_k3.rollout.sglang.lending import Lending
from miles_k3.types import AdapterUpdate, Completion, LentAdapter


class SpeakingEngine(RemoteEngine):
    """Implements `protocols.Engine` on the rank that speaks for an engine, which lies on its GPUs or on several ranks'.

    `load_adapter` is collective over all ranks of the run.
    """

    def __init__(
        self, start: Callable[[], EngineProcess], lending: Lending, *, name: str, restarts: int, timeout_s: float
    ) -> None:
        self._lending = lending
        super().__init__(start, name=name, restarts=restarts, timeout_s=timeout_s)

    def load_adapter(self, update: AdapterUpdate | LentAdapter) -> None:
        assert isinstance(update, AdapterUpdate), "what was lent is loaded by the engine's process"
        self._lending.hand_over(update, self.adapter_version, super().load_adapter)


class NeighbourEngine:
    """Implements `protocols.Engine` on a rank whose GPU belongs to another rank's engine: it lends that one its shard
    and follows the versions. It answers nothing, and a rank that has it is given nothing to ask."""

    def __init__(self, lending: Lending) -> None:
        self._lending = lending
        self.adapter_version = -1

    async def generate(self, *_: Any, **__: Any) -> Completion:
        self._refuse("generate")

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> NoReturn:
        self._refuse("score")

    def load_adapter(self, update: AdapterUpdate) -> None:
        """Lend this rank's shard; the rank that speaks for the engine loads it. Collective."""
        self._lending.hand_over(update, self.adapter_version, None)
        self.adapter_version = update.version

    def abort(self, request_id: str) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...

    def _refuse(self, verb: str) -> NoReturn:
        raise EngineError(f"{verb} was asked of a rank whose GPU belongs to another rank's engine; ask that one")
