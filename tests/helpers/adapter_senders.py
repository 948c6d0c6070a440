"""Both ends of an adapter's way between processes, as functions that child processes can import."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from miles_k3.adapters.transport import broadcast
from miles_k3.adapters.transport.local import fetch
from miles_k3.adapters.transport.stream import Incoming
from miles_k3.adapters.update import adapter_sha256, make_update
from miles_k3.errors import TransportError
from miles_k3.types import AdapterConfig, AdapterUpdate

CONFIG = AdapterConfig(rank=2, alpha=4.0)


def random_update(version: int, num_bytes: int = 40_000, seed: int = 0) -> AdapterUpdate:
    """Float32 and bfloat16 tensors of uneven sizes, about `num_bytes` together."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    left, index = num_bytes, 0
    while left > 0:
        rows, dtype = 1 + (index * 7) % 13, (torch.float32, torch.bfloat16)[index % 2]
        tensors[f"t{index}"] = torch.randn(rows, max(1, num_bytes // 90), generator=generator).to(dtype)
        left -= tensors[f"t{index}"].nbytes
        index += 1
    return make_update(version, CONFIG, tensors)


def facts(update: AdapterUpdate) -> tuple[int, str, list[str]]:
    """Version, hash of what is there, and names of tensors that do not own their memory."""
    borrowed = [name for name, t in update.tensors.items() if t.untyped_storage().nbytes() != t.nbytes]
    return update.version, adapter_sha256(update.version, update.config, update.tensors), borrowed


def fetch_and_tell(address: str, pipe: Any) -> None:
    """Fetch; send `facts` or the error's words."""
    try:
        pipe.send(facts(fetch(address, source="rank 0", timeout_s=20)))
    except TransportError as error:
        pipe.send(str(error))


def fetch_all_on_cuda(pipe: Any) -> None:
    """Fetch into the device's memory from each address that comes, until None; send `facts` and the devices."""
    while (address := pipe.recv()) is not None:
        update = fetch(address, source="rank 0", device="cuda", timeout_s=60)
        pipe.send((facts(update), {t.device.type for t in update.tensors.values()}))


def fetch_and_die(address: str, pipe: Any) -> None:
    """Fetch, and be killed in the midst of it."""
    _die_at(3)
    fetch_and_tell(address, pipe)


def broadcast_between(rank: int, port: int, names: list[str], case: dict[str, Any], pipe: Any) -> None:
    """One rank of a group of its own; sends what it got from each hand-over, or the error's words."""
    torch.set_num_threads(1)
    if rank == case.get("dies", -1):
        _die_at(case["at"])
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    group = broadcast.BroadcastGroup(store, name="test", rank=rank, names=names, timeout_s=case["timeout_s"])
    for version in range(case.get("hand_overs", 1)):
        try:
            if rank == broadcast.SOURCE:
                update = random_update(version, seed=version)
                if case.get("damaged"):
                    object.__setattr__(update, "sha256", "0" * 64)
                broadcast.send(update, group, bucket_bytes=case["bucket_bytes"])
            else:
                update = broadcast.receive(group)
            pipe.send(facts(update))
        except TransportError as error:
            pipe.send(str(error))
            break
    group.close()


def _die_at(bucket: int) -> None:
    """Have this process killed when it takes that bucket."""
    take = Incoming.take

    def dying(self: Incoming, index: int, slot: torch.Tensor) -> None:
        if index == bucket:
            os.kill(os.getpid(), signal.SIGKILL)
        take(self, index, slot)

    Incoming.take = dying
