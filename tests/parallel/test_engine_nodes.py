"""An SGLang engine over two machines under Ray, with a package in SGLang's place that notes how it is started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.fake_sglang import FOLDER, notes, write_package
from helpers.tiny import tiny_adapter

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.transport.loan import Loan
from miles_k3.adapters.update import cut, make_update
from miles_k3.assemble import adapter_config, model_config
from miles_k3.ray.actors import RayEngineProcess
from miles_k3.ray.cluster import Request, placed
from miles_k3.ray.engine_nodes import engine_nodes
from miles_k3.ray.order import Order
from miles_k3.ray.remote_engine import RemoteEngine
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.span import engine_ranks, held_experts
from miles_k3.types import Completion, LentAdapter, SamplingParams

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).parents[2]
SPAN = ("rollout.engine=sglang", "rollout.engine_tp=4", "rollout.sglang.ep=2", "rollout.sglang.nodes=2",
        "cluster.nodes=2", "cluster.ranks_per_node=2", "rollout.sampling.max_new_tokens=4")  # fmt: skip
WAIT_S = 60.0


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Path]:
    """What the package's processes have noted; a cluster of this machine on which they run."""
    import ray

    package, folder = write_package(tmp_path / "package"), tmp_path / "notes"
    folder.mkdir()
    paths = os.pathsep.join([str(package), str(ROOT / "tests"), str(ROOT)])
    environment = {
        "PYTHONPATH": paths, FOLDER: str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }  # fmt: skip
    ray.init(
        num_cpus=4, num_gpus=4, object_store_memory=100 << 20, include_dashboard=False, namespace="miles-k3",
        runtime_env={"env_vars": environment},
    )  # fmt: skip
    yield folder
    ray.shutdown()


def order(bundles: list[Any]) -> Order:
    """Rank 0's, whose engine lies on all four ranks' GPUs, of two machines with two each."""
    recipe = load_recipe("tiny-cpu", SPAN).recipe
    environments = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
         "CUDA_VISIBLE_DEVICES": ("4,5", "6,7")[rank // 2], "MILES_K3_LAUNCHER": "ray"}
        for rank in range(4)
    ]  # fmt: skip
    engines = engine_nodes(bundles, environments, lambda rank: engine_ranks(recipe, rank, 4))
    assert [len(engine) for engine in engines] == [2, 0, 0, 0]
    return Order(
        recipe=recipe, resume=False, debug=False, environment=environments[0], folder=ROOT, engine=engines[0],
        share={"CPU": 0.5, "GPU": 0.5},
    )  # fmt: skip


def lend(told_of: Order, version: int) -> tuple[LentAdapter, list[Loan]]:
    """The shards of all four ranks; the loans end with what holds them."""
    config, adapter = model_config(told_of.recipe), adapter_config(told_of.recipe)
    layout = adapter_layout(config, adapter)
    update = make_update(version, adapter, tiny_adapter(config, adapter, seed=version))
    loans = []
    for rank in range(4):
        experts = held_experts(told_of.recipe, config, rank, 4)
        assert experts is not None
        loans.append(Loan(cut(update, layout, experts), experts, readers=1, keep=True))
    shards = tuple(loan.lent for loan in loans)
    return LentAdapter(version=version, config=adapter, sha256=update.sha256, shards=shards), loans


def ask(engine: RemoteEngine) -> Completion:
    return asyncio.run(engine.generate([1, 2, 3], SamplingParams(temperature=1.0, max_new_tokens=4)))


def flag(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_its_machines_are_started_together_end_together_and_are_started_again(told: Path) -> None:
    with placed(Request(nodes=2, per_node=2, gpus=True)) as bundles:
        of_rank = order(bundles)
        engine = RemoteEngine(
            lambda: RayEngineProcess(of_rank, "the engine", WAIT_S), name="the engine", restarts=3, timeout_s=WAIT_S
        ).ready()
        kept = []
        for version in range(2):
            lent, loans = lend(of_rank, version)
            engine.load_adapter(lent)
            kept = loans
        assert len(kept) == 4
        assert ask(engine).adapter_version == 1

        (started,), (node,) = notes(told, "engine"), notes(told, "node")
        arguments, argv = started["arguments"], node["argv"]
        assert (arguments["tp_size"], arguments["nnodes"], arguments["node_rank"]) == (4, 2, 0)
        assert (flag(argv, "--tp-size"), flag(argv, "--nnodes"), flag(argv, "--node-rank")) == ("4", "2", "1")
        assert flag(argv, "--dist-init-addr") == arguments["dist_init_addr"]
        assert (arguments["base_gpu_id"], flag(argv, "--base-gpu-id")) == (0, "0")
        assert int(flag(argv, "--port")) != int(arguments["dist_init_addr"].rpartition(":")[2])
        assert [one["environment"]["CUDA_VISIBLE_DEVICES"] for one in (started, node)] == ["4,5", "6,7"]
        loads = notes(told, "load")
        assert [one["name"] for one in loads] == ["policy@0", "policy@1"]
        for one in loads:
            assert one["sums"][:2] == [one["sums"][0]] * 2, "two share the columns of the same experts"
            assert one["sums"][0] != one["sums"][2]
            assert {shape[0] for shapes in one["shapes"] for shape in shapes.values()} == {4}, "half of eight experts"
            assert one["longest"] < 50_000, "handles and tables, no tensors"

        os.kill(notes(told, "scheduler")[-1]["child"], signal.SIGKILL)
        assert ask(engine).adapter_version == 1, "another one has the current adapter"
        again = notes(told, "load")[2]
        assert (again["name"], again["sums"]) == ("policy@1", loads[1]["sums"]), "the ranks' memory is read again"
        assert len(notes(told, "engine")) == len(notes(told, "node")) == 2

        first_machine = psutil.Process(notes(told, "engine")[-1]["pid"])
        os.kill(notes(told, "node")[-1]["pid"], signal.SIGKILL)
        first_machine.wait(timeout=WAIT_S)
        assert ask(engine).adapter_version == 1, "the other machine took it along"
        places = [one["arguments"]["dist_init_addr"] for one in notes(told, "engine")]
        assert len(set(places)) == 3, "each start has a meeting place of its own"
        assert engine.stats()["restarts"] == 2

        engine.close()
        everyone = {one[key] for kind, key in (("engine", "pid"), ("node", "pid"), ("scheduler", "child"))
                    for one in notes(told, kind)}  # fmt: skip
        left = [psutil.Process(pid) for pid in everyone if psutil.pid_exists(pid)]
        assert psutil.wait_procs(left, timeout=WAIT_S)[1] == []
