"""Adapters between processes: whole at the far end, nothing left by one that is killed, errors that name ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from helpers.adapter_senders import broadcast_between, facts, fetch_and_die, fetch_and_tell, random_update
from helpers.ranks import environment
from torch._C._distributed_c10d import TCPStore

from miles_k3.adapters.transport.local import Offer
from miles_k3.errors import TransportError
from miles_k3.types import AdapterUpdate

pytestmark = pytest.mark.parallel
NAMES = ["rank 0", "engine 1", "engine 2"]
SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def child(target: Any, *arguments: Any) -> Iterator[Connection]:
    """A process of `target(*arguments, pipe)` and the pipe to it; ended afterwards."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)
    with environment({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}):
        process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def offered(update: AdapterUpdate) -> Offer:
    return Offer(update, to="engine 0", bucket_bytes=1000, timeout_s=60)


def named_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "miles" in path.name or path.name.startswith("psm_")}


def test_another_process_of_this_host_gets_the_whole() -> None:
    update = random_update(2)
    with offered(update) as offer, child(fetch_and_tell, offer.address) as pipe:
        offer.serve()
        assert pipe.recv() == (2, update.sha256, [])


def test_a_receiver_that_is_killed_leaves_nothing_behind() -> None:
    before = named_shared_memory()
    update = random_update(2)

    with offered(update) as offer, child(fetch_and_die, offer.address) as pipe:
        with pytest.raises(TransportError, match="engine 0 ended while adapter v2 was on its way"):
            offer.serve()
        with pytest.raises(EOFError):
            pipe.recv()
    assert named_shared_memory() == before
    with offered(update) as offer, child(fetch_and_tell, offer.address) as pipe:
        offer.serve()  # the next one gets it
        assert pipe.recv() == facts(update)


def told_by_ranks(case: dict[str, Any]) -> list[list[Any]]:
    """What each rank of a broadcast sent."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told: list[list[Any]] = []
    with (
        child(broadcast_between, 0, store.port, NAMES, case) as first,
        child(broadcast_between, 1, store.port, NAMES, case) as second,
        child(broadcast_between, 2, store.port, NAMES, case) as third,
    ):
        for pipe in (first, second, third):
            words: list[Any] = []
            told.append(words)
            try:
                while True:
                    words.append(pipe.recv())
            except EOFError:
                continue
    return told


@pytest.mark.parametrize("bucket_bytes", [1000, 1 << 20])
def test_a_broadcast_brings_the_whole_to_every_rank(bucket_bytes: int) -> None:
    expected = [facts(random_update(version, seed=version)) for version in range(3)]
    assert told_by_ranks({"bucket_bytes": bucket_bytes, "timeout_s": 60, "hand_overs": 3}) == [expected] * 3


@pytest.mark.parametrize("dies", [1, 2])
def test_a_rank_that_is_killed_in_a_broadcast_is_named(dies: int) -> None:
    told = told_by_ranks({"bucket_bytes": 1000, "timeout_s": 5, "dies": dies, "at": 3})
    assert told[dies] == []
    (source,) = told[0]
    assert f"waited 5 s for engine {dies} to take bucket" in source
    (other,) = told[3 - dies]
    assert "did not come through" in other or "rank 0" in other


def test_nobody_uses_what_one_of_them_found_damaged() -> None:
    told = told_by_ranks({"bucket_bytes": 1000, "timeout_s": 60, "damaged": True})
    assert all("engine 1: adapter v0 arrived with sha256" in words[0] for words in told)
