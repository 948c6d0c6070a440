"""Recorded steps under rejection sampling against launched ones: drafted tokens' distributions stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.drafts import small_config, telling_weights
from helpers.engines import ask, make_engine, poison_before_steps
from helpers.mutants import mutate
from helpers.padded import recording, replays
from helpers.speculating import ALL, PROMPTS
from unit.rollout.embedded.test_step_graphs import PARAMS, traced

from miles_k3.errors import EngineError
from miles_k3.k3.draft_params import MARKOV_W2
from miles_k3.rollout.embedded import speculation
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.fused.graphs import context, verify
from miles_k3.rollout.embedded.proposal import Speculative
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.audit import CommitAudit
from miles_k3.rollout.speculative.engine_costs import measure_engine
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.types import Completion

COSTS = CostProfile.of([(1, 1, 1.0), (1, 7, 1.3), (6, 6, 1.0), (6, 42, 2.0)])  # few enough that some isn't verified


@pytest.fixture(scope="module")
def told() -> list[Completion]:
    return ask(make_engine(top_k=ALL), PROMPTS, PARAMS)


def rejecting(told: Sequence[Completion], mode: PlanMode = PlanMode.VERIFY_ALL, **options: Any) -> EmbeddedEngine:
    """With a draft that puts much, but not all, on what the policy has said, and NaN in free memory."""
    config = small_config(markov_rank=256)
    weights = telling_weights(config, [a.token_ids for a in told])
    weights[MARKOV_W2] = weights[MARKOV_W2] / 10
    how = Speculative(
        config=config, weights=weights, accept=AcceptMode.REJECTION, mode=mode,
        profile=COSTS if mode is PlanMode.TRIM else None,
    )  # fmt: skip
    engine = make_engine(top_k=ALL, speculative=how, **options)
    poison_before_steps(engine)
    assert engine.speculator is not None
    engine.speculator.audit = CommitAudit(engine.runner.model.conv_weights())
    engine.speculator.wants = lambda _: True  # type: ignore[method-assign]
    engine.scheduler._follows = lambda *_: True
    return engine


def check_replays(told: Sequence[Completion], mode: PlanMode, count: int = len(PROMPTS)) -> None:
    """Tokens, log-probabilities, states, windows, latents: step by step, to the last bit."""
    plain, recorded = (rejecting(told, mode, max_running=6, page_size=4) for _ in range(2))
    one, other = traced(plain), traced(recording(recorded))
    answers = [ask(engine, PROMPTS[:count], PARAMS[:count]) for engine in (plain, recorded)]
    assert [(a.token_ids, a.logprobs) for a in answers[0]] == [(a.token_ids, a.logprobs) for a in answers[1]]
    assert len(one) == len(other)
    for ordinary, replayed in zip(one, other, strict=True):
        assert ordinary.keys() == replayed.keys()
        for prompt, (*exact, _) in ordinary.items():
            assert all(torch.equal(a, b) for a, b in zip(exact, replayed[prompt], strict=False))
    assert recorded.speculator is not None
    assert plain.speculator is not None
    counters = recorded.speculator.counters
    assert counters["drafted_tokens"] > counters["accepted_tokens"] > 5
    assert {n: v for n, v in counters.items() if "drafted" not in n} == {
        n: v for n, v in plain.speculator.counters.items() if "drafted" not in n
    }
    assert recorded.speculator.audit.wrong == 0  # type: ignore[union-attr]
    assert replays(recorded)["verify"] > 0
    assert replays(recorded)["others"] == 0


def test_trimmed_blocks(told: list[Completion]) -> None:
    """Drafted in one replay, judged in another."""
    check_replays(told, PlanMode.TRIM, 7)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [PlanMode.VERIFY_ALL, PlanMode.TRIM])
def test_all_of_them(told: list[Completion], mode: PlanMode) -> None:
    check_replays(told, mode)


@pytest.mark.slow
def test_asleep_nothing_is_kept_and_costs_are_those_of_the_graphs(told: list[Completion]) -> None:
    engine = recording(rejecting(told, PlanMode.TRIM, max_running=4, page_size=4))
    speculator = engine.speculator
    assert speculator is not None
    before = ask(engine, PROMPTS[:4], PARAMS[:4])
    engine.sleep()
    assert speculator.num_bytes == 0
    engine.wake()
    recording(engine)
    assert speculator.num_bytes > 5 * 256 * 4 * 4
    assert measure_engine(engine, repeats=1).tiers.requests == (1, 2, 4)
    assert [a.token_ids for a in ask(engine, PROMPTS[:4], PARAMS[:4])] == [a.token_ids for a in before]
    assert replays(engine)["others"] == 0


@pytest.mark.slow
def test_what_does_not_fit_is_launched(told: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MOST_PROBS", 1000)
    engine = recording(rejecting(told, max_running=4))
    answers = ask(engine, PROMPTS[:4], PARAMS[:4])
    assert replays(engine)["others"] > 0
    assert replays(engine)["verify"] == 0
    assert engine.speculator is not None
    assert engine.speculator.probs_NGV is None
    assert [a.token_ids for a in answers] == [
        a.token_ids for a in ask(rejecting(told, max_running=4), PROMPTS[:4], PARAMS[:4])
    ]


PLANTS = {
    "another's distributions": (verify.VerifyGraphs, "_step", ("buffer_NGV[packed", "buffer_NGV.flip(0)[packed")),
    "the policy's uniforms": (context, "draft_blocks", ("draft_seeds(mode,", "draft_seeds(AcceptMode.COUPLED,")),
    "a draft that draws nothing": (verify.VerifyGraphs, "_step", ("None if probs is", "None if probs is not")),
    "one distribution for a block": (context.DraftProbs, "put", ("rows_R + k", "rows_R")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PLANTS)
def test_planted_mistakes_are_seen(told: list[Completion], mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, edit = PLANTS[mistake]
    changed: Any = mutate(getattr(owner, name), edit)
    monkeypatch.setattr(owner, name, changed)
    if name == "draft_blocks":
        monkeypatch.setattr("miles_k3.rollout.embedded.fused.graphs.draft.draft_blocks", changed)
    with pytest.raises((AssertionError, EngineError)):
        check_replays(told, PlanMode.TRIM)
