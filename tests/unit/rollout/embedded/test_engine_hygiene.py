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
    tokens_of,
)
from helpers.mutants import mutate

from miles_k3.rollout.cache import pools
from miles_k3.rollout.embedded import batch, runner
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.types import Completion, FinishReason, SamplingParams

PROMPTS = random_prompts(24, seed=11)
PARAMS = [SamplingParams(max_new_tokens=6 + i % 5, seed=i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return ask(make_engine(), PROMPTS, PARAMS)


def check_recycled_memory(expected: list[Completion]) -> None:
    """Small pools, so that slots and pages are used again and again; what is free holds NaN before every step."""
    engine = make_engine(max_running=5, num_pages=40, page_size=4, prefill_chunk_tokens=48)
    poison_before_steps(engine)
    answers = ask(engine, PROMPTS, PARAMS)
    assert all(a.finish_reason is FinishReason.LENGTH for a in answers)
    assert tokens_of(answers) == tokens_of(expected)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert_idle(engine)


def test_recycled_and_free_memory_is_never_read(expected: list[Completion]) -> None:
    check_recycled_memory(expected)


@pytest.mark.parametrize(
    ("owner", "name", "edit"),
    [
        (pools.StateSlots, "scrub", ("pool.index_fill_(1, index, 0.0)", "pass")),
        (pools.StateSlots, "compact", ("self.copy(list(moves), list(moves.values()))", "pass")),
        (batch, "decode_batch", ("positions_S > contexts_B[:, None]", "positions_S > contexts_B[:, None] + 1")),
        (batch, "decode_batch", ("pages.rows_of(slots_B, contexts_B)", "pages.rows_of(slots_B, contexts_B + 1)")),
        (batch, "_context", ("positions_S <= queries_BL[", "positions_S <= 1 + queries_BL[")),
    ],
    ids=[
        "slots are not zeroed",
        "compaction moves no bytes",
        "decode looks ahead",
        "decode writes ahead",
        "chunks look ahead",
    ],
)
def test_the_check_sees_planted_mistakes(
    expected: list[Completion], monkeypatch: pytest.MonkeyPatch, owner: object, name: str, edit: tuple[str, str]
) -> None:
    mutant = mutate(getattr(owner, name), edit)
    monkeypatch.setattr(owner, name, mutant)
    if hasattr(runner, name):
        monkeypatch.setattr(runner, name, mutant)
    with pytest.raises((AssertionError, IndexError)):
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
            damage(engine, engine._requests[str(index)][0].slot)
        return await asyncio.gather(*tasks)

    return asyncio.run(run())


def poison_state(engine: EmbeddedEngine, slot: int) -> None:
    engine.slots.states[2, slot, 1, 3, 4] = torch.nan


def poison_window(engine: EmbeddedEngine, slot: int) -> None:
    engine.slots.windows[0, slot] = torch.inf


def poison_page(engine: EmbeddedEngine, slot: int) -> None:
    engine.pages.kv[1, engine.pages.pages_of(slot)[0], 0] = torch.nan


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
    assert not engine.pages.kv[:, 0].any()
    assert not engine.slots.states[:, 0].any()
    assert not engine.slots.windows[:, 0].any()
