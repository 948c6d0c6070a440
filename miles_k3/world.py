"""The processes of one run: who this one is, and the few words they exchange on the host.

`torchrun` starts them and says who is who in environment variables; without it there is one. Device tensors travel
through megatron's groups, not here.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from miles_k3.errors import LaunchError, MilesError

T = TypeVar("T")
_TIMEOUT = timedelta(hours=2)  # a rank may grade or checkpoint for long while the others wait
PEER_LOST = (
    f"another process of this run has ended, or did not answer within {_TIMEOUT // timedelta(hours=1)} hours, so the "
    "run ends; its own message, or the launcher's report, says why"
)
_store: Any = None  # the launcher's key-value store, which outlives a rank that ends
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
LAUNCHER = "MILES_K3_LAUNCHER"  # what started the ranks, where it was not torchrun
TORCHRUN = "torchrun"


class PeerLostError(LaunchError):
    """Another process of the run has ended, so this one can't go on; what happened is that one's to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Rank `rank` of `size` processes; `local_rank` of `local_size` on this host; `launcher` started them.

    The verbs but `share` are collective: every rank calls the same ones in the same order. They raise PeerLostError
    when another rank has ended.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = TORCHRUN

    @property
    def first(self) -> bool:
        """Whether this process writes the run's files and speaks to the terminal."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank. Values are pickled: keep them on the host."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[T] = [value] * self.size
        _exchange(lambda: dist.all_gather_object(found, value))
        return found

    def broadcast(self, value: T, source: int = 0) -> T:
        """Rank `source`'s value on every rank."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        _exchange(lambda: dist.broadcast_object_list(box, src=source))
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        return any(self.gather(bool(flag)))

    def wait(self) -> None:
        """Until every rank has come here."""
        self.gather(None)

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank. A MilesError or OSError of any rank is raised on all of them.

        `work` must not talk to other ranks, unless all of them get there and fail alike: one that failed alone would
        leave them waiting.
        """
        if self.size == 1:
            return [work()]
        return unpack(self.gather(_attempt(work)))

    def together(self, work: Callable[[], T]) -> T:
        """What `work` gives here, once it has come through on every rank; values stay where they are. See `everywhere`
        for errors."""
        if self.size == 1:
            return work()
        outcome = _attempt(work)
        unpack(self.gather(outcome if isinstance(outcome, _Failed) else None))
        assert not isinstance(outcome, _Failed)
        return outcome

    def once(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, which alone does it; its MilesError or OSError is raised on every rank."""
        if self.size == 1:
            return work()
        return unpack([self.broadcast(_attempt(work) if self.first else None)])[0]

    def board(self, name: str) -> Board:
        """Where ranks tell each other something without waiting; the same `name` on all of them, once a run."""
        return Board(name, self.rank, self.size)

    def share(self, count: int) -> range:
        """This rank's part of `count` things: contiguous, sizes differ by one at most."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)


class Board:
    """One value a rank, told at any time and from any thread; it is no collective. Kept in the launcher's store."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        # A name may come again, as a checkpoint of a step that was written before does.
        _boards[name] = number = _boards.get(name, 0) + 1
        self._keys = [f"miles-k3/board/{name}/{number}/{r}" for r in range(size)]
        self._own, self._rank = None, rank

    @property
    def first(self) -> bool:
        return self._rank == 0

    def tell(self, value: Any) -> None:
        """This rank's value, of what JSON holds."""
        self._own = value
        if len(self._keys) > 1:
            assert _store is not None, "join_world first"
            _store.set(self._keys[self._rank], json.dumps(value))

    def told(self) -> list[Any] | None:
        """Every rank's value, in the order of ranks; None while one is missing."""
        if len(self._keys) == 1:
            return None if self._own is None else [self._own]
        assert _store is not None, "join_world first"
        if not _store.check(self._keys):
            return None
        return [json.loads(_store.get(key)) for key in self._keys]


_boards: dict[str, int] = {}
ALONE = World()  # one process


@dataclass(frozen=True, slots=True)
class _Failed:
    error: MilesError | OSError


