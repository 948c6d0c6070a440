"""`trim` where whole blocks are verified in the replay that drafts them: the scenarios of `test_step_graphs` again,
with some requests that get no block."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers.drafts import small_config, telling_weights
from helpers.engines import ask, make_engine, tokens_of
from helpers.padded import recording, replays
from helpers.speculating import ALL, PROMPTS
from numpy.typing import NDArray
from unit.rollout.embedded import test_step_graphs as scenarios
from unit.rollout.embedded.test_rejection_graphs import rejecting
from unit.rollout.embedded.test_step_graphs import PARAMS

from miles_k3.k3.draft_params import MARKOV_W2
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.fused.graphs.verify import STOPS, Shape
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.rollout.speculative.planner.history import History
from miles_k3.rollout.speculative.planner.planner import Promise
from miles_k3.types import Completion

FLAT = CostProfile.of([(1, 1, 1.0), (1, 8, 1.0)])  # a step that is launched takes all of a block as well


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return ask(make_engine(top_k=ALL), PROMPTS, PARAMS)


def wholly(engine: EmbeddedEngine, *, left_out: int = 4) -> EmbeddedEngine:
    """Every `left_out`-th request that is asked about gets no block."""
    assert engine.speculator is not None
    planner, turns = engine.speculator.planner, itertools.count(1)
    planner.mode, planner.profile = PlanMode.TRIM, FLAT

    def members(requests: int, followed: Sequence[Any]) -> NDArray[np.bool_]:
        members_F = np.array([next(turns) % left_out > 0 for _ in followed], dtype=bool)
        planner._promised = Promise(members_F=members_F, accepted=1.0, longer=1.0, warm=False, whole=True)
        return members_F

    planner.members = members  # type: ignore[method-assign]
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [
    lambda e: scenarios.test_stops_inside_an_accepted_block(e, 0),
    lambda e: scenarios.test_stops_inside_an_accepted_block(e, STOPS + 1),
    scenarios.test_a_verify_that_is_not_finite_is_decoded_again,
    scenarios.test_new_versions_need_no_new_graphs,
    scenarios.test_hidden_states_for_training_are_the_same,
], ids=["stop tokens", "many stop tokens", "not finite", "versions", "for training"])  # fmt: skip
def test_scenarios(
    expected: list[Completion], scenario: Callable[[list[Completion]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, limits, telling = [], [], scenarios.telling_engine

    def made(*args: Any, **options: Any) -> EmbeddedEngine:
        engine = wholly(telling(*args, **options))
        assert engine.speculator is not None
        engines.append(engine)
        choose = engine.speculator.choose

        def chosen(requests: Any, limits_R: Any, *rest: Any, **how: Any) -> Any:
            if how.get("whole"):
                limits.append(limits_R)
            return choose(requests, limits_R, *rest, **how)

        engine.speculator.choose = chosen  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(scenarios, "telling_engine", made)
    scenario(expected)
    assert any((limits_R == 0).any() for limits_R in limits)
    shapes = [
        key[0] for engine in engines if engine.runner.graphs is not None and engine.runner.graphs.verify is not None
        for key in engine.runner.graphs.verify._recorded
    ]  # fmt: skip
    found = [shape.pages > 0 for shape in shapes if isinstance(shape, Shape)]
    assert found
    assert all(found)  # blocks are drafted where they are verified


def test_under_rejection_they_are_verify_alls(expected: list[Completion]) -> None:
    """The same blocks, judged by the same uniforms, to the last bit."""
    answers = []
    for mode in (PlanMode.VERIFY_ALL, PlanMode.TRIM):
        engine = recording(rejecting(expected, mode, max_running=6, page_size=4))
        assert engine.speculator is not None
        if mode is PlanMode.TRIM:
            wholly(engine)
            engine.speculator.planner.members(1, [History()])  # nobody is left out where all are wanted
        found = ask(engine, PROMPTS[:7], PARAMS[:7])
        answers.append([(a.token_ids, a.logprobs) for a in found])
        assert engine.stats()["drafted_tokens"] > engine.stats()["accepted_tokens"] > 5
        assert replays(engine)["others"] == 0
        assert engine.speculator.audit.wrong == 0  # type: ignore[union-attr]
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_drafts_of_two_versions_under_rejection(expected: list[Completion]) -> None:
    """Recorded and launched, each request's tokens are judged by what its own draft drew them from."""
    engines = [rejecting(expected, max_running=4), recording(rejecting(expected, max_running=4))]
    weights = telling_weights(small_config(markov_rank=256), [a.token_ids for a in expected[4:8]])
    weights[MARKOV_W2] = weights[MARKOV_W2] / 10
    for version in range(3):
        answers = [asyncio.run(scenarios._through_swap(engine, version, weights)) for engine in engines]
        assert tokens_of(answers[0]) == tokens_of(answers[1])
    keys: list[Any] = list(engines[1].runner.graphs.verify._recorded)  # type: ignore[union-attr]
    assert any(len(key[-1]) == 2 for key in keys)
    assert replays(engines[1])["others"] == 0
