"""What a running SGLang engine must show on the golden checkpoint, as numbers. Compares, measures, judges nothing."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_k3.adapters.update import make_update
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.types import AdapterConfig, AdapterUpdate, Completion, SamplingParams

Adapter = Mapping[str, Tensor]
SETTLE_S, PAUSED_S = 0.2, 0.5  # until a pause holds, tokens under way included; and for how long it is watched then


def closeness(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> dict[str, float]:
    """Mean and largest |difference| and the correlation of two sets of log-probabilities; NaN of empty ones."""
    if not ours:
        return dict.fromkeys(("mean", "max", "correlation"), float("nan"))
    pair = torch.stack([torch.cat([t.double().cpu().flatten() for t in side]) for side in (ours, theirs)])
    difference = (pair[0] - pair[1]).abs()
    return {
        "mean": difference.mean().item(), "max": difference.max().item(),
        "correlation": torch.corrcoef(pair)[0, 1].item() if pair.shape[1] > 1 else float("nan"),
    }  # fmt: skip


def zero_b(tensors: Adapter) -> dict[str, Tensor]:
    """The adapter that changes nothing."""
    return {name: torch.zeros_like(t) if ".lora_B." in name else t.clone() for name, t in tensors.items()}


def noise(engine: SglangEngine, sequences: Sequence[Sequence[int]], repeats: int = 3) -> dict[str, float]:
    """How far one engine's scores are from its own, with the same weights: the worst of some repeats."""
    first = engine.score(sequences)
    each = [closeness(engine.score(sequences), first) for _ in range(repeats)]
    return {key: max(one[key] for one in each) for key in ("mean", "max")}


def scores_of_versions(
    engine: SglangEngine, config: AdapterConfig, tensors: Adapter, sequences: Sequence[Sequence[int]]
) -> dict[str, list[Tensor]]:
    """Scores of the base, of an adapter with B = 0, and of the adapter, which is left loaded."""
    scores = {"base": engine.score(sequences)}
    for name, chosen in (("zero_b", zero_b(tensors)), ("adapter", tensors)):
        engine.load_adapter(next_update(engine, config, chosen))
        scores[name] = engine.score(sequences)
    return scores


def next_update(engine: SglangEngine, config: AdapterConfig, tensors: Adapter) -> AdapterUpdate:
    """Tensors as the version that the engine expects."""
    return make_update(max(0, engine.adapter_version + 1), config, dict(tensors))


def answers(
    engine: SglangEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    versions: Sequence[int | None],
) -> list[Completion]:
    """All prompts at once, each under its version, and with its own parameters where there are several."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params

    async def run() -> list[Completion]:
        return list(await asyncio.gather(
            *(engine.generate(p, s, adapter_version=v) for p, s, v in zip(prompts, each, versions, strict=True))
        ))  # fmt: skip

    return asyncio.run(run())


def mixed_batch(engine: SglangEngine, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
    """Greedy answers of two versions and the base, asked alone and all in one batch.

    Needs two loaded versions. Tokens may differ where two are equally likely; log-probabilities of the common start are
    compared.
    """
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens)
    kinds = (-1, engine.adapter_version - 1, engine.adapter_version)
    alone = {v: answers(engine, prompts, params, [v] * len(prompts)) for v in kinds}
    order = [(p, v) for p in range(len(prompts)) for v in kinds]
    mixed = answers(engine, [prompts[p] for p, _ in order], params, [v for _, v in order])
    pairs = [(mixed[i], alone[v][p]) for i, (p, v) in enumerate(order)]
    common = [common_tokens(a.token_ids, b.token_ids) for a, b in pairs]
    starts = [(a.logprobs[:n], b.logprobs[:n]) for (a, b), n in zip(pairs, common, strict=True) if n]
    apart = [common_tokens(alone[kinds[1]][p].token_ids, alone[kinds[2]][p].token_ids) for p in range(len(prompts))]
    return {
        **closeness([torch.tensor(a) for a, _ in starts], [torch.tensor(b) for _, b in starts]),
        "versions_right": all(a.adapter_version == v for a, (_, v) in zip(mixed, order, strict=True)),
        "common_tokens": sum(common), "asked_tokens": new_tokens * len(order),
        "common_tokens_of_two_versions": sum(apart),
    }  # fmt: skip


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def prefix_hits(
    engine: SglangEngine, cached: Callable[[], int], prompt: Sequence[int], update: Callable[[], AdapterUpdate]
) -> dict[str, int]:
    """Prompt tokens taken from the cache: the second time under one version, and the first under the next.

    `cached` tells how many those of the last request were.
    """
    params = SamplingParams(temperature=0.0, max_new_tokens=2)
    found = {}
    for name in ("first", "again"):
        answers(engine, [prompt], params, [None])
        found[name] = cached()
    engine.load_adapter(update())
    answers(engine, [prompt], params, [None])
    found["next_version"] = cached()
    answers(engine, [prompt], params, [engine.adapter_version - 1])
    found["old_version"] = cached()
    return found


def paused(
    engine: SglangEngine, prompt: Sequence[int], params: SamplingParams, *, retract: bool
) -> tuple[Completion, int]:
    """An answer under the newest version that is paused behind its first tokens and goes on later; and how many tokens
    came while it was paused."""

    async def run() -> tuple[Completion, int]:
        heard, begun = list[int](), asyncio.Event()

        def hear(tokens: Sequence[int], _: Sequence[float]) -> None:
            heard.extend(tokens)
            begun.set()

        answer = asyncio.ensure_future(engine.generate(prompt, params, on_tokens=hear))
        first = asyncio.ensure_future(begun.wait())
        await asyncio.wait({answer, first}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        await asyncio.to_thread(engine.pause, retract=retract)
        try:
            await asyncio.sleep(SETTLE_S)
            before = len(heard)
            await asyncio.sleep(PAUSED_S)
            moved = len(heard) - before
        finally:
            await asyncio.to_thread(engine.unpause)
        return await answer, moved

    return asyncio.run(run())


def swap_seconds(
    engine: SglangEngine, updates: Callable[[], AdapterUpdate], prompt: Sequence[int], repeats: int
) -> dict[str, float]:
    """Of a load, and of the first token after it; medians. The update is made before the clock starts."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    loads, firsts = [], []
    for _ in range(repeats):
        update = updates()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        engine.load_adapter(update)
        loaded = time.perf_counter()
        answers(engine, [prompt], params, [None])
        loads.append(loaded - start)
        firsts.append(time.perf_counter() - loaded)
    return {
        "load_s": statistics.median(loads), "first_token_s": statistics.median(firsts), "repeats": repeats,
        "load_s_max": max(loads), "first_token_s_max": max(firsts),
    }  # fmt: skip


def decode_step_ms(
    engine: SglangEngine, prompts: Sequence[Sequence[int]], version: int | None, repeats: int = 3
) -> dict[str, float]:
    """Milliseconds of a decode step with all prompts in the batch: what 96 more tokens take. Median, least, most."""
    short, long = (SamplingParams(temperature=1.0, max_new_tokens=n) for n in (32, 128))
    versions = [version] * len(prompts)
    answers(engine, prompts, short, versions)  # compiles, and fills the cache with the prompts
    steps = []
    for _ in range(repeats):
        seconds = []
        for params in (short, long):
            start = time.perf_counter()
            answers(engine, prompts, params, versions)
            seconds.append(time.perf_counter() - start)
        steps.append(1000 * (seconds[1] - seconds[0]) / (long.max_new_tokens - short.max_new_tokens))
    return {"median": statistics.median(steps), "min": min(steps), "max": max(steps)}
