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
        self._write([f"{name}: {json.dumps(_rounded(value))}" for name, value in entries.items()])

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
        whole.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(whole, self._path)


def _rounded(value: Any) -> Any:
    """Four digits are enough to read."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {str(key): _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value
