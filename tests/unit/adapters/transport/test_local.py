"""The two ends of the shared-memory way in two threads; processes that die are in tests/parallel."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from miles_k3.adapters.store import AdapterStore
from miles_k3.adapters.transport.local import Offer, fetch, receive, send
from miles_k3.adapters.transport.slots import HostSlots
from miles_k3.adapters.transport.stream import BUCKETS_ALIVE, Outgoing
from miles_k3.errors import AdapterError, TransportError

BUCKET = 1000


def memfds() -> int:
    """Anonymous files that this process holds."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += "memfd:miles-k3" in str(link.readlink())
        except FileNotFoundError:  # the listing's own
            continue
    return found


def handed_over(update, *, bucket_bytes=BUCKET):
    with Offer(update, to="engine 0", bucket_bytes=bucket_bytes, timeout_s=10) as offer, ThreadPoolExecutor() as pool:
        served = pool.submit(offer.serve)
        found = fetch(offer.address, source="rank 0", timeout_s=10)
        served.result()
    return found


def test_an_update_arrives_whole_and_nothing_stays_behind(new_update):
    before = memfds()
    for version in range(3):
        update = new_update(version)
        found = handed_over(update)
        assert found.sha256 == update.sha256
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in update.tensors.items())
    assert memfds() == before


def test_what_arrived_can_be_loaded_and_a_wrong_one_leaves_the_version(config, new_update):
    store = AdapterStore(config, max_rank=4, dtype=torch.float32)
    store.load(handed_over(new_update(0)))
    store.load(handed_over(new_update(1)))
    with pytest.raises(AdapterError, match="expected to be v2"):
        store.load(handed_over(new_update(7)))
    assert store.current_version == 1


class Faulty:
    """A connection whose buckets go wrong at `at`: dropped, doubled, out of order, damaged, or cut off."""

    def __init__(self, connection: Connection, slots: HostSlots, fault: str, at: int = 3) -> None:
        self.connection, self.slots, self.fault, self.at = connection, slots, fault, at
        self.kept: tuple[str, int] | None = None

    def send(self, message: tuple) -> None:
        if message[0] == "bucket" and message[1] == self.at:
            if self.fault == "drop":
                return
            if self.fault == "double":
                self.connection.send(message)
            if self.fault == "damage":
                self.slots.buckets[self.at % BUCKETS_ALIVE][5] ^= 1
            if self.fault == "cut":
                self.connection.close()
                raise BrokenPipeError("cut")
            if self.fault == "reorder":
                self.kept = message
                return
        self.connection.send(message)
        if self.kept is not None:
            kept, self.kept = self.kept, None
            self.connection.send(kept)

    def __getattr__(self, name: str):
        return getattr(self.connection, name)


@pytest.mark.parametrize("fault", ["drop", "double", "reorder", "damage", "cut"])
def test_a_fault_on_the_way_is_an_error_at_both_ends(new_update, fault):
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    outgoing = Outgoing(new_update(0), BUCKET)
    slots = HostSlots.make(BUCKET)
    with ThreadPoolExecutor() as pool:
        arriving = pool.submit(receive, theirs, slots, source="rank 0", timeout_s=0.3)
        with pytest.raises((TransportError, ConnectionError)) as sent:
            send(Faulty(ours, slots, fault), outgoing, slots, to="engine 0", timeout_s=2)  # type: ignore[arg-type]
        with pytest.raises((TransportError, EOFError, ConnectionError)) as received:
            arriving.result()
    told = {
        "drop": "bucket 4 of .* came where 3 was due|no sign of life", "double": "bucket 3 of .* came where 4 was due",
        "reorder": "bucket 4 of .* came where 3 was due", "damage": "damaged on the way", "cut": "",
    }[fault]  # fmt: skip
    if told:
        assert received.match(told)
        assert sent.match("engine 0")
    ours.close()
    theirs.close()
    slots.close()


def test_at_most_two_buckets_are_alive(new_update):
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    slots = HostSlots.make(BUCKET)
    waiting, told = threading.Event(), []

    class Counting(Faulty):
        def send(self, message: tuple) -> None:
            told.append(message)
            self.connection.send(message)

        def poll(self, timeout: float) -> bool:
            waiting.set()
            return self.connection.poll(timeout)

    with ThreadPoolExecutor() as pool:
        outgoing = Outgoing(new_update(0), BUCKET)
        sending = pool.submit(send, Counting(ours, slots, ""), outgoing, slots, to="engine 0", timeout_s=10)  # type: ignore[arg-type]
        waiting.wait(10)
        assert [word for word, _ in told] == ["manifest", "bucket", "bucket"], "the third waits for the first's release"
        found = pool.submit(receive, theirs, slots, source="rank 0", timeout_s=10).result()
        sending.result()
    assert found.version == 0
    for connection in (ours, theirs):
        connection.close()
    slots.close()


def test_who_does_not_come_is_named(new_update):
    with (
        Offer(new_update(4), to="engine of rank 3", timeout_s=0.05) as offer,
        pytest.raises(TransportError, match=r"engine of rank 3 did not ask for adapter v4 within 0\.05 s"),
    ):
        offer.serve()
    with pytest.raises(TransportError, match="rank 3 no longer offers"):
        fetch(offer.address, source="rank 3", timeout_s=1)


def test_who_stops_in_the_midst_is_named(new_update):
    with Offer(new_update(4), to="engine of rank 3", bucket_bytes=BUCKET, timeout_s=0.2) as offer:
        silent = socket.socket(socket.AF_UNIX)
        silent.connect(f"\0{offer.address}")
        with pytest.raises(TransportError, match=r"engine of rank 3 gave no sign of life for 0\.2 s while bucket 0"):
            offer.serve()
        silent.close()


def test_an_offer_can_be_withdrawn(new_update):
    with Offer(new_update(0), to="engine 0", timeout_s=20) as offer, ThreadPoolExecutor() as pool:
        served = pool.submit(offer.serve)
        offer.withdraw()
        with pytest.raises(TransportError, match="was withdrawn"):
            served.result(timeout=10)
    offer.withdraw()


def test_another_users_process_is_refused(new_update, monkeypatch):
    with Offer(new_update(0), to="engine 0", timeout_s=5) as offer, ThreadPoolExecutor() as pool:
        monkeypatch.setattr("os.getuid", lambda: 12345)
        served = pool.submit(offer.serve)
        with pytest.raises(TransportError, match="runs as user"):
            fetch(offer.address, source="rank 0", timeout_s=5)
        with pytest.raises(TransportError, match="runs as user"):
            served.result()
