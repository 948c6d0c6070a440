"""What is refused before anything is loaded: layouts, devices, kernels. All reasons at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from miles_k3 import launch
from miles_k3.errors import LaunchError
from miles_k3.k3.config import K3Config
from miles_k3.launch import launch_problems, pick_threads, refuse_launch, train_command
from miles_k3.parallel import smallest_world
from miles_k3.recipe import load_recipe
from miles_k3.world import ALONE, World

TINY = K3Config.from_folder(Path(__file__).parents[2] / "assets" / "tiny-k3")


def problems(*overrides: str, world: World = ALONE, training: bool = True, config: K3Config = TINY) -> list[str]:
    return launch_problems(load_recipe("tiny-cpu", overrides).recipe, config, world, training)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch):
    """Pretend that there are that many CUDA devices."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    pretend(0)
    return pretend


@pytest.mark.usefixtures("devices")
def test_all_reasons_are_told_at_once() -> None:
    recipe = load_recipe("tiny-cpu", ["trainer.parallel.tp=3", "trainer.kda_kernel=fla", "model.device=cuda"]).recipe
    with pytest.raises(LaunchError) as caught:
        refuse_launch(recipe, TINY, World(size=1), training=True)
    lines = str(caught.value).splitlines()
    for said in ("= 3 ranks, but there are 1", "KDA heads 4", "no CUDA device", "trainer.kda_kernel is fla"):
        assert sum(said in line for line in lines) == 1, lines
    assert problems("trainer.parallel.tp=3", "trainer.kda_kernel=fla", training=False) == [], "evaluation has no layout"


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("layout", [(), ("tp=2",), ("cp=2",), ("pp=2",), ("ep=2",), ("tp=2", "ep=2")])
def test_layouts_that_fit_two_ranks(layout: tuple[str, ...]) -> None:
    overrides = [f"trainer.parallel.{part}" for part in layout]
    assert problems(*overrides, world=World(size=2, local_size=2)) == []


def test_each_rank_needs_a_device_of_its_own(devices) -> None:
    devices(2)
    assert problems(world=World(rank=1, size=2, local_rank=1, local_size=2)) == []
    (problem,) = problems(world=World(rank=1, size=4, local_rank=1, local_size=4))
    assert "4 ranks were started on a host with 2 visible CUDA devices" in problem
    (problem,) = problems("model.device=cpu")
    assert "hide the devices with CUDA_VISIBLE_DEVICES=" in problem


def test_kernels_must_be_importable(devices, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(1)

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}\nand more")

    monkeypatch.setattr(launch.importlib, "import_module", missing)
    (problem,) = problems("trainer.mla_attention=transformer_engine")
    assert "TransformerEngine can't be imported (No module named 'transformer_engine.pytorch'); install it" in problem
    (problem,) = problems("trainer.kda_kernel=fla")
    assert "set trainer.kda_kernel: torch or auto" in problem
    monkeypatch.setattr(launch.importlib, "import_module", lambda name: None)
    assert problems("trainer.kda_kernel=fla", "trainer.mla_attention=transformer_engine") == []


@pytest.mark.usefixtures("devices")
def test_routing_replay_needs_a_router() -> None:
    dense = dataclasses.replace(TINY, first_k_dense_replace=TINY.num_hidden_layers)
    assert problems("algorithm.routing_replay=true") == []
    assert any("no MoE layer" in p for p in problems("algorithm.routing_replay=true", config=dense))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [({}, 1), ({"tp": 2, "pp": 3, "cp": 2}, 12), ({"tp": 2, "ep": 4}, 4), ({"ep": 6, "tp": 4, "pp": 2}, 24)],
)
def test_the_least_number_of_ranks(layout: dict[str, int], ranks: int) -> None:
    parallel = load_recipe("tiny-cpu", [f"trainer.parallel.{k}={v}" for k, v in layout.items()]).recipe.trainer.parallel
    assert smallest_world(parallel) == ranks


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert pick_threads(3, World(size=4, local_size=4)) == 3
    assert pick_threads(0, World(size=4, local_size=4)) == 2
    assert pick_threads(0, World(size=16, local_size=16)) == 1
    assert pick_threads(0, ALONE) == torch.get_num_threads()


def test_how_a_run_is_started() -> None:
    assert train_command("r.yaml", 1) == "miles-k3 train r.yaml"
    assert train_command("r.yaml", 4) == "torchrun --nproc-per-node 4 -m miles_k3 train r.yaml"
    assert train_command("r", 16, 8, "ray") == "miles-k3 launch r"
    assert train_command("r", 16, 8) == "torchrun --nnodes 2 --nproc-per-node 8 -m miles_k3 train r"


@pytest.mark.usefixtures("devices")
def test_a_run_wants_the_ranks_that_cluster_asks_for() -> None:
    (problem,) = problems("cluster.ranks_per_node=2")
    assert "ask for 2 ranks, but 1 were started; start with torchrun --nproc-per-node 2 -m" in problem
    (problem,) = problems("cluster.nodes=2", "cluster.ranks_per_node=2", world=World(size=2, local_size=2))
    assert "torchrun --nnodes 2 --nproc-per-node 2" in problem
    assert problems("cluster.ranks_per_node=2", world=World(size=2, local_size=2)) == []
    assert problems("cluster.ranks_per_node=2", training=False) == [], "evaluation runs on any number"


@pytest.mark.usefixtures("devices")
def test_sglang_is_refused_with_every_reason() -> None:
    """The tiny model has neither the widths nor the packages, and this machine no GPU."""
    found = problems("rollout.engine=sglang")
    for said in ("multiples of 1024", "SGLang is not installed", "has no CUDA device", "KDA head_dim is 16"):
        assert sum(said in problem for problem in found) == 1, found
