"""Recorded speculation on kernels against the same steps launched one by one, and both against the plain engine.

`python -m helpers.fused_graphs` (with TRITON_INTERPRET=1) prints what differs on a CPU, where a replay runs its step
again, as JSON; on a GPU steps are recorded.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from helpers import fused_engines
from helpers.drafts import small_config, small_weights, telling_weights
from helpers.engines import poison_before_steps, random_prompts
from helpers.fused_engines import differences, make, reexecuted, update_of
from helpers.no_sync import apart
from torch import Tensor
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from miles_k3.k3.draft_params import MARKOV_W2
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.proposal import Speculative
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.audit import CommitAudit
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.types import AdapterUpdate, Completion, SamplingParams

FREE = CostProfile.of([(1, 1, 1.0), (1, 8, 1.0)])  # positions cost nothing
SMALL = {"num_hidden_layers": 3, "mla_layers": (1,)}  # the interpreter takes a second a step and layer


def telling(
    answers: Sequence[Completion], *, recorded: bool, device: str, accept: AcceptMode = AcceptMode.COUPLED,
    **options: Any,
) -> EmbeddedEngine:  # fmt: skip
    """An engine on kernels whose draft knows most of these answers, with NaN in all free memory."""
    config = small_config(target_layer_ids=(0, 1, 2), markov_rank=256, block_size=3)
    weights = telling_weights(config, [a.token_ids for a in answers])
    if accept is AcceptMode.REJECTION:
        weights[MARKOV_W2] = weights[MARKOV_W2] / 10  # sure of it, but not quite
    draft = Speculative(config=config, weights=weights, accept=accept)
    graphs = recorded if device == "cuda" else None
    engine = make("fused", device=device, speculative=draft, cuda_graphs=graphs, **options)
    poison_before_steps(engine)
    assert engine.speculator is not None
    engine.speculator.audit = CommitAudit(engine.runner.model.conv_weights())
    return engine if device == "cuda" or not recorded else reexecuted(engine)


def held(engine: EmbeddedEngine) -> list[list[Tensor]]:
    """After each step, in order of submission: state, window, latents and draft's context of who decodes."""
    steps, step = [], engine.runner.step

    def noted() -> Any:
        done = step()
        engine.pool.flush()
        found = []
        for r in sorted(engine.scheduler.decoding, key=lambda r: r.order):
            row, size = engine.pool.slot_rows([r.slot]), r.num_cached
            at = engine.memory.token_rows([r], torch.zeros(size, dtype=torch.int64), torch.arange(size))
            at, row = at.to(engine.pool.device), row.to(engine.pool.device)
            pages = engine.pool.kv.flatten(1, 2)[:, at], engine.pool.draft[0].flatten(0, 1)[at]
            found += [t.clone() for t in (engine.pool.states[:, row], engine.pool.windows[:, row], *pages)]
        steps.append(found)
        return done

    engine.runner.step = noted  # type: ignore[method-assign]
    return steps


def asked(engine: EmbeddedEngine, count: int, tokens: int) -> list[Completion]:
    """Answers of the base, then of the base and a version side by side; more than run at once, and a stop inside."""
    prompts = random_prompts(count, low=1, high=12, seed=5)
    params = [SamplingParams(max_new_tokens=tokens + i % 3, seed=i, return_routed_experts=True) for i in range(count)]

    async def run(versions: Sequence[int]) -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(p, s, adapter_version=v) for p, s, v in zip(prompts, params, versions, strict=True))
        )

    answers = asyncio.run(run([-1] * count))
    engine.load_adapter(update_of(0, engine.config))
    return answers + asyncio.run(run([i % 2 - 1 for i in range(count)]))


