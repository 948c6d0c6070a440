"""Speculation changes no answer, whatever it is combined with, and every commit leaves decode's own state.

Log-probabilities: a verify's products have more rows than decode's, which rounds their last bits in another way (MKL);
fp32 sums over a few layers, 1e-4. States are held against decode on the verify's own inputs, bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import adapter_update, ask, assert_idle, make_engine, tokens_of
from helpers.mutants import mutate
from helpers.speculating import ALL, PARAMS, PROMPTS, Book, assert_same, book_of, check_pages, speculating_engine

from miles_k3.errors import EngineError
from miles_k3.rollout.embedded import attention, speculation
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.embedded.speculation import Speculator
from miles_k3.rollout.speculative import acceptance
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.engine_costs import measure_engine
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.rollout.speculative.replay import ReplayBuffer
from miles_k3.types import Completion, FinishReason, SamplingParams

OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "small chunks and pages": {"prefill_chunk_tokens": 60, "page_size": 3, "max_running": 5},
    "overlap": {"overlap": True, "max_running": 4},
    "split pool": {"cache_pool": "split", "max_running": 6},
    "paged cache": {"prefix_cache": "paged", "cache_min_tokens": 1, "page_size": 8, "track_interval": 8},
    "radix cache and snapshots": {
        "prefix_cache": "radix", "cache_min_tokens": 1, "page_size": 4, "track_interval": 4, "cache_slots": 20,
    },
    "retracted": {"prefix_cache": "radix", "reserve_tokens": 0, "num_pages": 26, "page_size": 4, "max_running": 6},
    "few positions": {"how": {"verify_tokens": 16, "num_draft_tokens": 3}, "max_running": 10},
}  # fmt: skip


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return ask(make_engine(top_k=ALL), PROMPTS, PARAMS)


def check(expected: Sequence[Completion], every: int = 3, **options: Any) -> EmbeddedEngine:
    engine = speculating_engine(book_of(PROMPTS, PARAMS, expected), every=every, top_k=ALL, **options)
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
    stats = engine.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    return engine


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_answers_are_plain_decodings(expected: list[Completion], options: dict[str, Any]) -> None:
    engine = check(expected, **options)
    if "reserve_tokens" in options:
        assert engine.stats()["retracted"] > 0
    if "how" in options:
        assert len(engine.speculator.replay.k_TLNK) == 16  # type: ignore[union-attr]


@pytest.mark.parametrize("every", [1, 2, 1000])
def test_whatever_the_draft_knows(expected: list[Completion], every: int) -> None:
    """Nothing, half of it, nearly everything."""
    engine = speculating_engine(book_of(PROMPTS, PARAMS, expected), every=every, top_k=ALL)
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
    kept = engine.speculator.audit.kept  # type: ignore[union-attr]
    assert set(kept) == {1: {1}, 2: {1, 2}, 1000: {1, 2, 3, 4, 5, 6}}[every]


def test_no_more_is_drafted_than_an_answer_may_still_have() -> None:
    """Of three tokens the prompt gives one and each verify one: a single one is left for the draft."""
    engine = speculating_engine(every=1000)
    ask(engine, PROMPTS[:5], SamplingParams(max_new_tokens=3, temperature=0.0))
    assert engine.stats()["drafted_tokens"] == 5


@pytest.mark.parametrize("accept", AcceptMode)
def test_a_random_draft(expected: list[Completion], accept: AcceptMode) -> None:
    """The model itself, not a script: under rejection sampled answers are others, greedy ones are not."""
    engine = speculating_engine(None, how={"accept": accept}, top_k=ALL)
    answers = ask(engine, PROMPTS, PARAMS)
    mine = [i for i, p in enumerate(PARAMS) if accept is AcceptMode.COUPLED or p.temperature == 0]
    assert_same(engine, [answers[i] for i in mine], [expected[i] for i in mine])
    assert engine.stats()["drafted_tokens"] > 100


# --- planted mistakes -----------------------------------------------------------------------------------------------
PLANTS = {
    "one token too many is folded": (
        Speculator, "_commit",
        ("windows, rows, kept", "windows, rows, [min(n + 1, m) for n, m in zip(kept, steps.lengths)]"),
    ),
    "the window stays": (ReplayBuffer, "fold_", ("self._roll_windows(", "print(")),
    "the window goes to the end": (
        ReplayBuffer, "_roll_windows", ("taps = old_BLWD", "counts = [n + 1 for n in counts]\n    taps = old_BLWD"),
    ),
    "acceptance is off by one": (
        acceptance, "_prefix", ("== 0)", "== 0).add(1).minimum(packed.lengths_B - 1)"),
    ),
    "tokens are judged by their neighbours": (Speculator, "_judge", ("(*block, 0)", "(0, *block)")),
    "verify writes the state": (
        attention, "kda_verify", ("state_BNKV.index_select(0, steps.order_B if rows_B is None else rows_B)",
                                  "state_BNKV[int(rows_B.min()) :][: len(rows_B)]"),
    ),
    "rejected rows stay in the pages": (Speculator, "_commit", (".index_fill_(1, gone, 0.0)", ".shape")),
    "the draft gets another's context": (
        Speculator, "write_context", ("batch.write_T[taken]", "batch.write_T[taken].flip(0)"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PLANTS)
def test_planted_mistakes_are_seen(expected: list[Completion], mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, edit = PLANTS[mistake]
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name), edit))

    def checks() -> None:
        check(expected)
        check_pages()

    with pytest.raises((AssertionError, EngineError)):  # the latter from inside a step
        checks()


# --- pages ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cache", ["off", "radix", "paged"])
def test_the_drafts_context_is_in_the_pages(cache: str) -> None:
    """Cold, forked from a twin, taken over from the cache, moved by the pool: always what a whole forward gives."""
    check_pages(prefix_cache=cache, cache_min_tokens=1, track_interval=4)


# --- ends inside a block --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("overlap", [False, True])
def test_stop_tokens_cut_inside_a_block(expected: list[Completion], overlap: bool) -> None:
    """Every answer stops at its middle token; the engine goes on serving from the states that are left."""
    stops = [SamplingParams(**{**_fields(p), "stop_token_ids": (a.token_ids[len(a.token_ids) // 2],)})
             for p, a in zip(PARAMS, expected, strict=True)]  # fmt: skip
    plain = ask(make_engine(top_k=ALL), PROMPTS, stops)
    whole = {(tuple(p), s, -1): a.token_ids for p, s, a in zip(PROMPTS, stops, expected, strict=True)}
    engine = speculating_engine(
        whole, every=5, top_k=ALL, prefix_cache="radix", cache_min_tokens=1, page_size=4, overlap=overlap
    )
    assert_same(engine, ask(engine, PROMPTS, stops), plain)
    turns = [[*p, *a.token_ids, 7] for p, a in zip(PROMPTS, plain, strict=True)]  # served by the ended states
    again = ask(make_engine(top_k=ALL), turns, PARAMS)
    del engine.speculator._draft  # type: ignore[union-attr]
    assert_same(engine, ask(engine, turns, PARAMS), again)
    assert engine.stats()["cached_prompt_tokens"] > 0


@pytest.mark.parametrize("mode", [PlanMode.VERIFY_ALL, PlanMode.TRIM])
@pytest.mark.parametrize("accept", AcceptMode)
def test_nothing_is_verified_behind_a_drafted_stop_token(accept: AcceptMode, mode: PlanMode) -> None:
    """A draft that knows everything proposes the end as well; blocks reach up to it. Coupled trimming leaves it to the
    policy, whose own token it is behind the accepted ones; under rejection it can't: what p has more than q would be
    drawn too often."""
    greedy = [replace(p, temperature=0.0) for p in PARAMS]
    plain = ask(make_engine(top_k=ALL), PROMPTS, greedy)
    stops = [replace(s, stop_token_ids=(a.token_ids[3],)) for s, a in zip(greedy, plain, strict=True)]
    book = {(tuple(p), s, -1): a.token_ids for p, s, a in zip(PROMPTS, stops, plain, strict=True)}
    free = CostProfile.of([(1, 1, 1.0), (1, 6, 1.0)])
    how = {"accept": accept, "mode": mode, "profile": free if mode is PlanMode.TRIM else None}
    engine = speculating_engine(book, every=10**6, top_k=ALL, how=how)
    answers = ask(engine, PROMPTS, stops)
    wanted = [a.token_ids[: a.token_ids.index(a.token_ids[3]) + 1] for a in plain]
    assert tokens_of(answers) == wanted
    stats = engine.stats()
    own = 1 + (mode is PlanMode.TRIM and accept is AcceptMode.COUPLED)  # the prompt's, and the stop token
    assert stats["drafted_tokens"] == stats["accepted_tokens"] == sum(max(0, len(w) - own) for w in wanted)


@pytest.mark.parametrize(("accept", "room"), [(AcceptMode.COUPLED, [3, 2, 1]), (AcceptMode.REJECTION, [4, 3, 2])])
def test_whole_blocks_have_no_more_room_than_chosen_ones(accept: AcceptMode, room: list[int]) -> None:
    """Verified unseen, a stop token is among them, but no token of the policy comes behind it: expecting both would
    promise one too many. Under rejection room may not depend on what was drafted."""
    engine = speculating_engine(how={"accept": accept, "mode": PlanMode.TRIM})
    assert engine.speculator is not None
    ends = SamplingParams(stop_token_ids=(9,))
    requests = [Request(id=str(i), prompt=(1,), params=ends, version=-1) for i in range(5)]
    tokens = np.array([[1, 2, 3, 4, 5], [1, 2, 9, 4, 5], [9, 9, 9, 9, 9], [1, 2, 3, 9, 5], [9, 9, 9, 9, 9]])
    limits = np.array([3, 4, 2, 1, 0])
    proposal = engine.speculator.choose(requests, limits, tokens, np.full(tokens.shape, 0.5), whole=True)
    assert proposal is not None
    assert proposal.lengths.tolist() == proposal.useful_R.tolist() == [3, 3, 1, 1, 0]
    calibration = engine.speculator.planner.calibration
    assert calibration.blocks == 4
    assert calibration.room_G[:3].tolist() == room


def test_a_supposed_acceptance_is_what_confidences_say() -> None:
    """Of a random draft they mean nothing."""
    engine = speculating_engine(how={"supposed_acceptance": 0.7})
    assert engine.speculator is not None
    request = Request(id="", prompt=(1,), params=SamplingParams(), version=-1)
    proposal = engine.speculator.choose([request], np.array([5]), np.ones((1, 5), dtype=np.int64), np.zeros((1, 5)))
    assert proposal is not None
    assert (proposal.confidence_RG == 0.7).all()


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


class Letters:
    """A tokenizer: token t is the letter t % 26."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + t % 26) for t in token_ids)


