"""What a run measures. `metrics.jsonl` is the truth, one JSON line a step; the terminal and wandb only repeat it.

A line holds `step` and names like `train/loss`, `rollout/reward`, `time/rollout_s`. Numbers that JSON doesn't have are
written as the texts "nan", "inf" and "-inf", and `log/nonfinite` counts them; `read_metrics` turns them back.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from miles_k3.errors import CheckpointError
from miles_k3.wandb_sink import WandbSink

# Names that the progress line and the pictures look for.
REWARD = "rollout/reward"
TOKENS_PER_S = "time/tokens_per_s"
MISMATCH = "train/mismatch_abs"
EVAL_ACCURACY = "eval/accuracy"
STEP_S = "time/step_s"
PHASES = ("rollout", "reward", "train", "sync", "checkpoint", "eval")
NONFINITE = "log/nonfinite"


class MetricsLog:
    """Writes each step's numbers to metrics.jsonl, to the terminal and to the sinks. Use as a context manager.

    Whatever happens to a sink, the run goes on without it: it is dropped with one line on the terminal.
    """

    def __init__(
        self, path: Path, *, total_steps: int, sink: WandbSink | None = None, console: Console | None = None
    ) -> None:
        if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
            raise CheckpointError(f"{path} ends in half a line, left by a killed process; resume the run to mend it")
        self._file = path.open("a", encoding="utf-8")
        self._sink = sink
        self._terminal = _Terminal(console or Console(stderr=True), total_steps)
        self._total_steps = total_steps

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Record one line. Values are numbers or things with `item()`; anything else raises TypeError."""
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._file.write(json.dumps(_line(step, numbers), allow_nan=False) + "\n")
        self._file.flush()
        self._terminal.step(step, format_step(step, self._total_steps, numbers))
        if self._sink and (complaint := self._sink.poll()):
            self._sink = None
            self.note(complaint)

    def note(self, text: str) -> None:
        """A line for the reader that isn't a step, printed above the progress bar."""
        self._terminal.print(text)

    def close(self) -> None:
        """Close the file and give the sinks a few seconds to finish."""
        self._terminal.stop()
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()
        if self._sink and (complaint := self._sink.close()):
            self.note(complaint)
        self._sink = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SilentLog(MetricsLog):
    """For the ranks that write nothing."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class DeviceMemory(Protocol):
    """A device whose memory is looked at phase by phase."""

    def take_peak(self) -> int:
        """The most bytes held since the last call."""
        ...

    def held(self) -> int:
        """Bytes held now."""
        ...


class StepTimer:
    """Seconds per phase, and the most that `memory` held in each. Phases may nest: each second counts for the
    innermost, so that phases and `other` add up.

    A lap lasts from the last `lap()` to the next; whatever follows the writing of a step's line, such as its
    checkpoint, counts for the lap after, and no second is lost or counted twice.
    """

    def __init__(self, clock: Any = time.perf_counter, memory: DeviceMemory | None = None) -> None:
        self._clock, self._memory = clock, memory
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}
        self._active = ["other"]
        self._lap_start = self._since = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block for `name`."""
        self._charge()
        self._active.append(name)
        try:
            yield
        finally:
            self._charge()
            self._active.pop()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` of this lap for another phase than the block they were spent in; at most what it has."""
        moved = min(seconds, self._seconds.get(source, 0.0))
        self._seconds[source] = self._seconds.get(source, 0.0) - moved
        self._seconds[target] = self._seconds.get(target, 0.0) + moved

    def lap(self) -> dict[str, float]:
        """`time/<phase>_s` of this lap, `time/other_s` and their sum `time/step_s`; starts the next lap."""
        self._charge()
        seconds = {name: self._seconds.get(name, 0.0) for name in dict.fromkeys((*PHASES, *self._seconds, "other"))}
        step_s = self._since - self._lap_start
        self._seconds, self._lap_start = {}, self._since
        return {**{f"time/{name}_s": value for name, value in seconds.items()}, STEP_S: step_s}

    def lap_memory(self) -> dict[str, int]:
        """`memory/<phase>_peak_bytes` since the last call, and `memory/held_bytes` now; empty without a device."""
        if self._memory is None:
            return {}
        self._charge()
        peaks, self._peaks = self._peaks, {}
        return {
            **{f"memory/{name}_peak_bytes": peak for name, peak in peaks.items()},
            "memory/held_bytes": self._memory.held(),
        }

    def _charge(self) -> None:
        now = self._clock()
        name = self._active[-1]
        if self._memory is not None:
            self._peaks[name] = max(self._peaks.get(name, 0), self._memory.take_peak())
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, a torn last one left out. Raises CheckpointError on a line that isn't ours."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; expected the folder of a run that has made a step") from None
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = {name: float(value) if isinstance(value, str) else value for name, value in json.loads(line).items()}
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path}:{number}: not a line of metrics: {line[:60]!r}") from None
    return rows


def format_step(step: int, total_steps: int, values: Mapping[str, float]) -> str:
    """One line for the terminal, with what is there: `step 12/40  reward 0.610  1.9 s (rollout 0.6 ...`."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for name, label, spec in (
        (REWARD, "reward", ".3f"),
        (EVAL_ACCURACY, "eval accuracy", ".3f"),
        ("train/loss", "loss", ".4f"),
        ("train/grad_norm", "grad", ".3g"),
        (MISMATCH, "|dlogp|", ".1e"),
    ):
        if name in values:
            parts.append(f"{label} {values[name]:{spec}}".replace(" -0.0000", " 0.0000"))
    for name, label in (("rollout/dropped/error", "engine errors"), ("rollout/failures", "failed gradings"),
                        ("eval/failures", "failed in the evaluation")):  # fmt: skip
        if values.get(name, 0.0) > 0:
            parts.append(f"{label} {values[name]:.0f}")
    if STEP_S in values:
        phases = [(name, values.get(f"time/{name}_s", 0.0)) for name in (*PHASES, "other")]
        shown = " ".join(f"{name} {seconds:.1f}" for name, seconds in phases if seconds >= 0.05)
        parts.append(f"{values[STEP_S]:.1f} s" + (f" ({shown})" if shown else ""))
    if TOKENS_PER_S in values:
        rate = values[TOKENS_PER_S]
        parts.append(f"{rate / 1000:.1f}k tok/s" if rate >= 1000 else f"{rate:.0f} tok/s")
    if strange := [name for name, value in values.items() if not math.isfinite(value)]:
        parts.append(f"not finite: {', '.join(strange)}")
    return "  ".join(parts)


def peak_memory_bytes() -> int:
    """Peak resident memory of this process plus the highest sum of its living descendants' peaks at any call so far.

    An upper bound of what was held at once, but for children that came and went between two calls. The system's own
    `ru_maxrss` won't do: a child inherits its parent's size at the fork and keeps it. Off Linux it is all there is, and
    children aren't counted.
    """
    global _descendants_peak
    own = _peak_of(os.getpid())
    if not own:
        unit = 1 if sys.platform == "darwin" else 1024
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    _descendants_peak = max(_descendants_peak, sum(_peak_of(pid) for pid in _descendants(os.getpid())))
    return own + _descendants_peak


_descendants_peak = 0


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue  # the thread ended while we looked
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _peak_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0  # it ended while we looked, or there is no /proc
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def _number(name: str, value: Any) -> int | float:
    if hasattr(value, "item"):  # a NumPy scalar or a tensor with one element
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, int | float):
        raise TypeError(f"metric {name} is {value!r}; a metric is one number")
    return value


def _line(step: int, numbers: Mapping[str, int | float]) -> dict[str, Any]:
    texts = {name: str(float(value)) for name, value in numbers.items() if not math.isfinite(value)}
    counted = {NONFINITE: len(texts)} if texts else {}
    return {"step": step, **numbers, **texts, **counted}


class _Terminal:
    """A progress bar below the step lines on a terminal, the lines alone elsewhere."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
            self._task = self._progress.add_task("steps", total=total_steps)
            self._progress.start()

    def step(self, step: int, line: str) -> None:
        self.print(line)
        if self._progress:
            self._progress.update(self._task, completed=step)

    def print(self, line: str) -> None:
        # Markup and wrapping would change a line that others may want to search for.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self._progress:
            self._progress.stop()
