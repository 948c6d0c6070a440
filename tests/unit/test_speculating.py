"""rollout.speculative: what is refused, and what an engine is given."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from helpers.engines import ask, tokens_of

from miles_k3.assemble import load_engine
from miles_k3.errors import ConfigError, EngineError
from miles_k3.recipe import load_recipe
from miles_k3.rollout.embedded.batch import StepBatch
from miles_k3.rollout.embedded.runner import Runner
from miles_k3.rollout.speculative.engine_costs import measure_engine, ragged
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.tasks.registry import make_task
from miles_k3.speculating import measure_if_asked
from miles_k3.types import SamplingParams
from miles_k3.world import ALONE

DRAFT = Path(__file__).resolve().parents[2] / "assets" / "tiny-k3-draft"
ON = ("rollout.speculative.mode=verify_all", f"rollout.speculative.draft={DRAFT}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("rollout.speculative.mode=trim",), "rollout.speculative.draft is null"),
        (("rollout.speculative.train=true",), "rollout.speculative.mode is off, so nothing drafts"),
        ((*ON, "rollout.speculative.costs=costs.json"), "only trim looks at costs"),
        ((*ON, "rollout.speculative.verify_tokens=511"), "have 512 positions; set that or more"),
        ((*ON, "rollout.engine=sglang"), "only the embedded one drafts"),
        (("rollout.speculative.train=true", "rollout.engine=sglang"), "sglang, whose draft stays the one"),
        ((*ON, "rollout.speculative.num_draft_tokens=0"), "num_draft_tokens"),
    ],
)
def test_what_does_not_go_together(changes: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe("tiny-cpu", changes)


def test_a_trimming_engine_measures_costs_and_forgets_the_measuring(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On tokens that differ: equal ones share their experts, and cost a fraction of what a step costs."""
    measured: list[StepBatch] = []
    forward = Runner._forward
    monkeypatch.setattr(
        Runner, "_forward", lambda self, batch, *rest: measured.append(batch) or forward(self, batch, *rest)
    )
    recipe = load_recipe(
        "tiny-cpu",
        [*ON, "rollout.speculative.mode=trim", "rollout.max_running=5", "rollout.speculative.num_draft_tokens=3"],
    ).recipe
    engine = load_engine(recipe, ALONE)
    planner = engine.speculator.planner  # type: ignore[union-attr]
    assert all(len(set(b.tokens_T.tolist())) > len(b.tokens_T) / 2 for b in measured if len(b.tokens_T) > 4)
    assert max(len(b.tokens_T) for b in measured) == 20
    assert planner.mode is PlanMode.TRIM
    assert planner.profile is not None
    assert [c.requests for c in planner.profile.curves] == [1, 4, 5]
    assert [c.positions for c in planner.profile.curves] == [tuple(n * k for k in range(1, 5)) for n in (1, 4, 5)]
    assert (
        planner.profile.engine
        == "8 layers of 96, 8 experts; a draft of 2 layers, blocks of 7, coupled acceptance; float32 on cpu"
    )
    named = recipe.rollout.speculative.model_copy(update={"costs": "costs.json"})
    caplog.clear()
    measure_if_asked(engine, named)
    assert caplog.messages == []
    planner.profile = dataclasses.replace(planner.profile, engine="61 layers of 7168")
    measure_if_asked(engine, named)
    (warning,) = caplog.messages
    assert warning.startswith("costs.json was measured on another engine (61 layers of 7168) than this one (8 layers")
    assert engine.pool.num_held == 0
    assert not any(engine.stats()[name] for name in ("verify_steps", "drafted_tokens", "generated_tokens"))
    engine.speculator = None
    with pytest.raises(EngineError, match="an engine that speculates"):
        measure_engine(engine)


def test_a_draft_of_shorter_sequences_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    short = tmp_path / "draft"
    shutil.copytree(DRAFT, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 48}))
    lengths = ("task.max_prompt_tokens=32", "rollout.sampling.max_new_tokens={}")
    for new_tokens, said in ((16, False), (17, True)):
        caplog.clear()
        changes = (*ON[:1], f"rollout.speculative.draft={short}", lengths[0], lengths[1].format(new_tokens))
        load_engine(load_recipe("tiny-cpu", changes).recipe, ALONE)
        assert any("takes 48 tokens" in m and "sequences here have up to 49" in m for m in caplog.messages) is said


def test_measured_verifies_are_as_ragged_as_planned_ones() -> None:
    for count in (1, 2, 3, 7, 64):
        for longest in (2, 4, 8):
            for mean in range(1, longest + 1):
                lengths = ragged(count, mean, longest)
                assert sum(lengths) == mean * count
                assert 1 <= min(lengths) <= max(lengths) <= longest
    assert len(set(ragged(64, 4, 8))) > 5


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["radix", "paged"])
def test_warm_acceptance_is_cold_acceptance(cache: str) -> None:
    """The shipped draft: what it is worth doesn't depend on who computed a prompt, nor on which policy kept it."""
    recipe = load_recipe(
        "tiny-cpu", [*ON, f"rollout.prefix_cache={cache}", "rollout.cache_min_tokens=1", "rollout.page_size=4"]
    ).recipe
    engine = load_engine(recipe, ALONE)
    prompts = [p.token_ids for p in make_task(recipe.task, engine.tokenizer, seed=0).next(64)]
    params = [SamplingParams(max_new_tokens=12, seed=i) for i in range(64)]
    names = ("drafted_tokens", "accepted_tokens", *(f"verifies_accepting_{n}" for n in range(8)))
    counts, answers = [], []
    before = now = engine.stats()
    for _ in range(2):
        before = dict(engine.stats())
        answers.append(ask(engine, prompts, params))
        now = engine.stats()
        counts.append([now[name] - before[name] for name in names])
    assert now["cached_prompt_tokens"] - before["cached_prompt_tokens"] > 0.9 * sum(map(len, prompts))
    assert counts[0] == counts[1]
    assert counts[0][1] > 2 * 64
    assert tokens_of(answers[0]) == tokens_of(answers[1])
