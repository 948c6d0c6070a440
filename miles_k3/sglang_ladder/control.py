"""Runs the ladder's steps one after the other within a budget of time. Imports neither torch nor SGLang.

Each step is a process group of its own: a step that fails, hangs or takes SGLang with it costs only itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOSING_S = 8.0  # of a budget, for the end of a step's processes and the last lines
LOOK_S = 0.2  # between two looks at a step's figures
_SGLANG = ("torch", "sglang", "sgl_kernel", "safetensors", "pydantic", "psutil")
_LESSONS = ("transformers", "jinja2")
_TRAINER = ("megatron.core", "omegaconf", "rich", *_LESSONS, "matplotlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a step, SGLang's start included: what it is expected to take, and when it is ended.

    `needs`: modules that must be importable; `instead`: the step that comes next where this one got to no check at all,
    because it leaves out what most likely failed.
    """

    expected_s: float
    limit_s: float
    needs: tuple[str, ...] = _SGLANG
    instead: str | None = None


# In the order of what a short lease should know first. Expected: what each took on an H200 with kept caches (nvcc's
# alone take 246 s of a core otherwise), and some to spare.
TIMINGS: Mapping[str, Timing] = {
    "kernels": Timing(expected_s=20, limit_s=480),
    "golden": Timing(expected_s=100, limit_s=270, instead="golden-eager"),
    "wide-lora": Timing(expected_s=150, limit_s=360, instead="wide-lora-blocks"),
    "wide-base": Timing(expected_s=90, limit_s=240),
    "rl": Timing(expected_s=120, limit_s=420, needs=(*_SGLANG, *_TRAINER)),
    "dspark": Timing(expected_s=260, limit_s=480, instead="dspark-eager"),
    "lossless": Timing(expected_s=210, limit_s=420, needs=(*_SGLANG, *_LESSONS)),
    "golden-eager": Timing(expected_s=90, limit_s=240),
    "wide-lora-blocks": Timing(expected_s=130, limit_s=300),
    "dspark-eager": Timing(expected_s=130, limit_s=300),
}


def run_ladder(
    steps: Sequence[str],
    command: Callable[[str, Path], list[str]],
    *,
    out: Path,
    work: Path,
    budget_s: float | None,
    timings: Mapping[str, Timing] = TIMINGS,
) -> dict[str, dict[str, Any]]:
    """Each step's report by name; OUT/gpu_sglang.json has them, and those of earlier calls, after each step.

    `command(step, path)` makes a step write its report to `path`. A step that can't end within the budget as far as is
    known, or lacks a module, is not begun: its report says so.
    """
    out.mkdir(parents=True, exist_ok=True)
    (work / "reports").mkdir(parents=True, exist_ok=True)
    deadline = None if budget_s is None else time.monotonic() + budget_s - CLOSING_S
    whole = out / "gpu_sglang.json"
    known: dict[str, dict[str, Any]] = _read(whole)
    reports: dict[str, dict[str, Any]] = {}
    waiting = list(steps)
    while waiting:
        step = waiting.pop(0)
        left = float("inf") if deadline is None else deadline - time.monotonic()
        if missing := [name for name in timings[step].needs if not _importable(name)]:
            reports[step] = {"error": f"needs {', '.join(missing)}, which can't be imported here"}
        elif left < timings[step].expected_s:
            reports[step] = {"skipped": f"{left:.0f} s are left, it takes about {timings[step].expected_s:g}"}
        else:
            limit = min(timings[step].limit_s, left)
            report = work / "reports" / f"{step}.json"

            def keep(so_far: dict[str, Any], step: str = step) -> None:
                _replace(whole, json.dumps({**known, step: so_far}, indent=1) + "\n")

            reports[step] = _run_step(step, command(step, report), report, out / f"{step}.log", limit, keep)
        for word in ("error", "skipped"):
            if word in reports[step]:
                print(f"{step}: {word}: {reports[step][word]}", flush=True)
        if not reports[step].get("checks") and (instead := timings[step].instead) in waiting:
            waiting.insert(0, waiting.pop(waiting.index(instead)))
        known[step] = reports[step]
        _replace(whole, json.dumps(known, indent=1) + "\n")
    return reports


def passed(report: Mapping[str, Any]) -> bool:
    """Whether a step came to its end without an error, with every check in its limit."""
    return not report.get("error") and not report.get("errors") and all(c["ok"] for c in report.get("checks", []))


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _run_step(
    step: str, command: Sequence[str], report: Path, log: Path, limit_s: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run a step, print its figures as they come and `keep` its report so far; end its processes afterwards, or when
    its time is over."""
    figures = report.with_suffix(".txt")
    for old in (report, figures):
        old.unlink(missing_ok=True)
    start, told = time.monotonic(), 0
    print(f"{step}: at most {limit_s:.0f} s", flush=True)
    with log.open("wb") as file:
        # Its own group, but our session: whoever ends that ends the step, too.
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, process_group=0)
        try:
            while (code := child.poll()) is None and time.monotonic() - start < limit_s:
                time.sleep(LOOK_S)
                if (now := _tell_new(step, figures, told, start)) > told:
                    told = now
                    keep({**_read(report), "error": "it is under way"})
        finally:
            _end_group(child.pid)
            child.wait()
    _tell_new(step, figures, told, start)
    found = _read(report)
    if code != 0:
        told_end = "was ended: its time was over" if code is None else f"ended with {code}"
        if not found.get("errors"):
            found.setdefault("error", f"the step {told_end}; see {log.name}")
        lines = log.read_text(errors="replace").splitlines()[-12:]
        print("\n".join(f"    {line[:300]}" for line in lines), flush=True)
        found["ended"] = told_end
    found["wall_s"] = round(time.monotonic() - start, 1)
    print(f"{step}: {'passed' if passed(found) else 'FAILED'} after {found['wall_s']} s", flush=True)
    return found


def _tell_new(step: str, figures: Path, told: int, start: float) -> int:
    """Print what a step has written since `told` characters of whole lines; how many there are now."""
    text = figures.read_text() if figures.exists() else ""
    end = text.rfind("\n") + 1
    for line in text[told:end].splitlines():
        print(f"  {time.monotonic() - start:5.0f} s  {step}  {line[:700]}", flush=True)
    return max(told, end)


def _read(report: Path) -> dict[str, Any]:
    return json.loads(report.read_text()) if report.exists() else {}


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _replace(path: Path, text: str) -> None:
    whole = path.with_suffix(".new")
    whole.write_text(text)
    os.replace(whole, path)


def child_command(script: Path, work: Path) -> Callable[[str, Path], list[str]]:
    """How a step's process is started: the script itself, told what to do."""
    return lambda step, report: [
        sys.executable, str(script), "--step", step, "--work", str(work), "--report", str(report),
    ]  # fmt: skip
