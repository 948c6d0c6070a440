"""Small runs of the shipped recipe: a few prompts, a few steps, the whole loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from miles_k3.recipe import load_recipe
from miles_k3.run_folder import RunFolder

SMALL = (
    "rollout.prompts_per_step=8", "rollout.group_size=4", "eval.prompts=0", "run.threads=1", "trainer.lr=2.0e-3",
    "rollout.max_running=32",
)  # fmt: skip
# Seconds and bytes of a machine, not results of the run.
MEASURED = ("time/", "memory/", "sync/load_s")


def small_recipe(folder: Path, *overrides: str) -> Any:
    return load_recipe("tiny-cpu", [*SMALL, f"run.folder={folder}", *overrides]).recipe


def train_here(folder: Path, *overrides: str, resume: bool = False) -> Any:
    """Run the loop in this process; its RunResult."""
    from miles_k3.loop import run_training

    recipe = small_recipe(folder, *overrides)
    with RunFolder.create(recipe, resume=resume) as run:
        return run_training(recipe, run, resume=resume)


def train_command(folder: Path, *overrides: str, resume: bool = False) -> list[str]:
    sets = [x for o in (*SMALL, f"run.folder={folder}", *overrides) for x in ("--set", o)]
    return [sys.executable, "-m", "miles_k3", "train", "tiny-cpu", *sets, *(["--resume"] if resume else [])]


def torchrun_command(ranks: int, folder: Path, *overrides: str, resume: bool = False) -> list[str]:
    """`train_command` on that many ranks of this machine, whatever else runs on it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *train_command(folder, *overrides, resume=resume)[1:]]


def start(command: list[str], **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env}
    )


def read_results(folder: Path, name: str = "tiny-cpu") -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the machine."""
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)} for line in lines]
