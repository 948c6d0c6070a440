"""Recorded steps of an engine that speculates, against ordinary ones: the scenarios of `test_engine_speculation` again.

On a CPU a replay runs its step anew, on inputs that are padded as a GPU's are, with NaN for whatever padding gives, and
under a guard that fails where a graph could not be recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import speculating
from helpers.drafts import small_config, telling_weights
from helpers.engines import adapter_update, ask, make_engine, poison_before_steps
from helpers.fused_graphs import FIFTY, fifty_steps, short_draft
from helpers.mutants import mutate
from helpers.no_sync import NoSync, apart
from helpers.padded import recording, replays
from helpers.speculating import assert_same, speculating_engine
from torch import Tensor
from unit.rollout.embedded import test_engine_speculation as scenarios
from unit.rollout.embedded.test_engine_speculation import ALL, OPTIONS, PROMPTS, check

from miles_k3.errors import EngineError
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.fused.graphs import verify
from miles_k3.rollout.embedded.fused.graphs.verify import STOPS, Shape
from miles_k3.rollout.embedded.proposal import Speculative, up_to_stop
from miles_k3.rollout.speculative import acceptance
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.audit import CommitAudit
from miles_k3.rollout.speculative.engine_costs import measure_engine
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.rollout.speculative.state_keeper import StateKeeper
from miles_k3.types import Completion, FinishReason

PARAMS = [replace(p, top_p=1.0, top_k=0) for p in scenarios.PARAMS]


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return ask(make_engine(top_k=ALL), PROMPTS, PARAMS)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EmbeddedEngine]]:
    """The scenarios' engines record, no request needs a filter, which no graph holds, and whatever has no prompts in it
    is replayed."""
    engines: list[EmbeddedEngine] = []

    def make(*args: Any, **kwargs: Any) -> EmbeddedEngine:
        engines.append(recording(speculating_engine(*args, **kwargs)))
        return engines[-1]

    for module in (scenarios, speculating):
        monkeypatch.setattr(module, "speculating_engine", make)
    monkeypatch.setattr(scenarios, "PARAMS", PARAMS)
    yield engines
    for engine in engines:
        assert replays(engine)["verify"] > 0
        assert replays(engine)["others"] == 0


def telling_engine(answers: Sequence[Completion], **options: Any) -> EmbeddedEngine:
    """With a draft that can be recorded, and knows most of these answers."""
    config = small_config(markov_rank=256)
    weights = telling_weights(config, [a.token_ids for a in answers])
    engine = make_engine(top_k=ALL, speculative=Speculative(config=config, weights=weights), **options)
    poison_before_steps(engine)
    assert engine.speculator is not None
    engine.speculator.audit = CommitAudit(engine.runner.model.conv_weights())
    return engine


def traced(engine: EmbeddedEngine) -> list[dict[tuple[int, ...], list[Tensor]]]:
    """After each step, of each decoding request by its prompt: state, window, latents and the draft's context."""
    steps, step = [], engine.runner.step

    def noted() -> Any:
        done = step()
        engine.pool.flush()
        found = {}
        for r in engine.scheduler.decoding:
            row, size = engine.pool.slot_rows([r.slot]), engine.memory.capacity(r)
            at = engine.memory.token_rows([r], torch.zeros(size, dtype=torch.int64), torch.arange(size))
            pages = engine.pool.kv.flatten(1, 2)[:, at], engine.pool.draft[0].flatten(0, 1)[at]
            found[r.prompt] = [engine.pool.states[:, row], engine.pool.windows[:, row], *pages]
        steps.append({prompt: [t.clone() for t in tensors] for prompt, tensors in found.items()})
        return done

    engine.runner.step = noted  # type: ignore[method-assign]
    return steps


def test_states_and_pages_are_those_of_ordinary_steps(expected: list[Completion]) -> None:
    """Drafting and verifying in one replay, step by step: states, windows and latents bit for bit. The draft's context
    is a product of more rows, padding, which rounds its last bits."""
    plain, recorded = (telling_engine(expected, max_running=5, page_size=4) for _ in range(2))
    one, other = traced(plain), traced(recording(recorded))
    for engine in (plain, recorded):  # two requests that no draft follows
        turns = iter([True, True, False, True, True, True, False, True, True])
        engine.scheduler._follows = lambda *_, turns=turns: next(turns)
    answers = [ask(engine, PROMPTS[:9], PARAMS[:9]) for engine in (plain, recorded)]
    assert [(a.token_ids, a.logprobs) for a in answers[0]] == [(a.token_ids, a.logprobs) for a in answers[1]]
    assert len(one) == len(other)
    for ordinary, replayed in zip(one, other, strict=True):
        assert ordinary.keys() == replayed.keys()
        for prompt, (*exact, context) in ordinary.items():
            for a, b in zip(exact, replayed[prompt], strict=False):
                assert torch.equal(a, b)
            torch.testing.assert_close(context, replayed[prompt][-1], rtol=1e-5, atol=1e-6)
    assert recorded.speculator is not None
    assert plain.speculator is not None
    assert recorded.speculator.counters == plain.speculator.counters
    assert recorded.speculator.counters["accepted_tokens"] > 20
    assert recorded.speculator.audit.wrong == 0  # type: ignore[union-attr]
    assert replays(recorded)["others"] == 0


