"""Who runs when: mixed steps, overlap of host and device, priorities, protection, snapshots of growing answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.engines import ask, assert_idle, make_engine, poison_before_steps, random_prompts, tokens_of
from helpers.mutants import mutate

from miles_k3.errors import EngineError
from miles_k3.rollout.cache.contract import PoolError
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.prefix import Prefixes
from miles_k3.rollout.embedded.runner import Runner
from miles_k3.rollout.embedded.scheduler import Scheduler, Step
from miles_k3.types import Completion, FinishReason, SamplingParams

ALL = 8  # experts: no router decides anything
STOPS = tuple(range(0, 256, 7))
PROMPTS = [p for p in random_prompts(10, low=1, high=50, seed=51) for _ in range(2)]
PARAMS = [
    SamplingParams(max_new_tokens=4 + i % 11, seed=i, stop_token_ids=STOPS * (i % 2), return_routed_experts=i % 4 == 0)
    for i in range(len(PROMPTS))
]


def steps_of(engine: EmbeddedEngine) -> list[Step]:
    """Every step that is planned from now on."""
    seen, plan = [], engine.scheduler.plan

    def watched() -> Step:
        seen.append(plan())
        return seen[-1]

    engine.scheduler.plan = watched  # type: ignore[method-assign]
    return seen


def assert_same(answers: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert tokens_of(answers) == tokens_of(expected)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.finish_reason is other.finish_reason
        assert answer.logprobs == pytest.approx(other.logprobs, rel=1e-5, abs=1e-5)
        assert (answer.routed_experts is None) == (other.routed_experts is None)
        if answer.routed_experts is not None and other.routed_experts is not None:
            assert answer.routed_experts.shape == other.routed_experts.shape


# --- mixed steps ----------------------------------------------------------------------------------------------------
def test_prompts_and_decodes_share_steps_under_a_token_budget() -> None:
    engine = make_engine(prefill_chunk_tokens=24, max_running=6, page_size=4, top_k=ALL)
    steps = steps_of(engine)
    answers = ask(engine, PROMPTS, PARAMS)
    assert_same(answers, ask(make_engine(share_prompts=False, top_k=ALL), PROMPTS, PARAMS))
    assert any(step.decodes and step.chunks for step in steps)
    for step in steps:
        assert len(step.decodes) + sum(count for _, count in step.chunks) <= 24


def test_prompts_go_on_when_decodes_fill_the_budget() -> None:
    engine = make_engine(prefill_chunk_tokens=4, max_running=8, page_size=4, top_k=ALL)
    assert_same(ask(engine, PROMPTS, PARAMS), ask(make_engine(share_prompts=False, top_k=ALL), PROMPTS, PARAMS))


# --- overlap --------------------------------------------------------------------------------------------------------
OPTIONS: list[dict[str, Any]] = [
    {}, {"prefix_cache": "radix", "cache_min_tokens": 1}, {"prefix_cache": "paged", "cache_min_tokens": 1},
    {"prefix_cache": "radix", "cache_min_tokens": 1, "num_pages": 24, "cache_slots": 1, "reserve_tokens": 2},
    {"cache_pool": "split", "num_pages": 30, "reserve_tokens": 0},
]  # fmt: skip


def check_overlap(options: dict[str, Any]) -> EmbeddedEngine:
    engine = make_engine(overlap=True, max_running=5, page_size=4, prefill_chunk_tokens=24, top_k=ALL, **options)
    expected = ask(make_engine(share_prompts=False, top_k=ALL), PROMPTS, PARAMS)
    poison_before_steps(engine)
    for _ in range(2):
        assert_same(ask(engine, PROMPTS, PARAMS), expected)
        assert_idle(engine)
    assert engine.stats()["generated_tokens"] == 2 * sum(map(len, tokens_of(expected)))
    assert engine.stats()["discarded_tokens"] <= 2 * sum(e.finish_reason is FinishReason.STOP for e in expected)
    return engine


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_overlap_changes_no_answer(options: dict[str, Any]) -> None:
    """A step is planned before the tokens of the last one are known; a request that ended is found out a step later."""
    assert check_overlap(options).stats()["discarded_tokens"] > 0


@pytest.mark.parametrize(
    ("owner", "verb", "edit"),
    [
        (Runner, "_feed_in_flight", ("if pairs:", "if False:")),
        (Runner, "collect", ("if request.stage is Stage.DONE:", "if False:")),
        (Scheduler, "plan", ("if not r.is_full and", "if")),
    ],
    ids=["a token of the last step is not fed", "a token after the end is kept", "one token too many"],
)
def test_the_check_of_overlap_sees_planted_mistakes(
    monkeypatch: pytest.MonkeyPatch, owner: type, verb: str, edit: tuple[str, str]
) -> None:
    monkeypatch.setattr(owner, verb, mutate(getattr(owner, verb), edit))
    with pytest.raises((AssertionError, EngineError, ValueError)):
        check_overlap({})


def test_an_answer_that_stops_keeps_its_routed_experts() -> None:
    """Its last token was fed by the step in flight; the experts of that one are left out."""
    params = SamplingParams(max_new_tokens=30, seed=2, stop_token_ids=STOPS, return_routed_experts=True)
    expected = ask(make_engine(), PROMPTS, params)
    answers = ask(make_engine(overlap=True), PROMPTS, params)
    assert any(e.finish_reason is FinishReason.STOP for e in expected)
    for answer, other in zip(answers, expected, strict=True):
        assert other.routed_experts is not None
        assert answer.routed_experts is not None
        assert torch.equal(answer.routed_experts, other.routed_experts)


def test_a_step_is_queued_while_the_last_one_runs() -> None:
    engine = make_engine(overlap=True, top_k=ALL)
    depth, launch, collect = [], engine.runner._launch, engine.runner.collect

    def watched_launch(step: Step, *settled: Any) -> Any:
        depth.append(engine.runner._in_flight is not None)
        return launch(step, *settled)

    engine.runner._launch = watched_launch  # type: ignore[method-assign]
    assert collect() == []
    ask(engine, PROMPTS[:3], SamplingParams(max_new_tokens=9))
    assert depth == [False] + [True] * 8


# --- priorities and protection --------------------------------------------------------------------------------------
def race(engine: EmbeddedEngine, early: list[dict[str, Any]], late: list[dict[str, Any]]) -> list[str]:
    """Ids in the order in which they end; `late` ones come when the early ones decode."""
    ended = []

    async def one(i: int, options: dict[str, Any]) -> None:
        await engine.generate(PROMPTS[i], SamplingParams(max_new_tokens=25, **options), request_id=str(i))
        ended.append(str(i))

    async def run() -> None:
        tasks = [asyncio.ensure_future(one(i, o)) for i, o in enumerate(early)]
        while engine.stats()["decode_steps"] < 3:
            await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(one(len(early) + i, o)) for i, o in enumerate(late)]
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert_idle(engine)
    return ended


def test_the_queue_is_in_order_of_priority() -> None:
    order = race(make_engine(max_running=1), [{}, {}, {"priority": 1}], [{"priority": 1}, {}])
    assert order == ["2", "3", "0", "1", "4"]  # nobody is preempted by his like


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["off", "radix"])
def test_a_higher_priority_preempts(policy: str, overlap: bool) -> None:
    engine = make_engine(max_running=2, prefix_cache=policy, cache_min_tokens=1, overlap=overlap)
    assert race(engine, [{}, {}], [{"priority": 1}]) == ["0", "2", "1"]
    assert engine.stats()["retracted"] == 1


def test_protected_requests_are_never_preempted() -> None:
    engine = make_engine(max_running=2)
    assert race(engine, [{"protected": True}] * 2, [{"priority": 1}]) == ["0", "1", "2"]
    assert engine.stats()["retracted"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_protected_requests_keep_their_memory_under_pressure(overlap: bool) -> None:
    """They hold their whole length; the others grow, and give way to them and to one another."""
    engine = make_engine(
        cache_pool="split", num_pages=26, page_size=4, max_running=6, reserve_tokens=0, overlap=overlap, top_k=ALL
    )
    prompts = random_prompts(10, low=6, high=10, seed=8)
    params = [SamplingParams(max_new_tokens=24, seed=i, protected=i % 3 == 0) for i in range(10)]
    retracted: list[bool] = []
    retract = engine.scheduler._retract
    engine.scheduler._retract = lambda r: (retracted.append(r.params.protected), retract(r))[1]  # type: ignore[method-assign]

    assert_same(ask(engine, prompts, params), ask(make_engine(share_prompts=False, top_k=ALL), prompts, params))
    assert retracted
    assert not any(retracted)
    assert_idle(engine)


# --- snapshots of growing answers -----------------------------------------------------------------------------------
def check_changed_answer(kept: int, overlap: bool, **options: Any) -> float:
    """An answer of 40 tokens, and a next turn that keeps `kept` of them: tokens that it takes over."""
    engine = make_engine(page_size=8, cache_min_tokens=1, overlap=overlap, top_k=ALL, **options)
    poison_before_steps(engine)
    prompt = random_prompts(1, low=30, high=30, seed=2)[0]
    (answer,) = ask(engine, [prompt], SamplingParams(max_new_tokens=40))
    again = [*prompt, *answer.token_ids[:kept], 3, 4]
    turn = ask(engine, [again], SamplingParams(max_new_tokens=4, seed=1))
    assert_same(turn, ask(make_engine(top_k=ALL), [again], SamplingParams(max_new_tokens=4, seed=1)))
    assert_idle(engine)
    return engine.stats()["cached_prompt_tokens"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("policy", "interval", "kept", "hit"),
    [
        ("radix", 16, 40, 69), ("radix", 16, 37, 64), ("radix", 16, 30, 30), ("radix", 0, 37, 30),
        ("paged", 16, 40, 64), ("paged", 16, 37, 64), ("paged", 0, 37, 28),
    ],
)  # fmt: skip
def test_a_changed_answer_starts_from_its_newest_snapshot(
    policy: str, interval: int, kept: int, hit: int, overlap: bool
) -> None:
    """Without one it starts at the prompt's end, or before: the paged policy keeps states at multiples only."""
    assert check_changed_answer(kept, overlap, prefix_cache=policy, track_interval=interval) == hit


