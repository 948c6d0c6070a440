"""metrics.jsonl as the truth, the step timer's books, and a wandb that can't hurt a run whatever it does."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from miles_k3.errors import CheckpointError
from miles_k3.metrics import MetricsLog, StepTimer, format_step, read_metrics
from miles_k3.wandb_sink import WandbSink

STEP = {
    "rollout/reward": 0.61,
    "time/tokens_per_s": 5234.0,
    "train/mismatch_abs": 3.1e-6,
    "time/rollout_s": 0.6,
    "time/train_s": 1.1,
    "time/sync_s": 0.01,
    "time/step_s": 1.9,
}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=60)


def test_each_step_is_one_line_that_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, total_steps=2, console=quiet()) as log:
        log.write(1, {"train/loss": 0.1, "samples": 256, "numpy": np.float32(0.5), "flag": True})
        assert json.loads(path.read_text()) == {"step": 1, "train/loss": 0.1, "samples": 256, "numpy": 0.5, "flag": 1}
        log.write(2, {"train/loss": 1 / 3})
    with MetricsLog(path, total_steps=3, console=quiet()) as log:
        log.write(3, {"train/loss": 0.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(path)[1]["train/loss"] == 1 / 3, "numbers come back bit for bit"


def test_numbers_that_json_lacks_are_texts_and_counted(tmp_path: Path) -> None:
    path, screen = tmp_path / "m.jsonl", quiet()
    with MetricsLog(path, total_steps=1, console=screen) as log:
        log.write(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line == {"step": 1, "a": "nan", "b": "-inf", "c": 1.0, "log/nonfinite": 2}
    row = read_metrics(path)[0]
    assert math.isnan(row["a"])
    assert row["b"] == -math.inf
    assert "not finite: a, b" in screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["0.5", None, [1.0], {"x": 1}])
def test_a_metric_is_one_number(tmp_path: Path, value: object) -> None:
    with MetricsLog(tmp_path / "m.jsonl", total_steps=1, console=quiet()) as log:
        with pytest.raises(TypeError, match=r"metric train/loss is .*; a metric is one number"):
            log.write(1, {"train/loss": value})
        assert (tmp_path / "m.jsonl").read_text() == "", "nothing half-written"


def test_a_torn_last_line_is_left_out_and_not_written_behind(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 2.0}\n{"step": 2, "a"')
    assert read_metrics(path) == [{"step": 1, "a": 2.0}]
    with pytest.raises(CheckpointError, match="ends in half a line"):
        MetricsLog(path, total_steps=1, console=quiet())
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(CheckpointError, match=r"m\.jsonl:2: not a line of metrics"):
        read_metrics(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_metrics(tmp_path / "none.jsonl")


def test_the_progress_line() -> None:
    line = format_step(3, 40, STEP)
    assert line == "step  3/40  reward 0.610  |dlogp| 3.1e-06  1.9 s (rollout 0.6 train 1.1)  5.2k tok/s"
    assert format_step(0, 40, {"eval/accuracy": 0.25}) == "step  0/40  eval accuracy 0.250"
    assert format_step(40, 40, {}) == "step 40/40"


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_reach_the_reader_whole(tmp_path: Path, terminal: bool) -> None:
    screen = Console(file=io.StringIO(), width=60, force_terminal=terminal, legacy_windows=False)
    with MetricsLog(tmp_path / "m.jsonl", total_steps=40, console=screen) as log:
        log.write(3, STEP)
        log.note("[bold] is no markup here")
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert format_step(3, 40, STEP) in shown
    assert "[bold] is no markup here" in shown
    assert ("3/40" in shown.replace(format_step(3, 40, STEP), "")) is terminal, "the bar is for terminals only"


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_and_other_add_up_to_the_step() -> None:
    clock = FakeClock()
    timer = StepTimer(clock)
    clock.now += 1
    with timer.phase("rollout"):
        clock.now += 2
        with timer.phase("reward"):
            clock.now += 4
        clock.now += 8
    with timer.phase("train"):
        clock.now += 16
    with contextlib.suppress(RuntimeError), timer.phase("train"):
        clock.now += 32
        raise RuntimeError
    lap = timer.lap()
    assert lap["time/rollout_s"] == 10
    assert lap["time/reward_s"] == 4
    assert lap["time/train_s"] == 48
    assert lap["time/other_s"] == 1
    assert lap["time/sync_s"] == lap["time/checkpoint_s"] == lap["time/eval_s"] == 0
    assert lap["time/step_s"] == 63
    with timer.phase("checkpoint"):
        clock.now += 0.5
    after = timer.lap()
    assert after["time/checkpoint_s"] == after["time/step_s"] == 0.5, "what follows a lap counts for the next"


def test_seconds_move_between_phases_and_none_is_made() -> None:
    clock = FakeClock()
    timer = StepTimer(clock)
    with timer.phase("rollout"):
        clock.now += 8
    timer.move("rollout", "reward", 2)
    timer.move("rollout", "sync", 100)
    lap = timer.lap()
    assert (lap["time/rollout_s"], lap["time/reward_s"], lap["time/sync_s"], lap["time/step_s"]) == (0, 2, 6, 8)


class ScriptedMemory:
    """Each phase's peak as a test sets it."""

    def __init__(self) -> None:
        self.peak, self.now = 0, 7

    def take_peak(self) -> int:
        taken, self.peak = self.peak, self.now
        return taken

    def held(self) -> int:
        return self.now


