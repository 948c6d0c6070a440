"""The pool of ranks itself: one world after another in the same processes, and none poisoned by the last."""

from __future__ import annotations

import os

import pytest
from helpers.rank_toys import die, fail, hang, sum_of_ranks
from helpers.ranks import RankError, RankPool


def test_worlds_of_any_size_follow_one_another(pool: RankPool) -> None:
    before = dict(os.environ)
    processes = {}
    for size in (4, 1, 3, 2):
        results = pool.run(size, sum_of_ranks, 10)
        total = sum(range(size)) + size * 10
        assert [result[:4] for result in results] == [(rank, size, total, str(size)) for rank in range(size)]
        for rank, *_, process in results:
            assert processes.setdefault(rank, process) == process
    assert len(set(processes.values())) == 4
    assert os.environ == before


def test_a_failure_names_its_rank_and_shows_its_traceback(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1: .*in fail.*ValueError: nothing good on 1") as caught:
        pool.run(3, fail, 1)
    assert caught.value.rank == 1
    assert pool.run(3, sum_of_ranks, 0)[2][2] == 3


def test_a_hang_shows_where_each_rank_stands(pool: RankPool) -> None:
    pool.run(1, sum_of_ranks, 0)
    with pytest.raises(RankError, match=r"(?s)no answer within 2 s.*in hang.*rank 1: .*in hang"):
        pool.run(2, hang, 0, timeout_s=2.0)
    assert pool.run(2, sum_of_ranks, 0)[1][2] == 1


def test_a_death_is_told_at_once(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 2: the process died"):
        pool.run(3, die, 2)
    assert pool.run(4, sum_of_ranks, 0)[3][2] == 6