def test_the_check_of_snapshots_sees_planted_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = ("Track(position=request.num_cached,", "Track(position=request.num_cached - 8,")
    monkeypatch.setattr(Prefixes, "track", mutate(Prefixes.track, edit))
    with pytest.raises((AssertionError, EngineError)):
        check_changed_answer(37, False, prefix_cache="radix", track_interval=16)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_answer_is_left_to_the_next_try(overlap: bool) -> None:
    engine = make_engine(prefix_cache="radix", page_size=8, cache_min_tokens=1, overlap=overlap, top_k=ALL)
    poison_before_steps(engine)
    prompt = random_prompts(1, low=30, high=30, seed=2)[0]

    async def run() -> Completion:
        task = asyncio.ensure_future(engine.generate(prompt, SamplingParams(max_new_tokens=60), request_id="x"))
        while engine.stats()["generated_tokens"] < 40:
            await asyncio.sleep(0)
        engine.abort("x")
        return await task

    again = [*prompt, *asyncio.run(run()).token_ids, 3]
    turn = ask(engine, [again], SamplingParams(max_new_tokens=4, seed=1))
    assert engine.stats()["cached_prompt_tokens"] == len(again) - 1 - (not overlap)
    assert_same(turn, ask(make_engine(top_k=ALL), [again], SamplingParams(max_new_tokens=4, seed=1)))
    assert_idle(engine)


