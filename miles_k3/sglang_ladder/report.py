"""What a step measured and which of its checks held, written and told as it goes."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Report:
    """A step's numbers: PATH as JSON, whole after each entry, and beside it a .txt with a line for each, for whoever
    waits. A step that is ended leaves what it had."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, path.with_suffix(".txt")
        self._lines.write_text("")
        self.content: dict[str, Any] = {"checks": [], "part_s": {}, "errors": {}}

    def note(self, **entries: Any) -> None:
        """Numbers by name."""
        self.content |= entries
        self._write([f"{name}: {json.dumps(_as_json(value, digits=4))}" for name, value in entries.items()])

    def check(self, name: str, value: float, *, limit: float, at_least: bool = False) -> None:
        """A number against its limit: at most it, or at least it. A number that isn't finite never holds."""
        ok = math.isfinite(value) and (value >= limit if at_least else value <= limit)
        self.content["checks"].append({"name": name, "value": value, "limit": limit, "ok": ok})
        side = ">=" if at_least else "<="
        self._write([f"{'ok  ' if ok else 'FAIL'} {name}: {value:.4g} ({side} {limit:g})"])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the step, and keep its failure from the parts that follow."""
        start = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - reported, and the step counts as failed
            traceback.print_exc()
            self.content["errors"][name] = f"{type(error).__name__}: {error}"
            self._write([f"FAIL {name}: {self.content['errors'][name].splitlines()[0][:300]}"])
        finally:
            self.content["part_s"][name] = round(time.monotonic() - start, 1)
            self._write([f"{name} took {self.content['part_s'][name]} s"])

    def _write(self, lines: list[str]) -> None:
        with self._lines.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(_as_json(self.content), indent=1, allow_nan=False) + "\n")
        os.replace(whole, self._path)


def _as_json(value: Any, *, digits: int | None = None) -> Any:
    """JSON has no number that isn't finite: null stands for it. Others with so many `digits` that they can be read."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {str(key): _as_json(part, digits=digits) for key, part in value.items()}
    return [_as_json(part, digits=digits) for part in value] if isinstance(value, (list, tuple)) else value
