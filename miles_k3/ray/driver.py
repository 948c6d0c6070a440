"""`miles-k3 launch`: places a run's ranks on a cluster, starts them, and sees to it that all end together."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_k3.config import Recipe
from miles_k3.errors import LaunchError
from miles_k3.plan.planner import read_config
from miles_k3.ray.actors import SHARE, RankActor, end_of_process
from miles_k3.ray.cluster import Request, joined, placed, refuse_cluster, request_of, spare_proxies
from miles_k3.ray.engine_nodes import engine_nodes
from miles_k3.ray.order import Order, Place
from miles_k3.rollout.sglang.arguments import sglang_problems
from miles_k3.rollout.sglang.span import engine_ranks, span_problems
from miles_k3.world import LAUNCHER, PeerLostError

if TYPE_CHECKING:
    from miles_k3.loop import RunResult

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks at the signals
WORDS_S = 10.0  # after a rank's failure, for the one that failed first to say so
# All devices of the host stay visible, so that ranks and engines call each by the same number.
OWN_DEVICES = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
# Of a cluster that is started here. Ray's own 15 lets ranks and engines starve beside anything else.
NICENESS = "RAY_worker_niceness"
PASSED_ON = ("no_proxy", "NO_PROXY", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE", "GLOO_SOCKET_IFNAME")


def launch(recipe: Recipe, *, resume: bool = False, debug: bool = False) -> RunResult:
    """Run `recipe` on its cluster; rank 0's result. SIGINT and SIGTERM end it after a step, a second one at once.

    Raises LaunchError when the cluster can't hold the run or a process of it is lost, and what ended a rank.
    """
    refuse_engines(recipe)
    os.environ.setdefault(OWN_DEVICES, "1")
    os.environ.setdefault(NICENESS, "0")
    with joined(recipe):
        wanted = request_of(recipe, ray.cluster_resources().get("GPU", 0))
        refuse_cluster(wanted, ray.nodes())
        with placed(wanted) as bundles, _signals() as signals:
            ranks = [_make_rank(rank, bundle, wanted) for rank, bundle in enumerate(bundles)]
            places = _places(ranks)
            store = _open_store() if len(ranks) > 1 else None
            environments = list(_environments(places, store))
            engines = engine_nodes(bundles, environments, lambda rank: engine_ranks(recipe, rank, len(ranks)))
            running = [
                rank.run.remote(Order(
                    recipe=recipe, resume=resume, debug=debug, environment=environment, folder=Path.cwd(),
                    engine=engine, share=_share(wanted),
                ))
                for rank, environment, engine in zip(ranks, environments, engines, strict=True)
            ]  # fmt: skip
            try:
                return _watch(ranks, running, signals, recipe)
            finally:
                for rank in ranks:
                    ray.kill(rank)


def refuse_engines(recipe: Recipe) -> None:
    """Raise LaunchError where the recipe's SGLang engines can't be started, before a cluster is joined."""
    if recipe.rollout.engine != "sglang":
        return
    config, wanted = read_config(recipe), request_of(recipe, 1)
    problems = [
        *sglang_problems(recipe, config),
        *span_problems(recipe, ranks=wanted.ranks, per_node=wanted.per_node, launcher="ray"),
    ]
    if problems:
        raise LaunchError("\n".join(problems))


def _share(wanted: Request) -> dict[str, float]:
    return {kind: SHARE * each for kind, each in wanted.of_rank.items()}


def _make_rank(rank: int, bundle: tuple[PlacementGroup, int], wanted: Request) -> Any:
    group, index = bundle
    share = _share(wanted)
    return ray.remote(RankActor).options(
        num_cpus=share["CPU"], num_gpus=share.get("GPU", 0), max_restarts=0,
        max_concurrency=2,  # one thread trains, the other listens
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    ).remote(rank)  # fmt: skip


def _open_store() -> Any:
    """The ranks' key-value store, held here so that it outlives each of them."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)


