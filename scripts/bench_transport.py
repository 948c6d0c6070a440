"""How fast an adapter goes to another process, beside a plain copy of the same bytes, and the memory it takes.

    python scripts/bench_transport.py [--gib 1] [--bucket-mib 64] [--repeats 5]

Prints a markdown table. `moved` is without the hash of the whole, which the receiver always computes: it is replaced by
nothing for this measurement. Peak memory is what each process's peak resident size (VmHWM) grew by, less the receiver's
own tensors; the buckets are shared pages and count in both.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from miles_k3.adapters.transport import broadcast, local, stream
from miles_k3.adapters.update import make_update
from miles_k3.types import AdapterConfig, AdapterUpdate

MIB = 1 << 20
WAYS = ("shared memory", "broadcast over gloo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    update = _update(options.gib)
    num_bytes = sum(t.nbytes for t in update.tensors.values())
    print(f"{num_bytes / 2**30:.2f} GiB in {len(update.tensors)} tensors, buckets of {options.bucket_mib} MiB\n")
    print("| way | GB/s, median | slowest, fastest | extra peak memory, sender / receiver |")
    print("|---|---|---|---|")
    for fresh in (False, True):
        where = "fresh memory" if fresh else "memory that is there"
        _row(f"plain copy in one process, into {where}", num_bytes, _time_copies(update, options.repeats, fresh), "")
    _row("the update's hash alone", num_bytes, _time_hashes(update, options.repeats), "")
    _row("SHA-256 of the bytes, for comparison", num_bytes, _time_sha256(update, options.repeats), "")
    for way in WAYS:
        for hashed in (False, True):
            seconds, sender, receiver = _time_way(way, update, options.bucket_mib * MIB, options.repeats, hashed)
            memory = f"{sender / MIB:.0f} / {(receiver - num_bytes) / MIB:.0f} MiB"
            _row(f"{way}, {'verified' if hashed else 'moved'}", num_bytes, seconds, memory)


def _update(gib: float) -> AdapterUpdate:
    """Factors as K3 has them: many small ones and some of tens of megabytes."""
    shapes = [(32, 7168)] * 40 + [(7168, 32)] * 40 + [(112, 3072, 32)] * 8
    tensors, left, index = {}, gib * 2**30, 0
    while left > 0:
        tensors[f"t{index}"] = torch.randn(shapes[index % len(shapes)], dtype=torch.float32).to(torch.bfloat16)
        left -= tensors[f"t{index}"].nbytes
        index += 1
    return make_update(0, AdapterConfig(rank=32, alpha=64.0), tensors)


def _row(name: str, num_bytes: int, seconds: list[float], memory: str) -> None:
    rates = sorted(num_bytes / s / 1e9 for s in seconds)
    print(f"| {name} | {statistics.median(rates):.2f} | {rates[0]:.2f}, {rates[-1]:.2f} | {memory} |", flush=True)


def _timed(call: Callable[[], Any], repeats: int) -> list[float]:
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def _time_copies(update: AdapterUpdate, repeats: int, fresh: bool) -> list[float]:
    """Fresh memory costs page faults; it is one piece, so large that the allocator asks the system for it each time."""
    whole = stream.Stream(list(update.tensors.values()))
    target = torch.empty(len(whole), dtype=torch.uint8)
    return _timed(lambda: whole.read(0, torch.empty_like(target) if fresh else target), repeats)


def _time_hashes(update: AdapterUpdate, repeats: int) -> list[float]:
    return _timed(lambda: stream.adapter_sha256(update.version, update.config, update.tensors), repeats)


def _time_sha256(update: AdapterUpdate, repeats: int) -> list[float]:
    arrays = [t.view(torch.uint8).numpy() for t in update.tensors.values()]
    return _timed(lambda: [hashlib.sha256(array).digest() for array in arrays], repeats)


def _time_way(
    way: str, update: AdapterUpdate, bucket_bytes: int, repeats: int, hashed: bool
) -> tuple[list[float], int, int]:
    """Seconds of each hand-over after the first, and the growth of both processes' peaks in bytes."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = context.Process(target=_receiver, args=(way, store.port, hashed, theirs), daemon=True)
    process.start()
    ours.recv()
    group = _group(store, 0) if way == WAYS[1] else None

    def hand_over(update: AdapterUpdate = update, *, watched: bool = False) -> int:
        if group is not None:
            ours.send(("", watched))
            broadcast.send(update, group, bucket_bytes=bucket_bytes)
            return ours.recv()
        with local.Offer(update, to="receiver", bucket_bytes=bucket_bytes) as offer:
            ours.send((offer.address, watched))
            offer.serve()
        return ours.recv()

    hand_over(_update(0.001))  # brings in code and connections, and leaves no large free memory to the allocator
    before = _reset_peak()
    receiver = hand_over(watched=True)
    sender = _peak() - before
    seconds = _timed(hand_over, repeats)
    ours.send(None)
    process.join()
    return seconds, sender, receiver


def _receiver(way: str, port: int, hashed: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    if not hashed:
        stream._refuse_other = lambda manifest, tensors: None
    pipe.send(None)
    group = _group(TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60)), 1) if way == WAYS[1] else None
    while (order := pipe.recv()) is not None:
        address, watched = order
        before = _reset_peak() if watched else 0
        update = broadcast.receive(group) if group is not None else local.fetch(address, source="sender")
        pipe.send(_peak() - before)
        del update


def _group(store: TCPStore, rank: int) -> broadcast.BroadcastGroup:
    return broadcast.BroadcastGroup(store, name="bench", rank=rank, names=["sender", "receiver"], timeout_s=60)


def _reset_peak() -> int:
    """Resident bytes now, without what the allocator keeps for later; the peak counts from here."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