def test_snapshots_take_turns_in_two_slots() -> None:
    engine = make_engine(prefix_cache="radix", page_size=8, track_interval=8, max_running=2, cache_slots=2)
    most, track = [], engine.prefixes.track  # type: ignore[union-attr]

    def watched(requests: Sequence[Any]) -> None:
        track(requests)
        most.append(max((len(r.tracks) for r in requests), default=0))

    engine.prefixes.track = watched  # type: ignore[union-attr, method-assign]
    ask(engine, random_prompts(2, low=60, high=64), SamplingParams(max_new_tokens=50))
    assert engine.stats()["tracked"] >= 12
    assert max(most) == 2
    assert_idle(engine)


# --- failures -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_ends_everybody_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """No book is believed after it: memory and cache begin anew."""
    engine = make_engine(prefix_cache="radix", cache_min_tokens=1, overlap=overlap, top_k=ALL)
    expected, old = ask(engine, PROMPTS, PARAMS), engine.pool
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "prompt_done", lambda self, request: self.prefilling.remove(request) or 1 / 0)
        fresh = random_prompts(3, seed=99)

        async def run() -> list[Any]:
            return await asyncio.gather(*(engine.generate(p, PARAMS[0]) for p in fresh), return_exceptions=True)

        outcomes = asyncio.run(run())
    assert all(isinstance(o, EngineError) and "division by zero" in str(o) for o in outcomes)
    assert_idle(engine)
    assert not engine.pool.num_held
    with pytest.raises(PoolError):
        _ = old.states  # there may be no room for two
    again = ask(engine, PROMPTS, PARAMS)
    assert_same(again, expected)
    assert all(a.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for a in again)
