"""Requests that a draft follows beside some that it doesn't: theirs is no context, and nobody reads what is there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.engines import ask, make_engine, tokens_of
from helpers.mutants import mutate
from helpers.speculating import ALL, PARAMS, PROMPTS, assert_same, book_of, check_pages, speculating_engine

from miles_k3.errors import EngineError
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.prefix import Prefixes
from miles_k3.rollout.embedded.runner import InFlight
from miles_k3.rollout.embedded.scheduler import Scheduler, Step
from miles_k3.rollout.embedded.speculation import Speculator
from miles_k3.rollout.embedded.taps import Taps
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.rollout.speculative.serving_draft import ServingDraft
from miles_k3.types import SamplingParams

KINDS = (True, False, False, True, False)
PRESSED = {"prefix_cache": "radix", "reserve_tokens": 0, "num_pages": 15, "max_running": 6}


def following(follows: Sequence[bool], **options: Any) -> EmbeddedEngine:
    """An engine with a random draft, which follows requests in turn as is said."""
    engine, turns = speculating_engine(None, top_k=ALL, **options), iter(follows)
    engine.scheduler._follows = lambda *_: next(turns)
    return engine


@pytest.mark.parametrize("cache", ["radix", "paged"])
def test_pages_of_both_kinds(cache: str) -> None:
    """Cold, forked from a twin, from the cache: a draft's context where it follows, NaN elsewhere."""
    check_pages(KINDS, prefix_cache=cache, cache_min_tokens=1, track_interval=4)


@pytest.mark.slow
def test_pages_of_retracted_requests() -> None:
    """They come back as either kind."""
    assert check_pages(KINDS, cache_min_tokens=1, track_interval=4, **PRESSED).stats()["retracted"] > 0


def test_the_draft_reads_no_page_without_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model itself, over pages of which those without context hold NaN: what it is given is finite."""
    expected = ask(make_engine(top_k=ALL), PROMPTS, PARAMS)
    draft, drafted = ServingDraft.draft, []

    def watched(self: ServingDraft, tokens_S, anchors_S, context, choose=None):
        for row, anchor in enumerate(anchors_S.tolist()):
            assert all(torch.isfinite(part[row, :anchor]).all() for part in (*context.keys, *context.values))
        drafted.append(len(anchors_S))
        return draft(self, tokens_S, anchors_S, context, choose)

    monkeypatch.setattr(ServingDraft, "draft", watched)
    engine = following(KINDS * 99, prefix_cache="radix", cache_min_tokens=1, page_size=4)
    step = engine.runner.step

    def spoiling() -> Any:
        done = step()
        engine.pool.flush()
        for request in [*engine.scheduler.decoding, *engine.scheduler.prefilling]:
            if not request.followed:
                pages = engine.pool.page_rows(torch.tensor(request.pages[: request.num_cached // 4]))
                engine.pool.draft[0, pages] = torch.nan
        return done

    engine.runner.step = spoiling  # type: ignore[method-assign]
    for _ in range(2):
        assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
    assert 0 < max(drafted) < len(PROMPTS)


def test_a_step_that_follows_nobody_taps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ask(make_engine(top_k=ALL), PROMPTS, PARAMS)
    engine = following([False] * 99)
    monkeypatch.setattr(Taps, "empty", None)
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
    assert engine.stats()["verify_steps"] == 0


@pytest.mark.parametrize("follows", [True, False])
def test_steps_that_compute_prompts_are_timed(follows: bool) -> None:
    """Whoever is followed in them; those of both kinds say nothing of either."""
    engine, found = following([follows] * 99, prefill_chunk_tokens=64), []
    assert engine.speculator is not None
    planner = engine.speculator.planner
    planner.observe_prompts = lambda *args, **how: found.append((*args, how["followed"]))  # type: ignore[method-assign]
    ticks = itertools.count()
    engine.runner.clock = lambda: next(ticks)
    ask(engine, PROMPTS, [replace(p, max_new_tokens=1) for p in PARAMS])
    assert sum(count for prompts, *_ in found for _, count in prompts) == sum(map(len, PROMPTS))
    assert len(found) > 2
    assert all(seconds > 0 for _, _, seconds, _ in found)
    assert {followed for *_, followed in found} == {follows}


def test_with_kernels_that_run_on_the_clock_is_the_step_befores() -> None:
    engine = following(KINDS, overlap=True)
    runner, step, before = engine.runner, Step(), Step()
    assert runner._timed(step, drafts=False) is step
    runner.device = torch.device("cuda")
    assert runner._timed(step, drafts=False) is None
    nothing = torch.zeros(0)
    runner._in_flight = InFlight(step=before, requests=(), tokens_B=nothing, drawn_3B=nothing, event=None)
    assert runner._timed(step, drafts=False) is before
    assert runner._timed(step, drafts=True) is step


@pytest.mark.parametrize("gains", [True, False])
def test_trim_finds_out_whom_to_follow(gains: bool) -> None:
    """By a clock that says what blocks are worth: all answers are plain decoding's, whoever was followed."""
    expected = ask(make_engine(top_k=ALL), PROMPTS, PARAMS)
    profile = CostProfile.of([(1, 1, 1.0), (1, 6, 1.5)], {1: 0.1})
    engine = speculating_engine(
        book_of(PROMPTS, PARAMS, expected), every=6, top_k=ALL, how={"mode": PlanMode.TRIM, "profile": profile}
    )
    assert engine.speculator is not None
    ticks, counters = itertools.count(), engine.speculator.counters
    engine.runner.clock = lambda: next(ticks) + (0 if gains else 1000 * counters["verify_steps"])
    drafted = []
    for _ in range(4):
        before = counters["drafted_tokens"]
        assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
        drafted.append(counters["drafted_tokens"] - before)
    few, many = 0.2 * drafted[0], 0.5 * drafted[0]  # where one or two are left it takes more blocks to know
    assert drafted[-1] > many if gains else drafted[-1] < few