def compare(
    device: str, count: int, tokens: int, accept: AcceptMode = AcceptMode.COUPLED, **options: Any
) -> dict[str, Any]:
    """What differs of answers, and the largest difference of what requests hold after each step. Under rejection,
    whose answers are others than plain decoding's, those of launched kernels are what is expected."""
    expected = asked(make("plain", device=device, **options), count, tokens)
    engines = [
        telling(expected, recorded=recorded, device=device, accept=accept, **options) for recorded in (False, True)
    ]
    steps = [held(engine) for engine in engines]
    found = [asked(engine, count, tokens) for engine in engines]
    if accept is AcceptMode.REJECTION:
        expected = found[0]
    one, other = steps
    assert [len(s) for s in one] == [len(s) for s in other]
    worst = max((float((a - b).abs().max()) for s, t in zip(one, other, strict=True) for a, b in zip(s, t, strict=True)
                 if a.numel()), default=0.0)  # fmt: skip
    eager, recorded = engines
    assert eager.speculator is not None
    assert recorded.speculator is not None
    return {
        "launched": differences(expected, found[0]), "recorded": differences(expected, found[1]), "held": worst,
        "wrong states": sum(e.speculator.audit.wrong for e in engines),  # type: ignore[union-attr]
        "counts differ": eager.speculator.counters != recorded.speculator.counters,
        "drafted": recorded.speculator.counters["drafted_tokens"],
        "accepted": recorded.speculator.counters["accepted_tokens"],
        "graphs": 0 if recorded.runner.graphs is None else recorded.runner.graphs.num_recorded,
    }  # fmt: skip


FIFTY: dict[str, Any] = {"max_running": 4, "max_sequence_tokens": 1024, "num_pages": 600}


def short_draft() -> Speculative:
    config = small_config(target_layer_ids=(0, 1, 2), block_size=3)
    return Speculative(config=config, weights=small_weights(config))


def fifty_steps(engine: EmbeddedEngine, update: Callable[[int], AdapterUpdate], *, trim: bool) -> dict[str, int]:
    """What 50 steps of verifies add, behind as many that warm up: graphs, compiled kernels, bytes held, though an
    adapter and a draft come in between. On a GPU a wait of the host for it, but through events, raises.

    `engine` was made with `FIFTY` and `short_draft`.
    """
    speculator, graphs = engine.speculator, engine.runner.graphs
    assert speculator is not None
    assert graphs is not None
    config, on_gpu = speculator.at.config, engine.pool.device.type == "cuda"
    if trim:
        speculator.planner.mode, speculator.planner.profile = PlanMode.TRIM, FREE
    speculator.wants = lambda requests: True  # type: ignore[method-assign]
    engine.scheduler._follows = lambda *_: True
    for version in range(4):
        engine.load_adapter(update(version))
        engine.load_draft(small_weights(config, version), version)
    for i in range(4):
        engine.scheduler.submit(Request(
            id=str(i), prompt=(7, i), params=SamplingParams(max_new_tokens=900, seed=i), version=engine.store.acquire(3)
        ))  # fmt: skip
    for _ in range(50):
        engine.runner.step()

    def counts() -> tuple[int, ...]:
        held = torch.cuda.memory_allocated() if on_gpu else 0
        return graphs.num_recorded, compiled(), held, speculator.counters["verify_steps"]

    before = counts()
    for version in (4, 5):
        with no_waits() if on_gpu else nullcontext():
            for _ in range(25):
                engine.runner.step()
        if version == 4:  # beside those that run on, of whom the engine itself doesn't know
            engine.store.load(update(version))
            speculator.drafts.load(version, small_weights(config, version))
    names = ("graphs", "kernels", "bytes", "verifies")
    return {name: b - a for name, a, b in zip(names, before, counts(), strict=True)}


@contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled() -> int:
    """Kernels of ours that Triton has compiled."""
    modules = [m for n, m in sys.modules.items() if n.startswith("miles_k3.k3.kernels.")]
    functions = {id(f): f for m in modules for f in vars(m).values() if isinstance(f, JITFunction)}
    return sum(len(cache[0]) for f in functions.values() for cache in f.device_caches.values())


def main() -> None:
    GridExecutor.__call__ = apart(GridExecutor.__call__)  # type: ignore[method-assign]
    fused_engines.WIDTHS.update(SMALL)
    json.dump(compare("cpu", 3, 4, max_running=2, prefill_chunk_tokens=24), sys.stdout)


if __name__ == "__main__":
    main()
