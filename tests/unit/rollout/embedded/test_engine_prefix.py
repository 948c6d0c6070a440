"""A warm prefix cache changes no answer: tokens and log-probabilities are those of an engine without one.

All experts are chosen: a router that rates two alike to the last bit may otherwise choose another one, and everything
after that differs. What is left is fp32 rounding of sums in other chunks, 7e-7 of a log-probability.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch
from helpers.engines import (
    adapter_update,
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
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_warm_equals_cold(seed: int, policy: str) -> None:
    stats = check_traffic(seed, prefix_cache=policy).stats()
    assert stats["cached_prompt_tokens"] > 0
    assert stats["checkpoints"] > 0


@pytest.mark.parametrize("policy", ["radix", pytest.param("paged", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{"cache_slots": 1}, {"num_pages": 60}, {"max_running": 2}], ids=str)
def test_warm_equals_cold_under_pressure(options: dict, policy: str) -> None:
    check_traffic(9, prefix_cache=policy, **options)


@pytest.mark.parametrize("policy", [pytest.param("radix", marks=pytest.mark.slow), "paged"])
def test_memory_is_whole_when_the_cache_is_emptied(policy: str) -> None:
    engine = check_traffic(3, prefix_cache=policy)
    assert_idle(engine)
    assert engine.pool.num_held
    engine.sleep()
    assert not engine.pool.num_held
    engine.wake()
    assert len(ask(engine, random_prompts(2))) == 2


def test_a_second_turn_computes_its_own_words_only() -> None:
    engine = warm_engine()
    prompt = random_prompts(1, low=70, high=70)[0]
    (answer,) = ask(engine, [prompt], SamplingParams(max_new_tokens=9, temperature=0.0))
    before = engine.stats()["prompt_tokens"]
    ask(engine, [[*prompt, *answer.token_ids, 5, 6]], SamplingParams(max_new_tokens=2))
    assert engine.stats()["prompt_tokens"] - before == 3  # the answer's last token, never fed before, and two new ones


@pytest.mark.parametrize(("policy", "length", "again"), [
    ("radix", 70, 0), ("radix", 72, 0), ("paged", 72, 0), ("paged", 71, 3), ("paged", 73, 1),
])  # fmt: skip
def test_a_later_twin(policy: str, length: int, again: int) -> None:
    """A prompt's end is kept with what its last token gave, where the policy keeps states; else what is behind that."""
    engine = warm_engine(prefix_cache=policy)
    prompt = random_prompts(1, low=length, high=length)[0]
    params = SamplingParams(max_new_tokens=3, seed=4)
    first = ask(engine, [prompt], params)
    second = ask(engine, [prompt], params)
    assert_same(second, first)
    assert engine.stats()["prompt_tokens"] == length + again


@pytest.mark.parametrize("length", [40, *(pytest.param(n, marks=pytest.mark.slow) for n in (33, 47))])
def test_group_prefill(length: int) -> None:
    """64 prompts of 8 samples, more than run at once, cost 64 prompts, wherever they end."""
    engine = warm_engine(max_running=20, cache_slots=70, num_pages=800)
    poison_before_steps(engine)
    prompts = [p for i in range(64) for p in random_prompts(1, low=length, high=length, seed=i) * 8]
    ask(engine, prompts, [SamplingParams(max_new_tokens=2 + i % 5, seed=i) for i in range(len(prompts))])
    assert engine.stats()["prompt_tokens"] == 64 * length
    assert_idle(engine)


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
    """They are kept with a prompt's end, and so are those of its later samples; a longer prompt is computed."""
    warm, cold = warm_engine(prefix_cache=policy), cold_engine()
    prompt = random_prompts(1, low=60, high=60)[0]
    params = SamplingParams(max_new_tokens=6, return_routed_experts=True)
    first, second = ask(warm, [prompt] * 3, params), ask(warm, [prompt] * 3, params)
    for answers in (first, second):
        assert_routed(answers, ask(cold, [prompt] * 3, params))
    assert warm.stats()["prompt_tokens"] == 60
    longer = [[*prompt, *first[0].token_ids, 5]]
    assert_routed(ask(warm, longer, params), ask(cold, longer, params))
    assert warm.stats()["prompt_tokens"] == 60 + 67
    before = warm.stats()["cached_prompt_tokens"]
    ask(warm, [[*longer[0], 6]], SamplingParams(max_new_tokens=2))
    # The paged policy takes states at multiples of its unit only.
    assert warm.stats()["cached_prompt_tokens"] - before == {"radix": 67, "paged": 64}[policy]


