"""Signals end a run after its step; the second one, if it is another request, at once."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from miles_k3 import stop
from miles_k3.stop import ask_to_stop, stop_signal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_kept_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_signal() as asked:
        assert asked.signal is None
        os.kill(os.getpid(), number)
        assert asked.signal is number
    assert signal.getsignal(number) is before


def test_a_signal_that_comes_twice_at_once_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher passes on what the system sent to all its processes too."""
    with stop_signal() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.signal is signal.SIGTERM
        later = time.monotonic() + 2 * stop.SAME_REQUEST_S
        monkeypatch.setattr(stop.time, "monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_outside_the_main_thread_can_be_asked() -> None:
    assert not ask_to_stop(signal.SIGTERM), "no run is on"
    with ThreadPoolExecutor() as pool, stop_signal() as stop:
        assert pool.submit(ask_to_stop, signal.SIGTERM).result()
        ask_to_stop(signal.SIGINT)
        assert stop.signal is signal.SIGTERM, "the first one counts"
    assert not ask_to_stop(signal.SIGTERM)
