"""Kill -9 at the worst moments, then resume: the rest of the run is bit-equal to one that was never interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.runs import read_results, start, train_command, train_here

STEPS = ("run.steps=4", "run.save_every=2", "eval.prompts=16", "eval.every=2")
ENV = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

# Trains like the command, but dies as by kill -9 with the checkpoint of step 4 half written.
DIE_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from miles_k3.trainer.megatron import MegatronTrainer
save = MegatronTrainer.save
def save_half(self, folder):
    writing = save(self, folder)
    if self.version == 4:
        writing.wait()
        newest = max(Path(folder).rglob("*"), key=lambda p: p.stat().st_size)
        newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return writing
MegatronTrainer.save = save_half
sys.argv[0] = "miles-k3"
from miles_k3.cli import main
main()
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("whole")
    train_here(folder, *STEPS)
    return read_results(folder)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    path = folder / "tiny-cpu" / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().count("\n") > step:
            return
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.01)
    raise AssertionError(f"step {step} never came")


@pytest.mark.slow  # the next one kills a run, too, at a worse moment
def test_killed_during_a_step(tmp_path: Path, uninterrupted: list[dict]) -> None:
    process = start(train_command(tmp_path, *STEPS), **ENV)
    wait_for_step(tmp_path, 3, process)
    process.kill()
    process.wait()
    assert len(read_results(tmp_path)) >= 4
    train_here(tmp_path, *STEPS, resume=True)
    assert read_results(tmp_path) == uninterrupted


def test_killed_while_a_checkpoint_is_written(tmp_path: Path, uninterrupted: list[dict]) -> None:
    command = [sys.executable, "-c", DIE_WHILE_SAVING, *train_command(tmp_path, *STEPS)[3:]]
    process = start(command, **ENV)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == -signal.SIGKILL, output
    whole = [p.name for p in (tmp_path / "tiny-cpu" / "checkpoints").iterdir() if p.name.startswith("step-")]
    assert whole == ["step-000002"]
    train_here(tmp_path, *STEPS, resume=True)
    assert read_results(tmp_path) == uninterrupted


@pytest.mark.slow  # tests/unit/test_stop.py has the signals, test_torchrun.py a run that goes on
def test_terminated_run_ends_with_a_checkpoint_and_goes_on(tmp_path: Path, uninterrupted: list[dict]) -> None:
    # Saves nothing by itself, so that what is there came from the signal.
    process = start(train_command(tmp_path, *STEPS, "run.save_every=0"), **ENV)
    wait_for_step(tmp_path, 1, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert f"go on with miles-k3 train {tmp_path / 'tiny-cpu'} --resume" in output
    last = read_results(tmp_path)[-1]["step"]
    assert last < 4, "the signal came too late to test anything"
    assert (tmp_path / "tiny-cpu" / "checkpoints" / f"step-{last:06d}" / "COMPLETE").exists()
    train_here(tmp_path, *STEPS, resume=True)
    assert read_results(tmp_path) == uninterrupted
