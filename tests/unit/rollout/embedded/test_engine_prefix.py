"""A warm prefix cache changes no answer: tokens and log-probabilities are those of an engine without one.

All experts are chosen: a router that rates two alike to the last bit may otherwise choose another one, and everything
after that differs. What is left is fp32 rounding of sums in other chunks, 6e-6 of a log-probability.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch
from helpers.engines import adapter_update, ask, make_engine, poison_before_steps, random_prompts, tokens_of
from helpers.mutants import mutate

from miles_k3.errors import EngineError
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.scheduler import Scheduler
from miles_k3.types import Completion, FinishReason, SamplingParams

PAGE, CHUNK, ALL = 8, 20, 8
EDGES = [n + d for n in (PAGE, 2 * PAGE, CHUNK, 2 * CHUNK, 5 * PAGE) for d in (-1, 0, 1)]


def warm_engine(**options) -> EmbeddedEngine:
    settings = {
        "page_size": PAGE, "prefill_chunk_tokens": CHUNK, "prefix_cache": "radix", "cache_min_tokens": 1,
        "cache_slots": 12, "max_running": 6, "num_pages": 200, "top_k": ALL,
    }  # fmt: skip
    return make_engine(**{**settings, **options})


def cold_engine() -> EmbeddedEngine:
    return make_engine(page_size=PAGE, prefill_chunk_tokens=CHUNK, max_running=6, share_prompts=False, top_k=ALL)


def assert_same(answers: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert all(a.finish_reason is FinishReason.LENGTH for a in answers)
    assert tokens_of(answers) == tokens_of(expected)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, rel=1e-5)
        assert answer.adapter_version == other.adapter_version


def random_traffic(seed: int, waves: int = 6) -> list[list[tuple[list[int], SamplingParams]]]:
    """Waves of requests: new prompts, extensions of old ones, and old ones cut, around every boundary there is."""
    draw, pool, made = random.Random(seed), [], []
    for wave in range(waves):
        calls = []
        for i in range(6):
            old = draw.choice(pool) if pool else []
            kept = old[: draw.choice([0, len(old), *(e for e in EDGES if e <= len(old))])]
            fresh = random_prompts(1, low=1, high=50, seed=seed * 1000 + wave * 10 + i)[0]
            prompt = [*kept, *fresh[: draw.choice([1, len(fresh), *(e for e in EDGES if e <= len(fresh))])]]
            calls.append((prompt[:180], SamplingParams(max_new_tokens=draw.choice([1, 2, 7, 9]), seed=wave * 10 + i)))
        pool += [prompt for prompt, _ in calls]
        made.append(calls)
    return made


def check_traffic(seed: int, **options) -> EmbeddedEngine:
    """Answers of the last wave become prompts of the next: turns of a conversation. Adapters change in between."""
    warm, cold, turns = warm_engine(**options), cold_engine(), []
    poison_before_steps(warm)
    for wave, calls in enumerate(random_traffic(seed)):
        if wave in (2, 4):
            for engine in (warm, cold):
                engine.load_adapter(adapter_update(wave // 2 - 1, scale=0.1))
        calls = [*calls, *turns]
        prompts, params = [p for p, _ in calls], [s for _, s in calls]
        answers, expected = ask(warm, prompts, params), ask(cold, prompts, params)
        assert_same(answers, expected)
        turns = [
            ([*p, *a.token_ids, 7, wave], SamplingParams(max_new_tokens=5, seed=wave))
            for p, a in zip(prompts, answers, strict=True)
            if len(p) < 150
        ][:3]
    return warm


@pytest.mark.parametrize("policy", ["radix", "paged"])
@pytest.mark.parametrize("seed", range(3))
def test_warm_equals_cold(seed: int, policy: str) -> None:
    stats = check_traffic(seed, prefix_cache=policy).stats()
    assert stats["cached_prompt_tokens"] > 0
    assert stats["checkpoints"] > 0


@pytest.mark.parametrize("policy", ["radix", "paged"])
@pytest.mark.parametrize("options", [{"cache_slots": 1}, {"num_pages": 60}, {"max_running": 2}], ids=str)
def test_warm_equals_cold_under_pressure(options: dict, policy: str) -> None:
    check_traffic(9, prefix_cache=policy, **options)


@pytest.mark.parametrize("policy", ["radix", "paged"])
def test_memory_is_whole_when_the_cache_is_emptied(policy: str) -> None:
    engine = check_traffic(3, prefix_cache=policy)
    stats = engine.stats()
    assert stats["free_pages"] == engine.pages.num_pages - stats["cache_pages"]
    assert stats["free_slots"] == engine.slots.num_slots - stats["cache_slots"]
    engine.sleep()
    assert engine.pages.num_free == engine.pages.num_pages
    assert engine.slots.num_free == engine.slots.num_slots
    engine.wake()
    assert len(ask(engine, random_prompts(2))) == 2


def test_a_second_turn_computes_its_own_words_only() -> None:
    engine = warm_engine()
    prompt = random_prompts(1, low=70, high=70)[0]
    (answer,) = ask(engine, [prompt], SamplingParams(max_new_tokens=9, temperature=0.0))
    before = engine.stats()["prompt_tokens"]
    ask(engine, [[*prompt, *answer.token_ids, 5, 6]], SamplingParams(max_new_tokens=2))
    assert engine.stats()["prompt_tokens"] - before == 3  # the answer's last token, never fed before, and two new ones


def test_a_later_twin_computes_less_than_a_page() -> None:
    engine = warm_engine()
    prompt = random_prompts(1, low=70, high=70)[0]
    for _ in range(2):
        before = engine.stats()["prompt_tokens"]
        ask(engine, [prompt], SamplingParams(max_new_tokens=3))
    assert engine.stats()["prompt_tokens"] - before == 70 - 69 // PAGE * PAGE  # pyright: ignore[reportPossiblyUnboundVariable]


def test_a_fork_is_found_and_planted() -> None:
    """The first request leaves no state at the fork; the second stops there; the third starts from there."""
    engine = warm_engine()
    shared, *tails = (random_prompts(1, low=n, high=n, seed=n)[0] for n in (48, 31, 30, 29))
    computed = []
    for tail in tails:
        before = engine.stats()["prompt_tokens"]
        ask(engine, [[*shared, *tail]], SamplingParams(max_new_tokens=1))
        computed.append(engine.stats()["prompt_tokens"] - before)
    assert computed == [48 + 31, 48 + 30, 29]


@pytest.mark.parametrize("policy", ["radix", "paged"])
def test_routed_experts_come_whole_from_a_warm_cache(policy: str) -> None:
    """Nobody kept the routes of a cached prefix, so the prompt is computed; the answer is left to others as any is."""
    warm, cold = warm_engine(prefix_cache=policy), cold_engine()
    prompt = random_prompts(1, low=60, high=60)[0]
    params = SamplingParams(max_new_tokens=6, return_routed_experts=True)
    for _ in range(2):
        answers = ask(warm, [prompt] * 3, params)
    expected = ask(cold, [prompt] * 3, params)
    assert_same(answers, expected)  # pyright: ignore[reportPossiblyUnboundVariable]
    for answer, other in zip(answers, expected, strict=True):  # pyright: ignore[reportPossiblyUnboundVariable]
        assert answer.routed_experts is not None
        assert other.routed_experts is not None
        assert torch.equal(answer.routed_experts.sort(-1).values, other.routed_experts.sort(-1).values)
    assert warm.stats()["cached_prompt_tokens"] == 0
    ask(warm, [[*prompt, *answers[0].token_ids, 5]], SamplingParams(max_new_tokens=2))  # pyright: ignore[reportPossiblyUnboundVariable]
    # The paged policy takes states at multiples of its unit only, and the answer ended elsewhere.
    assert warm.stats()["cached_prompt_tokens"] == {"radix": 65, "paged": 0}[policy]


def test_no_hit_crosses_versions() -> None:
    engine = warm_engine()
    prompt = random_prompts(1, low=60, high=60)[0]
    ask(engine, [prompt], SamplingParams(max_new_tokens=3))
    engine.load_adapter(adapter_update(0))
    ask(engine, [prompt], SamplingParams(max_new_tokens=3))
    assert engine.stats()["cached_prompt_tokens"] == 0
    assert engine.stats()["cache_pages"] > 0


def test_a_broken_answer_is_not_kept() -> None:
    engine = warm_engine()
    prompt = random_prompts(1, low=60, high=60)[0]

    async def run() -> Completion:
        task = asyncio.ensure_future(engine.generate(prompt, SamplingParams(max_new_tokens=30), request_id="bad"))
        while engine.stats()["generated_tokens"] < 3:
            await asyncio.sleep(0)
        with torch.inference_mode():
            engine.slots.states[:, engine._requests["bad"][0].slot] = torch.nan
        return await task

    broken = asyncio.run(run())
    assert broken.finish_reason is FinishReason.ERROR
    turns = [prompt, [*prompt, *broken.token_ids, 5]]  # the second would begin with the state it broke in
    params = SamplingParams(max_new_tokens=8)
    assert_same(ask(engine, turns, params), ask(cold_engine(), turns, params))


LONG = [SamplingParams(max_new_tokens=20 + i % 9, seed=i, return_routed_experts=i % 3 == 0) for i in range(12)]


def check_retraction(**options) -> EmbeddedEngine:
    """Twelve answers, four of them samples of one prompt, in a pool that holds three or four whole ones."""
    prompts = [*random_prompts(8, low=5, high=40, seed=5), *random_prompts(1, low=33, high=33, seed=6) * 4]
    engine = warm_engine(num_pages=30, max_running=8, **options)
    poison_before_steps(engine)
    answers, expected = ask(engine, prompts, LONG), ask(cold_engine(), prompts, LONG)
    assert_same(answers, expected)
    for answer, other in zip(answers, expected, strict=True):
        assert (answer.routed_experts is None) == (other.routed_experts is None)
        if answer.routed_experts is not None and other.routed_experts is not None:
            assert torch.equal(answer.routed_experts.sort(-1).values, other.routed_experts.sort(-1).values)
    assert not engine._requests
    return engine


@pytest.mark.parametrize("policy", ["radix", "paged", "off"])
@pytest.mark.parametrize("reserve", [0, 3])
def test_a_retracted_request_loses_nothing(policy: str, reserve: int) -> None:
    engine = check_retraction(prefix_cache=policy, reserve_tokens=reserve)
    assert engine.stats()["retracted"] > 0
    engine.sleep()
    assert engine.pages.num_free == engine.pages.num_pages


def test_with_whole_lengths_reserved_nothing_is_retracted() -> None:
    assert check_retraction().stats()["retracted"] == 0


def test_growing_memory_admits_more_at_once() -> None:
    """Answers that may be long and are short: memory for the whole length would let them wait."""
    prompts = random_prompts(6, low=8, high=8, seed=3)
    most = {}
    for reserve in (None, 8):
        engine, seen = warm_engine(num_pages=24, reserve_tokens=reserve, prefix_cache="off"), []
        step = engine.runner.step
        engine.runner.step = lambda step=step, seen=seen, e=engine: (seen.append(e.scheduler.num_running), step())[1]
        ask(engine, prompts, SamplingParams(max_new_tokens=80, stop_token_ids=tuple(range(0, 256, 3))))
        most[reserve] = max(seen)
    assert most == {None: 2, 8: 6}


@pytest.mark.parametrize(
    ("verb", "edit"),
    [
        ("_retract", ("request.routed = Stage.WAITING, 0, []", "request.routed = Stage.WAITING, 0, request.routed")),
        ("_admit", ("(*request.prompt, *request.token_ids)", "request.prompt")),
    ],
    ids=["routes are kept", "what was sampled is not computed again"],
)
def test_the_check_of_retraction_sees_planted_mistakes(
    monkeypatch: pytest.MonkeyPatch, verb: str, edit: tuple[str, str]
) -> None:
    monkeypatch.setattr(Scheduler, verb, mutate(getattr(Scheduler, verb), edit))
    with pytest.raises((AssertionError, EngineError)):
        check_retraction(reserve_tokens=0)
