"""Who may come in: a bounded number of sequences at once, and nobody new while the server drains."""

from __future__ import annotations

import asyncio
import math
import time

from miles_k3.rollout.server.errors import ApiError


class Gate:
    """Counts sequences in flight. `max_running` of them decode at once, `max_queue` more may wait.

    All methods belong to the server's event loop.
    """

    def __init__(self, *, max_running: int, max_queue: int) -> None:
        self.max_running, self.max_queue = max_running, max_queue
        self.in_flight = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_s = 1.0  # how long a sequence stays, lately

    def enter(self, num_sequences: int) -> Ticket:
        """Raises ApiError 503 while draining, 400 for a request that could never enter, 429 when the queue is full."""
        if self.draining:
            raise ApiError(503, "the server is shutting down; ask another one", code="draining", retry_after_s=30)
        room = self.max_running + self.max_queue
        if num_sequences > room:
            raise ApiError(
                400,
                f"the request asks for {num_sequences} answers at once; this server holds {room} "
                "(--max-running and --max-queue): ask for fewer",
                code="too_many_answers",
            )
        if self.in_flight + num_sequences > room:
            raise ApiError(
                429,
                f"{self.in_flight} answers run or wait and {room} may; try again later",
                code="queue_full",
                retry_after_s=self.retry_after_s(),
            )
        self.in_flight += num_sequences
        self._idle.clear()
        return Ticket(self, num_sequences)

    def retry_after_s(self) -> int:
        """About when a place will be free, from how long sequences stay lately; 1 to 60."""
        return min(60, max(1, math.ceil(self._mean_s * self.in_flight / self.max_running / 2)))

    def left(self, num_sequences: int, stayed_s: float) -> None:
        self.in_flight -= num_sequences
        self._mean_s += 0.1 * (stayed_s - self._mean_s)
        if not self.in_flight:
            self._idle.set()

    async def idle(self) -> None:
        """Returns once nobody is in."""
        await self._idle.wait()


class Ticket:
    """A request's places; `leave` gives them back, once."""

    def __init__(self, gate: Gate, num_sequences: int) -> None:
        self._gate, self._count, self._since = gate, num_sequences, time.monotonic()

    def leave(self) -> None:
        if self._count:
            count, self._count = self._count, 0
            self._gate.left(count, time.monotonic() - self._since)
