"""What a process of a cluster's run is told, and how it becomes the one that it was told to be.

Torch is imported only after the environment is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_k3.config import Recipe
from miles_k3.errors import LaunchError

if TYPE_CHECKING:
    from miles_k3.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNode:
    """A machine's part of one engine: the bundle that its process lies in, its first GPU among those that the run has
    there, and the environment of a process of the run there."""

    group: PlacementGroup
    bundle: int
    first_gpu: int
    environment: Mapping[str, str | None]

    def actor(self, kind: type, share: Mapping[str, float], **options: Any) -> Any:
        """A remote class whose instances are placed here."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return ray.remote(kind).options(
            num_cpus=share["CPU"], num_gpus=share.get("GPU", 0), scheduling_strategy=strategy, max_restarts=0, **options
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an actor landed. `devices` are the GPUs it was given, as the host numbers them."""

    node: str
    address: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process of the run has to know. `environment`: None removes a variable; `folder` is the working one;
    `engine`: the machines of the engine that the rank speaks for, none where it has none; `share`: of a bundle's
    resources, what the engine's process has."""

    recipe: Recipe
    resume: bool
    debug: bool
    environment: Mapping[str, str | None]
    folder: Path
    engine: tuple[EngineNode, ...]
    share: Mapping[str, float]


def settle_in(order: Order) -> World:
    """Make this process the one that the order describes; its place among the ranks."""
    for name, value in order.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if not order.folder.is_dir():
        raise LaunchError(
            f"{order.folder}, where the run was launched, does not exist on {ray.util.get_node_ip_address()}; every "
            "node must see the run's folder and the model under the same paths"
        )
    os.chdir(order.folder)
    from miles_k3.logs import set_up_logging
    from miles_k3.world import world_of

    world = world_of()
    set_up_logging(debug=order.debug, rank=world.rank)
    return world
