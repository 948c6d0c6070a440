"""Where a prefill stops."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_k3.rollout.cache.chunking import chunk_ends, state_marks


def test_chunks_end_on_block_boundaries() -> None:
    assert chunk_ends(0, 110, 40, 16) == [32, 64, 96, 110]
    assert chunk_ends(5, 100, 40, 16) == [32, 64, 100]  # the end is within reach; a state at 96 takes a mark
    assert chunk_ends(0, 96, 48, 16) == [48, 96]


def test_marks_are_stops() -> None:
    assert chunk_ends(0, 100, 64, 16, marks=[50, 99]) == [50, 99, 100]
    assert chunk_ends(20, 100, 64, 16, marks=[0, 20, 100, 300]) == [80, 100]


def test_a_block_longer_than_a_chunk() -> None:
    assert chunk_ends(0, 40, 10, 16) == [10, 16, 26, 32, 40]


def test_nothing_to_compute() -> None:
    assert chunk_ends(7, 7, 4, 16) == []


@pytest.mark.parametrize("sizes", [(3, 2, 4, 4), (-1, 2, 4, 4), (0, 2, 0, 4), (0, 2, 4, 0)])
def test_impossible_sizes(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="can't cut tokens"):
        chunk_ends(*sizes)


@given(
    start=st.integers(0, 300), more=st.integers(0, 300), chunk=st.integers(1, 120), block=st.integers(1, 64),
    marks=st.lists(st.integers(0, 600), max_size=6),
)  # fmt: skip
def test_rules_of_cutting(start: int, more: int, chunk: int, block: int, marks: list[int]) -> None:
    total = start + more
    ends = chunk_ends(start, total, chunk, block, marks)
    inner = {mark for mark in marks if start < mark < total}
    assert ends[-1:] == ([total] if more else [])
    assert inner <= set(ends)
    for at, end in itertools.pairwise([start, *ends]):
        assert at < end <= at + chunk
        if end in inner or end == total:
            continue
        # No further: the next block boundary, or any token, would be out of reach.
        boundaries = [p for p in range(at + 1, at + chunk + 1) if p % block == 0]
        assert end == (boundaries[-1] if boundaries else at + chunk)


@given(
    total=st.integers(1, 400), start=st.integers(0, 399), chunk=st.integers(1, 100), block=st.sampled_from([4, 16, 48])
)
def test_every_mark_of_a_prompt_becomes_an_end(total: int, start: int, chunk: int, block: int) -> None:
    start = min(start, total - 1)
    marks = state_marks(start, total, block=block, unit=4, fork=total // 2, interval=2 * block)
    ends = chunk_ends(start, total, chunk, block, marks)
    assert set(marks) <= set(ends)
    assert all(start < mark < total for mark in marks)


def test_marks_stop_before_the_last_token() -> None:
    """A prompt of exactly two blocks: who repeats it can use a state at one block only (vllm-project/vllm 50235)."""
    assert state_marks(0, 32, block=16, unit=4) == [16, 28]
    assert state_marks(0, 33, block=16, unit=4) == [32]
    assert state_marks(0, 32, block=16, unit=1) == []  # the end itself is kept
    assert state_marks(16, 32, block=16, unit=16) == []


def test_marks_of_intervals_and_forks() -> None:
    assert state_marks(0, 100, block=16, unit=16, interval=20) == [32, 64, 96]
    assert state_marks(40, 100, block=16, unit=16, fork=48, interval=32) == [48, 64, 96]