def test_memory_counts_for_the_innermost_phase_and_starts_anew_with_a_lap():
    memory = ScriptedMemory()
    timer = StepTimer(memory=memory)
    with timer.phase("rollout"):
        memory.peak = 50
        with timer.phase("reward"):
            memory.peak = 20
        memory.peak = 40
    with timer.phase("train"):
        memory.peak = 90
    memory.now = 8
    assert timer.lap_memory() == {
        "memory/other_peak_bytes": 7, "memory/rollout_peak_bytes": 50, "memory/reward_peak_bytes": 20,
        "memory/train_peak_bytes": 90, "memory/held_bytes": 8,
    }  # fmt: skip
    with timer.phase("train"):
        memory.peak = 30
    assert timer.lap_memory()["memory/train_peak_bytes"] == 30
    assert StepTimer().lap_memory() == {}


def test_laps_lose_no_second() -> None:
    start = time.perf_counter()
    timer, total = StepTimer(), 0.0
    for _ in range(3):
        with timer.phase("train"):
            time.sleep(0.01)
        lap = timer.lap()
        parts = sum(value for name, value in lap.items() if name != "time/step_s")
        assert parts == pytest.approx(lap["time/step_s"], abs=1e-9)
        total += lap["time/step_s"]
    assert total == pytest.approx(time.perf_counter() - start, abs=0.005)


def test_peak_memory_counts_children() -> None:
    """In a process of its own, which no other test's children have been part of."""
    code = """
        import subprocess, sys
        from miles_k3.metrics import peak_memory_bytes
        alone = peak_memory_bytes()
        assert 10e6 < alone < 1e9, alone
        hungry = "import sys; x = b'1' * 150_000_000; print('full', flush=True); sys.stdin.read()"
        child = subprocess.Popen([sys.executable, "-c", hungry], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        assert alone + 140e6 < peak_memory_bytes() < alone + 250e6
        child.communicate()
        assert alone + 140e6 < peak_memory_bytes() < alone + 250e6, "an ended child is remembered"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


FAKE_WANDB = """
import json, os, sys, time

class Settings:
    def __init__(self, **kwargs): pass

class Run:
    def define_metric(self, *args, **kwargs): pass
    def log(self, row):
        with open(os.environ["FAKE_LOG"], "a") as file:
            file.write(json.dumps(row) + "\\n")
        if os.environ["FAKE"] == "fail-in-log": raise RuntimeError("the server is on fire")
        if os.environ["FAKE"] == "hang-in-log": time.sleep(1000)
    def finish(self):
        if os.environ["FAKE"] == "hang-in-finish": time.sleep(1000)
        open(os.environ["FAKE_LOG"], "a").write('"finished"\\n')

def init(**kwargs):
    if os.environ["FAKE"] == "fail-in-init": raise RuntimeError("no key")
    if os.environ["FAKE"] == "hang-in-init": time.sleep(1000)
    if os.environ["FAKE"] == "exit": os._exit(3)
    open(os.environ["FAKE_LOG"], "a").write(json.dumps(kwargs["mode"]) + "\\n")
    return Run()
