"""What each rank gets of the adapter: whole or as its engine's shard, equal bit for bit to what one rank exports."""

from __future__ import annotations

import re
import time

import pytest
import torch
from helpers.exchanges import SMALL, beyond_the_destination, export_with, hand_over, whole_and_shard
from helpers.parity import Case
from helpers.ranks import RankError, RankPool

pytestmark = [pytest.mark.timeout(240)]

LAYOUTS = [
    Case(name="tp2_ep2", ranks=2, parallel={"tp": 2, "ep": 2}),
    Case(name="pp2", ranks=2, parallel={"pp": 2}),
    *(
        pytest.param(Case(name=name, ranks=4, parallel=parallel), marks=pytest.mark.parallel)
        for name, parallel in {
            "tp4": {"tp": 4}, "tp2_pp2": {"tp": 2, "pp": 2}, "ep2_dp4": {"ep": 2}, "ep4": {"ep": 4}, "dp4": {},
            "pp2_ep2": {"pp": 2, "ep": 2}, "tp2_ep4": {"tp": 2, "ep": 4}, "cp2_ep2": {"cp": 2, "ep": 2},
            "tp2_pp2_vpp2": {"tp": 2, "pp": 2, "vpp": 2},
        }.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_exports_equal_one_ranks(pool: RankPool, case: Case) -> None:
    """Shares of two engines' ranks where there are four; a bucket is far smaller than the largest tensor."""
    ((wanted, (sha256, *_)),) = pool.run(1, whole_and_shard, case.on_one_rank(), 1)
    for found, hashes in pool.run(case.ranks, whole_and_shard, case, 2):
        assert set(hashes) == {sha256}
        assert list(found) == list(wanted)
        assert all(torch.equal(t, wanted[name]) for name, t in found.items())
    assert max(t.numel() * t.element_size() for t in wanted.values()) > 2 * SMALL


@pytest.mark.parallel
def test_beyond_its_shard_a_rank_needs_two_buckets(pool: RankPool) -> None:
    """And what the ranks tell one another: less than a bucket here, for an adapter four times as large, too."""
    parallel, bucket = {"tp": 2, "ep": 2}, 1 << 17
    (held, large), _ = pool.run(2, beyond_the_destination, 96, parallel, bucket)
    (_, small), _ = pool.run(2, beyond_the_destination, 96, parallel, bucket // 8)
    (less, little), _ = pool.run(2, beyond_the_destination, 24, parallel, bucket // 8)
    assert held == 4 * less > 20 * bucket
    assert 2 * bucket <= large < 3 * bucket, (large, bucket)
    assert small < bucket, (small, bucket)
    assert little < bucket, (little, bucket)


CASE = Case(name="faults", ranks=2, parallel={"tp": 2, "ep": 2})
HALVES = range(4), range(4, 8)
SLOWER = pytest.mark.parallel


@pytest.mark.parametrize(
    ("fault", "experts", "said"),
    [
        ("damaged", HALVES, r"adapter v0 arrived otherwise on ranks \[1\] than on rank 0: it was damaged"),
        ("expert", HALVES[::-1], r"adapter v0 arrived with another .*\.experts\.w.* than was sent: it was damaged"),
        pytest.param(
            "lost", HALVES, r"MilesError: .*experts.* did not come whole to ranks \[1\] \(1 tensors\)", marks=SLOWER
        ),
        pytest.param("version", HALVES, r"is not what all ranks export \(rank 0: v0, .*; rank 1: v7, ", marks=SLOWER),
        ("none", (range(4), range(3, 8)), "held by ranks with experts 0-3, 3-7; expected shares that make up 8"),
        pytest.param("none", (range(4), range(5, 8)), "held by ranks with experts 0-3, 5-7; expected", marks=SLOWER),
        pytest.param("none", (range(4), range(4, 9)), r"did not come whole to ranks \[1\]", marks=SLOWER),
    ],
    ids=["damaged", "an expert's", "lost", "version", "twice", "not all", "too many"],
)
def test_a_fault_is_every_ranks_error(
    pool: RankPool, fault: str, experts: tuple[range, range], said: str
) -> None:  # fmt: skip
    for rank, told in enumerate(pool.run(2, export_with, CASE, fault, experts)):
        assert re.search(said, told), (rank, told)


def test_a_rank_that_ends_in_the_middle_is_told_at_once(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1: the process died") as caught:
        pool.run(2, export_with, CASE, "gone", HALVES)
    assert "died" in caught.value.text
    assert time.monotonic() - start < 60.0


@pytest.mark.parallel
def test_an_engine_over_two_ranks_reads_what_each_of_them_has_exported(pool: RankPool) -> None:
    """By handles, out of both ranks' memory; a process started again reads it once more."""
    case = Case(name="hand-over", ranks=2, parallel={"tp": 2, "ep": 2})
    ((wanted, _),) = pool.run(1, whole_and_shard, case.on_one_rank(), 1)
    overrides = ("rollout.engine=sglang", "rollout.engine_tp=2", "rollout.sglang.ep=2", "cluster.ranks_per_node=0")
    speaker, neighbour = pool.run(2, hand_over, case, overrides)
    assert [version for version, _ in neighbour] == [0, 1]
    assert [version for version, _ in speaker] == [0, 1, 1]
    for _, found in speaker:
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], t.to(torch.bfloat16)) for name, t in wanted.items())
