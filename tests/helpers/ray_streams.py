"""A stream of tokens from an engine in a process of a Ray cluster: `python ray_streams.py ADDRESS` prints what came."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_k3.ray.actors import SHARE, RayEngineProcess
from miles_k3.ray.order import EngineNode, Order
from miles_k3.ray.remote_engine import RemoteEngine
from miles_k3.recipe import load_recipe
from miles_k3.types import SamplingParams

PROMPT = (1, 4, 50, 60, 70)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3)


class Owner:
    """Stands for a rank: an actor, of which every thread knows the placement group."""

    def stream_twice(self, order: Order, kill_after: int) -> dict[str, Any]:
        return stream_twice(order, kill_after)


def stream_twice(order: Order, kill_after: int) -> dict[str, Any]:
    """One answer whole and one told as it is sampled, whose engine's process ends after `kill_after` tokens."""
    engine = RemoteEngine(
        lambda: RayEngineProcess(order, "engine 0", 120.0), name="engine 0", restarts=1, timeout_s=120.0
    )
    tokens, logprobs, calls = [], [], []

    def hear(some: Sequence[int], their_logprobs: Sequence[float]) -> None:
        tokens.extend(some)
        logprobs.extend(their_logprobs)
        calls.append(len(some))
        if len(tokens) == kill_after:
            engine._process.end()

    async def both() -> dict[str, Any]:
        whole = await engine.generate(PROMPT, PARAMS)
        told = await engine.generate(PROMPT, PARAMS, on_tokens=hear)
        return {
            "whole": whole.token_ids, "completion": told.token_ids, "told": tokens, "logprobs": logprobs,
            "whole_logprobs": whole.logprobs, "calls": len(calls), "restarts": engine.stats()["restarts"],
        }  # fmt: skip

    try:
        engine.ready()
        return asyncio.run(both())
    finally:
        engine.close()


def main(address: str) -> None:
    ray.init(address=address, log_to_driver=False)
    group = placement_group([{"CPU": 1.0}])
    ray.get(group.ready())
    order = Order(
        recipe=load_recipe("tiny-cpu").recipe, resume=False, debug=False, environment={}, folder=Path.cwd(),
        engine=(EngineNode(group=group, bundle=0, first_gpu=0, environment={}),), share={"CPU": SHARE},
    )  # fmt: skip
    place = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    owner: Any = ray.remote(Owner).options(num_cpus=SHARE, scheduling_strategy=place).remote()
    print(json.dumps(ray.get(owner.stream_twice.remote(order, 5))))


if __name__ == "__main__":
    main(sys.argv[1])