def test_stop_strings_and_streams(expected: list[Completion]) -> None:
    """A stop string that spans two tokens of a block; callers hear of every token once, in order, in blocks."""
    text = Letters().decode
    stops = [
        SamplingParams(**{**_fields(p), "stop": (text(list(a.token_ids[2:4])),)})
        for p, a in zip(PARAMS, expected, strict=True)
    ]
    plain = ask(make_engine(top_k=ALL, tokenizer=Letters()), PROMPTS, stops)
    whole = {(tuple(p), s, -1): a.token_ids for p, s, a in zip(PROMPTS, stops, expected, strict=True)}
    engine = speculating_engine(whole, every=7, top_k=ALL, tokenizer=Letters())
    heard: list[list[tuple[tuple[int, ...], tuple[float, ...]]]] = [[] for _ in PROMPTS]

    async def run() -> list[Completion]:
        return await asyncio.gather(*(
            engine.generate(p, s, on_tokens=lambda t, l, i=i: heard[i].append((tuple(t), tuple(l))))
            for i, (p, s) in enumerate(zip(PROMPTS, stops, strict=True))
        ))  # fmt: skip

    answers = asyncio.run(run())
    assert_same(engine, answers, plain)
    assert {a.finish_reason for a in answers} >= {FinishReason.STOP}
    for parts, answer in zip(heard, answers, strict=True):
        assert tuple(t for tokens, _ in parts for t in tokens) == answer.token_ids
        assert tuple(l for _, logprobs in parts for l in logprobs) == answer.logprobs
    assert any(len(tokens) > 1 for parts in heard for tokens, _ in parts)


