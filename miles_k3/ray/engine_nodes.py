"""The machines of an engine: its own process on the first of them, SGLang's part on each of the others.

One that ends takes the others with it, since none can go on alone; whoever holds the engine starts it again whole.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from miles_k3.ray.order import EngineNode, Order, settle_in

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at whether a machine's part has ended


def engine_nodes(
    bundles: Sequence[tuple[PlacementGroup, int]], environments: Sequence[Mapping[str, str | None]],
    ranks: Callable[[int], range],
) -> list[tuple[EngineNode, ...]]:  # fmt: skip
    """For each rank the machines of the engine that it speaks for; none where another rank does.

    `ranks(r)`: those on whose GPUs the engine of rank r lies.
    """
    found: list[tuple[EngineNode, ...]] = []
    for rank in range(len(bundles)):
        mine = ranks(rank)
        firsts = [r for r in mine if r == mine.start or bundles[r][0] is not bundles[r - 1][0]]
        found.append(tuple(
            EngineNode(
                group=bundles[r][0], bundle=bundles[r][1], first_gpu=int(environments[r]["LOCAL_RANK"] or 0),
                environment=environments[r],
            )
            for r in (firsts if rank == mine.start else ())
        ))  # fmt: skip
    return found


def free_address() -> str:
    """HOST:PORT of this machine, free a moment ago."""
    with closing(socket.socket()) as found:
        found.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"


class NodeActor:
    """SGLang's part of an engine on one machine that isn't the engine's first."""

    def __init__(self, order: Order, node: int, name: str) -> None:
        self._order, self._node, self._name = order, node, name

    def __repr__(self) -> str:
        return f"{self._name}, machine {self._node}"

    def serve(self, meeting_place: str) -> str:
        """Run it until it ends; what its end was."""
        own = self._order.engine[self._node]
        settle_in(dataclasses.replace(self._order, environment=own.environment))
        from miles_k3.assemble import model_config
        from miles_k3.rollout.sglang.commands import node_command
        from miles_k3.rollout.sglang.visible import make_visible

        recipe, folder = self._order.recipe, make_visible()
        port = int(free_address().rpartition(":")[2])
        command = node_command(
            recipe, model_config(recipe), node=self._node, first_gpu=own.first_gpu, meeting_place=meeting_place,
            port=port,
        )  # fmt: skip
        process = subprocess.Popen([sys.executable, *command[1:]], preexec_fn=_end_with_parent)
        code = process.wait()
        if folder is not None:
            folder.cleanup()
        return f"machine {self._node}'s part of it has ended with {code}; its own lines in the log say why"


def _end_with_parent() -> None:
    """In a child before its program begins: the kernel ends it when the thread that started it has gone."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class OtherNodes:
    """The parts of one engine on machines that aren't its first; `lost` is called once when one of them ends."""

    def __init__(self, order: Order, name: str, lost: Callable[[], None]) -> None:
        self._actors: list[Any] = [
            node.actor(NodeActor, order.share).remote(order, index, name)
            for index, node in enumerate(order.engine)
            if index
        ]
        self._lost, self._ended = lost, threading.Event()
        self.reason: str | None = None  # of the first that ended

    def start(self, meeting_place: str) -> None:
        """Begin on all of them; returns at once."""
        running = [actor.serve.remote(meeting_place) for actor in self._actors]
        if running:
            threading.Thread(target=self._watch, args=(running,), name="engine nodes", daemon=True).start()

    def _watch(self, running: list[Any]) -> None:
        done: list[Any] = []
        while not done and not self._ended.is_set():
            done, _ = ray.wait(running, num_returns=1, timeout=LOOK_S)
        if self._ended.is_set():
            return
        try:
            self.reason = ray.get(done[0])
        except RayError as error:
            self.reason = str(error).strip().splitlines()[0]
        log.warning("%s", self.reason)
        self._lost()

    def end(self) -> None:
        """End all of them. Nothing where that has been done."""
        self._ended.set()
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)
