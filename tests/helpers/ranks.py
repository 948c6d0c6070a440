"""A pool of worker processes that serve, call after call, as the ranks of one world after another.

Importing megatron costs seconds of CPU, so the workers are forked from a server that has imported it once, and live for
a whole test session. A call that fails or hangs costs its pool: the workers are ended and new ones forked, so nothing
that it left behind reaches the next test.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CALL_TIMEOUT_S = 90.0  # below pytest's own limit, so that the stacks of hanging ranks are shown
_GRACE_S = 2.0  # after a rank's failure: what do its peers say?
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_CPU_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}


class RankError(AssertionError):
    """A rank raised, died or never answered; `rank` is the first that did."""

    def __init__(self, rank: int, text: str):
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.text = rank, text


@dataclass(frozen=True, slots=True)
class _Call:
    rank: int
    size: int
    port: int
    timeout_s: float
    fn: Callable[..., Any]
    args: tuple[Any, ...]


class _Worker:
    """One process, the pipe to it, and the file where its stacks go when it hangs."""

    def __init__(self, cuda: bool, index: int):
        # CUDA doesn't survive a fork, and asking for devices at import may have started it.
        context = multiprocessing.get_context("spawn") if cuda else multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["helpers.ranks_preload"])
        handle, name = tempfile.mkstemp(prefix="ranks_", suffix=f"_{index}.txt")
        os.close(handle)
        self.stacks = Path(name)
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, name), daemon=True)
        # Python 3.12 starts the fork server without the caller's sys.path.
        with environment(
            {**_ENVIRONMENT, **({} if cuda else _CPU_ENVIRONMENT), "PYTHONPATH": os.pathsep.join(sys.path)}
        ):
            self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stacks.unlink(missing_ok=True)


class RankPool:
    """`size` workers. `cuda`: worker i may use devices; else they see none."""

    def __init__(self, size: int = 4, *, cuda: bool = False):
        self.size, self.cuda = size, cuda
        self._workers: list[_Worker] = []

    def run(self, size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """`fn(rank, size, *args)` on `size` ranks of a fresh world; their results by rank.

        `fn` is found by its module's name, so it lives in `helpers`. Raises RankError with the traceback of the rank
        that failed first, and what its peers said then.
        """
        assert size <= self.size, f"the pool has {self.size} workers, not {size}"
        try:
            self._start()
            port = _free_port()
            for rank, worker in enumerate(self._workers[:size]):
                worker.connection.send_bytes(pickle.dumps(_Call(rank, size, port, timeout_s, fn, args)))
            return self._results(size, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers; the next call starts new ones."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _start(self) -> None:
        if not self._workers:
            self._workers = [_Worker(self.cuda, i) for i in range(self.size)]
            for worker in self._workers:  # the imports of the first ones don't count as the call's time
                worker.connection.recv_bytes()

    def _results(self, size: int, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s + 2.0  # the workers write their stacks at timeout_s
        while len(results) + len(errors) < size:
            waiting = {self._workers[r].connection: r for r in range(size) if r not in results and r not in errors}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if not errors:
                    errors = {rank: self._hanging(rank, timeout_s) for rank in waiting.values()}
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                good, value = _receive(connection)
                (results if good else errors)[rank] = value
                if not good:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if errors:
            first, *others = errors
            raise RankError(first, "\n\n".join([errors[first], *(f"rank {r}: {errors[r]}" for r in others)]))
        return [results[rank] for rank in range(size)]

    def _hanging(self, rank: int, timeout_s: float) -> str:
        return f"no answer within {timeout_s:g} s\n{self._workers[rank].stacks.read_text()}"


def _receive(connection: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return False, "the process died"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """os.environ with `changes`, then as before."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _serve(connection: Connection, stacks: str) -> None:
    """The life of a worker: answer calls until the parent goes or a call fails."""
    import torch

    torch.set_num_threads(1)
    os.nice(15)  # four ranks must not slow what another test worker times or samples
    connection.send_bytes(b"ready")
    with Path(stacks).open("w") as file:
        while True:
            try:
                call: _Call = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            faulthandler.dump_traceback_later(call.timeout_s, file=file)
            try:
                answer = True, _in_world(call)
            except BaseException:  # noqa: BLE001  (the parent raises it, whatever it is)
                answer = False, traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(pickle.dumps(answer))


def _in_world(call: _Call) -> Any:
    """Join the others, run, and leave nothing of the world behind. An error undoes nothing: that could hang."""
    import torch.distributed as dist

    from miles_k3.trainer.mcore import parallel_state
    from miles_k3.world import join_world, leave_world

    places = {"RANK": call.rank, "LOCAL_RANK": call.rank, "WORLD_SIZE": call.size, "MASTER_PORT": call.port}
    with environment({**{name: str(value) for name, value in places.items()}, "MASTER_ADDR": "127.0.0.1"}):
        join_world()
        result = call.fn(call.rank, call.size, *call.args)
        gc.collect()  # trainers hold groups in reference cycles
        if dist.is_initialized():
            dist.barrier()
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        leave_world()
    return result