def test_twins_go_their_leaders_way() -> None:
    """They share its prompt's pages, whatever they were meant to be."""
    prompts, params = [PROMPTS[0]] * 4, [SamplingParams(max_new_tokens=6, seed=i) for i in range(4)]
    plain = ask(make_engine(top_k=ALL), prompts, params)
    for first in (True, False):
        engine = following([first, not first, not first, not first])
        assert tokens_of(ask(engine, prompts, params)) == tokens_of(plain)
        assert (engine.stats()["drafted_tokens"] > 0) is first
        assert engine.stats()["shared_prompt_tokens"] == 3 * len(PROMPTS[0])


# --- the prefix cache -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cache", ["radix", "paged"])
def test_a_followed_request_takes_pages_with_context_only(cache: str) -> None:
    """It computes what the cache has without context; whoever isn't followed takes both kinds, and is followed where
    that of a draft reaches further."""
    prompt, params = PROMPTS[1] * 2, SamplingParams(max_new_tokens=6, temperature=0.0)
    engine = following([False, False, True, True, False, False], prefix_cache=cache, cache_min_tokens=1, page_size=4)
    [plain] = ask(make_engine(top_k=ALL), [prompt], params)
    taken, drafts = [], []
    for _ in range(5):
        before = engine.stats()
        [answer] = ask(engine, [prompt], params)
        assert answer.token_ids == plain.token_ids
        taken.append(int(engine.stats()["cached_prompt_tokens"] - before["cached_prompt_tokens"]))
        drafts.append(engine.stats()["drafted_tokens"] > before["drafted_tokens"])
    assert taken[:3:2] == [0, 0]
    assert min(taken[1], taken[3], taken[4]) > len(prompt) - 4
    assert drafts == [False, False, True, True, False]
    ask(engine, [[*prompt, *plain.token_ids[:-1], 7]], params)  # both kinds of the answer are there as well
    assert engine.prefixes is not None
    engine.prefixes.forget_all_but(set())
    assert engine.stats()["cache_pages"] == 0


def test_what_is_cached_with_context_only_is_taken_and_followed() -> None:
    prompt, params = PROMPTS[1] * 2, SamplingParams(max_new_tokens=6, temperature=0.0)
    engine = following([True, False, False], prefix_cache="radix", cache_min_tokens=1, page_size=4)
    plain = ask(make_engine(top_k=ALL), [prompt, [*prompt, 9, 9]], params)
    answers = [ask(engine, [p], params)[0] for p in (prompt, [*prompt, 9, 9])]
    assert tokens_of(answers) == tokens_of(plain)
    assert engine.stats()["cached_prompt_tokens"] == len(prompt)
    drafted = engine.stats()["drafted_tokens"]
    ask(engine, [PROMPTS[2]], params)  # nothing of it is cached
    assert engine.stats()["drafted_tokens"] == drafted


PLANTS = {
    "a twin goes its own way": (Scheduler, "_admit", ("request.followed = leader.followed", "pass")),
    "context of nobody": (Speculator, "write_context", ("if request.followed]", "if not request.followed]")),
    "drafts for all": (Speculator, "limits", ("or not request.followed", "")),
    "followed by what it takes": (Prefixes, "find", ("request.followed = False", "pass")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PLANTS)
def test_planted_mistakes_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, edit = PLANTS[mistake]
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name), edit))

    def checks() -> None:
        check_pages(KINDS, prefix_cache="radix", cache_min_tokens=1, track_interval=4)
        test_the_draft_reads_no_page_without_context(monkeypatch)
        test_a_followed_request_takes_pages_with_context_only("radix")

    with pytest.raises((AssertionError, EngineError)):  # the latter from inside a step
        checks()
