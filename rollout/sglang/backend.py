"""What SglangEngine needs of a running SGLang, and nothing more; tests stand in for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from miles_k3.errors import EngineError
from miles_k3.types import LentAdapter

# (all tokens so far, their (log-probability, token, ...) rows): called as they come, on SGLang's thread.
OnProgress = Callable[[Sequence[int], Sequence[Sequence[Any]]], None]


class SglangGoneError(EngineError):
    """SGLang's processes have ended; whatever was asked of them has no answer."""


class Backend(Protocol):
    """Every verb raises SglangGoneError once SGLang's processes have ended."""

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        request_id: str,
        adapter: str | None,
        routed_experts: bool,
        on_progress: OnProgress | None,
    ) -> Mapping[str, Any]:
        """SGLang's answer with `output_ids` and `meta_info`. Awaited on the caller's event loop."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], adapter: str | None) -> list[Mapping[str, Any]]:
        """The `meta_info` of each sequence, with the log-probabilities of its tokens."""
        ...

    def load(self, name: str, lent: LentAdapter) -> None:
        """Raises AdapterError with SGLang's words when it refuses; nothing is loaded then."""
        ...

    def unload(self, name: str) -> None:
        """Raises EngineError with SGLang's words when it refuses."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; its answer has what there is. Unknown ids are ignored."""
        ...

    def pause(self, mode: str) -> None:
        """Stop computing: `in_place` with all requests as they are, `retract` with their memory given back."""
        ...

    def unpause(self) -> None:
        """Go on after `pause`."""
        ...

    def release(self, tags: Sequence[str]) -> None:
        """Give memory back: `kv_cache`, `weights`. Nothing may run."""
        ...

    def resume(self, tags: Sequence[str]) -> None:
        """Take it again."""
        ...

    def state(self) -> Mapping[str, Any]:
        """What the scheduler tells of itself."""
        ...

    def close(self) -> None:
        """End SGLang's processes."""
        ...
