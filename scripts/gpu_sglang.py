#!/usr/bin/env python3
"""The ladder of SGLang on one GPU (docs/sglang.md): each step in a process of its own, with a time limit, as JSON.

    python scripts/gpu_sglang.py --out FOLDER [--steps golden,wide-base,...] [--work FOLDER]
    python scripts/gpu_sglang.py --dry        everything up to the start of SGLang, on any machine

A step that fails or runs out of time is reported and the next begins. FOLDER/gpu_sglang.json has what was measured,
each check with its limit, FOLDER/STEP.log what the step said. Exits with 1 when a check or a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Seconds, start of SGLang included; measured before without the plugin's graphs: a start 45 to 68 s, cold kernels more.
LIMITS = {"golden": 360, "golden-eager": 240, "wide-base": 300, "wide-lora": 420, "wide-lora-blocks": 420, "rl": 480}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_sglang"), help="where results and logs go")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/miles-k3-gpu-sglang"), help="checkpoints, kept between runs"
    )
    parser.add_argument("--steps", default=",".join(LIMITS), help=f"some of {', '.join(LIMITS)}")
    parser.add_argument("--dry", action="store_true", help="make checkpoints and arguments, start nothing")
    parser.add_argument("--step", help=argparse.SUPPRESS)  # what a child process does
    options = parser.parse_args()
    steps = options.steps.split(",")
    if unknown := set(steps) - set(LIMITS):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(LIMITS)}")
    sys.path.insert(0, str(ROOT))
    if options.step:
        return run_step(options.step, options.work, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.dry:
        return dry(steps, options.work)
    reports = {step: in_child(step, options.work, options.out) for step in steps}
    (options.out / "gpu_sglang.json").write_text(json.dumps(reports, indent=1) + "\n")
    failed = [step for step, report in reports.items() if not passed(report)]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


def passed(report: dict[str, Any]) -> bool:
    return "error" not in report and all(check["ok"] for check in report.get("checks", []))


def in_child(step: str, work: Path, out: Path) -> dict[str, Any]:
    """Run one step in a process group of its own, and end that when its time is over."""
    result, log = out / f"{step}.json", out / f"{step}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--step", step, "--work", str(work), "--out", str(out)]
    start = time.monotonic()
    print(f"{step}: at most {LIMITS[step]} s", flush=True)
    with log.open("wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | str = child.wait(timeout=LIMITS[step])
        except subprocess.TimeoutExpired:
            code = f"ended after {LIMITS[step]} s"
        finally:
            _end_group(child.pid)
            child.wait()
    report = json.loads(result.read_text()) if result.exists() else {}
    if code != 0:
        report.setdefault("error", f"the step ended with {code}; see {log.name}")
    report["wall_s"] = round(time.monotonic() - start, 1)
    for check in report.get("checks", []):
        print(f"  {'ok  ' if check['ok'] else 'FAIL'} {check['name']}: {check['value']:.4g} (limit {check['limit']:g})")
    if "error" in report:
        print(f"  FAIL {report['error']}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n    ")
    return report


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def run_step(step: str, work: Path, out: Path) -> int:
    """In the child: the step's report to FOLDER/STEP.json, also when it fails halfway."""
    from miles_k3.sglang_ladder.steps import Report, steps

    report, code = Report(out / f"{step}.json"), 0
    try:
        steps()[step](work, report)
    except BaseException as error:  # noqa: BLE001 - reported, and the exit code says it
        report.note(error=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        code = 1
    report.write()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads and processes of SGLang's may still be there; the parent ends the group


def dry(steps: list[str], work: Path) -> int:
    from miles_k3.sglang_ladder.steps import dry_run

    for line in dry_run(steps, work):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
