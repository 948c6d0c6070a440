"""The last step of every way: the engine makes an update its newest adapter, and it is checked that it did."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from miles_k3.adapters.update import update_bytes
from miles_k3.errors import SyncError
from miles_k3.types import AdapterUpdate


class AdapterReceiver(Protocol):
    """What a hand-over needs of an Engine."""

    @property
    def adapter_version(self) -> int: ...

    def load_adapter(self, update: AdapterUpdate) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One hand-over: what was sent and how long the engine took to make it live."""

    version: int
    num_tensors: int
    payload_bytes: int
    load_s: float


def publish(update: AdapterUpdate, engine: AdapterReceiver) -> SyncReport:
    """Make `update` the engine's newest adapter; keeps no reference to it afterwards.

    Whatever the engine raises passes through, with the old version still live. Raises SyncError when the engine's
    version afterwards is not the one it should be, in either case: nothing may be sampled then.
    """
    before = engine.adapter_version
    start = time.perf_counter()
    try:
        engine.load_adapter(update)
    except Exception as e:
        if engine.adapter_version != before:
            raise SyncError(
                f"loading adapter v{update.version} failed and left the engine at v{engine.adapter_version} "
                f"instead of v{before}: {e}"
            ) from e
        raise
    load_s = time.perf_counter() - start
    if engine.adapter_version != update.version:
        raise SyncError(
            f"adapter v{update.version} was sent, but the engine serves v{engine.adapter_version}: the update was lost"
        )
    return SyncReport(
        version=update.version, num_tensors=len(update.tensors), payload_bytes=update_bytes(update), load_s=load_s
    )