def _attempt[R](work: Callable[[], R]) -> R | _Failed:
    try:
        return work()
    except PeerLostError:
        raise
    except (MilesError, OSError) as error:
        return _Failed(error)


def unpack(outcomes: Sequence[Any]) -> list[Any]:
    """The ranks' values; raises the lowest failing rank's error, which names the rank where others had none."""
    failed = {rank: outcome.error for rank, outcome in enumerate(outcomes) if isinstance(outcome, _Failed)}
    if not failed:
        return list(outcomes)
    rank = min(failed)
    if len(failed) < len(outcomes):
        failed[rank].add_note(f"rank {rank}")
    raise failed[rank]


def _exchange(call: Callable[[], None]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise PeerLostError(PEER_LOST) from error


def world_of(environ: Mapping[str, str] = os.environ) -> World:
    """What the launcher's variables say. Raises LaunchError when they are incomplete or contradict one another."""
    given = {name: environ[name] for name in _NAMES if name in environ}
    launcher = environ.get(LAUNCHER, TORCHRUN)
    if not given or given.get("WORLD_SIZE") == "1":
        return World(launcher=launcher)
    try:
        rank, size, local = (int(given[name]) for name in _NAMES)
        local_size = int(environ.get("LOCAL_WORLD_SIZE", size))  # torchrun says it; `join_world` counts otherwise
    except (KeyError, ValueError):
        raise LaunchError(
            f"the launcher set {given}; expected whole numbers in all of {', '.join(_NAMES)}: start with "
            "torchrun --nproc-per-node N -m miles_k3 train RECIPE"
        ) from None
    if not 0 <= rank < size:
        raise LaunchError(f"RANK is {rank} of WORLD_SIZE {size}; start with torchrun, which numbers the processes")
    return World(rank=rank, size=size, local_rank=local, local_size=local_size, launcher=launcher)


def join_world(environ: Mapping[str, str] = os.environ) -> World:
    """`world_of`, and the processes' common group where there are several: gloo for the host, NCCL for CUDA tensors."""
    global _store
    world = world_of(environ)
    if world.size == 1:
        return world
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        _store = _meet(world)
        dist.init_process_group(backend, store=_store, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)
        atexit.register(leave_world)
    if "LOCAL_WORLD_SIZE" not in environ:
        here = socket.gethostname()
        world = replace(world, local_size=world.gather(here).count(here))
    return world


def _meet(world: World) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, which every rank reaches."""
    from torch.distributed.rendezvous import rendezvous

    try:
        return next(rendezvous("env://", world.rank, world.size, timeout=_TIMEOUT))[0]
    except (ValueError, RuntimeError) as error:
        raise LaunchError(
            f"the ranks can't meet at MASTER_ADDR {os.environ.get('MASTER_ADDR')}, MASTER_PORT "
            f"{os.environ.get('MASTER_PORT')} ({str(error).splitlines()[0]}); expected rank 0's host and a free port "
            "of it, as torchrun sets them"
        ) from None


def leave_world() -> None:
    """End the group; NCCL warns of leaked resources when a process ends without it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def first_to_say(text: str) -> bool:
    """Whether no other rank has asked this before: of ranks that end for the same reason, one tells it."""
    if _store is None:
        return True
    # The launcher ends the other ranks as soon as the first has ended; none may go between claiming and saying.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        return _store.add(f"miles-k3/said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
    except RuntimeError:  # the store has gone with the rank that held it
        return True


def end_alone(main: Callable[[], None]) -> None:
    """Run `main` as one process of several: a failure ends this one at once, whatever the others wait for.

    The usual way out would tear the groups down, which can wait for ranks that are waiting for this one.
    """
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:  # noqa: BLE001 printed, and the process ends with it
        code = 1
        if not (isinstance(error, RuntimeError) and " by peer" in str(error)):  # gloo's words in the midst of a step
            traceback.print_exc()
        elif first_to_say(text := f"error: {PEER_LOST}"):
            print(text, file=sys.stderr)
    if code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
