"""Planted mistakes: each must be seen, in the numbers that it spoils and in no other."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers.parity import Bench, Case, beyond, check, differences
from helpers.parity_faults import measure_with

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(240)]
BOUND = 1e-5  # test_parity's
TP2: dict[str, Any] = {"ranks": 2, "parallel": {"tp": 2}}
CP2: dict[str, Any] = {"ranks": 2, "parallel": {"cp": 2}}
DP2: dict[str, Any] = {"ranks": 2}
EP2: dict[str, Any] = {"ranks": 2, "parallel": {"ep": 2}}
PP2: dict[str, Any] = {"ranks": 2, "parallel": {"pp": 2}}
# Fault -> layout, and the gradients that become wrong: all of these and no others.
GRADIENTS = {
    "o_proj b not summed": (TP2, r"self_attn\.o_proj\.lora_B"),
    "fc1 a not summed": (TP2, r"(mlp|shared_experts)\.(gate|up)_proj\.lora_A"),
    "fc2 b not summed": (TP2, r"(mlp|shared_experts)\.down_proj\.lora_B"),
    "expert_fc1 a not summed": (TP2, r"experts\.w[13]\.lora_A"),
    "expert_fc2 b not summed": (TP2, r"experts\.w2\.lora_B"),
    "latent a summed twice": (TP2, r"(q_a_proj|kv_a_proj_with_mqa)\.lora_A"),
    "experts summed like dense factors": (EP2, r"experts\.(w[13]\.lora_B|w2\.lora_A)"),
}
# Fault -> layout, the numbers of which some become wrong, and those that stay right.
OTHERS = {
    "split factors counted once in the norm": (TP2, "step 0 grad_norm", "gradient|loss|score [0-9]"),
    "rank 1 has another base": (TP2, "score [0-9]", "step 0 lr"),
    "rank 1 has another adapter": (TP2, "score [0-9]", "step 0 lr"),
    "rank 1 has another batch": (DP2, "gradient|step 0 loss", "score [0-9]"),
    "copies part on rank 1": (TP2, "score after", "gradient|loss|score [0-9]|step 0 grad_norm"),
    "another rate": (DP2, "adapter", "gradient|loss|score [0-9]"),
    "another denominator": (DP2, "gradient", "score [0-9]"),
    "a mean of means": (DP2, "step 0 mismatch_abs", "gradient|loss|score|adapter"),
    "no state from the rank before": (CP2, "score [0-9]", "step 0 lr"),
    "no gradient from the rank behind": (CP2, "gradient", "loss|score [0-9]"),
    "keys of other ranks earn no gradient": (CP2, "gradient", "loss|score [0-9]"),
    "the extra key not copied to the ranks": (TP2, "gradient", "loss|score [0-9]"),
    "a replicated use counted on each rank": (TP2, "gradient", "loss|score [0-9]"),
    "the bank earns no gradient over a stage's edge": (PP2, "gradient", "loss|score [0-9]"),
    "sent rows earn no gradient": (EP2, "gradient", "loss|score [0-9]"),
}


def wrong_numbers(bench: Bench, fault: str, layout: dict[str, Any]) -> set[str]:
    """What the parity test would complain of."""
    case = Case(name=fault, batches="one", **layout)
    found, wanted = bench.pool.run(case.ranks, measure_with, case, fault), bench.one_rank(case)
    with pytest.raises(AssertionError):
        check(found, wanted, BOUND)
    return set(beyond(differences(found[0], wanted), BOUND))


@pytest.mark.parametrize("fault", GRADIENTS)
def test_a_wrong_reduction_names_its_factors(bench: Bench, fault: str) -> None:
    layout, factors = GRADIENTS[fault]
    spoiled = {name for name in wrong_numbers(bench, fault, layout) if name.startswith("gradient")}
    gradients = (f"gradient {name}" for name in bench.one_rank(Case(name=fault, batches="one")).gradients)
    assert spoiled == {name for name in gradients if re.search(factors, name)}


@pytest.mark.parametrize("fault", OTHERS)
def test_a_mistake_spoils_what_it_should(bench: Bench, fault: str) -> None:
    layout, wrong, right = OTHERS[fault]
    spoiled = wrong_numbers(bench, fault, layout)
    assert any(re.match(wrong, name) for name in spoiled), spoiled
    assert not [name for name in spoiled if re.match(right, name)]


def test_ranks_that_disagree_are_seen(bench: Bench) -> None:
    fault = "rank 1 tells another loss"
    case = Case(name=fault, batches="one", **DP2)
    found = bench.pool.run(2, measure_with, case, fault)
    with pytest.raises(AssertionError, match=r"rank 1 differs from rank 0 in 1 numbers: \n.*step 0 loss"):
        check(found, bench.one_rank(case), BOUND)