def _environments(places: Sequence[Place], store: Any) -> Iterator[dict[str, str | None]]:
    """What torchrun would set, for each rank."""
    spare_proxies(sorted({place.address for place in places}))
    common: dict[str, str | None] = {name: os.environ.get(name) for name in PASSED_ON}
    common |= {LAUNCHER: "ray", "WORLD_SIZE": str(len(places)), "MASTER_ADDR": ray.util.get_node_ip_address()}
    common |= {"MASTER_PORT": str(store.port) if store else "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for rank, place in enumerate(places):
        neighbours = [r for r, other in enumerate(places) if other.node == place.node]
        devices = [device for r in neighbours for device in places[r].devices]
        yield common | {
            "RANK": str(rank), "LOCAL_RANK": str(neighbours.index(rank)), "LOCAL_WORLD_SIZE": str(len(neighbours)),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        }  # fmt: skip


def _watch(ranks: Sequence[Any], running: Sequence[Any], signals: list[signal.Signals], recipe: Recipe) -> RunResult:
    """Until all ranks have ended: passes signals on, and raises the first failure."""
    waiting, told = list(running), False
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=LOOK_S)
        if any(_failure(ref) is not None for ref in done):
            raise _cause(running, recipe)
        if len(signals) > 1:
            raise KeyboardInterrupt
        if signals and not told:
            told = _told(ranks, signals[0])
    return ray.get(running[0])


def _told(ranks: Sequence[Any], number: signal.Signals) -> bool:
    """Whether all ranks have heard of the signal: those that are still loading have not."""
    try:
        return all(ray.get([rank.stop.remote(int(number)) for rank in ranks]))
    except RayActorError:  # the rank's own call says so next
        return False


def _places(ranks: Sequence[Any]) -> list[Place]:
    try:
        return ray.get([rank.place.remote() for rank in ranks])
    except RayActorError as error:
        raise LaunchError(
            f"a rank ended before it began ({end_of_process(error)}); its node may lack memory"
        ) from error


def _failure(ref: Any) -> Exception | None:
    try:
        ray.get(ref, timeout=0)
    except GetTimeoutError:
        return None
    except RayError as error:
        return error
    return None


def _cause(running: Sequence[Any], recipe: Recipe) -> Exception:
    """Why the run ends: what the rank that failed first says of it, rather than those that miss it."""
    deadline = time.monotonic() + WORDS_S
    while True:
        ended, waiting = ray.wait(list(running), num_returns=len(running), timeout=0)
        failures = {running.index(ref): failure for ref in ended if (failure := _failure(ref)) is not None}
        first = {rank: failure for rank, failure in failures.items() if not _misses_another(failure)}
        if first or not waiting or time.monotonic() > deadline:
            rank = min(first or failures)
            return _explained(rank, failures[rank], recipe)
        ray.wait(waiting, num_returns=1, timeout=LOOK_S)


def _misses_another(failure: Exception) -> bool:
    """Whether it only says that another rank has gone; gloo's own words where it hears of it in the midst of a step."""
    cause = failure.cause if isinstance(failure, RayTaskError) else None
    return isinstance(cause, PeerLostError) or (isinstance(cause, RuntimeError) and " by peer" in str(cause))


def _explained(rank: int, failure: Exception, recipe: Recipe) -> Exception:
    if isinstance(failure, RayTaskError):
        return failure.cause if isinstance(failure.cause, Exception) and _has_words(failure.cause) else failure
    folder = Path(recipe.run.folder) / recipe.run.name
    assert isinstance(failure, RayError)
    return LaunchError(
        f"rank {rank} has ended ({end_of_process(failure)}), and the run with it; go on from its last checkpoint with "
        f"miles-k3 launch {folder} --resume"
    )


def _has_words(cause: Exception) -> bool:
    """Whether an error says by itself what to do; others are shown with their traceback."""
    from miles_k3.errors import MilesError

    return isinstance(cause, MilesError | OSError)


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """SIGINT and SIGTERM as they come, once a second at most: a terminal and a launcher may both pass one on."""
    from miles_k3.stop import SAME_REQUEST_S

    came: list[signal.Signals] = []
    last = 0.0

    def on_signal(number: int, _frame: object) -> None:
        nonlocal last
        if not came or time.monotonic() - last > SAME_REQUEST_S:
            came.append(signal.Signals(number))
        last = time.monotonic()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