def test_answers(expected: list[Completion]) -> None:
    check(expected)


@pytest.mark.parametrize(("position_s", "whole"), [(1.0, True), (0.1, False)])
def test_whole_blocks_are_drafted_where_they_are_verified(
    expected: list[Completion], position_s: float, whole: bool
) -> None:
    """`trim`, where looking at blocks first costs more than it saves: one replay, and all of it is verified, though
    chosen one by one hardly any token would pay; and where it doesn't: two replays."""
    engine = recording(telling_engine(expected, max_running=5, page_size=4))
    assert engine.speculator is not None
    planner, choose, cut = engine.speculator.planner, engine.speculator.choose, []

    def chosen(requests: Any, limits_R: Any, tokens_RG: Any, *rest: Any, **how: Any) -> Any:
        proposal = choose(requests, limits_R, tokens_RG, *rest, **how)
        most_R = np.minimum(limits_R, up_to_stop(tokens_RG, requests) + 1)
        cut.append(int(most_R.sum()) - (0 if proposal is None else int(proposal.lengths.sum())))
        return proposal

    engine.speculator.choose = chosen  # type: ignore[method-assign]
    points = [(n, n * k, 1.0 + k * position_s) for n in (1, 5) for k in range(1, 9)]
    planner.mode = PlanMode.TRIM
    planner.profile = CostProfile.of(points, {1: 0.1, 5: 0.1}, whole_s=dict.fromkeys((1, 5), 1.0 if whole else 9.0))
    assert_same(engine, ask(engine, PROMPTS[:5], PARAMS[:5]), expected[:5])
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.verify is not None
    shapes = [key[0] for key in graphs.verify._recorded]
    assert {bool(s.pages) for s in shapes if isinstance(s, Shape)} == {whole}  # pages that a draft looks at
    assert cut
    assert not whole or not any(cut)
    assert replays(engine)["verify"] > 0
    assert replays(engine)["others"] == 0
    assert engine.speculator.audit.wrong == 0  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_answers_of_other_engines(expected: list[Completion], options: dict[str, Any]) -> None:
    check(expected, **options)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["off", "radix", "paged"])
@pytest.mark.parametrize("follows", [(True,), (True, False)], ids=["all", "half"])
def test_the_drafts_context_is_in_the_pages(cache: str, follows: tuple[bool, ...]) -> None:
    """Of the requests that it follows."""
    speculating.check_pages(follows, prefix_cache=cache, cache_min_tokens=1, track_interval=4)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [
    lambda e: scenarios.test_stop_tokens_cut_inside_a_block(e, True),
    lambda _: [
        scenarios.test_nothing_is_verified_behind_a_drafted_stop_token(AcceptMode.COUPLED, mode)
        for mode in (PlanMode.VERIFY_ALL, PlanMode.TRIM)
    ],
    scenarios.test_stop_strings_and_streams,
    scenarios.test_aborts_from_callbacks,
    lambda _: scenarios.check_swaps(),
    lambda _: scenarios.test_groups_fork_and_routes_are_whole(),
    lambda e: scenarios.test_a_random_draft(e, AcceptMode.COUPLED),
    lambda e: scenarios.test_a_random_draft(e, AcceptMode.REJECTION),
], ids=[
    "stop tokens", "nothing behind them", "stop strings", "aborts", "swaps", "groups", "random draft", "rejection",
])  # fmt: skip
def test_scenarios(expected: list[Completion], scenario: Any) -> None:
    scenario(expected)


@pytest.mark.slow
def test_a_verify_that_is_not_finite_is_decoded_again(expected: list[Completion]) -> None:
    engine = recording(telling_engine(expected))
    model, times = engine.runner.model, []
    head = model.head

    @apart
    def spoiled(x_TH: Tensor) -> Tensor:
        logits_TV, real = head(x_TH), x_TH.isfinite().all(-1).nonzero().flatten()
        if len(real) > 30 and not times:
            times.append(1)
            logits_TV[real[4]] = torch.nan
        return logits_TV

    model.head = spoiled  # type: ignore[method-assign]
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
    assert times
    model.head = lambda x_TH: head(x_TH) * torch.nan  # type: ignore[method-assign]
    assert [a.finish_reason for a in ask(engine, PROMPTS[:2], PARAMS[:2])] == [FinishReason.ERROR] * 2
    model.head = head  # type: ignore[method-assign]
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)


