"""Signals that ask a run to end, with a checkpoint."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

SAME_REQUEST_S = 1.0  # a launcher that passes a signal on, and the system that sent it to everyone, mean one thing


class Stop:
    """The signal that has asked for the end, None before one has."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None


_present: Stop | None = None


def ask_to_stop(number: signal.Signals) -> bool:
    """What the signal does to a process, from any thread of it: the run that is on ends after its present step.

    False where none is on yet.
    """
    if _present is None:
        return False
    _present.signal = _present.signal or number
    return True


@contextmanager
def stop_signal() -> Iterator[Stop]:
    """SIGINT and SIGTERM end the run after the present step, with a checkpoint; a second one ends it at once."""
    global _present
    stop = _present = Stop()
    asked_at = 0.0

    def on_signal(number: int, _frame: object) -> None:
        nonlocal asked_at
        if stop.signal is not None:
            if time.monotonic() - asked_at < SAME_REQUEST_S:
                return
            raise KeyboardInterrupt
        stop.signal, asked_at = signal.Signals(number), time.monotonic()
        log.info("%s: the run ends after this step, with a checkpoint; once more ends it now", stop.signal.name)

    try:
        previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us there handles signals, and may `ask_to_stop`
        previous = {}
    try:
        yield stop
    finally:
        _present = None
        for number, handler in previous.items():
            signal.signal(number, handler)
