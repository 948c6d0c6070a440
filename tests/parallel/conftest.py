"""Pools of ranks: one a session, ended with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.parity import Bench
from helpers.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks on the CPU."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def bench(pool: RankPool) -> Bench:
    return Bench(pool)
