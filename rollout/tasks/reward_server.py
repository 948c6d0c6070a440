"""The process that grades: it imports the scorer once, forks workers from itself and keeps their time.

A hung worker is killed and forked anew within milliseconds, since nothing has to be imported again; the workers share
the scorer's memory. The process has one thread, so forking it is safe. Started by RewardPool as `python -c BOOT`.

Messages to it: `id (8 bytes) + pickle of (prompt, text)`. Messages from it: `id (8 bytes) + pickle of Grade`; id 0
carries the pickled text of a start-up problem, "" once it is ready.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

from miles_k3.rollout.tasks.grading import Grader, grade_with
from miles_k3.types import Grade

ID_BYTES = 8
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from miles_k3.rollout.tasks.reward_server import main; main(int(sys.argv[2]))"
)
# Stands for a process that was waited for: its id may belong to anyone by now and must not be signalled.
REAPED = 0
# A scorer that computes 10**10**10 gets a MemoryError instead of the whole machine's memory.
SCORER_MEMORY_BYTES = 1 << 30


def pack(request_id: int, value: object) -> bytes:
    """One message."""
    return request_id.to_bytes(ID_BYTES) + pickle.dumps(value)


def unpack(message: bytes) -> tuple[int, object]:
    """(request id, value) of a message."""
    return int.from_bytes(message[:ID_BYTES]), pickle.loads(message[ID_BYTES:])


@dataclass
class _Worker:
    """One forked process; `request_id` and `deadline` (monotonic seconds) belong to the answer it grades now."""

    pid: int
    channel: Connection
    request_id: int | None = None
    deadline: float = 0.0


def _work(channel: Connection, grader: Grader) -> None:
    """Grade until the server closes the channel."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + SCORER_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    while True:
        try:
            request_id, (prompt, text) = unpack(channel.recv_bytes())  # pyright: ignore[reportGeneralTypeIssues]
        except EOFError:
            return
        channel.send_bytes(pack(request_id, grade_with(grader, prompt, text)))


class _Server:
    def __init__(self, client: Connection, grader: Grader, *, workers: int, timeout_s: float) -> None:
        self._client = client
        self._grader = grader
        self._timeout_s = timeout_s
        self._queue: deque[bytes] = deque()
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(self._fork())

    def _fork(self) -> _Worker:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Worker(pid=pid, channel=ours)
        code = 1
        try:
            # A worker that held others' channels open would hide their end from them.
            for channel in (ours, self._client, *(worker.channel for worker in self._workers)):
                if not channel.closed:
                    channel.close()
            _work(theirs, self._grader)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)

    def serve(self) -> None:
        """Until the client is gone."""
        while True:
            for worker in self._workers:
                if worker.request_id is None and self._queue:
                    self._assign(worker, self._queue.popleft())
            busy = {worker.channel: worker for worker in self._workers if worker.request_id is not None}
            next_deadline = min((worker.deadline for worker in busy.values()), default=None)
            limit = None if next_deadline is None else max(0.0, next_deadline - time.monotonic())
            for channel in wait([self._client, *busy], limit):
                if channel is self._client:
                    self._queue.append(self._client.recv_bytes())
                else:
                    self._finish(busy[channel])  # pyright: ignore[reportArgumentType]
            now = time.monotonic()
            for worker in self._workers:
                if worker.request_id is not None and worker.deadline <= now:
                    self._fail(worker, f"timeout: no reward within {self._timeout_s:g} s")

    def _assign(self, worker: _Worker, message: bytes) -> None:
        worker.request_id = int.from_bytes(message[:ID_BYTES])
        worker.deadline = time.monotonic() + self._timeout_s
        try:
            worker.channel.send_bytes(message)
        except OSError:
            # It ended while idle, through no fault of this answer.
            self._replace(worker)
            self._queue.appendleft(message)

    def _finish(self, worker: _Worker) -> None:
        try:
            message = worker.channel.recv_bytes()
        except (EOFError, OSError):
            self._fail(worker, "")
            return
        worker.request_id = None
        self._client.send_bytes(message)

    def _fail(self, worker: _Worker, failure: str) -> None:
        """Replace a worker and report its answer as a failed grading; `failure` "" means that it ended by itself."""
        assert worker.request_id is not None
        request_id = worker.request_id
        code = self._replace(worker)
        failure = failure or f"died: the scorer ended its process (exit code {code})"
        self._client.send_bytes(pack(request_id, Grade(reward=0.0, failure=failure)))

    def _replace(self, worker: _Worker) -> int:
        """Exit code of the old process, which is killed if it still runs."""
        os.kill(worker.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        worker.pid = REAPED
        worker.channel.close()
        fresh = self._fork()
        worker.pid, worker.channel, worker.request_id = fresh.pid, fresh.channel, None
        return code

    def kill_workers(self) -> None:
        """End what `_fork` started."""
        for worker in self._workers:
            if worker.pid != REAPED:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)


def main(client_fd: int) -> None:
    """Serve the process that holds the other end of `client_fd`."""
    os.dup2(2, 1)  # what scorers print must not mix with the run's own output
    client = Connection(client_fd)
    try:
        grader_bytes, workers, timeout_s = pickle.loads(client.recv_bytes())
        try:
            grader = pickle.loads(grader_bytes)
            grader.prepare()
        except Exception as error:  # noqa: BLE001 reported to the client, which raises it
            client.send_bytes(pack(0, f"{type(error).__name__}: {error}"))
            return
        gc.collect()
        gc.freeze()  # keeps the collector from touching, and so copying, the pages that workers share
        server = _Server(client, grader, workers=workers, timeout_s=timeout_s)
        try:
            client.send_bytes(pack(0, ""))
            server.serve()
        finally:
            server.kill_workers()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the client closed or died: nobody waits for an answer