# --- adapters, groups, aborts ---------------------------------------------------------------------------------------
def book_by_version(engine: EmbeddedEngine) -> tuple[Book, dict[int, list[Completion]]]:
    """Answers of a plain engine under the base and two adapters."""
    answers = {-1: ask(engine, PROMPTS, PARAMS)}
    for version in (0, 1):
        engine.load_adapter(adapter_update(version, scale=0.1))
        answers[version] = ask(engine, PROMPTS, PARAMS)
    book: dict = {}
    for found in answers.values():
        book.update(book_of(PROMPTS, PARAMS, found))
    return book, answers


def serve_through_swaps(book: Book) -> tuple[EmbeddedEngine, list[tuple[int, Completion]]]:
    """Requests of three versions side by side; two adapters, and a draft with each, come while they run."""
    engine = speculating_engine(
        book, every=4, top_k=ALL, prefix_cache="radix", cache_min_tokens=1, page_size=4, adapter_slots=2, max_running=30
    )

    async def run() -> list[tuple[int, Completion]]:
        tasks = []
        for version in (-1, 0, 1):
            if version >= 0:
                engine.load_adapter(adapter_update(version, scale=0.1))
                engine.load_draft(engine.speculator.drafts.of(-1).weights, version)  # type: ignore[union-attr]
            tasks += [
                (i, asyncio.ensure_future(engine.generate(p, s)))
                for i, (p, s) in enumerate(zip(PROMPTS, PARAMS, strict=True))
            ]
            for _ in range(3):
                await asyncio.sleep(0)
        assert len(engine.speculator.drafts) == 3  # type: ignore[union-attr]
        return [(i, await task) for i, task in tasks]

    return engine, asyncio.run(run())


