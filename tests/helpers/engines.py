"""Embedded engines on tiny models, ways to ask them, and what the oracle says about their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from helpers.oracle64 import Oracle64
from helpers.pool_driver import poison
from helpers.tiny import mild_weights, tiny_adapter, tiny_config, tiny_weights
from torch import Tensor

from miles_k3.adapters.update import make_update
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import text_params
from miles_k3.k3.weights import build_base
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.types import AdapterConfig, AdapterUpdate, Completion, SamplingParams

ADAPTER = AdapterConfig(rank=4, alpha=12.0)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)


@cache
def weights(*, calm: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """Tiny-A's weights. Those of the specification amplify rounding to 1e-3 nats and more, NaiveK3's in fp32 as well;
    `calm` ones are mild, so that any order of summation gives the same tokens."""
    return (mild_weights if calm else tiny_weights)(tiny_config(), seed)


def make_engine(
    *,
    calm: bool = True,
    dtype: torch.dtype = torch.float32,
    base_dtype: str = "bf16",
    device: str = "cpu",
    top_k: int | None = None,
    **options: Any,
) -> EmbeddedEngine:
    """An engine on tiny-A; `options` are the constructor's. `top_k` experts: with all 8 no router decides anything."""
    config, tensors = tiny_config(**({} if top_k is None else {"num_experts_per_token": top_k})), weights(calm=calm)
    base = build_base(
        config, text_params(config), lambda p: tensors[p.name], dtype=dtype, device=device, base_dtype=base_dtype
    )
    settings = {"max_lora_rank": 8, "max_running": 64, "max_sequence_tokens": 256, **options}
    return EmbeddedEngine(base, config, **settings)


def adapter_update(version: int, *, scale: float = 0.05, config: AdapterConfig = ADAPTER) -> AdapterUpdate:
    """A whole adapter whose factors depend on its version."""
    drawn = tiny_adapter(tiny_config(), config, scale=scale)
    return make_update(version, config, {name: t.roll(version, -1) for name, t in drawn.items()})


def random_prompts(count: int, *, low: int = 1, high: int = 60, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def ask(
    engine: EmbeddedEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    **options: Any,
) -> list[Completion]:
    """All prompts at once, in one event loop of their own."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params

    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(p, s, **options) for p, s in zip(prompts, each, strict=True)))

    return asyncio.run(run())


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in completions]


def oracle(*, calm: bool = True, adapter: AdapterUpdate | None = None, config: K3Config | None = None) -> Oracle64:
    """The naive model in float64, with an adapter if one is given."""
    model = Oracle64(config or tiny_config(), weights(calm=calm))
    if adapter is not None:
        model.adapter, model.scaling = adapter.tensors, adapter.config.scaling
    return model


@torch.no_grad()
def answer_logits(model: Oracle64, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [answer length, V] that each answer token was drawn from, by one padded forward."""
    rows = [[*prompt, *answer][:-1] for prompt, answer in zip(prompts, answers, strict=True)]
    longest = max(map(len, rows))
    logits = model(torch.tensor([row + [0] * (longest - len(row)) for row in rows]))
    return [logits[i, len(prompt) - 1 : len(row)] for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))]


def assert_greedy(
    logits: Sequence[Tensor], completions: Sequence[Completion], *, tie: float = 0.0, tolerance: float = 1e-4
) -> None:
    """Each token is the oracle's argmax, but for ties within `tie`; each log-probability that of the raw logits."""
    for row, completion in zip(logits, completions, strict=True):
        tokens = torch.tensor(completion.token_ids)
        chosen = row.gather(1, tokens[:, None]).squeeze(1)
        assert (row.amax(-1) - chosen <= tie).all(), (row.argmax(-1).tolist(), completion.token_ids)
        difference = row.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1) - torch.tensor(completion.logprobs)
        assert difference.abs().max() <= tolerance, difference


def poison_before_steps(engine: EmbeddedEngine) -> None:
    """From now on, what is free holds NaN before every forward. Queued moves read there until the flush."""
    flush = engine.pool.flush

    def poisoned_flush() -> None:
        flush()
        poison(engine.pool)

    engine.pool.flush = poisoned_flush  # type: ignore[method-assign]


def row_of(engine: EmbeddedEngine, request_id: str) -> int:
    """Where a running request's state is, until the next flush."""
    return engine.pool.slot_rows([engine._requests[request_id][0].slot]).tolist()[0]


def assert_idle(engine: EmbeddedEngine) -> None:
    """No request holds anything any more: what isn't free is the prefix cache's, which gives it back."""
    stats: Mapping[str, float] = engine.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert not engine._requests
    assert not any(engine.store.users(version) for version in engine.store.live_versions())
    assert not engine.memory._table.any()
    assert engine.pool.num_held == stats.get("cache_pages", 0) + stats.get("cache_slots", 0)
    engine.pool.check()
    if engine.prefixes is not None:
        engine.prefixes.cache.check()
        held = engine.prefixes.cache.stats()
        assert held["pinned_pages"] == held["pinned_slots"] == 0
