"""Between hosts: buckets broadcast over a torch.distributed group, words over its key-value store.

The source fills the next bucket only when every receiver has taken the one before the last, and no receiver uses
anything before all of them hold the whole. What is missing when time is up is read from the store, so an error names
the rank. After an error the group is of no more use: close it and make another.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from miles_k3.adapters.transport.stream import BUCKETS_ALIVE, DEFAULT_BUCKET_BYTES, Incoming, Manifest, Outgoing
from miles_k3.errors import TransportError
from miles_k3.types import AdapterUpdate

SOURCE = 0  # the rank that sends


class BroadcastGroup:
    """Rank 0, which sends, and the receivers 1..size-1. Nothing to do with the process's default group.

    `store` is one that all of them reach (a `TCPStore`); its keys begin with `name`, which no other group of the store
    has. `names[r]` is what errors call rank r. `device` is where buckets live: gloo on the CPU, NCCL on a GPU.
    Making one is collective.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        rank: int,
        names: Sequence[str],
        device: torch.device | str = "cpu",
        timeout_s: float,
    ) -> None:
        self.rank, self.names, self.device, self.timeout_s = rank, list(names), torch.device(device), timeout_s
        self.store = PrefixStore(name, store)
        self._hand_overs = 0
        self.meet("joined")
        self._backend = _make_backend(self.device, PrefixStore("group", self.store), rank, len(names), timeout_s)

    @property
    def receivers(self) -> range:
        return range(1, len(self.names))

    def meet(self, word: str) -> None:
        """Until every rank has come here. Raises TransportError that names who has not."""
        self.store.set(f"{word}/{self.rank}", "")
        everyone = range(len(self.names))
        self.wait_for({r: f"{word}/{r}" for r in everyone}, "to join")

    def wait_for(self, keys: dict[int, str], awaited: str) -> None:
        """Until the ranks have set their keys. Raises TransportError that names those which have not in time."""
        try:
            self.store.wait(list(keys.values()), timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            late = [self.names[r] for r, key in keys.items() if not self._is_set(key)]
            raise TransportError(
                f"waited {self.timeout_s:g} s for {', '.join(late) or 'the store'} {awaited}; it has ended or hangs"
            ) from error

    def _is_set(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError:  # the store has gone with its host, which is then the one that is late
            return False

    def next_prefix(self) -> str:
        """Where the keys of the next hand-over are; the same on every rank."""
        self._hand_overs += 1
        return f"update/{self._hand_overs}"

    def broadcast(self, bucket: torch.Tensor) -> None:
        """`bucket` of the source, in everyone's; returns when it is there. RuntimeError where a peer has ended."""
        options = dist.BroadcastOptions()
        options.rootRank = SOURCE
        self._backend.broadcast([bucket], options).wait(timedelta(seconds=self.timeout_s))
        if bucket.is_cuda:  # NCCL's wait is the stream's, not ours
            torch.cuda.current_stream(bucket.device).synchronize()

    def close(self) -> None:
        """End the connections; peers in the midst of a hand-over see an error."""
        self._backend.shutdown()


def send(update: AdapterUpdate, group: BroadcastGroup, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
    """Rank 0's part: returns once every receiver holds the whole. Raises TransportError; no receiver uses it then."""
    outgoing, prefix = Outgoing(update, bucket_bytes), group.next_prefix()
    manifest = outgoing.manifest
    group.store.set(f"{prefix}/manifest", pickle.dumps(manifest))  # pyright: ignore[reportArgumentType]
    slots = _slots(manifest, group.device)
    for index in range(manifest.num_buckets):
        if index >= BUCKETS_ALIVE:
            _await_taken(group, prefix, index - BUCKETS_ALIVE, manifest)
        bucket = outgoing.fill(index, slots[index % BUCKETS_ALIVE])
        try:
            group.broadcast(bucket)
        except RuntimeError as error:
            group.close()  # whoever still waits in this broadcast sees it end, and says so
            _await_taken(group, prefix, index, manifest)
            raise TransportError(f"{_bucket(manifest, index)} did not come through: {_first_line(error)}") from error
    ends = {r: f"{prefix}/end/{r}" for r in group.receivers}
    group.wait_for(ends, f"to check the whole of adapter v{manifest.version}")
    told = {group.names[r]: group.store.get(key).decode() for r, key in ends.items()}
    failed = [f"{name}: {text}" for name, text in told.items() if text]
    group.store.set(f"{prefix}/verdict", "\n".join(failed))
    group.wait_for({r: f"{prefix}/heard/{r}" for r in group.receivers}, "to hear that all have it")
    if failed:
        raise TransportError("\n".join(failed))


def receive(group: BroadcastGroup) -> AdapterUpdate:
    """A receiver's part: the update, once every receiver holds the whole of it. Raises TransportError."""
    prefix = group.next_prefix()
    group.wait_for({SOURCE: f"{prefix}/manifest"}, "to announce an adapter")
    manifest: Manifest = pickle.loads(group.store.get(f"{prefix}/manifest"))
    failure, incoming, update = "", None, None
    try:
        incoming = Incoming(manifest, group.device)
    except TransportError as error:
        failure = str(error)  # the others go on, and hear of it at the end
    slots = _slots(manifest, group.device)
    for index in range(manifest.num_buckets):
        bucket = slots[index % BUCKETS_ALIVE]
        try:
            group.broadcast(bucket[: manifest.bucket_length(index)])
            if incoming is not None:
                incoming.take(index, bucket)
        except RuntimeError as error:
            text = (
                f"{_bucket(manifest, index)} did not come through ({_first_line(error)}); {group.names[SOURCE]} knows"
            )
            raise TransportError(f"{text} who has ended, or has ended itself") from error
        finally:
            group.store.set(_taken(prefix, index, group.rank), "")
    try:
        update = None if incoming is None else incoming.finish()
    except TransportError as error:
        failure = str(error)
    group.store.set(f"{prefix}/end/{group.rank}", failure)
    group.wait_for({SOURCE: f"{prefix}/verdict"}, "to say that all have it")
    verdict = group.store.get(f"{prefix}/verdict").decode()
    group.store.set(f"{prefix}/heard/{group.rank}", "")
    if verdict or update is None:
        raise TransportError(verdict or failure)
    return update


def _await_taken(group: BroadcastGroup, prefix: str, index: int, manifest: Manifest) -> None:
    keys = {r: _taken(prefix, index, r) for r in group.receivers}
    group.wait_for(keys, f"to take {_bucket(manifest, index)}")
    for key in keys.values():
        group.store.delete_key(key)


def _taken(prefix: str, index: int, rank: int) -> str:
    return f"{prefix}/taken/{index}/{rank}"


def _bucket(manifest: Manifest, index: int) -> str:
    return f"bucket {index} of {manifest.num_buckets} of adapter v{manifest.version}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _slots(manifest: Manifest, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(manifest.slot_bytes, dtype=torch.uint8, device=device) for _ in range(BUCKETS_ALIVE)]


def _make_backend(device: torch.device, store: Store, rank: int, size: int, timeout_s: float) -> Any:
    if device.type == "cuda":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL as Backend  # builds for a CPU have none
    else:
        from torch.distributed.distributed_c10d import ProcessGroupGloo as Backend
    return Backend(store, rank, size, timedelta(seconds=timeout_s))  # pyright: ignore[reportArgumentType]