def check_swaps() -> None:
    book, answers = book_by_version(make_engine(top_k=ALL))
    engine, found = serve_through_swaps(book)
    assert {a.adapter_version for _, a in found} == {-1, 0, 1}
    assert_same(engine, [a for _, a in found], [answers[a.adapter_version][i] for i, a in found])
    engine._forget_dead()
    assert len(engine.speculator.drafts) == 1  # type: ignore[union-attr]


def test_versions_change_in_flight() -> None:
    check_swaps()


@pytest.mark.slow
def test_a_verify_under_another_version_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_k3.rollout.embedded.runner import Runner

    edit = ("versions, counts, self.device)", "[max(versions)] * len(versions), counts, self.device)")
    monkeypatch.setattr(Runner, "_forward", mutate(Runner._forward, edit))
    with pytest.raises(AssertionError):
        check_swaps()


def test_groups_fork_and_routes_are_whole() -> None:
    """Four samples of each prompt, with routed experts: the draft's context is forked, rejected tokens leave none."""
    prompts = [p for p in PROMPTS[:4] for _ in range(4)]
    params = [SamplingParams(max_new_tokens=9, seed=i, return_routed_experts=True) for i in range(16)]
    plain = ask(make_engine(top_k=2), prompts, params)
    engine = speculating_engine(book_of(prompts, params, plain), every=3, top_k=2, page_size=4)
    answers = ask(engine, prompts, params)
    assert_same(engine, answers, plain)
    assert engine.stats()["shared_prompt_tokens"] > 0
    for answer, other in zip(answers, plain, strict=True):
        assert answer.routed_experts is not None
        assert torch.equal(answer.routed_experts, other.routed_experts)  # type: ignore[arg-type]


def test_aborts_from_callbacks(expected: list[Completion]) -> None:
    """A caller that has heard three tokens ends its request, and its neighbour's, inside the step that told it."""
    engine = speculating_engine(book_of(PROMPTS, PARAMS, expected), every=6, top_k=ALL, prefix_cache="radix",
                                cache_min_tokens=1, page_size=4)  # fmt: skip
    told = [0] * len(PROMPTS)

    def hear(i: int, count: int) -> None:
        told[i] += count
        if i % 3 == 0 and told[i] >= 3:
            engine.abort(str(i))
            engine.abort(str(i + 1))

    async def run() -> list[Completion]:
        return await asyncio.gather(*(
            engine.generate(p, s, request_id=str(i), on_tokens=lambda t, _, i=i: hear(i, len(t)))
            for i, (p, s) in enumerate(zip(PROMPTS, PARAMS, strict=True))
        ))  # fmt: skip

    answers = asyncio.run(run())
    assert_idle(engine)
    assert {a.finish_reason for a in answers} >= {FinishReason.ABORT, FinishReason.LENGTH}
    for answer, whole in zip(answers, expected, strict=True):
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)  # whatever was left in the cache is sound


# --- failures -------------------------------------------------------------------------------------------------------
def test_a_verify_that_is_not_finite_is_decoded_again(expected: list[Completion], monkeypatch) -> None:
    """NaN that a drafted token brings is none of its request's; NaN of a token of its own ends it."""
    engine = speculating_engine(book_of(PROMPTS, PARAMS, expected), every=3, top_k=ALL)
    head, times = engine.runner.model.head, []

    def spoiled(x):
        logits = head(x)
        if len(logits) > 30 and not times:
            times.append(1)
            logits[4] = torch.nan
        return logits

    monkeypatch.setattr(engine.runner.model, "head", spoiled)
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
    assert times
    monkeypatch.setattr(engine.runner.model, "head", lambda x: head(x) * torch.nan)
    failed = ask(engine, PROMPTS[:2], PARAMS[:2])
    assert [a.finish_reason for a in failed] == [FinishReason.ERROR] * 2
    monkeypatch.setattr(engine.runner.model, "head", head)
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)


def test_after_a_failed_step_and_a_sleep(expected: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating_engine(book_of(PROMPTS, PARAMS, expected), top_k=ALL)
    with monkeypatch.context() as patch:
        patch.setattr(speculation, "judge", None)
        with pytest.raises(Exception, match="step failed"):
            ask(engine, PROMPTS, PARAMS)
    assert engine.stats()["replay_bytes"] > 0
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
    engine.sleep()
    assert engine.stats()["replay_bytes"] == 0
    engine.wake()
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)


def test_costs_are_measured_without_the_audit() -> None:
    """Which expects states noted before a commit, and would count in every figure."""
    engine = speculating_engine(None, max_running=2, how={"mode": PlanMode.TRIM})
    assert engine.speculator is not None
    audit = engine.speculator.audit
    assert audit is not None
    measure_engine(engine, [1], repeats=1)
    assert engine.speculator.audit is audit
    assert audit.commits == 0
