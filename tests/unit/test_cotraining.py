"""The draft follows the policy: what it learns from, which version it drafts for, and runs that are resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.engines import adapter_update, ask, make_engine, random_prompts
from helpers.speculating import book_of, speculating_engine
from safetensors.torch import load_file

from miles_k3.config_speculative import SpeculativeSection
from miles_k3.cotraining import DraftFollower, SpeculationMeter
from miles_k3.errors import AdapterError, EngineError, LaunchError
from miles_k3.loop import run_training
from miles_k3.recipe import load_recipe
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.speculative.draft_io import write_draft
from miles_k3.rollout.speculative.state_keeper import StateKeeper
from miles_k3.rollout.speculative.taps import target_states
from miles_k3.run_folder import RunFolder
from miles_k3.types import SamplingParams
from miles_k3.world import ALONE

DRAFT = Path(__file__).resolve().parents[2] / "assets" / "tiny-k3-draft"
PROMPTS = [p for p in random_prompts(5, high=30, seed=51) for _ in range(2)]
PARAMS = [SamplingParams(max_new_tokens=2 + i, seed=i) for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"prefill_chunk_tokens": 60, "page_size": 4, "max_running": 3}, {"mode": "off"}],
    ids=["verifies", "overlap", "chunks", "plain steps"],
)
def test_examples_are_what_a_forward_computes(options: dict) -> None:
    """Leaders, their followers, cut verifies and steps that run ahead: the states of an uncached forward."""
    answers = ask(make_engine(top_k=8), PROMPTS, PARAMS)
    plain = options.pop("mode", None)
    engine = speculating_engine(book_of(PROMPTS, PARAMS, answers), top_k=8, **options)
    speculator = engine.speculator
    assert speculator is not None
    if plain:
        speculator.wants = lambda _: False  # type: ignore[method-assign]
    keeper = speculator.keeper = StateKeeper(10_000)
    ask(engine, PROMPTS, PARAMS)
    assert sorted(e.token_ids for e in keeper.examples) == sorted(
        (*p, *a.token_ids) for p, a in zip(PROMPTS, answers, strict=True)
    )
    layers = speculator.at.config.target_layer_ids
    for example in keeper.examples:
        wanted = target_states(engine, [example.token_ids], layers)[0]
        answer = slice(example.num_prompt_tokens, -1)
        torch.testing.assert_close(example.states.taps_TW[:-1], wanted.taps_TW[:-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(example.states.final_TH[answer], wanted.final_TH[answer], rtol=1e-4, atol=1e-4)
    assert keeper._left == 10_000 - sum(len(e.token_ids) for e in keeper.examples)
    assert not keeper._kept


def test_no_more_tokens_are_kept_than_asked_for() -> None:
    engine = speculating_engine(None, prefix_cache="radix", cache_min_tokens=1, page_size=4)
    keeper = engine.speculator.keeper = StateKeeper(70)  # type: ignore[union-attr]
    ask(engine, PROMPTS, PARAMS)
    ask(engine, PROMPTS, PARAMS)  # cached prompts: nobody computes their taps
    assert 0 < sum(len(e.token_ids) for e in keeper.examples) <= 70
    assert keeper._left >= 0


def follower_of(engine: EmbeddedEngine, folder: Path) -> DraftFollower:
    drafts = engine.speculator.drafts  # type: ignore[union-attr]
    if not folder.exists():
        write_draft(folder, drafts.config, drafts.of(-1).weights)
    section = SpeculativeSection(mode="verify_all", draft=str(folder), train=True, train_steps=3)
    found = DraftFollower.of(section, engine, engine.runner.model.base, ALONE, seed=0)
    assert found is not None
    return found


def test_a_draft_travels_with_its_adapter(tmp_path: Path) -> None:
    """Versions that came after a draft use it, older ones keep theirs; what nobody uses goes."""
    engine = speculating_engine(None)
    follower, speculator = follower_of(engine, tmp_path / "draft"), engine.speculator
    assert speculator is not None
    with follower.listening():
        ask(engine, PROMPTS, PARAMS)
    assert speculator.keeper is None
    first = speculator.drafts.of(-1)
    numbers = follower.step(0)
    assert numbers["draft/examples"] == len(PROMPTS)
    assert numbers["draft/frozen_expected_accepted"] == numbers["draft/expected_accepted"]  # before the first step
    assert speculator.drafts.of(-1) is first
    newer = speculator.drafts.of(0)
    assert newer is not first
    name = "fc.weight"
    assert torch.equal(newer.weights[name], follower.trainer.weights[name])
    assert not torch.equal(newer.weights[name], first.weights[name])
    engine.load_adapter(adapter_update(0))
    assert len(speculator.drafts) == 1
    with follower.listening():
        ask(engine, PROMPTS, PARAMS)
    numbers = follower.step(1)
    assert numbers["draft/expected_accepted"] > numbers["draft/frozen_expected_accepted"]
    with pytest.raises(AdapterError, match="a draft for adapter v0 came after the one for v1"):
        engine.load_draft(first.weights, 0)


def test_a_checkpoint_brings_everything_back(tmp_path: Path) -> None:
    engine = speculating_engine(None)
    follower = follower_of(engine, tmp_path / "draft")
    with follower.listening():
        ask(engine, PROMPTS, PARAMS)
    examples = list(follower._examples)
    follower.step(0)
    (file,) = follower.save(tmp_path / "saved")
    assert file.is_file()
    other = follower_of(speculating_engine(None), tmp_path / "draft")
    other.load(tmp_path / "saved", 0)
    assert other._engine.speculator.drafts.newest == 0  # type: ignore[union-attr]
    for one in (follower, other):
        one._examples = list(examples)
        one.step(1)
    for name, w in follower.trainer.weights.items():
        assert torch.equal(w, other.trainer.weights[name])


def test_engines_that_can_not_be_followed(tmp_path: Path) -> None:
    section = SpeculativeSection(mode="verify_all", draft="x", train=True)
    engine = make_engine()
    with pytest.raises(LaunchError, match="the hidden states of a object don't come back"):
        DraftFollower.of(section, object(), engine.runner.model.base, ALONE, 0)  # type: ignore[arg-type]
    assert DraftFollower.of(SpeculativeSection(), object(), None, ALONE, 0) is None  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="doesn't speculate"):
        engine.load_draft({}, 0)
    with pytest.raises(EngineError, match="doesn't speculate"):
        engine.listen(10)
    assert engine.heard() == []


def test_a_steps_acceptance_is_measured() -> None:
    answers = ask(make_engine(top_k=8), PROMPTS, PARAMS)
    engine = speculating_engine(book_of(PROMPTS, PARAMS, answers), every=1000, top_k=8)
    ask(engine, PROMPTS, PARAMS)
    meter = SpeculationMeter(engine, ALONE)
    with meter.measuring():
        ask(engine, PROMPTS, PARAMS)
    shares = [n for name, n in meter.metrics.items() if name.startswith("speculative/accepted_")]
    assert sum(shares) == pytest.approx(1.0)
    mean = sum(n * share for n, share in enumerate(shares))
    assert meter.metrics["speculative/mean_accepted"] == pytest.approx(mean)
    assert SpeculationMeter(make_engine(), ALONE)._counts() == {}


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_draft(tmp_path: Path) -> None:
    def run(name: str, steps: int, resume: bool = False) -> Path:
        recipe = load_recipe("tiny-cpu", [
            f"run.folder={tmp_path}", f"run.name={name}", f"run.steps={steps}", "run.save_every=2", "eval.prompts=0",
            "rollout.prompts_per_step=8", "trainer.lr_decay=constant", "rollout.speculative.mode=verify_all",
            f"rollout.speculative.draft={DRAFT}", "rollout.speculative.train=true",
        ]).recipe  # fmt: skip
        with RunFolder.create(recipe, resume=resume) as folder:
            run_training(recipe, folder, resume=resume)
            return folder.path

    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 4, resume=True)
    one, other = (load_file(next((p / "draft").glob("*.safetensors"))) for p in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)
    last = [json.loads((p / "metrics.jsonl").read_text().splitlines()[-1]) for p in (whole, parts)]
    for name in ("draft/loss", "draft/expected_accepted", "speculative/mean_accepted", "rollout/reward"):
        assert last[0][name] == last[1][name]
    assert last[0]["draft/version"] == 4