@pytest.mark.parametrize("more", [0, pytest.param(STOPS + 1, marks=pytest.mark.slow)])
def test_stops_inside_an_accepted_block(expected: list[Completion], more: int) -> None:
    """Known on the device, and too many for that: then the host moves the states on. What ended is continued from the
    cache, where its state is."""
    never = tuple(range(250, 250 - more, -1))
    stops = [
        replace(p, stop_token_ids=(*(t for t in never if t not in a.token_ids), a.token_ids[len(a.token_ids) // 2]))
        for p, a in zip(PARAMS, expected, strict=True)
    ]
    options: dict[str, Any] = {"prefix_cache": "radix", "cache_min_tokens": 1, "page_size": 4}
    engine = recording(telling_engine(expected, **options))
    plain = make_engine(top_k=ALL, **options)
    assert_same(engine, ask(engine, PROMPTS, stops), ended := ask(plain, PROMPTS, stops))
    turns = [[*p, *a.token_ids, 7] for p, a in zip(PROMPTS, ended, strict=True)]
    assert_same(engine, ask(engine, turns, PARAMS), ask(make_engine(top_k=ALL), turns, PARAMS))
    assert engine.stats()["cached_prompt_tokens"] > 0
    assert engine.stats()["accepted_tokens"] > 10


@pytest.mark.slow
def test_new_versions_need_no_new_graphs(expected: list[Completion]) -> None:
    """Adapters and drafts of each step of a run come to where graphs read already, while others' requests run on, each
    under its own draft: as much is accepted as where steps are launched."""
    engine, launched = (telling_engine(expected[:4], max_running=4) for _ in range(2))
    recording(engine)
    plain = make_engine(top_k=ALL, max_running=4)
    weights = telling_weights(small_config(markov_rank=256), [a.token_ids for a in expected[4:8]])
    for version in range(5):
        found = [asyncio.run(_through_swap(e, version, weights)) for e in (engine, plain, launched)]
        assert_same(engine, *found[:2])
    assert engine.speculator.counters == launched.speculator.counters  # type: ignore[union-attr]
    keys: list[Any] = list(engine.runner.graphs.verify._recorded)  # type: ignore[union-attr]
    assert {slot for key in keys for slot in key[-2]} == {(0, 3.0), (1, 3.0)}
    assert len({draft for key in keys for draft in key[-1]}) == 2
    assert any(len(key[-2]) == len(key[-1]) == 2 for key in keys)


async def _through_swap(engine: EmbeddedEngine, version: int, weights: dict[str, Tensor]) -> list[Completion]:
    tasks = [asyncio.ensure_future(engine.generate(p, s)) for p, s in zip(PROMPTS[10:12], PARAMS[10:12], strict=True)]
    for _ in range(2):
        await asyncio.sleep(0)
    engine.load_adapter(adapter_update(version, scale=0.1))
    if engine.speculator is not None:
        engine.load_draft({n: w.roll(version, 0) for n, w in weights.items()}, version)
    return await asyncio.gather(
        *tasks, *(engine.generate(p, s) for p, s in zip(PROMPTS[7:9], PARAMS[7:9], strict=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize("trim", [False, True])
def test_fifty_steps_need_nothing_new(trim: bool) -> None:
    """An adapter and a draft come in between."""
    engine = recording(make_engine(speculative=short_draft(), **FIFTY))
    found = fifty_steps(engine, adapter_update, trim=trim)
    assert found == {"graphs": 0, "kernels": 0, "bytes": 0, "verifies": 50}
    assert replays(engine)["others"] == 0


@pytest.mark.slow
def test_costs_are_those_of_the_graphs(expected: list[Completion]) -> None:
    """Measured at their tiers, replayed, and nothing is left behind."""
    engine = recording(telling_engine(expected, max_running=6, page_size=4))
    assert engine.speculator is not None
    audit, engine.speculator.audit = engine.speculator.audit, None
    profile = measure_engine(engine, repeats=1)
    assert profile.engine.endswith("float32 on cpu, recorded steps")
    assert profile.tiers.requests == (1, 2, 4, 6)
    for curve in profile.curves:
        assert curve.whole_s is not None
        assert {*curve.positions[1:]} <= {*profile.tiers.positions}
    assert engine.runner.graphs.num_recorded > len(profile.curves)  # type: ignore[union-attr]
    engine.speculator.audit = audit
    engine.speculator.planner.mode, engine.speculator.planner.profile = PlanMode.TRIM, profile
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
    assert replays(engine)["others"] == 0  # whether verifies pay is the clock's to say


@pytest.mark.slow
def test_hidden_states_for_training_are_the_same(expected: list[Completion]) -> None:
    found = []
    for engine in (telling_engine(expected, max_running=5), recording(telling_engine(expected, max_running=5))):
        assert engine.speculator is not None
        engine.speculator.keeper = StateKeeper(100_000)
        ask(engine, PROMPTS, PARAMS)
        found.append({e.token_ids: e.states for e in engine.speculator.keeper.examples})
    assert len(found[0]) > 10
    assert found[0].keys() == found[1].keys()
    for tokens, states in found[0].items():
        assert torch.equal(states.taps_TW, found[1][tokens].taps_TW)
        assert torch.equal(states.final_TH, found[1][tokens].final_TH)


@pytest.mark.slow
def test_graphs_go_with_the_memory_that_they_read(expected: list[Completion]) -> None:
    """Asleep or closed; awake again all is recorded anew."""
    engine, counts = telling_engine(expected), []
    for end in (engine.sleep, engine.close):
        graphs = recording(engine).runner.graphs
        assert graphs is not None
        assert graphs.verify is not None
        assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
        counts.append(graphs.num_recorded)
        assert graphs.verify._recorded
        end()
        assert not graphs.verify._recorded
        if end == engine.sleep:
            engine.wake()
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_plain_steps_of_an_engine_with_a_draft(expected: list[Completion], overlap: bool) -> None:
    """Where drafting doesn't pay: overlapped, with the draft's context written, so that a block can follow."""
    engine = recording(telling_engine(expected, max_running=5, overlap=overlap))
    assert engine.speculator is not None
    pays = iter([True, False, False] * 100)
    engine.speculator.wants = lambda _: next(pays)  # type: ignore[method-assign]
    assert_same(engine, ask(engine, PROMPTS, PARAMS), expected)
    assert engine.stats()["accepted_tokens"] > 20
    assert replays(engine)["others"] == 0


# --- planted mistakes -----------------------------------------------------------------------------------------------
STEP = verify.VerifyGraphs, "_step"
PLANTS = {
    "requests begin a row late": (verify.VerifyGraphs, "_values", ("np.array([*firsts_R", "np.array([*firsts_R + 1")),
    "late requests are folded twice": (*STEP, ('torch.where(at["late"] != 0, 0, kept_B)', "kept_B")),
    "rejected rows stay": (*STEP, ("clear_(pool", "(pool")),
    "padding is the last request's": (*STEP, ('slots_B=at["states"]', 'slots_B=at["states"].clamp(min=0)')),
    "a stop token is not seen": (acceptance, "kept_positions", ("packed) == 0))", "packed) >= 0))")),
    "the host reads": (*STEP, ("taps = p", "int(slot_T[0])\n    taps = p")),
    "a mask": (*STEP, ("taps = p", "slot_T[slot_T > 0]\n    taps = p")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PLANTS)
def test_planted_mistakes_are_seen(
    expected: list[Completion], mistake: str, monkeypatch: pytest.MonkeyPatch, made: list[EmbeddedEngine]
) -> None:
    owner, name, edit = PLANTS[mistake]
    monkeypatch.setattr(verify, name, mutate(getattr(owner, name), edit), raising=False)
    if owner is not acceptance:
        monkeypatch.setattr(owner, name, getattr(verify, name))

    def checks() -> None:
        test_stops_inside_an_accepted_block(expected, STOPS + 1)
        test_stops_inside_an_accepted_block(expected, 0)
        test_states_and_pages_are_those_of_ordinary_steps(expected)

    with pytest.raises((AssertionError, EngineError)):
        checks()
    made.clear()


@pytest.mark.parametrize("inference", [False, True])
def test_the_guard_sees_what_no_graph_holds(inference: bool) -> None:
    x = torch.arange(4)
    for call in (
        lambda: x[0].item(), lambda: int(x[0]), lambda: bool(x.any()), x.tolist, x.cpu, x.nonzero, lambda: x[x > 1],
        lambda: torch.tensor([1]), lambda: x.repeat_interleave(x),
    ):  # fmt: skip
        with torch.inference_mode(inference), NoSync(), pytest.raises(AssertionError, match="in a recorded step"):
            call()
    with torch.inference_mode(inference), NoSync():
        torch.where(x > 1, x, 0)[x].cumsum(0)
