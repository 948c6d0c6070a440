"""What memory held before, what padding holds, and what a broken neighbour holds never reaches an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from helpers.engines import (
    ask,
    assert_idle,
    make_engine,
    poison_before_steps,
    random_prompts,
    row_of,
    tokens_of,
)
from helpers.mutants import mutate

from miles_k3.errors import EngineError
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.cache.unified import UnifiedPool
from miles_k3.rollout.embedded import batch, runner
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.types import Completion, FinishReason, SamplingParams

PROMPTS = random_prompts(24, seed=11)
PARAMS = [SamplingParams(max_new_tokens=6 + i % 5, seed=i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return ask(make_engine(), PROMPTS, PARAMS)


def check_recycled_memory(expected: list[Completion], **options) -> None:
    """Small pools, so that slots and pages are used again and again; what is free holds NaN before every step."""
    engine = make_engine(max_running=5, num_pages=40, page_size=4, prefill_chunk_tokens=48, **options)
    poison_before_steps(engine)
    answers = ask(engine, PROMPTS, PARAMS)
    assert all(a.finish_reason is FinishReason.LENGTH for a in answers)
    assert tokens_of(answers) == tokens_of(expected)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cache_pool", ["unified", "split"])
def test_recycled_and_free_memory_is_never_read(expected: list[Completion], cache_pool: str, overlap: bool) -> None:
    check_recycled_memory(expected, cache_pool=cache_pool, overlap=overlap)


@pytest.mark.parametrize(
    ("owner", "name", "edit"),
    [
        (BlockPool, "flush", ("self._zero(kind, dirty)", "pass")),
        (UnifiedPool, "_move", ("self._copy(kind, self._as_rows(kind, sources), self._rows(kind, moved))", "pass")),
        (
            batch,
            "_decode_batch",
            ("r.num_cached + 1 for r", "r.num_cached + 2 for r"),
        ),
        (batch, "step_batch", ("starts_B[owners_T] +", "1 + starts_B[owners_T] +")),
        (batch, "_context", ("positions_S <= queries_BL[", "positions_S <= 1 + queries_BL[")),
    ],
    ids=[
        "blocks are not zeroed",
        "compaction moves no bytes",
        "decode looks ahead",
        "tokens are written ahead",
        "chunks look ahead",
    ],
)
def test_the_check_sees_planted_mistakes(
    expected: list[Completion], monkeypatch: pytest.MonkeyPatch, owner: object, name: str, edit: tuple[str, str]
) -> None:
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name), edit))
    if hasattr(runner, name):
        monkeypatch.setattr(runner, name, getattr(owner, name))
    with pytest.raises((AssertionError, IndexError, EngineError)):
        check_recycled_memory(expected)


Damage = Callable[[EmbeddedEngine, int], None]


def break_request(engine: EmbeddedEngine, index: int, damage: Damage) -> list[Completion]:
    """Run all prompts; once all of them decode, damage the memory of one."""

    async def run() -> list[Completion]:
        tasks = [
            asyncio.ensure_future(engine.generate(p, s, request_id=str(i)))
            for i, (p, s) in enumerate(zip(PROMPTS, PARAMS, strict=True))
        ]
        while engine.stats()["generated_tokens"] < 2 * len(PROMPTS):
            await asyncio.sleep(0)
        with torch.inference_mode():
            damage(engine, index)
        return await asyncio.gather(*tasks)

    return asyncio.run(run())


def poison_state(engine: EmbeddedEngine, index: int) -> None:
    engine.pool.states[2, row_of(engine, str(index)), 1, 3, 4] = torch.nan


def poison_window(engine: EmbeddedEngine, index: int) -> None:
    engine.pool.windows[0, row_of(engine, str(index))] = torch.inf


def poison_page(engine: EmbeddedEngine, index: int) -> None:
    page = engine._requests[str(index)][0].pages[0]
    engine.pool.kv[1, engine.pool.page_rows([page]), 0] = torch.nan


@pytest.mark.parametrize("damage", [poison_state, poison_window, poison_page])
def test_a_broken_request_ends_alone(expected: list[Completion], damage: Damage) -> None:
    engine = make_engine()
    answers = break_request(engine, 7, damage)
    broken = answers.pop(7)
    assert broken.finish_reason is FinishReason.ERROR
    assert broken.error is not None
    assert "not finite" in broken.error
    assert broken.token_ids == expected[7].token_ids[: len(broken.token_ids)]
    assert len(broken.token_ids) == len(broken.logprobs) == 2
    assert tokens_of(answers) == tokens_of([e for i, e in enumerate(expected) if i != 7])
    assert_idle(engine)
    assert tokens_of(ask(engine, PROMPTS, PARAMS)) == tokens_of(expected)  # its memory serves others again


def test_padding_pages_stay_clean(expected: list[Completion]) -> None:
    """Page 0 and slot 0 pad index tensors; nothing ever writes them."""
    engine = make_engine(page_size=4)
    assert tokens_of(ask(engine, PROMPTS, PARAMS)) == tokens_of(expected)
    slot, page = engine.pool.slot_rows([0]), engine.pool.page_rows([0])
    assert not engine.pool.kv[:, page].any()
    assert not engine.pool.states[:, slot].any()
    assert not engine.pool.windows[:, slot].any()
