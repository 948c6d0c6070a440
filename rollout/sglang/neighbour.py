"""What a rank has in the place of an engine whose GPU belongs to another rank's engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from miles_k3.errors import EngineError
from miles_k3.types import AdapterUpdate, Completion


class NeighbourEngine:
    """Implements `protocols.Engine`: follows the versions, and has nothing to put to sleep. It answers nothing, and a
    rank that has it is given nothing to ask."""

    def __init__(self) -> None:
        self.adapter_version = -1

    async def generate(self, *_: Any, **__: Any) -> Completion:
        self._refuse("generate")

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> NoReturn:
        self._refuse("score")

    def load_adapter(self, update: AdapterUpdate) -> None:
        """The rank that speaks for the engine loads it."""
        self.adapter_version = update.version

    def abort(self, request_id: str) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...

    def _refuse(self, verb: str) -> NoReturn:
        raise EngineError(f"{verb} was asked of a rank whose GPU belongs to another rank's engine; ask that one")
