"""Adapters as SGLang knows them: a name for each version, PEFT's config, and which names one engine holds.

Every load makes a new identity inside SGLang, which is part of its cache keys: an adapter never finds what another one
computed, so nothing is flushed. A request in flight keeps its version until it ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from miles_k3.adapters.store import BASE_VERSION
from miles_k3.errors import AdapterError
from miles_k3.rollout.sglang.names import TARGETS, VERSIONS
from miles_k3.types import AdapterConfig


def adapter_name(version: int) -> str | None:
    """What SGLang calls a version; None for the bare base."""
    return None if version == BASE_VERSION else f"policy@{version}"


def peft_config(config: AdapterConfig) -> dict[str, Any]:
    """What describes an adapter to SGLang."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": config.rank, "lora_alpha": config.alpha,
        "target_modules": list(TARGETS), "lora_dropout": 0.0, "bias": "none",
    }  # fmt: skip


class LiveVersions:
    """Which versions an engine holds and how many requests use each. Thread-safe; moves no tensors."""

    def __init__(self) -> None:
        self._live = {BASE_VERSION}
        self._users: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.current = BASE_VERSION

    def acquire(self, version: int | None) -> int:
        """Take a version for a request (None: the current one). Raises AdapterError when it is not live."""
        with self._lock:
            version = self.current if version is None else version
            if version not in self._live:
                raise AdapterError(f"adapter v{version} is not live; live are {self._listed()}")
            self._users[version] += 1
            return version

    def release(self, version: int) -> None:
        """Undo one `acquire`."""
        with self._lock:
            self._users[version] -= 1
            assert self._users[version] >= 0

    def to_retire(self, arriving: int) -> int | None:
        """The version that has to go before `arriving` is loaded, if any.

        Raises AdapterError while requests still use it: a load never waits.
        """
        with self._lock:
            adapters = sorted(self._live - {BASE_VERSION, self.current})
            if len(adapters) < VERSIONS - (self.current != BASE_VERSION):
                return None
            oldest = adapters[0]
            if self._users[oldest]:
                raise AdapterError(
                    f"adapter v{arriving} has to wait: v{oldest} is in use by {self._users[oldest]} requests and "
                    f"{VERSIONS} adapters fit; v{self.current} stays; load again when those requests have ended"
                )
            return oldest

    def retire(self, version: int) -> None:
        """It can't be acquired any more."""
        with self._lock:
            self._live.discard(version)

    def adopt(self, version: int) -> None:
        """A loaded version becomes the current one."""
        with self._lock:
            self._live.add(version)
            self.current = version

    def forget(self) -> Mapping[int, int]:
        """Nothing but the base is live any more, as after a restart; the users of each version until now."""
        with self._lock:
            users, self._users, self._live = dict(self._users), Counter(), {BASE_VERSION}
            return users

    def _listed(self) -> str:
        return ", ".join("the base (-1)" if v == BASE_VERSION else f"v{v}" for v in sorted(self._live))
