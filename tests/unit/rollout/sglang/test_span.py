"""Which ranks an SGLang engine spans, who samples, and what a launch refuses before it joins a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_k3.config import Recipe
from miles_k3.errors import LaunchError
from miles_k3.k3.config import K3Config
from miles_k3.ray import driver
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.span import engine_ranks, held_experts, sampled_share, span_problems, worker_experts
from miles_k3.world import World

K3 = K3Config.from_folder(Path("assets/kimi-k3"))
SMALL = K3Config.from_folder(Path("assets/k3-4layer"))


def made(*overrides: str) -> Recipe:
    return load_recipe("k3-4layer", ["rollout.engine=sglang", *overrides]).recipe


@pytest.mark.parametrize("count", [1, 7, 64])
def test_prompts_go_to_the_ranks_that_have_an_engine(count: int) -> None:
    """All of them, in order; the embedded engine's shares are the ranks' own."""
    recipe = made("rollout.engine_tp=4", "cluster.ranks_per_node=8")
    shares = [sampled_share(recipe, World(rank=rank, size=8), count) for rank in range(8)]
    assert [n for share in shares for n in share] == list(range(count))
    assert [rank for rank, share in enumerate(shares) if share] == [rank for rank in (0, 4) if shares[rank]]
    embedded = load_recipe("tiny-cpu").recipe
    for rank in range(3):
        world = World(rank=rank, size=3)
        assert sampled_share(embedded, world, count) == world.share(count)
    assert engine_ranks(recipe, 0, 1) == range(1), "one rank speaks for an engine over all GPUs it sees"


def problems(
    *overrides: str, ranks: int = 8, per_node: int = 4, launcher: str = "ray"
) -> Iterator[str]:  # fmt: skip
    made_of = made("cluster.ranks_per_node=0", *overrides)  # the world is given here
    return span_problems(made_of, ranks=ranks, per_node=per_node, launcher=launcher)


TWO_NODES = ("rollout.engine_tp=8", "rollout.sglang.nodes=2")


def test_what_can_be_started() -> None:
    assert [*problems()] == []
    assert [*problems("rollout.engine_tp=4")] == []
    assert [*problems(*TWO_NODES)] == []
    assert [*problems("rollout.engine_tp=4", ranks=1, per_node=1, launcher="torchrun")] == []


@pytest.mark.parametrize(
    ("overrides", "given", "said"),
    [
        (("rollout.sglang.disaggregation.transfer=nixl",), {}, "starts no prefill and decode workers; set it to off"),
        (("rollout.engine_tp=4",), {"launcher": "torchrun"}, "is started by `miles-k3 launch RECIPE`, not by torchrun"),
        (("rollout.engine_tp=3",), {"ranks": 9, "per_node": 4}, "into whole engines; choose a number that divides"),
        (("rollout.engine_tp=8",), {}, "over nodes of 4 ranks spans 2; set it to 2"),
        (("rollout.engine_tp=4", "rollout.sglang.nodes=4"), {}, "spans 1; set it to 1"),
        (("rollout.engine_tp=4", "rollout.sglang.nodes=4"), {"ranks": 1}, "a run of one rank knows one machine"),
    ],
)  # fmt: skip
def test_what_can_not(overrides: tuple[str, ...], given: dict, said: str) -> None:
    (problem,) = problems(*overrides, **given)
    assert said in problem


def test_a_launch_says_so_before_it_joins_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(*_: object) -> None:
        raise AssertionError("Ray was started for nothing")

    monkeypatch.setattr(driver, "joined", joined)
    with pytest.raises(LaunchError, match="starts no prefill and decode workers") as caught:
        driver.launch(made("rollout.sglang.disaggregation.transfer=nixl", "rollout.max_lora_rank=128"))
    assert "known to work up to 64" in str(caught.value), "and all else that SGLang can't do"


def test_a_ranks_experts_are_those_of_its_workers() -> None:
    """SGLang numbers the ranks that share an expert's columns first; four engines of 16 GPUs, one expert each of 16."""
    twelve = range(12)
    assert [worker_experts(w, tp=4, ep=2, experts=twelve) for w in range(4)] == [
        range(6), range(6), range(6, 12), range(6, 12),
    ]  # fmt: skip
    cluster = load_recipe("k3-64xgb300").recipe
    shares = [held_experts(cluster, K3, rank, 64) for rank in range(64)]
    assert shares[:16] == [range(56 * rank, 56 * rank + 56) for rank in range(16)]
    assert shares == shares[:16] * 4
    one_rank = made("rollout.engine_tp=4", "rollout.sglang.ep=4", "cluster.ranks_per_node=0")
    assert held_experts(one_rank, SMALL, 0, 1) == range(SMALL.num_experts)
    assert held_experts(load_recipe("tiny-cpu").recipe, SMALL, 1, 2) is None, "an embedded engine takes all of it"


@pytest.mark.parametrize("name", ["k3-64xgb300", "k3-16xgb300"])
def test_the_cluster_recipes_can_be_started(name: str) -> None:
    recipe = load_recipe(name).recipe
    ranks = recipe.cluster.nodes * recipe.cluster.ranks_per_node
    assert [*span_problems(recipe, ranks=ranks, per_node=4, launcher="ray")] == []
