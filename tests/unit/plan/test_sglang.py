"""SGLang's share of a plan: what it gives back while the trainer works, and what the recipe's keys change.

That the sizes are SGLang's own is tried with SGLang itself (`tests/sglang`).
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
from helpers.drafts import RADIXARK

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.shard import held_layout
from miles_k3.k3.config import K3Config
from miles_k3.plan.engine import BF16, EngineBytes, engine_bytes
from miles_k3.plan.phases import EXPORT_BUCKET_BYTES
from miles_k3.plan.planner import Machine, plan, read_config
from miles_k3.plan.sglang import Split, kept_numbers, slot_numbers, weight_bytes
from miles_k3.plan.shapes import Phase
from miles_k3.plan.weights import Share, adapter_numbers
from miles_k3.recipe import load_recipe
from miles_k3.types import AdapterConfig

KIMI = K3Config.from_folder(Path("assets/kimi-k3"))


def of(*overrides: str) -> EngineBytes:
    recipe = load_recipe("k3-4layer", ["rollout.engine=sglang", *overrides]).recipe
    return engine_bytes(recipe, read_config(recipe), BF16)


def test_a_sleeping_engine_keeps_its_slots_and_its_graphs() -> None:
    recipe = load_recipe("k3-64xgb300").recipe
    for rank in plan(recipe, KIMI, Machine()).ranks:
        awake, training = rank.device[Phase.SWITCH], rank.device[Phase.TRAIN]
        assert awake.keys() - training.keys() == {"engine base", "KV", "states"}
        for kept in ("adapter slots", "adapter copies", "graphs"):
            assert training[kept] == awake[kept]
        assert rank.host[Phase.TRAIN]["sleeping engine"] == awake["engine base"]
    awake = load_recipe("k3-64xgb300", ["rollout.sleep_while_training=false"]).recipe
    for rank in plan(awake, KIMI, Machine()).ranks:
        assert "engine base" in rank.device[Phase.TRAIN]
        assert "sleeping engine" not in rank.host[Phase.TRAIN]


@pytest.mark.parametrize("name", ["k3-64xgb300", "k3-16xgb300"])
def test_a_rank_gets_its_shard_of_the_adapter_and_the_buckets_that_it_comes_in(name: str) -> None:
    recipe = load_recipe(name).recipe
    layout = adapter_layout(KIMI, AdapterConfig(rank=recipe.lora.rank, alpha=1.0))
    shard = sum(prod(t.shape) for t in held_layout(layout, range(KIMI.num_experts // 16)).values()) * BF16
    found = plan(recipe, KIMI, Machine())
    assert found.fits
    for rank in found.ranks:
        assert rank.device[Phase.SYNC]["buffers"] == shard + 2 * EXPORT_BUCKET_BYTES
        assert rank.host[Phase.ROLLOUT]["lent adapter"] == shard
        assert rank.host[Phase.SYNC]["lent adapter"] == 2 * shard, "the next beside the one before"


def test_an_engines_gpus_share_it() -> None:
    """Experts over all of them however they are cut; three slots and copies are more than the adapter itself."""
    whole = weight_bytes(KIMI, Split(tp=1, ep=1))
    for split in (Split(tp=16, ep=16), Split(tp=16, ep=4), Split(tp=8, ep=1)):
        assert whole / split.tp < weight_bytes(KIMI, split) < 1.2 * whole / split.tp
        adapter = adapter_numbers(KIMI, Share.whole(KIMI), 32, one_gate_up_a=False)
        assert adapter.total / split.tp < slot_numbers(KIMI, 32, split) < 1.4 * adapter.total / split.tp
    assert slot_numbers(KIMI, 32, Split(tp=16, ep=16)) == 2 * slot_numbers(KIMI, 16, Split(tp=16, ep=16))
    dense = adapter.dense
    assert kept_numbers(KIMI, 32, Split(tp=8, ep=8)) == 2 * dense + adapter.expert // 8


@pytest.mark.parametrize(
    ("override", "item", "change"),
    [
        ("rollout.sglang.state_slots=9", "states", lambda usual: usual / (5 * 64 + 1) * 10),
        ("rollout.max_lora_rank=32", "slots", lambda usual: 2 * usual),
    ],
)
def test_keys_that_change_it(override: str, item: str, change) -> None:
    usual = ("rollout.max_running=64", "lora.rank=16")
    expected = change(getattr(of(*usual), item))
    assert getattr(of(*usual, override), item) == pytest.approx(expected)


def test_a_draft_takes_its_weights_and_room_for_what_is_verified(tmp_path: Path) -> None:
    """With eight verified rows of a request."""
    (tmp_path / "config.json").write_text(json.dumps(RADIXARK))
    usual = ("rollout.max_running=4", "rollout.num_pages=64", "rollout.page_size=16", "rollout.sglang.state_slots=19")
    plain, drafted = of(*usual), of(*usual, f"rollout.sglang.draft={tmp_path}")
    assert drafted.draft == 2_249_289_601 * BF16, "as many as are published"
    of_draft = 2 * 5 * 16 * 64 * BF16
    per_token = plain.kv // (64 * 16 + 1)
    assert drafted.kv == (64 * 16 + 1 + 2 * 8 * 4) * (per_token + of_draft)
    assert drafted.replay == plain.states // 20 * 8 * 5, "of each request, and the pool's own spare one"
    assert drafted.work == 8 * plain.work
    assert drafted.graphs > plain.graphs


def test_graphs_cost_memory() -> None:
    assert of("rollout.sglang.cuda_graphs=false").graphs < of().graphs
    assert of("rollout.max_running=8").graphs < of("rollout.max_running=64").graphs
