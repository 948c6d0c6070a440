"""`miles-k3 launch`: the run of one process on a cluster of two nodes, and what becomes of it when parts of it end.

The cluster is of this machine alone: two raylets, one CPU each. Afterwards no process of it is left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.runs import SMALL, read_results, start, train_here

pytestmark = pytest.mark.parallel

RUN = (
    "run.steps=3",
    "run.save_every=1",
    "eval.prompts=10",
    "trainer.lr_decay=constant",
    "trainer.micro_batch_tokens=256",
)
# No proxy answers there: whatever asked one would fail.
ENV = {
    "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "RAY_DEDUP_LOGS": "0", "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": "",
}  # fmt: skip
LIMIT_S = 300
_started: list[subprocess.Popen[str]] = []
MARK = "MILES_K3_TEST_RUN"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes, ended afterwards."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 200 << 20, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=small)
    nodes.add_node(num_cpus=1, object_store_memory=200 << 20)
    yield str(nodes.address)
    nodes.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of the run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train_here(folder, *RUN)
    return read_results(folder)


def launch(folder: Path, *overrides: str, resume: bool = False, mark: str = "") -> subprocess.Popen[str]:
    sets = [x for o in (*SMALL, *RUN, f"run.folder={folder}", *overrides) for x in ("--set", o)]
    command = [sys.executable, "-m", "miles_k3", "launch", "tiny-cpu", *sets, *(["--resume"] if resume else [])]
    _started.append(start(command, **ENV, **{MARK: mark}))
    return _started[-1]


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    """What a failed test leaves running ends with it."""
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.communicate()


def on(address: str) -> tuple[str, ...]:
    """Two ranks, on a node each."""
    return f"cluster.ray_address={address}", "cluster.nodes=2", "cluster.ranks_per_node=1"


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, output
    return re.sub(r"\x1b\[\d+m", "", output)


def assert_same_run(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Everything sampled is equal; what is trained is so to within rounding."""
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        assert line.keys() == wanted.keys()
        rounded = {name for name in line if name.startswith(("train/", "sync/canary"))}
        assert {k: v for k, v in line.items() if k not in rounded} == {k: wanted[k] for k in wanted if k not in rounded}
        for name in rounded:
            relative, absolute = (0.0, 1e-5) if name == "train/loss" else (1e-3, 1e-4)
            expected_value = pytest.approx(wanted[name], rel=relative, abs=absolute)
            assert line[name] == expected_value, f"step {line['step']}: {name}"


def ray_process(of: subprocess.Popen[str], title: str) -> psutil.Process:
    """The newest process that Ray calls so; `of` must live until there is one."""

    def find() -> psutil.Process | None:
        found = [p for p in psutil.process_iter(["name", "cmdline"]) if title in " ".join(p.info["cmdline"] or [])]
        return max(found, key=lambda p: p.create_time(), default=None)

    return wait_until(find, of)


def wait_until[T](find: Callable[[], T | None], process: subprocess.Popen[str]) -> T:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if found := find():
            return found
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.02)
    raise AssertionError("it never came")


def steps_done(folder: Path) -> int:
    path = folder / "tiny-cpu" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_two_nodes_make_the_run_of_one_process(tmp_path: Path, cluster: str, alone: list[dict[str, Any]]) -> None:
    output = finish(launch(tmp_path, *on(cluster)))
    assert_same_run(read_results(tmp_path), alone)
    assert len(re.findall(r"^\(rank 0 pid=\d+\) step 1/3", output, re.MULTILINE)) == 1
    assert output.count("step 1/3") == 1, "rank 0 alone speaks"
    assert (tmp_path / "tiny-cpu" / "adapter" / "adapter_config.json").is_file()


def test_an_engine_that_is_killed_in_a_step_costs_nothing(tmp_path: Path, cluster: str) -> None:
    longer = ("rollout.prompts_per_step=32", "rollout.group_size=8", "rollout.sampling.max_new_tokens=48",
              "run.steps=4", "run.save_every=0", "rollout.max_running=16")  # fmt: skip
    train_here(tmp_path / "alone", *RUN, *longer)
    folder = tmp_path / "killed"
    process = launch(folder, *on(cluster), *longer)
    wait_until(lambda: steps_done(folder) >= 2, process)
    issued = 0
    while not issued:  # unless it was between two rollouts
        ray_process(process, "ray::EngineActor").send_signal(signal.SIGKILL)
        line = wait_until(lambda: re.search(r"(\d+) requests are issued again", read_line(process)), process)
        issued = int(line[1])
    finish(process)
    assert_same_run(read_results(folder), read_results(tmp_path / "alone"))


