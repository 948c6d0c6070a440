"""What is proposed for a recipe that doesn't fit: it fits, it is small, and it is judged like any recipe."""

from __future__ import annotations

from typing import Any

import pytest

from miles_k3.config import Recipe
from miles_k3.errors import ConfigError
from miles_k3.plan.changes import candidates, changed, smallest_fix
from miles_k3.plan.planner import Machine, plan, read_config
from miles_k3.recipe import load_recipe


def fix_of(name: str, *overrides: str) -> dict[str, Any] | None:
    recipe = load_recipe(name, overrides).recipe
    config = read_config(recipe)
    assert not plan(recipe, config, Machine()).fits
    fix = smallest_fix(recipe, config, Machine())
    if fix is None:
        return None
    assert fix.plan.fits
    assert plan(changed(recipe, fix.values), config, Machine()).fits, "the plan that was shown is the changed recipe's"
    return fix.values


def test_the_recipes_own_settings_are_found_again() -> None:
    """What makes k3-16xgb300 fit, taken out of it."""
    values = fix_of("k3-16xgb300", "lora.rank=32", "lora.alpha=64.0")
    assert values == {"lora.rank": 16, "lora.alpha": 32.0, "rollout.max_lora_rank": 16}


def test_several_changes_where_several_are_needed() -> None:
    assert fix_of("k3-16xgb300", "cluster.gpu_memory_gb=272") == {"trainer.parallel.stage_layers": (24, 23, 23, 23)}
    assert fix_of("k3-16xgb300", "lora.rank=32", "lora.alpha=64.0", "cluster.gpu_memory_gb=272") == {
        "trainer.parallel.stage_layers": (24, 23, 23, 23), "lora.rank": 16, "lora.alpha": 32.0,
        "rollout.max_lora_rank": 16,
    }  # fmt: skip


def test_one_change_where_one_is_enough() -> None:
    assert fix_of("k3-4layer", "model.base_dtype=bf16") == {"model.base_dtype": "mxfp4"}
    assert fix_of("k3-4layer", "trainer.recompute=none", "trainer.micro_batch_tokens=32768") is not None


def test_what_costs_least_comes_first() -> None:
    """On a small GPU the caches sleep before anything is computed twice, and the adapter's rank is the last resort."""
    tight = ["rollout.sleep_while_training=false", "rollout.max_running=4096", "rollout.prefix_cache=off",
             "rollout.num_pages=1024"]  # fmt: skip
    values = fix_of("k3-4layer", *tight)
    assert values is not None
    assert "lora.rank" not in values
    assert "trainer.recompute" not in values


def test_nothing_is_proposed_where_nothing_helps() -> None:
    assert fix_of("k3-4layer", "cluster.gpu_memory_gb=8") is None


def test_every_candidate_is_a_recipe_of_its_own() -> None:
    recipe = load_recipe("k3-64xgb300").recipe
    config = read_config(recipe)
    seen = [change.values for change in candidates(recipe, config)]
    assert len(seen) > 10
    for values in seen:
        assert isinstance(changed(recipe, values), Recipe)


def test_a_layout_that_cannot_work_is_refused_with_its_reasons() -> None:
    recipe = load_recipe("k3-64xgb300", ["trainer.parallel.tp=5", "trainer.parallel.pp=7"]).recipe
    with pytest.raises(ConfigError) as caught:
        plan(recipe, read_config(recipe), Machine())
    assert len(caught.value.problems) > 1
    engine = load_recipe("k3-64xgb300", ["rollout.engine_tp=32", "cluster.ranks_per_node=0"]).recipe
    with pytest.raises(ConfigError, match="engine_tp 32 doesn't divide the 48 ranks"):
        plan(engine, read_config(engine), Machine(), world=48)
