"""Which adapter a model name means. Names are looked up on the server's loop only."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace

from miles_k3.rollout.server.errors import ApiError

BASE = -1  # the version of the bare base
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A loaded adapter. `pinned`: no later load takes its place. `sha256` is that of the update, version and all;
    `weights_sha256` is the same for the same weights, and what a PEFT folder of the product carries."""

    version: int
    name: str | None
    rank: int
    alpha: float
    sha256: str
    weights_sha256: str
    source: str
    pinned: bool = False
    loaded_at: int = field(default_factory=lambda: int(time.time()))


class Names:
    """`ID` is the newest adapter, else the base; `ID@VERSION`, `ID@base` and adapter names pin one."""

    def __init__(self, model_id: str) -> None:
        self.model_id, self.created = model_id, int(time.time())
        self._served: dict[int, Served] = {}

    @property
    def newest(self) -> int:
        return max(self._served, default=BASE)

    def served(self) -> list[Served]:
        """The loaded adapters, oldest first."""
        return [self._served[version] for version in sorted(self._served)]

    def add(self, adapter: Served) -> None:
        """A name moves from the adapter that had it to this one."""
        for version, other in self._served.items():
            if adapter.name is not None and other.name == adapter.name:
                self._served[version] = replace(other, name=None)
        self._served[adapter.version] = adapter

    def keep(self, live: set[int]) -> list[int]:
        """Forget what the engine has replaced; which versions those were."""
        gone = [version for version in self._served if version not in live]
        for version in gone:
            del self._served[version]
        return gone

    def remove(self, version: int) -> Served:
        self.get(version)
        return self._served.pop(version)

    def get(self, version: int) -> Served:
        """Raises ApiError 404."""
        if version not in self._served:
            raise ApiError(404, f"adapter version {version} is not loaded; {self._known()}", code="adapter_not_found")
        return self._served[version]

    def pin(self, version: int, pinned: bool) -> Served:
        self._served[version] = replace(self.get(version), pinned=pinned)
        return self._served[version]

    def models(self) -> dict[str, int]:
        """Every name that can be asked for, and the version behind it."""
        names = {self.model_id: self.newest, f"{self.model_id}@base": BASE}
        for adapter in self.served():
            names[f"{self.model_id}@{adapter.version}"] = adapter.version
        names |= {adapter.name: adapter.version for adapter in self.served() if adapter.name is not None}
        return names

    def version_of(self, model: str) -> int:
        """Raises ApiError 404 with the names there are."""
        names = self.models()
        if model in names:
            return names[model]
        if model == f"{self.model_id}@{BASE}":
            return BASE
        raise ApiError(404, f"model {model!r} does not exist; {self._known()}", code="model_not_found", param="model")

    def judge_name(self, name: str) -> None:
        """Raises ApiError 400 for a name that no adapter may have."""
        if not NAME.fullmatch(name) or name == self.model_id:
            raise ApiError(
                400,
                f"adapter name {name!r}: expected up to 64 letters, digits and . _ -, beginning with a letter or "
                f"digit, and not the model's own name {self.model_id!r}",
                param="name",
            )

    def _known(self) -> str:
        return f"there are {', '.join(self.models())}"
