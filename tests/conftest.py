"""Hooks of every test run."""

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what is imported by now out of the garbage collector's sight: with torch, megatron and three thousand tests
    one full collection takes a quarter of a second, and they come by the hundred."""
    gc.collect()
    gc.freeze()
