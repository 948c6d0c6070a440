"""fla's context-parallel test cases on our ranks: the state hand-over and the halo in torch, and fla's own on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.fla_cp import (
    CONV_CASES,
    CONV_LIMIT,
    DELTA_CASES,
    LIMITS,
    NAMES,
    Case,
    conv_case,
    delta_rule_case,
    fla_case,
)
from helpers.ranks import RankPool
from torch import Tensor

pytestmark = [pytest.mark.timeout(300)]
# Ours computes in fp32, in chunks that each slice cuts anew, so only the order of sums differs.
OURS = 2e-5


@pytest.fixture(scope="module")
def cuda_pool() -> Iterator[RankPool]:
    """As many ranks as there are devices, four at most."""
    ranks = RankPool(min(4, torch.cuda.device_count()), cuda=True)
    yield ranks
    ranks.close()


def joined(per_rank: list[list[Tensor]]) -> list[Tensor]:
    """Each result over the whole stream."""
    return [torch.cat(parts) for parts in zip(*per_rank, strict=True)]


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parallel
@pytest.mark.parametrize("case", DELTA_CASES.values(), ids=DELTA_CASES)
def test_state_handover(pool: RankPool, case: Case) -> None:
    split = joined(pool.run(case.ranks, delta_rule_case, case.lengths, case.dim))
    whole = joined(pool.run(1, delta_rule_case, case.lengths, case.dim))
    for name, a, b in zip(NAMES, split, whole, strict=True):
        assert (a - b).abs().max() < LIMITS[name], name
        assert relative(a, b) <= OURS, name


@pytest.mark.parallel
@pytest.mark.parametrize("case", CONV_CASES.values(), ids=CONV_CASES)
def test_convolution_halo(pool: RankPool, case: Case) -> None:
    split = joined(pool.run(case.ranks, conv_case, case.lengths))
    whole = joined(pool.run(1, conv_case, case.lengths))
    for a, b in zip(split, whole, strict=True):
        assert relative(a, b) <= min(CONV_LIMIT, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", DELTA_CASES.values(), ids=DELTA_CASES)
def test_fla_on_gpus(request: pytest.FixtureRequest, case: Case) -> None:
    """fla's limits between one GPU and several, and to our form; the gradients of all ranks, not only of the last."""
    if (found := torch.cuda.device_count()) < case.ranks:
        pytest.skip(f"needs {case.ranks} CUDA devices, found {found}")
    pool = request.getfixturevalue("cuda_pool")
    split = joined(pool.run(case.ranks, fla_case, case.lengths, case.dim, False, timeout_s=200.0))
    whole = joined(pool.run(case.ranks, fla_case, case.lengths, case.dim, True, timeout_s=200.0))
    ours = delta_rule_case(0, 1, case.lengths, case.dim)
    for name, a, b, c in zip(NAMES, split, whole, ours, strict=True):
        print(f"{name}: {(a - b).abs().max():.1e} to one GPU, {relative(a, c):.1e} to the torch form")
        assert (a - b).abs().max() < LIMITS[name], name
        assert relative(a, c) <= 1e-2, name
