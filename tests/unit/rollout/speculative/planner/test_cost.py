"""Cost profiles: curves that never fall, between and outside of what was measured, files, and timing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_k3.errors import EngineError
from miles_k3.rollout.speculative.planner.cost import KEPT, CostProfile, Curve, Tiers, measure_costs
from miles_k3.rollout.speculative.planner.isotonic import isotonic


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_isotonic_is_the_max_min_formula(pairs: list[tuple[float, float]]) -> None:
    """fit_i = max over j <= i of min over k >= i of the mean of j to k (Robertson, Wright, Dykstra 1988)."""
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))

    def mean(j: int, k: int) -> float:
        return float(np.average(values[j : k + 1], weights=weights[j : k + 1]))

    n = len(values)
    expected = [max(min(mean(j, k) for k in range(i, n)) for j in range(i + 1)) for i in range(n)]
    np.testing.assert_allclose(isotonic(values.tolist(), weights.tolist()), expected, rtol=1e-9, atol=1e-9)


def test_noise_never_makes_more_cheaper() -> None:
    profile = CostProfile.of([(2, 2, 1.0), (2, 4, 3.0), (2, 6, 2.0), (2, 6, 2.4), (2, 8, 5.0)], {2: 0.5})
    (curve,) = profile.curves
    assert curve.positions == (2, 4, 6, 8)
    assert curve.seconds == pytest.approx((1.0, 7.4 / 3, 7.4 / 3, 5.0))
    assert profile.draft_seconds(2) == 0.5


def test_between_and_outside_of_points() -> None:
    profile = CostProfile.of([(4, 4, 1.0), (4, 8, 2.0), (8, 8, 3.0), (8, 16, 3.0)], {4: 1.0, 8: 2.0})
    assert profile.seconds(4, [4, 6, 8, 12]).tolist() == [1.0, 1.5, 2.0, 3.0]
    assert profile.seconds(1, 1) == 1.0
    assert profile.seconds(99, 200) == 3.0
    assert profile.seconds(6, 8) == 2.5
    assert profile.draft_seconds(5) == 1.25


@pytest.mark.parametrize("tiers", [Tiers(), Tiers(requests=(4, 8), positions=(6, 12))])
def test_what_is_kept_is_what_was_worked_out(tiers: Tiers, tmp_path: Path) -> None:
    """Each load's table grows when more of it is asked for, and stays out of the file and of comparisons."""
    points = [(4, 4, 1.0), (4, 8, 2.0), (8, 8, 3.0), (8, 16, 3.5)]
    profile, fresh = (CostProfile.of(points, {4: 1.0, 8: 2.0}, tiers) for _ in range(2))
    for requests in (3, 4, 6, 9, 3):
        for most in (2, 3, 0, 7, 5):
            wanted = fresh.seconds(requests, requests + np.arange(most + 1))
            np.testing.assert_array_equal(profile.table(requests, most), wanted)
    assert profile == fresh
    profile.save(tmp_path / "costs.json")
    assert set(json.loads((tmp_path / "costs.json").read_text())) == {"curves", "tiers", "engine"}
    assert CostProfile.load(tmp_path / "costs.json") == fresh
    for requests in range(1, 3 * KEPT):
        assert len(profile.table(requests, 3)) == 4
        assert len(profile._tables) <= KEPT


def test_file_round_trip(tmp_path: Path) -> None:
    points = [(1, 1, 0.1), (1, 2, 0.30000000000000004), (7, 7, 1e-9)]
    profile = CostProfile.of(points, {1: 0.01}, whole_s={1: 0.5, 7: 2.0})
    assert [profile.whole_seconds(n) for n in (1, 4, 9)] == [0.5, 1.25, 2.0]
    assert CostProfile.of(points, whole_s={1: 0.5}).whole_seconds(4) is None
    profile.save(tmp_path / "costs.json")
    assert CostProfile.load(tmp_path / "costs.json") == profile


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read"),
        (b'{"curves": [{"requests": 1', "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b'{"curves": [{"requests": 1}]}', "is no cost profile; name the costs.json of `miles-k3 bench speculative`"),
        (b"[]", "is no cost profile"),
        (b'{"curves": []}', ": a cost profile needs curves"),
        (b'{"curves": [{"requests": 1e400, "draft_s": 0, "positions": [1], "seconds": [1]}]}', "is no cost profile"),
        (b'{"curves": [{"requests": 1, "draft_s": 0, "positions": [1], "seconds": [-1]}]}', ": a cost curve needs"),
    ],
)
def test_what_is_no_profile_is_told_by_its_file(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineError, match=re.escape(f"{path}") + ".?" + said):
        CostProfile.load(path)


