"""`miles-k3 serve` as a process: what it refuses before it loads, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from helpers.servers import TINY, save_tiny_adapter

PATIENCE_S = 120.0


def serve(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "miles_k3", "serve", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ})


def refusal(*arguments: str) -> str:
    """What the command says when it ends with exit code 2."""
    process = serve(*arguments)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, said
    assert "Traceback" not in said
    return said


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """(process, its address, the lines it has written so far)."""
    process = serve("--port", "0", *arguments)
    lines: list[str] = []
    found: list[str] = []
    known = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"serving .* on (http://\S+)", line):
                found.append(match[1])
                known.set()
        known.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert known.wait(PATIENCE_S)
        assert found, "".join(lines)
        yield process, found[0], lines
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        reader.join(PATIENCE_S)


def test_a_port_in_use_is_said_before_the_model_is_read() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal("--model", "/nowhere", "--port", str(port))
    assert f"error: port {port} of 127.0.0.1 is in use; choose another --port, or 0 for a free one" in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "takes either --recipe RECIPE or --model FOLDER"),
        (("--model", str(TINY), "--recipe", "tiny-cpu"), "takes either --recipe RECIPE or --model FOLDER"),
        (("--model", str(TINY), "--set", "a=b"), "--set changes values of a recipe"),
        (("--model", str(TINY), "--port", "0", "--host", "no such host"), "name an address of this machine"),
        (("--model", "/nowhere", "--port", "0"), "/nowhere"),
        (("--model", str(TINY), "--port", "0", "--adapter", "/nowhere"), "--adapter /nowhere: no such folder"),
        (("--model", str(TINY), "--port", "0", "--adapter", f"a={TINY}"), "adapter_config.json does not exist"),
        (("--model", str(TINY), "--port", "0", "--max-sequence-tokens", "9000"), "the model takes 8192"),
        (("--recipe", "tiny-gpu", "--port", "0"), "no recipe of that name"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(*arguments)


@pytest.mark.slow
def test_sigterm_finishes_what_runs_and_exits_with_0(tmp_path: Path) -> None:
    for seed in range(2):
        save_tiny_adapter(tmp_path / f"a{seed}", seed)
    adapters = ("--adapter", str(tmp_path / "a0"), "--adapter", f"second={tmp_path / 'a1'}")
    with serving("--model", str(TINY), "--max-running", "8", *adapters) as (process, url, lines):
        names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        assert names == ["tiny-k3", "tiny-k3@base", "tiny-k3@0", "tiny-k3@1", "a0", "second"]
        body = {"model": "second", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True, "n": 4}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            events = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
            assert json.loads(next(events))["adapter_version"] == 1
            process.send_signal(signal.SIGTERM)
            *_, last = events
        assert last == "[DONE]"
        assert process.wait(PATIENCE_S) == 0
    assert any("SIGTERM: 4 answers to finish" in line for line in lines)
    assert not any("Traceback" in line for line in lines), lines


@pytest.mark.slow
def test_a_recipe_and_a_second_signal() -> None:
    """With a recipe its limits hold; Ctrl-C twice ends what would take longer."""
    long = ("--set", "rollout.sampling.max_new_tokens=6000", "--set", "trainer.micro_batch_tokens=8192")
    small = ("--set", "rollout.max_running=2", "--set", "rollout.num_pages=1000")
    with serving("--recipe", "tiny-cpu", *long, *small) as (process, url, lines):
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 6000, "stop_token_ids": []}, "stream": True}
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=PATIENCE_S) as answer:
            events = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
            assert json.loads(next(events))["finish_reason"] is None
            process.send_signal(signal.SIGINT)
            while httpx.get(f"{url}/health").status_code == 200:
                pass
            process.send_signal(signal.SIGINT)
            *_, last = events
        assert json.loads(last)["finish_reason"] == "abort"
        assert process.wait(PATIENCE_S) == 0
    assert any("1 answers did not finish and are ended" in line for line in lines), lines
