"""Every layout against one rank: loss, every gradient, grad norm, three optimizer steps, scores, metrics.

The layouts are compared through the trainer's verbs alone, so nothing here knows how they are done. `BOUND` is what
fp32 sums in another order may differ by (see `helpers.parity`); a missing or doubled term is above 1e-3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.parity import SECTION, Bench, Case, check
from helpers.trainers import adapter_tensors

pytestmark = [pytest.mark.timeout(240)]  # the first imports megatron
BOUND = 1e-5
DENSE_TP: dict[str, Any] = {"parallel": {"tp": 2, "sequence_parallel": False}, "dense": True}
ALL_TERMS: dict[str, Any] = {
    "kl_coef": 0.3, "entropy_coef": 0.2, "loss_normalization": "sequence", "dual_clip": 3.0,
}  # fmt: skip

CASES = [
    Case(name="tp2", ranks=2, **DENSE_TP),
    Case(name="tp2_sp", ranks=2, parallel={"tp": 2}),
    Case(name="tp4_sp", ranks=4, parallel={"tp": 4}),
    Case(name="pp2", ranks=2, parallel={"pp": 2}),
    Case(name="pp3_uneven", ranks=3, parallel={"pp": 3, "stage_layers": (2, 3, 3)}),
    Case(name="pp2_vpp2", ranks=2, parallel={"pp": 2, "vpp": 2}),
    Case(name="pp4", ranks=4, parallel={"pp": 4}),
    Case(name="cp2", ranks=2, parallel={"cp": 2}),
    Case(name="cp4", ranks=4, parallel={"cp": 4}),
    Case(name="dp2", ranks=2, section={"distributed_optimizer": True}),
    Case(name="dp2_plain", ranks=2, section={"distributed_optimizer": False}),
    Case(name="ep2", ranks=2, parallel={"ep": 2}),
    Case(name="ep4", ranks=4, parallel={"ep": 4}),
    Case(name="ep2_dp4", ranks=4, parallel={"ep": 2}),
    Case(name="ep2_dp4_plain", ranks=4, parallel={"ep": 2}, section={"distributed_optimizer": False}),
    # combinations
    Case(name="tp2_dp2", ranks=4, parallel={"tp": 2}),
    Case(name="tp2_dp2_no_sp", ranks=4, **DENSE_TP),
    Case(name="tp2_ep2", ranks=2, parallel={"tp": 2, "ep": 2}),
    Case(name="tp2_ep4", ranks=4, parallel={"tp": 2, "ep": 4}),
    Case(name="tp2_cp2", ranks=4, parallel={"tp": 2, "cp": 2}),
    Case(name="tp2_cp2_no_sp", ranks=4, parallel={"tp": 2, "cp": 2, "sequence_parallel": False}, dense=True),
    Case(name="tp2_pp2_vpp2", ranks=4, parallel={"tp": 2, "pp": 2, "vpp": 2}),
    Case(name="pp2_cp2", ranks=4, parallel={"pp": 2, "cp": 2}),
    Case(name="pp2_ep2", ranks=4, parallel={"pp": 2, "ep": 2}),
    Case(name="pp2_dp2", ranks=4, parallel={"pp": 2}),
    Case(name="cp2_ep2", ranks=2, parallel={"cp": 2, "ep": 2}),
    Case(name="cp2_ep4", ranks=4, parallel={"cp": 2, "ep": 4}),
    # what else may not change a number
    Case(name="full_recompute", section={"recompute": "full"}),
    Case(name="pp2_full_recompute", ranks=2, parallel={"pp": 2}, section={"recompute": "full"}),
    Case(name="tp2_selective_recompute", ranks=2, parallel={"tp": 2},
         section={"recompute": "selective", "recompute_sublayers": ("attention", "mlp")}),
    Case(name="ep2_full_recompute", ranks=2, parallel={"ep": 2}, section={"recompute": "full"}),
    Case(name="ep2_mxfp4", ranks=2, parallel={"ep": 2}, base_dtype="mxfp4"),
    # more of the work
    Case(name="tp2_two_updates", ranks=2, parallel={"tp": 2}, updates=2),
    Case(name="pp2_two_updates_all_terms", ranks=2, parallel={"pp": 2}, updates=2, algorithm=ALL_TERMS),
    Case(name="cp2_all_terms", ranks=2, parallel={"cp": 2}, algorithm=ALL_TERMS),
    Case(name="ep2_two_updates_all_terms", ranks=2, parallel={"ep": 2}, updates=2, algorithm=ALL_TERMS),
    Case(name="tp2_cp2_replay", ranks=4, parallel={"tp": 2, "cp": 2}, replay=True),
    Case(name="tp2_ep2_replay", ranks=2, parallel={"tp": 2, "ep": 2}, replay=True),
    Case(name="pp2_vpp2_replay", ranks=2, parallel={"pp": 2, "vpp": 2}, replay=True),
    # fewer micro-batches than data-parallel ranks or stages, and harvests without any
    Case(name="dp4_few", ranks=4, batches="few"),
    Case(name="pp4_few", ranks=4, parallel={"pp": 4}, batches="few"),
    Case(name="pp2_vpp2_few", ranks=2, parallel={"pp": 2, "vpp": 2}, batches="few"),
    Case(name="ep4_few_two_updates", ranks=4, parallel={"ep": 4}, batches="few", updates=2),
    Case(name="cp4_few", ranks=4, parallel={"cp": 4}, batches="few"),
]  # fmt: skip
# One layout for each means of the trainer, and the means together where they meet: `make test` takes these.
QUICK = ("pp2_vpp2", "cp2_all_terms", "dp2", "tp2_ep2_replay")
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", QUICK)
def test_chosen_layouts_equal_one_rank(bench: Bench, name: str) -> None:
    case = BY_NAME[name]
    case = replace(case, batches="short" if case.batches == "uneven" else case.batches)
    check(bench.all_ranks(case), bench.one_rank(case), BOUND)


@pytest.mark.parallel
@pytest.mark.parametrize("name", BY_NAME)
def test_every_layout_equals_one_rank(bench: Bench, name: str) -> None:
    check(bench.all_ranks(BY_NAME[name]), bench.one_rank(BY_NAME[name]), BOUND)


@pytest.mark.parametrize("batches", ["short", pytest.param("uneven", marks=pytest.mark.parallel)])
def test_the_work_is_worth_comparing(bench: Bench, batches: str) -> None:
    """Else a layout could be right by luck: nothing that is compared is zero or stands still."""
    wanted = bench.one_rank(Case(name="plain", batches=batches))
    assert all(float(gradient.norm()) > 0 for gradient in wanted.gradients.values())
    assert all(abs(stats.loss) > 0.01 for stats in wanted.stats)
    assert all(stats.grad_norm > SECTION["grad_clip"] for stats in wanted.stats)  # clipping takes part
    start = adapter_tensors()
    for name, tensor in wanted.adapter.items():
        assert float((tensor - start[name]).norm() / tensor.norm()) > 1e-2, name