def test_a_draft_is_trained_on_what_engines_elsewhere_computed(tmp_path: Path, cluster: str) -> None:
    """Two engines, each in its own process: the draft, what it learns from and what is accepted are those of a run in
    one process."""
    draft = Path(__file__).resolve().parents[2] / "assets" / "tiny-k3-draft"
    trains = ("rollout.speculative.mode=verify_all", f"rollout.speculative.draft={draft}",
              "rollout.speculative.train=true")  # fmt: skip
    train_here(tmp_path / "alone", *RUN, *trains)
    finish(launch(tmp_path / "cluster", *on(cluster), *trains))
    found, wanted = read_results(tmp_path / "cluster"), read_results(tmp_path / "alone")
    for line, other in zip(found[1:], wanted[1:], strict=True):
        assert line["draft/examples"] == other["draft/examples"] > 0
        assert line["rollout/reward"] == other["rollout/reward"]
        assert line["draft/version"] == other["draft/version"]
        assert line["draft/expected_accepted"] == pytest.approx(other["draft/expected_accepted"], rel=0.05)
        assert line["draft/loss"] == pytest.approx(other["draft/loss"], rel=0.1)
    assert found[-1]["draft/expected_accepted"] != found[-1]["draft/frozen_expected_accepted"]
    assert (tmp_path / "cluster" / "tiny-cpu" / "draft" / "config.json").is_file()


def test_tokens_are_told_as_they_are_sampled_also_when_the_engine_is_killed(cluster: str) -> None:
    script = Path(__file__).parents[1] / "helpers" / "ray_streams.py"
    _started.append(start([sys.executable, str(script), cluster], **ENV))
    told = json.loads(finish(_started[-1]).splitlines()[-1])
    assert told["told"] == told["completion"] == told["whole"], "each token once, in order"
    assert told["logprobs"] == pytest.approx(told["whole_logprobs"], abs=1e-5)
    assert told["calls"] > 5, "not all at the end"
    assert told["restarts"] == 1


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of what a process says."""
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_rank_that_is_killed_ends_the_run_which_goes_on_from_its_checkpoint(
    tmp_path: Path, cluster: str, alone: list[dict[str, Any]]
) -> None:
    process = launch(tmp_path, *on(cluster))
    wait_until(lambda: steps_done(tmp_path) >= 2, process)
    ray_process(process, "ray::RankActor").send_signal(signal.SIGKILL)
    output = finish(process, 2)
    assert re.search(r"^error: rank \d has ended \(.*\), and the run with it; go on from its last checkpoint with "
                     rf"miles-k3 launch {tmp_path}/tiny-cpu --resume", output, re.MULTILINE), output  # fmt: skip
    finish(launch(tmp_path, *on(cluster), resume=True))
    assert_same_run(read_results(tmp_path), alone)


def test_a_terminated_run_goes_on(tmp_path: Path, cluster: str, alone: list[dict[str, Any]]) -> None:
    process = launch(tmp_path, *on(cluster), "run.save_every=0")
    wait_until(lambda: steps_done(tmp_path) >= 2, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process, 128 + signal.SIGTERM)
    assert "SIGTERM ended it after step" in output
    assert f"go on with miles-k3 launch {tmp_path}/tiny-cpu --resume" in output
    last = read_results(tmp_path)[-1]["step"]
    assert last < 3, "the signal came too late to test anything"
    assert [p.name for p in (tmp_path / "tiny-cpu" / "checkpoints").iterdir()] == [f"step-{last:06d}"]
    finish(launch(tmp_path, *on(cluster), "run.save_every=0", resume=True))
    assert_same_run(read_results(tmp_path), alone)


def test_a_cluster_that_is_too_small_is_told_at_once(tmp_path: Path, cluster: str) -> None:
    started = time.monotonic()
    address = f"cluster.ray_address={cluster}"
    output = finish(launch(tmp_path, address, "cluster.nodes=16", "cluster.ranks_per_node=4", "model.device=cuda"), 2)
    assert "error: requested 64 CPUs, cluster has 2 and requested 64 GPUs, cluster has 0" in output
    assert time.monotonic() - started < 60
    assert not (tmp_path / "tiny-cpu").exists()


def test_an_own_cluster_ends_with_its_run(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    bad = ("task.name=reasoning_gym:nonsense", "cluster.ranks_per_node=2", "trainer.parallel.pp=2")
    output = finish(launch(tmp_path, *bad, mark=mark), 2)
    assert len(re.findall("^error: .*nonsense", output, re.MULTILINE)) == 1, output
    assert_none_left(mark)


def test_an_own_cluster_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = launch(tmp_path, "cluster.ranks_per_node=2", "run.steps=100", mark=mark)
    wait_until(lambda: steps_done(tmp_path) >= 3, process)
    assert len([p for p in psutil.process_iter() if marked(p, mark)]) > 5, "ranks, engines, graders, Ray's own"
    process.kill()
    assert_none_left(mark)
    assert "step-000001" in {p.name for p in (tmp_path / "tiny-cpu" / "checkpoints").iterdir()}


def assert_none_left(mark: str) -> None:
    deadline = time.monotonic() + 60
    while left := [p for p in psutil.process_iter() if marked(p, mark)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return False


def test_a_cluster_that_is_not_there_is_told(tmp_path: Path) -> None:
    output = finish(launch(tmp_path, "cluster.ray_address=127.0.0.1:1"), 2)
    assert "error: cluster.ray_address 127.0.0.1:1: no Ray cluster can be reached there" in output
