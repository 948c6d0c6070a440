"""What a run asks of a cluster, and what is refused before anything waits."""

from __future__ import annotations

import pytest
from helpers.runs import small_recipe

from miles_k3.errors import LaunchError
from miles_k3.ray import cluster
from miles_k3.ray.cluster import Request, refuse_cluster, request_of, spare_proxies
from miles_k3.recipe import load_recipe


@pytest.fixture
def _own_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is added to them ends with the test."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")


def node(gpus: float = 0, cpus: float = 8, alive: bool = True) -> dict:
    resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}  # Ray leaves out what there is none of
    return {"Alive": alive, "NodeManagerAddress": "10.0.0.1", "Resources": resources}


def test_a_recipe_asks_for_a_device_a_rank(tmp_path) -> None:
    sixteen = small_recipe(tmp_path, "cluster.nodes=16", "cluster.ranks_per_node=4", "model.device=cuda")
    assert request_of(sixteen, 0) == Request(nodes=16, per_node=4, gpus=True)
    assert request_of(sixteen, 0).ranks == 64
    auto = small_recipe(tmp_path, "trainer.parallel.pp=2")
    assert request_of(auto, 0) == Request(nodes=1, per_node=2, gpus=False)
    assert request_of(auto, 8).of_rank == {"CPU": 1.0, "GPU": 1.0}


def test_too_few_devices_are_told_at_once() -> None:
    wanted = Request(nodes=16, per_node=4, gpus=True)
    with pytest.raises(LaunchError, match=r"requested 64 GPUs, cluster has 0 \(nodes: 10.0.0.1: 64 CPUs, 0 GPUs\)"):
        refuse_cluster(wanted, [node(cpus=64)])
    with pytest.raises(LaunchError, match="requested 64 CPUs, cluster has 8 and requested 64 GPUs, cluster has 4"):
        refuse_cluster(wanted, [node(gpus=4), node(gpus=4, alive=False)])


def test_enough_devices_on_the_wrong_nodes_are_told_too() -> None:
    wanted = Request(nodes=2, per_node=4, gpus=True)
    with pytest.raises(LaunchError, match="requested 2 nodes with 4 CPUs and 4 GPUs each, cluster has room for 1"):
        refuse_cluster(wanted, [node(gpus=6), node(gpus=2)])
    refuse_cluster(wanted, [node(gpus=4), node(gpus=4)])
    refuse_cluster(wanted, [node(gpus=8)])


def test_local_addresses_need_no_proxy() -> None:
    environ = {"http_proxy": "http://proxy:3128", "no_proxy": "example.org,localhost"}
    spare_proxies(["10.0.0.1", ""], environ)
    spare_proxies(["10.0.0.1"], environ)
    assert environ["no_proxy"] == "example.org,localhost,127.0.0.1,::1,10.0.0.1"
    assert environ["NO_PROXY"] == "localhost,127.0.0.1,::1,10.0.0.1"
    assert environ["http_proxy"] == "http://proxy:3128", "what is outside is still reached through it"


@pytest.mark.usefixtures("_own_proxies")
@pytest.mark.parametrize(("slow_starts", "starts"), [(2, 3), (3, 3)])
def test_a_cluster_that_starts_slowly_is_started_again(
    monkeypatch: pytest.MonkeyPatch, slow_starts: int, starts: int
) -> None:
    tried: list[str] = []

    def init(address: str, **options: object) -> None:
        tried.append(address)
        if len(tried) <= slow_starts:
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray, "nodes", list)
    recipe = load_recipe("tiny-ray").recipe
    if slow_starts < starts:
        with cluster.joined(recipe):
            pass
    else:
        with (
            pytest.raises(LaunchError, match=r"could not be started here .*less busy.*ray start --head"),
            cluster.joined(recipe),
        ):
            pass
    assert tried == ["local"] * starts


@pytest.mark.usefixtures("_own_proxies")
def test_another_failure_of_a_start_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(cluster.ray, "init", init)
    with (
        pytest.raises(LaunchError, match=r"could not be started here .no such thing"),
        cluster.joined(load_recipe("tiny-ray").recipe),
    ):
        pass
