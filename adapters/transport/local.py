"""Between two processes of one host: buckets in memory that both map, words over a Unix socket.

The sender offers an update under an address; the receiver connects, and both end with the outcome. The socket's address
is abstract and the memory anonymous, so a process that is killed leaves nothing behind, and the other end sees at once
that it has gone.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from miles_k3.adapters.transport.slots import Slots, make_slots, take_slots
from miles_k3.adapters.transport.stream import BUCKETS_ALIVE, DEFAULT_BUCKET_BYTES, Incoming, Outgoing
from miles_k3.errors import TransportError
from miles_k3.types import AdapterUpdate

DEFAULT_TIMEOUT_S = 120.0  # between two signs of life of the other end
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Offer:
    """An update that one process of this host may fetch under `address`. Use as a context manager.

    `to` names the receiver in errors. The update's tensors must not change before `serve` has returned.
    """

    def __init__(
        self,
        update: AdapterUpdate,
        *,
        to: str,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._update, self._to, self._timeout_s = update, to, timeout_s
        self._bucket_bytes, self._withdrawn = bucket_bytes, False
        self.address = f"miles-k3-adapter-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.settimeout(timeout_s)
        self._listener.listen(1)

    def serve(self) -> None:
        """Wait for the receiver, and send; returns once it holds the whole. Raises TransportError otherwise."""
        version = self._update.version
        with ending(f"{self._to} ended while adapter v{version} was on its way"):
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                raise TransportError(
                    f"{self._to} did not ask for adapter v{version} within {self._timeout_s:g} s; it may hang"
                ) from None
            if self._withdrawn:
                accepted.close()
                raise TransportError(f"the offer of adapter v{version} to {self._to} was withdrawn")
            pid = _judge_peer(accepted, self._to)
            with Connection(accepted.detach()) as connection:
                outgoing = Outgoing(self._update, self._bucket_bytes)
                slots = make_slots(_device_of(self._update), outgoing.manifest.slot_bytes)
                try:
                    slots.give(connection, pid)
                    send(connection, outgoing, slots, to=self._to, timeout_s=self._timeout_s)
                finally:
                    slots.close()

    def withdraw(self) -> None:
        """End the waiting for the receiver, from any thread. Nothing where it has come already."""
        self._withdrawn = True
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:  # closed already: no wait
            knock.setblocking(False)
            knock.connect(f"\0{self.address}")

    def __enter__(self) -> Offer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def fetch(
    address: str, *, source: str, device: torch.device | str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S
) -> AdapterUpdate:
    """The update that `source` offers under `address`, into the memory of `device`: whole and as announced.

    Raises TransportError otherwise, and lets the sender know.
    """
    with ending(f"{source} ended while its adapter was on its way"):
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own.settimeout(timeout_s)
        try:
            own.connect(f"\0{address}")
        except (ConnectionRefusedError, TimeoutError) as error:
            own.close()
            raise TransportError(f"{source} no longer offers the adapter at {address!r}") from error
        own.settimeout(None)
        _judge_peer(own, source)
        with Connection(own.detach()) as connection:
            _wait(connection, source, "the adapter's memory", timeout_s)
            slots = take_slots(connection)
            try:
                return receive(connection, slots, source=source, device=device, timeout_s=timeout_s)
            finally:
                slots.close()


def send(connection: Connection, outgoing: Outgoing, slots: Slots, *, to: str, timeout_s: float) -> None:
    """The sender's part once both ends are connected and share `slots`."""
    manifest = outgoing.manifest
    connection.send(("manifest", manifest))

    def freed(index: int) -> None:
        awaited = f"bucket {index} of {manifest.num_buckets}"
        found = _expect(connection, "free", to, awaited, timeout_s)
        if found != index:
            raise TransportError(f"{to} has taken bucket {found} where {index} was due")

    for index in range(manifest.num_buckets):
        if index >= BUCKETS_ALIVE:
            freed(index - BUCKETS_ALIVE)
        outgoing.fill(index, slots.buckets[index % BUCKETS_ALIVE])
        connection.send(("bucket", index))
    for index in range(max(0, manifest.num_buckets - BUCKETS_ALIVE), manifest.num_buckets):
        freed(index)
    connection.send(("end", None))
    _expect(connection, "whole", to, "the check of the whole", timeout_s)


def receive(
    connection: Connection, slots: Slots, *, source: str, device: torch.device | str = "cpu", timeout_s: float
) -> AdapterUpdate:
    """The receiver's part once both ends are connected and share `slots`."""
    try:
        incoming = Incoming(_expect(connection, "manifest", source, "the announcement", timeout_s), device)
        while True:
            word, index = _next(connection, source, "the next bucket", timeout_s)
            if word == "end":
                update = incoming.finish()
                connection.send(("whole", None))
                return update
            incoming.take(index, slots.buckets[index % BUCKETS_ALIVE])
            connection.send(("free", index))
    except TransportError as error:
        with suppress(ConnectionError):  # the sender has gone: that is the error then
            connection.send(("failed", str(error)))
        raise


def _expect(connection: Connection, wanted: str, peer: str, awaited: str, timeout_s: float) -> Any:
    word, value = _next(connection, peer, awaited, timeout_s)
    if word != wanted:
        raise TransportError(
            f"{peer} said {word!r} where {wanted!r} was due for {awaited}; both ends must be of one version of miles-k3"
        )
    return value


def _next(connection: Connection, peer: str, awaited: str, timeout_s: float) -> tuple[str, Any]:
    _wait(connection, peer, awaited, timeout_s)
    word, value = connection.recv()
    if word == "failed":
        raise TransportError(f"{peer}: {value}")
    return word, value


def _wait(connection: Connection, peer: str, awaited: str, timeout_s: float) -> None:
    if not connection.poll(timeout_s):
        raise TransportError(f"{peer} gave no sign of life for {timeout_s:g} s while {awaited} was awaited")


@contextmanager
def ending(text: str) -> Iterator[None]:
    """The other end's going away, told as `text`."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise TransportError(f"{text}; the version before stays") from error


def _judge_peer(connected: socket.socket, peer: str) -> int:
    """The other end's process id. Raises TransportError when it belongs to another user: its words are unpickled."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        connected.close()
        raise TransportError(f"{peer} runs as user {uid}, this process as {os.getuid()}; expected the same user")
    return pid


def _device_of(update: AdapterUpdate) -> torch.device:
    """The tensors' common device; the host where they have none in common."""
    devices = {tensor.device for tensor in update.tensors.values()}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")
