"""The engine on Triton kernels against the plain one: on a GPU, or a CPU in Triton's interpreter.

`python -m helpers.fused_engines` (with TRITON_INTERPRET=1) prints the largest differences of a short run as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from helpers.drafts import small_config, small_weights
from helpers.engines import ADAPTER, ask, poison_before_steps, random_prompts
from helpers.no_sync import NoSync, apart
from helpers.speculating import Knowing, book_of
from helpers.tiny import tiny_adapter, tiny_config, tiny_weights
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from miles_k3.adapters.update import make_update
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import text_params
from miles_k3.k3.weights import build_base
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.fused.graphs import GraphParts, Recorder, StepGraphs
from miles_k3.rollout.embedded.fused.graphs.recording import Recorded
from miles_k3.rollout.embedded.proposal import Speculative
from miles_k3.types import AdapterUpdate, Completion, SamplingParams

WIDTHS = {
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 128,
    "num_hidden_layers": 5,
    "mla_layers": (2, 4),
}  # two: rows of a layer are apart


def packed_config() -> K3Config:
    """A tiny model whose experts the kernels take packed: widths that are multiples of 64."""
    return tiny_config(**WIDTHS)


def update_of(version: int, config: K3Config) -> AdapterUpdate:
    drawn = tiny_adapter(config, ADAPTER, scale=0.05)
    return make_update(version, ADAPTER, {name: t.roll(version, -1) for name, t in drawn.items()})


def make(kernels: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any) -> EmbeddedEngine:
    """An engine of packed experts with a calm model: its output projections are small, so that rounding stays."""
    config = packed_config()
    drawn = tiny_weights(config, 0)
    calm = {n: t * 0.3 if "o_proj" in n or "lm_head" in n or "res_proj" in n else t for n, t in drawn.items()}
    base = build_base(
        config, text_params(config), lambda p: calm[p.name], dtype=dtype, device=device, base_dtype="mxfp4"
    )
    settings: dict[str, Any] = {"max_lora_rank": 8, "max_running": 8, "max_sequence_tokens": 128, "page_size": 8}
    return EmbeddedEngine(base, config, kernels=kernels, **{**settings, **options})  # type: ignore[arg-type]


def reexecuted(engine: EmbeddedEngine) -> EmbeddedEngine:
    """Steps through graphs whose replay runs the step again: for devices that record nothing."""

    class Reexecuting(Recorder):
        def _record[Left: tuple[Tensor | None, ...]](self, step: Callable[[], Left]) -> Recorded[Left]:
            with NoSync():
                left = step()

            def replay() -> None:
                with NoSync():
                    found = step()
                for old, new in zip(left, found, strict=True):
                    if old is not None and new is not None:
                        old.copy_(new)

            return Recorded(replay=replay, left=left)

    parts = GraphParts(
        model=engine._model, store=engine.store, memory=engine.memory, speculator=engine.speculator,
        recorder=Reexecuting(), max_running=engine.max_running, max_pages=engine._options.pages_per_request,
    )  # fmt: skip
    engine.runner.use_graphs(StepGraphs(parts))
    return engine


def run(engine: EmbeddedEngine, count: int, tokens: int) -> list[Completion]:
    """Answers of the bare base, of one version, and of two versions in one batch, with NaN in all free memory."""
    poison_before_steps(engine)
    prompts = random_prompts(count, low=1, high=20, seed=5)
    params = [SamplingParams(max_new_tokens=tokens, seed=i, return_routed_experts=True) for i in range(count)]
    answers = ask(engine, prompts, params)
    engine.load_adapter(update_of(0, engine.config))
    answers += ask(engine, prompts, params)
    engine.load_adapter(update_of(1, engine.config))
    versions = [(-1, 0, 1)[i % 3] for i in range(count)]
    return answers + _mixed(engine, prompts, params, versions)


def _mixed(engine: EmbeddedEngine, prompts: list[list[int]], params: list[SamplingParams], versions: list[int]
           ) -> list[Completion]:  # fmt: skip
    async def go() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(p, s, adapter_version=v) for p, s, v in zip(prompts, params, versions, strict=True))
        )

    return asyncio.run(go())


def differences(one: list[Completion], other: list[Completion]) -> dict[str, float]:
    """Where tokens or routed experts differ at all, and the largest difference of log-probabilities."""
    worst, tokens, routes = 0.0, 0, 0
    for a, b in zip(one, other, strict=True):
        tokens += a.token_ids != b.token_ids
        if a.token_ids == b.token_ids:
            worst = max(worst, *(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)))
            assert a.routed_experts is not None
            assert b.routed_experts is not None
            same = a.routed_experts.sort(-1).values == b.routed_experts.sort(-1).values
            routes += int((~same).sum())
    return {"tokens": tokens, "routes": routes, "logprobs": worst}


def speculating(count: int, tokens: int, **options: Any) -> tuple[dict[str, float], int]:
    """(differences between plain decoding and verifies on kernels, drafted tokens that were accepted)."""
    prompts = random_prompts(count, low=1, high=20, seed=5)
    params = [SamplingParams(max_new_tokens=tokens, seed=i, return_routed_experts=True) for i in range(count)]
    plain = make("plain", **options)
    plain.load_adapter(update_of(0, plain.config))
    expected = ask(plain, prompts, params)
    config = small_config(target_layer_ids=(1, 2, 4))
    draft = Speculative(config=config, weights=small_weights(config))
    fused = make("fused", speculative=draft, **options)
    poison_before_steps(fused)
    assert fused.speculator is not None
    knowing = Knowing(book_of(prompts, params, expected), 3, config.block_size)
    fused.speculator._draft, fused.speculator.drafts_ahead = knowing, False  # type: ignore[method-assign]
    fused.load_adapter(update_of(0, fused.config))
    found = differences(expected, ask(fused, prompts, params))
    return found, int(fused.speculator.counters["accepted_tokens"])


def main() -> None:
    GridExecutor.__call__ = apart(GridExecutor.__call__)  # type: ignore[method-assign]
    settings: dict[str, Any] = {"prefill_chunk_tokens": 24, "max_running": 3}
    plain = run(make("plain", **settings), 3, 3)
    eager, recorded = make("fused", **settings), reexecuted(make("fused", overlap=True, **settings))
    found = {"eager": differences(plain, run(eager, 3, 3)), "recorded": differences(plain, run(recorded, 3, 3))}
    found["recorded"]["graphs"] = 0 if recorded.runner.graphs is None else recorded.runner.graphs.num_recorded
    found["speculating"], found["speculating"]["accepted"] = speculating(3, 6, **settings)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
