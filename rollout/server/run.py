"""The process: a socket before anything else, uvicorn around the application, and an end that finishes what runs."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from miles_k3.errors import LaunchError
from miles_k3.rollout.server.app import make_app
from miles_k3.rollout.server.state import Server

log = logging.getLogger(__name__)

BACKLOG = 4096
# Of each connection. The system's own choice may grow to megabytes, for each reader that doesn't read.
SEND_BUFFER_BYTES = 1 << 16
KEEP_ALIVE_S = 30
CLOSING_S = 5  # for connections to close once every answer has been sent or ended


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises LaunchError when the address can't be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as e:
        raise LaunchError(f"--host {host}: {e}; name an address of this machine, such as 127.0.0.1") from e
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # its connections take it over
        bound.bind(address)
    except OSError as e:
        bound.close()
        if e.errno == errno.EADDRINUSE:
            raise LaunchError(f"port {port} of {host} is in use; choose another --port, or 0 for a free one") from e
        raise LaunchError(
            f"can't listen on port {port} of {host}: {e.strerror}; choose another --host or --port"
        ) from e
    return bound


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(
    server: Server, bound: socket.socket, *, drain_s: float, started: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain: new requests get 503, running ones have `drain_s` seconds to finish,
    and what is left is aborted. A second signal aborts at once."""
    _raise_open_files()
    process = Process(server, drain_s=drain_s, started=started)
    try:
        await process.serve(sockets=[bound])
    finally:
        server.chat.close()
        await server.backend.close()


class Process(uvicorn.Server):
    """uvicorn stops listening at a signal; this one drains first, and listens meanwhile to say so."""

    def __init__(self, server: Server, *, drain_s: float, started: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            make_app(server), log_config=None, access_log=False, backlog=BACKLOG, lifespan="off", ws="none",
            server_header=False, timeout_graceful_shutdown=CLOSING_S, timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        super().__init__(config)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._server, self._drain_s, self._on_started = server, drain_s, started
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Data that a reader leaves unread for so long ends its connection, also where the server has closed it.
        patience_ms = int(2000 * self._server.options.reader_timeout_s)
        for bound in sockets or ():
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        self._server.ready = True
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.drain, signal.Signals(sig).name)

    def drain(self, name: str) -> None:
        """What a signal of that name does. On the server's loop."""
        if self._draining is None:
            log.info("%s: %d answers to finish, at most %g s", name, self._server.gate.in_flight, self._drain_s)
            self._draining = asyncio.ensure_future(self._drain())
        else:
            log.info("%s again: ending what runs", name)
            self._hurry.set()

    async def _drain(self) -> None:
        gate = self._server.gate
        gate.draining = True
        idle, hurry = asyncio.ensure_future(gate.idle()), asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({idle, hurry}, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
            if gate.in_flight:
                log.warning("%d answers did not finish and are ended", gate.in_flight)
                for flight in list(self._server.flights):
                    flight.abort()
                await asyncio.wait({idle}, timeout=CLOSING_S)
        finally:
            idle.cancel()
            hurry.cancel()
            self.should_exit = True


def _raise_open_files() -> None:
    """Each connection takes a file; shells often allow 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
