"""RewardPool: grades answers in other processes, each within a wall-clock limit, one Grade for every answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Protocol, Self

from miles_k3.errors import LaunchError
from miles_k3.rollout.tasks.grading import Grader
from miles_k3.rollout.tasks.reward_server import BOOT, ID_BYTES, unpack
from miles_k3.types import Grade, Prompt

logger = logging.getLogger(__name__)

# Answers under way at once: enough to keep workers busy, few enough that neither side can fill the other's pipe.
WINDOW = 32
STARTUP_LIMIT_S = 300.0
# An answer that was under way when the server itself ended is tried once more.
MAX_ATTEMPTS = 2


class HasGrader(Protocol):
    """What the pool needs of a task."""

    @property
    def grader(self) -> Grader: ...


@dataclass
class _Request:
    message: bytes
    future: Future[Grade]
    attempts: int = 0


class _ServerProcess:
    """A running reward_server. It leads its own process group, so ending the group ends its workers and nobody else."""

    def __init__(self, grader_bytes: bytes, *, workers: int, timeout_s: float) -> None:
        self.channel, theirs = Pipe()
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **one_thread, "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"},
            )
        finally:
            theirs.close()
        self.ready = False
        self.channel.send_bytes(pickle.dumps((grader_bytes, workers, timeout_s)))

    def end(self) -> int:
        """Kill the group; exit code of its leader (its own if it had ended before). Harmless when called again."""
        self.channel.close()
        if self._process.returncode is None:
            # Not waited for yet, so the id can't be anyone else's. macOS refuses to signal a group of ended processes.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


class RewardPool:
    """Grades with `task.grader` in `workers` processes; `timeout_s` is the wall-clock limit of one grading.

    The constructor returns at once; processes start while the caller sets up other things. A timeout, an exception,
    a reward that is no finite number and a worker that ends cost that answer only: `Grade(0.0, failure="...")`.
    Use as a context manager, or call `close()`; when this process dies, the graders see it and end.
    """

    def __init__(self, task: HasGrader, workers: int, timeout_s: float) -> None:
        self._grader_bytes = pickle.dumps(task.grader)
        self._workers = workers
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._queue: deque[int] = deque()
        self._requests: dict[int, _Request] = {}
        self._suspects: set[int] = set()  # were under way when a server ended, and wait for their second attempt
        self._ids = itertools.count(1)
        self._closed = False
        self._problem: str | None = None
        self._wake_receiver, self._wake_sender = Pipe(duplex=False)
        self._awake = False
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    async def grade(self, prompt: Prompt, text: str) -> Grade:
        """Exactly one Grade. Raises LaunchError when the grading process can't start or the pool is closed."""
        future: Future[Grade] = Future()
        message = pickle.dumps((replace(prompt, token_ids=()), text))  # scorers read text, not tokens
        with self._lock:
            if self._closed:
                raise LaunchError("the reward pool is closed; grade answers before close()")
            if self._problem is not None:
                raise LaunchError(self._problem)
            request_id = next(self._ids)
            self._requests[request_id] = _Request(message=message, future=future)
            self._queue.append(request_id)
            self._wake()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the processes; gradings still under way raise LaunchError. Harmless when called again."""
        with self._lock:
            self._closed = True
            self._wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        """Call with the lock held."""
        if not self._awake and not self._wake_sender.closed:
            self._awake = True
            self._wake_sender.send_bytes(b"!")

    def _run(self) -> None:
        """The thread that owns the server process and both ends of every request."""
        problem = "the reward pool's thread failed; see its traceback above"
        try:
            while not self._closed:
                self._serve_once()
            problem = "the reward pool was closed while answers were being graded"
        except (LaunchError, OSError) as error:
            problem = str(error)
        finally:
            with self._lock:
                self._problem = problem
                pending, self._requests = self._requests, {}
                self._wake_sender.close()
                self._wake_receiver.close()
            for request in pending.values():
                if request.future.set_running_or_notify_cancel():
                    request.future.set_exception(LaunchError(problem))

    def _serve_once(self) -> None:
        """Serve with one server process until it ends or the pool closes."""
        server = _ServerProcess(self._grader_bytes, workers=self._workers, timeout_s=self._timeout_s)
        under_way: set[int] = set()
        try:
            while True:
                limit = None if server.ready else STARTUP_LIMIT_S
                ready = wait([server.channel, self._wake_receiver], limit)
                if not ready:
                    raise LaunchError(
                        f"the grading process was not ready after {STARTUP_LIMIT_S:g} s; see its messages above"
                    )
                if self._wake_receiver in ready:
                    with self._lock:
                        self._wake_receiver.recv_bytes()
                        self._awake = False
                if self._closed:
                    return
                if server.channel in ready:
                    self._receive(server, under_way)
                window = self._workers if self._suspects else WINDOW  # suspects wait beside nobody in the server
                while server.ready and self._queue and len(under_way) < window:
                    self._send(server.channel, under_way)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            code = server.end()
            if not server.ready:
                raise LaunchError(
                    f"the grading process ended while starting (exit code {code}); see its messages above"
                ) from None
            logger.warning("the grading process ended (exit code %d); starting another one", code)
            self._requeue(under_way)
        finally:
            server.end()

    def _receive(self, server: _ServerProcess, under_way: set[int]) -> None:
        request_id, value = unpack(server.channel.recv_bytes())
        if request_id == 0:
            if value:
                raise LaunchError(f"the scorer of this task can't be set up in the grading process: {value}")
            server.ready = True
            return
        assert isinstance(value, Grade)
        under_way.remove(request_id)
        self._resolve(request_id, value)

    def _send(self, channel: Connection, under_way: set[int]) -> None:
        request_id = self._queue.popleft()
        request = self._requests[request_id]
        if request.future.cancelled():
            self._suspects.discard(request_id)
            with self._lock:
                del self._requests[request_id]
            return
        under_way.add(request_id)
        request.attempts += 1
        channel.send_bytes(request_id.to_bytes(ID_BYTES) + request.message)

    def _requeue(self, under_way: set[int]) -> None:
        for request_id in sorted(under_way, reverse=True):
            if self._requests[request_id].attempts < MAX_ATTEMPTS:
                self._suspects.add(request_id)
                self._queue.appendleft(request_id)
            else:
                self._resolve(
                    request_id, Grade(reward=0.0, failure="died: the grading process ended twice over this answer")
                )

    def _resolve(self, request_id: int, grade: Grade) -> None:
        self._suspects.discard(request_id)
        with self._lock:
            request = self._requests.pop(request_id)
        if request.future.set_running_or_notify_cancel():  # False when the caller was cancelled
            request.future.set_result(grade)
