"""What a step measured and which of its checks held, written as it goes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class Report:
    """A step's numbers. Written after each entry, so that a step that is ended leaves what it had."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content: dict[str, Any] = {"checks": []}

    def note(self, **entries: Any) -> None:
        """Numbers by name."""
        self.content |= entries
        self.write()

    def check(self, name: str, value: float, *, limit: float, at_least: bool = False) -> None:
        """A number against its limit: at most it, or at least it. A number that isn't finite never holds."""
        ok = math.isfinite(value) and (value >= limit if at_least else value <= limit)
        self.content["checks"].append({"name": name, "value": value, "limit": limit, "ok": ok})
        self.write()

    def write(self) -> None:
        self._path.write_text(json.dumps(self.content, indent=1) + "\n")
