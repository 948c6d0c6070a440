"""Samples of one prompt: computed once, forked, and none the wiser."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from helpers.engines import GREEDY, adapter_update, ask, assert_idle, make_engine, random_prompts, tokens_of
from helpers.mutants import mutate

from miles_k3.errors import EngineError
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.types import Completion, FinishReason, SamplingParams


def prompts_of_groups(lengths: tuple[int, ...] = (1, 15, 16, 17, 40, 64)) -> list[list[int]]:
    """Four samples each of prompts on and off the page boundary."""
    return [p for n in lengths for p in random_prompts(1, low=n, high=n, seed=n) * 4]


PROMPTS = prompts_of_groups()
PARAMS = [
    SamplingParams(max_new_tokens=5 + i % 7, seed=i, return_routed_experts=i % 3 == 0) for i in range(len(PROMPTS))
]


def assert_same(answers: list[Completion], expected: list[Completion]) -> None:
    assert tokens_of(answers) == tokens_of(expected)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        if other.routed_experts is None:
            assert answer.routed_experts is None
        else:
            assert answer.routed_experts is not None
            assert torch.equal(answer.routed_experts, other.routed_experts)


def check_groups() -> EmbeddedEngine:
    expected = ask(make_engine(share_prompts=False), PROMPTS, PARAMS)
    engine = make_engine(prefill_chunk_tokens=50)
    assert_same(ask(engine, PROMPTS, PARAMS), expected)
    assert_idle(engine)
    return engine


def test_a_group_costs_one_prompt() -> None:
    stats = check_groups().stats()
    distinct = sum(len(p) for p in PROMPTS[::4])
    assert stats["prompt_tokens"] == distinct
    assert stats["shared_prompt_tokens"] == 3 * distinct


@pytest.mark.parametrize(
    "edit",
    [
        ("[f.slot for f in followers])", "[f.slot for f in followers][:1])"),
        ("self.pool.copy_pages(", "print("),
        ("leader.pages[full]", "leader.pages[0]"),
    ],
    ids=["state is not copied to all", "last page is not copied", "another page is copied"],
)
def test_the_check_sees_planted_mistakes(monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str]) -> None:
    monkeypatch.setattr(RequestMemory, "fork", mutate(RequestMemory.fork, edit))
    with pytest.raises((AssertionError, EngineError)):
        check_groups()


def test_followers_share_full_pages() -> None:
    """64 prompt tokens are four pages, held once by all four samples."""
    engine = make_engine(page_size=16, num_pages=4 + 4 * 1, max_running=4, max_sequence_tokens=128)
    answers = ask(engine, prompts_of_groups((64,)), dataclasses.replace(GREEDY, max_new_tokens=9))
    assert len(set(tokens_of(answers))) == 1
    assert engine.stats()["prompt_tokens"] == 64
    assert_idle(engine)


def test_small_pools_only_delay() -> None:
    """Room for three samples: the fourth comes later, when its prompt has to be computed again."""
    expected = ask(make_engine(share_prompts=False), PROMPTS, PARAMS)
    engine = make_engine(max_running=3, prefill_chunk_tokens=50)
    assert_same(ask(engine, PROMPTS, PARAMS), expected)
    assert_idle(engine)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_aborts_while_the_prompt_is_computed(victim: int) -> None:
    """Leader or follower: the others get their answers, the aborted one ends at once, nothing leaks."""
    prompts = prompts_of_groups((64,))
    expected = ask(make_engine(), prompts, PARAMS[:4])
    engine = make_engine(prefill_chunk_tokens=20)

    async def run() -> list[Completion]:
        tasks = [
            asyncio.ensure_future(engine.generate(p, s, request_id=str(i)))
            for i, (p, s) in enumerate(zip(prompts, PARAMS, strict=False))
        ]
        while not engine.stats().get("prefill_steps"):
            await asyncio.sleep(0)
        free = engine.stats()["free_slots"]
        engine.abort(str(victim))
        assert engine.stats()["free_slots"] > free
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert answers[victim].finish_reason is FinishReason.ABORT
    assert answers[victim].token_ids == ()
    assert tokens_of([a for i, a in enumerate(answers) if i != victim]) == tokens_of(
        [e for i, e in enumerate(expected) if i != victim]
    )
    assert_idle(engine)


def test_a_follower_of_a_leader_that_was_overtaken() -> None:
    """A third sample wants routed experts, which the first chunks were computed without: it leads a second time."""
    prompt = prompts_of_groups((64,))[0]
    engine = make_engine(prefill_chunk_tokens=16)

    async def run() -> list[Completion]:
        tasks = [asyncio.ensure_future(engine.generate(prompt, GREEDY, request_id=str(i))) for i in range(2)]
        while not engine.stats().get("prefill_steps"):
            await asyncio.sleep(0)
        routed = dataclasses.replace(GREEDY, return_routed_experts=True)
        tasks.append(asyncio.ensure_future(engine.generate(prompt, routed)))
        while engine.stats()["running"] < 3:
            await asyncio.sleep(0)
        engine.abort("1")
        return await asyncio.gather(*tasks)

    first, aborted, third = asyncio.run(run())
    assert aborted.finish_reason is FinishReason.ABORT
    assert first.token_ids == third.token_ids
    assert third.routed_experts is not None
    assert engine.stats()["prompt_tokens"] == 2 * len(prompt)
    assert_idle(engine)


def test_versions_do_not_share() -> None:
    """The same prompt under the base and under an adapter is two prompts."""
    engine = make_engine()
    engine.load_adapter(adapter_update(0, scale=0.1))
    prompt = PROMPTS[-1]

    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt, GREEDY, adapter_version=v) for v in (-1, 0, -1, 0)))

    base, adapted, *rest = asyncio.run(run())
    assert base.token_ids != adapted.token_ids
    assert tokens_of(rest) == [base.token_ids, adapted.token_ids]
    assert engine.stats()["prompt_tokens"] == 2 * len(prompt)
