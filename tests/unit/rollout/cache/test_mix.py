"""The experiment: what one free region lets in that two fixed pools of the same bytes don't."""

from __future__ import annotations

import pytest

from miles_k3.rollout.cache.mix import DRIFT, Phase, Sizes, SplitPlaces, compare, run, table, unified


def test_unified_holds_at_least_as_many_in_every_phase(capsys: pytest.CaptureFixture[str]) -> None:
    results = compare()
    with capsys.disabled():
        print("\n" + table(results))
    ours = results.pop("unified")
    for phases in results.values():
        for mine, theirs in zip(ours, phases, strict=True):
            assert mine.admitted >= theirs.admitted
            assert mine.running >= theirs.running
            assert mine.tokens >= theirs.tokens
    # No split is right for all of the trace: each loses a third of the requests somewhere.
    for phases in results.values():
        assert any(mine.admitted > 1.5 * theirs.admitted for mine, theirs in zip(ours, phases, strict=True))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_other_way_round(seed: int) -> None:
    """From few long to many short: blocks move, since the long requests' memory goes to slots."""
    sizes, phases = Sizes(num_bytes=20 * 10**9), DRIFT[2::-1]
    ours, theirs = run(unified(sizes), sizes, phases, seed), run(SplitPlaces(sizes, 0.6), sizes, phases, seed)
    assert all(a.admitted >= b.admitted and a.tokens >= b.tokens for a, b in zip(ours, theirs, strict=True))
    assert sum(phase.moved_bytes for phase in ours) > 0


def test_all_memory_comes_back() -> None:
    """After a phase without arrivals, as long as the longest request, nothing is held."""
    sizes = Sizes()
    places = unified(sizes)
    quiet = Phase(name="quiet", steps=70, arrivals=0, low=1, high=1)
    last = run(places, sizes, [*DRIFT[:2], quiet])[-1]
    places.check()
    assert last.admitted == 0
    assert places.free_bytes == sizes.num_bytes - sizes.slot_bytes - sizes.page_bytes == places.region_bytes
