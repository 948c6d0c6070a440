"""The Ray cluster of a run: joined or started, judged before anything waits for it, and the places on it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from miles_k3.config import Recipe
from miles_k3.errors import LaunchError
from miles_k3.parallel import planned_world

log = logging.getLogger(__name__)

LOCAL = "local"
OBJECT_STORE_BYTES = 256 << 20  # of a cluster started here: answers pass through it, adapters and weights do not
STARTS = 3  # of a cluster here, at most
TOO_SLOW = "timed out during startup"  # Ray's words
REACH_S = 10.0  # to the head node
PLACING_S = 60.0  # for a group of which the nodes are known to have room
NOT_PROXIED = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a run asks for: `nodes` places, each with room for `per_node` ranks and their engines."""

    nodes: int
    per_node: int
    gpus: bool

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def of_rank(self) -> dict[str, float]:
        """The bundle that a rank and its engine share: on CUDA one device, whose memory both know how to divide."""
        return {"CPU": 1.0, **({"GPU": 1.0} if self.gpus else {})}


def request_of(recipe: Recipe, gpus_there: float) -> Request:
    """What `recipe` asks for; model.device auto takes GPUs where the cluster has any."""
    nodes, device = recipe.cluster.nodes, recipe.model.device
    per_node = recipe.cluster.ranks_per_node or -(-planned_world(recipe) // nodes)
    return Request(nodes=nodes, per_node=per_node, gpus=device == "cuda" or (device == "auto" and gpus_there > 0))


@contextmanager
def joined(recipe: Recipe) -> Iterator[None]:
    """Ray, joined at `cluster.ray_address` or started here, and left or ended afterwards.

    Raises LaunchError when it can't be reached.
    """
    address = recipe.cluster.ray_address
    spare_proxies([] if address == LOCAL else [address.rpartition(":")[0]])
    local = {
        "num_cpus": max(os.cpu_count() or 1, request_of(recipe, 0).ranks),  # ranks share cores, as under torchrun
        "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False,
    }  # fmt: skip
    _refuse_silent(address)
    _enter(address, local if address == LOCAL else {})
    try:
        spare_proxies([node["NodeManagerAddress"] for node in ray.nodes()])
        yield
    finally:
        ray.shutdown()


def _enter(address: str, options: Mapping[str, Any]) -> None:
    """Join Ray, or start it, again where it was too slow: Ray's limit for that is fixed, and busy machines pass it."""
    for attempt in range(1, STARTS + 1):
        try:
            ray.init(
                address=address, log_to_driver=True, logging_level=logging.WARNING, namespace="miles-k3", **options
            )
            return
        except Exception as error:  # Ray raises a bare Exception when a node doesn't start in time
            if address != LOCAL or TOO_SLOW not in str(error) or attempt == STARTS:
                raise _unreachable(address, error) from error
            log.warning("Ray did not start in the 30 s that it gives itself; once more (%d of %d)", attempt + 1, STARTS)
            ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Ray tries for minutes to reach an address where nobody listens; one look is enough."""
    if address in (LOCAL, "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(
            f"cluster.ray_address is {address!r}; expected local, auto, or HOST:PORT of `ray start --head`"
        )
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> LaunchError:
    if address == LOCAL:
        return LaunchError(
            f"Ray could not be started here ({_first_line(error)}); try again when the machine is less busy, or start "
            "it with `ray start --head` and set cluster.ray_address: auto"
        )
    return LaunchError(
        f"cluster.ray_address {address}: no Ray cluster can be reached there ({_first_line(error)}); start one with "
        "`ray start --head`, or set cluster.ray_address: local"
    )


def spare_proxies(hosts: Sequence[str], environ: Any = os.environ) -> None:
    """Have no proxy stand between the processes of a run: `hosts` and this one are added to no_proxy.

    The proxies themselves stay for what is outside, such as wandb.
    """
    for name in ("no_proxy", "NO_PROXY"):
        present = [host for host in environ.get(name, "").split(",") if host]
        environ[name] = ",".join(dict.fromkeys([*present, *NOT_PROXIED, *filter(None, hosts)]))


def refuse_cluster(wanted: Request, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise LaunchError at once when the cluster's live nodes (of `ray.nodes()`) can never hold the run."""
    alive = [node for node in nodes if node["Alive"]]
    there = [node["Resources"] for node in alive]
    problems = []
    for kind, each in wanted.of_rank.items():
        asked, has = each * wanted.ranks, sum(resources.get(kind, 0) for resources in there)
        if has < asked:
            problems.append(f"requested {asked:g} {kind}s, cluster has {has:g}")
    places = sum(
        int(min(resources.get(kind, 0) // (each * wanted.per_node) for kind, each in wanted.of_rank.items()))
        for resources in there
    )
    if not problems and places < wanted.nodes:
        bundle = " and ".join(f"{each * wanted.per_node:g} {kind}s" for kind, each in wanted.of_rank.items())
        problems.append(f"requested {wanted.nodes} nodes with {bundle} each, cluster has room for {places}")
    if problems:
        seen = "; ".join(f"{node['NodeManagerAddress']}: {_counted(node['Resources'])}" for node in alive)
        raise LaunchError(
            f"{' and '.join(problems)} (nodes: {seen}); add nodes with `ray start`, or change cluster.nodes and "
            "cluster.ranks_per_node"
        )


@contextmanager
def placed(wanted: Request) -> Iterator[list[tuple[PlacementGroup, int]]]:
    """A bundle for each rank, those of one node together; given back afterwards.

    Raises LaunchError when others use what the cluster has.
    """
    groups = [placement_group([wanted.of_rank] * wanted.per_node, strategy="STRICT_PACK") for _ in range(wanted.nodes)]
    try:
        _, waiting = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=PLACING_S)
        if waiting:
            raise LaunchError(
                f"{len(waiting)} of {len(groups)} groups of {wanted.per_node} ranks found no place within "
                f"{PLACING_S:g} s; others use the cluster (free: {_counted(ray.available_resources())}): wait for "
                "them, or change cluster.nodes and cluster.ranks_per_node"
            )
        yield [(group, bundle) for group in groups for bundle in range(wanted.per_node)]
    finally:
        for group in groups:
            remove_placement_group(group)


def _counted(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
