"""Copies of a factor that should be equal and aren't: seen at the next export, on every rank."""

from __future__ import annotations

import pytest
import torch
from helpers.parity import Case, build
from helpers.ranks import RankPool

from miles_k3.errors import MilesError

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(240)]


def export_with_a_flipped_bit(rank: int, size: int, case: Case, module: str, factor: str) -> str | None:
    """On the last rank, one number of one factor gets another last bit."""
    trainer = build(case, rank)
    assert trainer.export_adapter().version == 0
    if rank == size - 1:
        name, parameter = next((n, p) for n, p in trainer.model.named_parameters() if n.endswith(f"{module}.{factor}"))
        assert parameter.requires_grad, name
        with torch.no_grad():
            first = parameter.view(-1)[:1]
            first.copy_(torch.nextafter(first, torch.tensor(torch.inf)))
    try:
        trainer.export_adapter()
    except MilesError as error:
        return str(error)
    return None


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
