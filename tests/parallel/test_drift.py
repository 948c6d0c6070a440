"""Copies of a factor that should be equal and aren't: seen at the next export, on every rank."""

from __future__ import annotations

import pytest
from helpers.drift import export_with_a_flipped_bit
from helpers.parity import Case
from helpers.ranks import RankPool

pytestmark = [pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("parallel", "module", "factor"),
    [
        ({"tp": 2}, "q_a_lora", "a"),
        ({"tp": 2}, "experts_lora", "a1"),
        ({}, "o_lora", "a"),
        ({"ep": 2}, "fc2_lora", "b"),
    ],
    ids=["latent under tp", "shared outer factor", "data parallel", "expert parallel"],
)
def test_a_copy_that_drifts_ends_the_run(pool: RankPool, parallel: dict, module: str, factor: str) -> None:
    case = Case(name="drift", ranks=2, parallel=parallel)
    told = pool.run(2, export_with_a_flipped_bit, case, module, factor)
    assert told[0] == told[1]
    assert told[0] is not None
    assert "drifted apart on ranks [1]" in told[0]
    assert f".{factor[0].upper()}" in told[0].replace("lora_", ".")


def test_split_factors_have_no_copies(pool: RankPool) -> None:
    case = Case(name="drift", ranks=2, parallel={"tp": 2})
    assert pool.run(2, export_with_a_flipped_bit, case, "o_lora", "a") == [None, None]