"""


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(textwrap.dedent(FAKE_WANDB))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "told.txt"))

    def start(behaviour: str, finish_s: float = 20.0) -> WandbSink:
        monkeypatch.setenv("FAKE", behaviour)
        sink = WandbSink.start(tmp_path, mode="online", project="p", name="n", config={"a": 1}, finish_s=finish_s)
        assert sink is not None
        return sink

    return start


def told(tmp_path: Path) -> list:
    path = tmp_path / "told.txt"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_off_starts_nothing(tmp_path: Path) -> None:
    assert WandbSink.start(tmp_path, mode="off", project="p", name="n", config={}) is None
    assert list(tmp_path.iterdir()) == []


def test_wandb_is_told_every_line_from_where_this_process_began(tmp_path: Path, fake_wandb) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with MetricsLog(path, total_steps=9, sink=fake_wandb("good"), console=quiet()) as log:
        log.write(2, {"loss": 2 / 3})
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(told(tmp_path)) < 2:
            time.sleep(0.05)
        for step in range(3, 9):
            log.write(step, {"loss": math.inf if step == 5 else step / 3})
    assert [row["step"] for row in told(tmp_path)[1:-1]] == list(range(2, 9))
    assert told(tmp_path)[0] == "online"
    assert told(tmp_path)[4] == {"step": 5, "loss": math.inf, "log/nonfinite": 1}
    assert told(tmp_path)[-1] == "finished"


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("fail-in-init", "wandb stopped (exit code 1"),
        ("exit", "wandb stopped (exit code 3"),
        ("fail-in-log", "wandb stopped (exit code 1"),
        ("hang-in-init", "wandb did not finish within 0.5 s"),
        ("hang-in-log", "wandb did not finish within 0.5 s"),
        ("hang-in-finish", "wandb did not finish within 0.5 s"),
    ],
)
def test_no_failure_of_wandb_ends_or_slows_a_run(tmp_path: Path, fake_wandb, behaviour: str, said: str) -> None:
    screen = Console(file=io.StringIO(), width=200)
    path = tmp_path / "metrics.jsonl"
    sink = fake_wandb(behaviour, finish_s=0.5)
    with MetricsLog(path, total_steps=99, sink=sink, console=screen) as log:
        slowest, deadline, step = 0.0, time.monotonic() + (15 if "hang" not in behaviour else 0.8), 0
        while time.monotonic() < deadline and said not in screen.file.getvalue():  # type: ignore[attr-defined]
            step += 1
            start = time.perf_counter()
            log.write(step, {"loss": 0.5})
            slowest = max(slowest, time.perf_counter() - start)
            time.sleep(0.02)
        start = time.perf_counter()
        log.write(step + 1, {"loss": 0.5})
    assert time.perf_counter() - start < 3.0
    assert slowest < 0.5, "a step waits for nobody"
    complaints = [line for line in screen.file.getvalue().splitlines() if "step" not in line[:4]]  # type: ignore[attr-defined]
    assert len(complaints) == 1
    assert complaints[0].startswith(said)
    assert len(read_metrics(path)) == step + 1, "metrics.jsonl has everything"
    if behaviour == "fail-in-log":
        assert "the server is on fire" in (tmp_path / "wandb.log").read_text()


def test_the_follower_ends_with_a_killed_run(tmp_path: Path, fake_wandb) -> None:
    sink = fake_wandb("good")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    os.close(sink._process.stdin.fileno())  # what the system does when a process is killed
    sink._process.wait(20)
    assert told(tmp_path)[1:] == [{"step": 1}, "finished"]


@pytest.mark.slow
def test_real_wandb_offline_takes_the_lines(tmp_path: Path) -> None:
    sink = WandbSink.start(tmp_path, mode="offline", project="p", name="n", config={"run": {"steps": 2}}, finish_s=60)
    screen = quiet()
    with MetricsLog(tmp_path / "metrics.jsonl", total_steps=2, sink=sink, console=screen) as log:
        log.write(1, {"train/loss": 0.5})
        log.write(2, {"train/loss": math.nan})
    assert "wandb" not in screen.file.getvalue(), (tmp_path / "wandb.log").read_text()  # type: ignore[attr-defined]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_real_wandb_with_a_server_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, never reads them
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        sink = WandbSink.start(tmp_path, mode="online", project="p", name="n", config={}, finish_s=2)
        screen, start = quiet(), time.perf_counter()
        with MetricsLog(tmp_path / "metrics.jsonl", total_steps=2, sink=sink, console=screen) as log:
            log.write(1, {"train/loss": 0.5})
        assert time.perf_counter() - start < 10
    assert "wandb" in screen.file.getvalue()  # type: ignore[attr-defined]
