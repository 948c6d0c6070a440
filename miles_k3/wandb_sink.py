"""wandb as a follower: a process of its own reads metrics.jsonl and repeats it, so it can't end, slow or stall a run.

The run only starts it, asks now and then whether it still lives, and gives it a few seconds at the end. It learns of
the run's end, also of a sudden one, by the end of its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal, Self

POLL_S = 0.5


class WandbSink:
    """The run's handle on the follower."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, finish_s: float) -> None:
        self._process, self._log, self._finish_s = process, log, finish_s

    @classmethod
    def start(
        cls,
        run: Path,
        *,
        mode: Literal["off", "offline", "online"],
        project: str,
        name: str,
        config: Mapping[str, Any],
        finish_s: float = 20.0,
    ) -> Self | None:
        """Follow `run/metrics.jsonl` from its present end on; None when `mode` is off. Its output goes to wandb.log."""
        if mode == "off":
            return None
        metrics, log = run / "metrics.jsonl", run / "wandb.log"
        job = {
            "metrics": str(metrics), "offset": metrics.stat().st_size if metrics.exists() else 0, "mode": mode,
            "project": project, "name": name, "config": config, "folder": str(run),
        }  # fmt: skip
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "miles_k3.wandb_sink"], stdin=subprocess.PIPE, stdout=out, stderr=out,
                start_new_session=True, env={**os.environ, "WANDB_SILENT": "true"},
            )  # fmt: skip
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once, which `poll` will tell
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        return cls(process, log, finish_s)

    def poll(self) -> str | None:
        """A sentence when the follower has ended before its time; costs a system call."""
        if (code := self._process.poll()) is None:
            return None
        self._close_stdin()
        return f"wandb stopped (exit code {code}, see {self._log}); the run goes on, metrics.jsonl has everything"

    def close(self) -> str | None:
        """Let the follower finish; after `finish_s` seconds end it and say so."""
        if complaint := self.poll():
            return complaint
        self._close_stdin()
        try:
            code = self._process.wait(self._finish_s)
        except subprocess.TimeoutExpired:
            # The session that `start` made, not reaped yet, so the number is still its own.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return f"wandb did not finish within {self._finish_s:g} s and was ended; metrics.jsonl has everything"
        return f"wandb ended with exit code {code}, see {self._log}; metrics.jsonl has everything" if code else None

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def follow(job: Mapping[str, Any], ended: threading.Event) -> None:
    """Repeat the lines of metrics.jsonl to wandb until the run has ended and all of them are told."""
    import wandb

    run = wandb.init(
        project=job["project"],
        name=job["name"],
        id=_stable_id(Path(job["folder"])),
        resume="allow" if job["mode"] == "online" else None,  # a resumed run goes on in the same picture
        mode=job["mode"],
        config=dict(job["config"]),
        dir=job["folder"],
        settings=wandb.Settings(console="off", silent=True),
    )
    run.define_metric("*", step_metric="step")
    metrics = Path(job["metrics"])
    while not metrics.exists() and not ended.is_set():
        time.sleep(POLL_S)
    if metrics.exists():
        with metrics.open("rb") as file:
            file.seek(job["offset"])
            _repeat(file, run, ended)
    run.finish()


def _stable_id(folder: Path) -> str:
    file = folder / "wandb.id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text()


def _repeat(file: IO[bytes], run: Any, ended: threading.Event) -> None:
    pending = b""
    while True:
        last_look = ended.is_set()  # asked before reading: what was written before the end is read below
        *lines, pending = (pending + file.read()).split(b"\n")
        for line in lines:
            row = json.loads(line)
            run.log({name: float(value) if isinstance(value, str) else value for name, value in row.items()})
        if last_look:
            return
        ended.wait(POLL_S)


def _main() -> None:
    job = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    follow(job, ended)


if __name__ == "__main__":
    _main()
