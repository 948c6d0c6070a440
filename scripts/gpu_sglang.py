#!/usr/bin/env python3
"""The ladder of SGLang on one GPU (docs/sglang.md): each step in a process of its own, with a time limit, as JSON.

    python scripts/gpu_sglang.py --out FOLDER [--steps golden,wide-base,...] [--budget-s 570] [--work FOLDER]
    python scripts/gpu_sglang.py --dry        everything up to the start of SGLang, on any machine

Figures are printed as they come. A step that fails or runs out of time is reported and the next begins; with --budget-s
a step that can't end in time any more is left out, and the command to go on is printed. FOLDER/gpu_sglang.json, written
after each step, has what was measured, each check with its limit; FOLDER/STEP.log what the step said. Exits with 1 when
a check or a step failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from miles_k3.sglang_ladder.control import TIMINGS, child_command, passed, run_ladder  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_sglang"), help="where results and logs go")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/miles-k3-gpu-sglang"), help="checkpoints, kept between runs"
    )
    parser.add_argument("--steps", default=",".join(TIMINGS), help=f"some of {', '.join(TIMINGS)}")
    parser.add_argument("--budget-s", type=float, help="seconds for all steps together; it ends before they are over")
    parser.add_argument("--dry", "--dry-run", action="store_true", help="make checkpoints and arguments, start nothing")
    parser.add_argument("--step", help=argparse.SUPPRESS)  # what a child process does
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = options.steps.split(",")
    if unknown := set(steps) - set(TIMINGS):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(TIMINGS)}")
    if options.step:
        return run_step(options.step, options.work, options.report)
    if options.dry:
        return dry(steps, options.work)
    command = child_command(Path(__file__).resolve(), options.work)
    reports = run_ladder(steps, command, out=options.out, work=options.work, budget_s=options.budget_s)
    skipped = [step for step, report in reports.items() if "skipped" in report]
    failed = [step for step, report in reports.items() if not passed(report)]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(steps) - len(skipped)} of {len(steps)} steps passed")
    if skipped:
        print(f"no time was left for some; go on with --steps {','.join(skipped)}")
    return bool(failed)


def run_step(step: str, work: Path, path: Path) -> int:
    """In the child: the step's report to `path`, also when it fails halfway."""
    from miles_k3.sglang_ladder.report import Report
    from miles_k3.sglang_ladder.steps import steps

    report = Report(path)
    with report.part(step):
        steps()[step](work, report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        bool(report.content["errors"])
    )  # threads and processes of SGLang's may still be there; the parent ends them


def dry(steps: list[str], work: Path) -> int:
    from miles_k3.sglang_ladder.steps import dry_run

    for line in dry_run(steps, work):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
