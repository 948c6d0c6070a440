"""`torchrun -m miles_k3 train`: the same run on several ranks, their common end, and what is refused before a start."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import read_results, start, torchrun_command, train_here

pytestmark = pytest.mark.parallel

# A constant learning rate, so that a run may be ended and gone on with; small micro-batches, some for each rank.
RUN = (
    "run.steps=3", "run.save_every=0", "eval.prompts=10", "trainer.lr_decay=constant", "trainer.micro_batch_tokens=256",
)  # fmt: skip
ENV = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
LIMIT_S = 400
TRAINED = ("train/", "sync/canary")  # to within rounding; all else is equal

# Trains like the command, but rank 1 fails in its second step, as RANK_1_FAILS says.
FAILING = """
import os, sys
from miles_k3.errors import EngineError
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.trainer.megatron import MegatronTrainer

def failing(cls, verb, error):
    original = getattr(cls, verb)
    def fail(self, *arguments, **options):
        if os.environ["RANK"] == "1" and getattr(self, "adapter_version", getattr(self, "version", 0)) == 1:
            raise error
        return original(self, *arguments, **options)
    setattr(cls, verb, fail)

class Killed(Exception):
    def __init__(self):
        import signal, time
        time.sleep(5)  # a long rollout: the checkpoint of the step before is on disk by now
        os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK_1_FAILS"] == "in its engine":
    failing(EmbeddedEngine, "generate", EngineError("the engine is tired"))
elif os.environ["RANK_1_FAILS"] == "by a kill":
    failing(EmbeddedEngine, "generate", Killed)
else:
    failing(MegatronTrainer, "step", ValueError("a bug"))
sys.argv[0] = "miles-k3"
from miles_k3.cli import main
main()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of the run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train_here(folder, *RUN)
    return read_results(folder)


def assert_same_run(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        assert line.keys() == wanted.keys()
        rounded = {name for name in line if name.startswith(TRAINED)}
        assert {k: v for k, v in line.items() if k not in rounded} == {
            k: v for k, v in wanted.items() if k not in rounded
        }
        for name in rounded:
            assert line[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-4), f"step {line['step']}: {name}"


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    return output


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ("algorithm.routing_replay=true",)),  # in fp32 both sides choose the same experts anyway
        (2, ("trainer.parallel.tp=2", "trainer.sleep_while_rollout=true", "trainer.recompute=selective")),
        (2, ("trainer.parallel.pp=2", "trainer.async_checkpoint=false")),
        (4, ("trainer.parallel.cp=2", "trainer.parallel.ep=2")),
        (4, ("trainer.parallel.tp=2", "trainer.parallel.pp=2", "trainer.recompute=full")),
    ],
    ids=["dp2", "tp2", "pp2", "cp2-ep2-dp2", "tp2-pp2"],
)
def test_any_layout_makes_the_run_of_one_process(
    tmp_path: Path, alone: list[dict[str, Any]], ranks: int, overrides: tuple[str, ...]
) -> None:
    process = start(torchrun_command(ranks, tmp_path, *RUN, *overrides), **ENV)
    output = finish(process)
    assert process.returncode == 0, output
    assert_same_run(read_results(tmp_path), alone)
    assert output.count("step 3/3") == output.count("adapter: ") == 1, "rank 0 alone speaks"
    run = tmp_path / "tiny-cpu"
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000003"]
    assert (run / "adapter" / "adapter_config.json").is_file()


def test_a_terminated_run_goes_on_at_another_layout(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    process = start(torchrun_command(2, tmp_path, *RUN, "trainer.parallel.tp=2"), **ENV)
    wait_for_step(tmp_path, 1, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode != 0, output
    assert "stopped by SIGTERM after step" in output
    assert f"torchrun --nproc-per-node 2 -m miles_k3 train {tmp_path / 'tiny-cpu'} --resume" in output
    last = read_results(tmp_path)[-1]["step"]
    assert last < 3, "the signal came too late to test anything"
    assert [p.name for p in (tmp_path / "tiny-cpu" / "checkpoints").iterdir()] == [f"step-{last:06d}"]
    other = start(torchrun_command(4, tmp_path, *RUN, "trainer.parallel.pp=2", resume=True), **ENV)
    output = finish(other)
    assert other.returncode == 0, output
    assert_same_run(read_results(tmp_path), alone)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    path = folder / "tiny-cpu" / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().count("\n") > step:
            return
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.01)
    raise AssertionError(f"step {step} never came")


def start_failing(tmp_path: Path, how: str, *overrides: str) -> subprocess.Popen[str]:
    (tmp_path / "failing.py").write_text(FAILING)
    command = torchrun_command(2, tmp_path / "runs", *RUN, "eval.prompts=0", *overrides)
    module = command.index("-m", command.index("--standalone"))
    return start([*command[:module], str(tmp_path / "failing.py"), *command[module + 2 :]],
                 RANK_1_FAILS=how, PYTHONPATH=str(Path.cwd()), **ENV)  # fmt: skip


def test_a_kill_in_a_rollout_leaves_the_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    process = start_failing(tmp_path, "by a kill", "run.save_every=1")
    output = finish(process)
    assert process.returncode != 0
    checkpoints = tmp_path / "runs" / "tiny-cpu" / "checkpoints"
    assert [p.name for p in checkpoints.iterdir()] == ["step-000001"], output


@pytest.mark.parametrize(
    ("fails", "told", "code"),
    [("in its engine", "error: the engine is tired (rank 1)", 2), ("in its trainer", "ValueError: a bug", 1)],
)
def test_a_rank_that_fails_ends_the_run_and_says_why_once(tmp_path: Path, fails: str, told: str, code: int) -> None:
    process = start_failing(tmp_path, fails)
    output = finish(process)
    assert process.returncode != 0
    assert output.count(told) == 1, output
    assert f"exitcode  : {code}" in output
    assert [line["step"] for line in read_results(tmp_path / "runs")] == [0, 1]


def test_a_refused_layout_is_told_once_before_anything_is_loaded(tmp_path: Path) -> None:
    bad = ("trainer.parallel.tp=3", "trainer.mla_attention=transformer_engine", "model.device=cpu")
    process = start(torchrun_command(2, tmp_path, *RUN, *bad), CUDA_VISIBLE_DEVICES="", **ENV)
    output = finish(process)
    assert process.returncode != 0
    errors = re.findall(r"^error: .*", output, re.MULTILINE)
    assert len(errors) == len(set(errors)) > 3, output
    assert "3 ranks, but there are 2; start with torchrun --nproc-per-node 3" in errors[0]
    assert "trainer.mla_attention is transformer_engine, which runs on CUDA" in errors[-1]
    assert "miles_k3/cli.py" not in output, "no traceback of ours"
    assert "exitcode  : 2" in output


def test_a_wrong_recipe_and_a_used_folder_are_told_once(tmp_path: Path) -> None:
    (tmp_path / "tiny-cpu").mkdir()
    (tmp_path / "tiny-cpu" / "thesis.tex").touch()
    for overrides, told in (((), "holds other files (thesis.tex)"), (("run.nome=x",), "run.nome: unknown key")):
        process = start(torchrun_command(2, tmp_path, *RUN, *overrides), **ENV)
        output = finish(process)
        assert process.returncode != 0
        assert output.count(told) == 1, output
    assert [p.name for p in (tmp_path / "tiny-cpu").iterdir()] == ["thesis.tex"]


def test_torchrun_is_the_interpreters_own() -> None:
    """The docs' command needs nothing but the environment that miles-k3 is installed in."""
    assert (Path(sys.executable).parent / "torchrun").is_file()