def test_what_is_padded_alike_costs_the_same(tmp_path: Path) -> None:
    """A recorded engine's stairs: seconds rise from tier to tier only, and plain decoding is no verify."""
    tiers = Tiers(requests=(4, 8), positions=(4, 8, 12, 16, 24))
    points = [(4, 4, 1.0), (4, 8, 1.5), (4, 12, 2.0), (3, 11, 2.2), (7, 7, 2.0), (8, 16, 3.0), (7, 21, 4.0)]
    profile = CostProfile.of(points, {3: 0.25, 7: 0.5}, tiers)
    assert [c.requests for c in profile.curves] == [4, 8]
    assert [c.positions for c in profile.curves] == [(4, 8, 12), (8, 16, 24)]
    assert profile.seconds(3, range(3, 13)).tolist() == [1.0, 1.0, *[1.5] * 4, *[2.1] * 4]
    assert profile.seconds(4, range(4, 10)).tolist() == [1.0, 1.5, 1.5, 1.5, 1.5, 2.1]
    assert profile.seconds(7, range(7, 26)).tolist() == [*[2.0] * 2, *[2.5] * 4, *[3.0] * 4, *[4.0] * 8, 4.125]
    assert [profile.draft_seconds(n) for n in (1, 4, 5, 8)] == [0.25, 0.25, 0.5, 0.5]
    profile.save(tmp_path / "costs.json")
    assert CostProfile.load(tmp_path / "costs.json") == profile
    (tmp_path / "old.json").write_text(
        json.dumps({"curves": json.loads((tmp_path / "costs.json").read_text())["curves"]})
    )
    assert CostProfile.load(tmp_path / "old.json").seconds(4, 10) == 1.8


def test_impossible_curves_are_refused() -> None:
    with pytest.raises(EngineError, match="measure plain decoding too"):
        CostProfile.of([(2, 3, 1.0)])
    with pytest.raises(EngineError, match="positive seconds"):
        CostProfile.of([(1, 1, 0.0)])
    with pytest.raises(EngineError, match="ascending loads"):
        CostProfile(curves=())
    with pytest.raises(EngineError, match="can't take"):
        Curve(requests=1, draft_s=-1.0, positions=(1,), seconds=(1.0,))
    with pytest.raises(EngineError, match="whole blocks can't take"):
        Curve(requests=1, draft_s=1.0, positions=(1,), seconds=(1.0,), whole_s=0.0)


def test_measured_with_a_clock() -> None:
    """A fake clock that a verify moves by its staircase: medians come out, the first call doesn't count."""
    now, calls = 0.0, 0

    def verify(requests: int, each: int) -> None:
        nonlocal now, calls
        calls += 1
        now += -(-requests * each // 4) + (50.0 if calls % 6 == 1 else 0.0)

    def draft(requests: int) -> None:
        nonlocal now
        now += 0.1 * requests

    def whole(requests: int) -> None:
        nonlocal now
        now += 0.7 * requests

    found = measure_costs(verify, draft, [1, 2], 3, repeats=5, clock=lambda: now, whole=whole)
    assert [c.positions for c in found.curves] == [(1, 2, 3, 4), (2, 4, 6, 8)]
    assert [c.seconds for c in found.curves] == [pytest.approx((1, 1, 1, 1)), pytest.approx((1, 1, 2, 2))]
    assert [c.draft_s for c in found.curves] == pytest.approx([0.1, 0.2])
    assert [c.whole_s for c in found.curves] == pytest.approx([0.7, 1.4])
    assert measure_costs(verify, draft, [1], 3, clock=lambda: now).whole_seconds(1) is None
