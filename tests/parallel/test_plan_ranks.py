"""What each rank of a layout allocates is what is planned for its stage."""

from __future__ import annotations

import pytest
from helpers.planned_ranks import compared
from helpers.ranks import RankPool

pytestmark = [pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("layout", "ranks", "micro_batches"),
    [
        (("tp=2", "ep=2"), 2, 1),
        pytest.param(("pp=2",), 2, 4, marks=pytest.mark.parallel),
        pytest.param(("cp=2",), 2, 1, marks=pytest.mark.parallel),
        pytest.param(("ep=2",), 2, 2, marks=pytest.mark.parallel),
    ],
    ids=["tp and ep", "pp", "cp", "ep and dp"],
)
def test_every_rank_takes_what_is_planned(
    pool: RankPool, layout: tuple[str, ...], ranks: int, micro_batches: int
) -> None:
    overrides = [f"trainer.parallel.{part}" for part in layout] + ["trainer.micro_batch_tokens=2048"]
    for rank, found in enumerate(pool.run(ranks, compared, overrides, micro_batches)):
        for name, (planned, allocated) in found.items():
            assert planned == pytest.approx(allocated, rel=0.15 if name == "activations" else 0.1), (rank, name)