def assert_routed(answers: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert_same(answers, expected)
    for answer, other in zip(answers, expected, strict=True):
        assert (answer.routed_experts is None) == (other.routed_experts is None)
        if answer.routed_experts is not None and other.routed_experts is not None:
            assert torch.equal(answer.routed_experts.sort(-1).values, other.routed_experts.sort(-1).values)


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
            engine.pool.states[:, row_of(engine, "bad")] = torch.nan
        return await task

    broken = asyncio.run(run())
    assert broken.finish_reason is FinishReason.ERROR
    turns = [prompt, [*prompt, *broken.token_ids, 5]]  # the second would begin with the state it broke in
    params = SamplingParams(max_new_tokens=8)
    assert_same(ask(engine, turns, params), ask(cold_engine(), turns, params))


@pytest.mark.parametrize("policy", ["radix", "paged"])
def test_a_broken_prompt_is_not_kept(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """One forward gives NaN, and what its prompt left is cached before that is known."""
    engine, prompt = warm_engine(prefix_cache=policy), random_prompts(1, low=60, high=60)[0]
    hidden = engine._model.hidden

    def broken(*args, **options):
        residual, routed = hidden(*args, **options)
        engine.pool.states.fill_(torch.nan)
        residual.add(torch.full_like(residual.mix(engine._model.weights.out_query_H), torch.nan))
        return residual, routed

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "hidden", broken)
        [answer] = ask(engine, [prompt], SamplingParams(max_new_tokens=8))
    assert answer.finish_reason is FinishReason.ERROR
    turns, params = [prompt, [*prompt, 5]], SamplingParams(max_new_tokens=8)
    assert_same(ask(engine, turns, params), ask(cold_engine(), turns, params))


@pytest.mark.parametrize("cache_pool", ["split", "unified"])
def test_a_request_that_fills_the_pool_beside_what_it_would_read(cache_pool: str) -> None:
    """The tail page that its prompt begins with is one too many: it is given up, and all is computed."""
    engine = warm_engine(
        max_running=1, cache_slots=1, num_pages=4, max_sequence_tokens=4 * PAGE + 1, share_prompts=False,
        cache_pool=cache_pool,
    )  # fmt: skip
    short = random_prompts(1, low=PAGE // 2, high=PAGE // 2)[0]
    long = [*short, *random_prompts(1, low=PAGE, high=PAGE, seed=1)[0]]
    ask(engine, [short], SamplingParams(max_new_tokens=1))
    assert engine.stats()["cache_pages"] == 1
    params = SamplingParams(max_new_tokens=4 * PAGE + 1 - len(long))
    assert_same(ask(engine, [long], params), ask(cold_engine(), [long], params))
    assert_idle(engine)


def test_what_is_kept_of_a_prompt_keeps_no_step() -> None:
    engine = warm_engine()
    ask(engine, random_prompts(4, low=20, high=30), SamplingParams(max_new_tokens=3))
    assert engine.prefixes is not None
    endings = engine.prefixes._endings.values()
    assert endings
    assert all(ending.x_H.untyped_storage().nbytes() == ending.x_H.nbytes for ending in endings)


LONG = [SamplingParams(max_new_tokens=20 + i % 9, seed=i, return_routed_experts=i % 3 == 0) for i in range(12)]


SMALL = {"split": {"num_pages": 30, "max_running": 8}, "unified": {"num_pages": 26, "max_running": 8, "cache_slots": 1}}


def check_retraction(pool: str = "split", **options) -> EmbeddedEngine:
    """Twelve answers, four of them samples of one prompt, in a pool that holds three or four whole ones."""
    prompts = [*random_prompts(8, low=5, high=40, seed=5), *random_prompts(1, low=33, high=33, seed=6) * 4]
    engine = warm_engine(cache_pool=pool, **SMALL[pool], **options)
    poison_before_steps(engine)
    assert_routed(ask(engine, prompts, LONG), ask(cold_engine(), prompts, LONG))
    assert_idle(engine)
    return engine


@pytest.mark.parametrize("policy", ["radix", "paged", "off"])
@pytest.mark.parametrize(("reserve", "overlap"), [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize("pool", SMALL)
def test_a_retracted_request_loses_nothing(policy: str, reserve: int, overlap: bool, pool: str) -> None:
    engine = check_retraction(pool, prefix_cache=policy, reserve_tokens=reserve, overlap=overlap)
    assert engine.stats()["retracted"] > 0
    engine.sleep()
    assert not engine.pool.num_held


def test_with_whole_lengths_reserved_nothing_is_retracted() -> None:
    assert check_retraction().stats()["retracted"] == 0


def test_growing_memory_admits_more_at_once() -> None:
    """Answers that may be long and are short: memory for the whole length would let them wait."""
    prompts = random_prompts(6, low=8, high=8, seed=3)
    most = {}
    for reserve in (None, 8):
        engine, seen = warm_engine(num_pages=24, reserve_tokens=reserve, prefix_cache="off", cache_pool="split"), []
        step = engine.runner.step
        engine.runner.step = lambda step=step, seen=seen, e=engine: (seen.append(e.scheduler.num_running), step())[1]
        ask(engine, prompts, SamplingParams(max_new_tokens=80, stop_token_ids=tuple(range(0, 256, 3))))
        most[reserve] = max(seen)
    assert most[8] >= 2 * most[None]


@pytest.mark.parametrize(
    ("verb", "edit"),
    [
        ("_lead", ("request.cut_routes(request.num_cached)", "pass")),
        ("_admit", ("request.feed = request.tokens", "request.feed = request.prompt")),
    ],
    ids=["routes are kept", "what was sampled is not computed again"],
)
def test_the_check_of_retraction_sees_planted_mistakes(
    monkeypatch: pytest.MonkeyPatch, verb: str, edit: tuple[str, str]
) -> None:
    monkeypatch.setattr(Scheduler, verb, mutate(getattr(Scheduler, verb), edit))
    with pytest.raises((AssertionError, EngineError)):
        check_retraction(reserve_tokens=0)
