"""Speculation on the tiny recipe, with the draft that ships: what is planned is what is allocated, within a tenth."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from helpers.allocations import allocations

from miles_k3.assemble import DTYPES, Model, make_embedded_engine
from miles_k3.config import Recipe
from miles_k3.cotraining import DraftFollower
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.k3.weights import load_base
from miles_k3.plan.engine import EngineBytes
from miles_k3.plan.phases import rank_facts
from miles_k3.plan.planner import Machine, plan, read_config
from miles_k3.plan.shapes import Phase
from miles_k3.recipe import load_recipe
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.types import SamplingParams
from miles_k3.world import ALONE

TENTH = 0.1
DRAFT = Path(__file__).resolve().parents[3] / "assets" / "tiny-k3-draft"
ON = ("rollout.speculative.mode=verify_all", f"rollout.speculative.draft={DRAFT}")


def planned(recipe: Recipe) -> EngineBytes:
    return rank_facts(recipe, read_config(recipe), 1, 0, cuda=False, fla=False).engine


def engine_of(recipe: Recipe) -> EmbeddedEngine:
    config = read_config(recipe)
    base = load_base(recipe.model.path, config, dtype=DTYPES[recipe.model.dtype])
    longest = recipe.task.max_prompt_tokens + recipe.rollout.sampling.max_new_tokens
    return make_embedded_engine(recipe, Model(config=config, base=base, tokenizer=None), longest)


def kept_by_engine(*overrides: str, asleep: bool = False) -> int:
    with allocations() as found:
        engine = engine_of(load_recipe("tiny-cpu", list(overrides)).recipe)
        if asleep:
            engine.sleep()
    engine.close()
    return found.kept


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("rollout.max_running=8", "rollout.speculative.num_draft_tokens=2"),
        ("rollout.max_running=32", "rollout.speculative.verify_tokens=70", "model.dtype=bfloat16"),
    ],
    ids=["as it is", "weights most of all", "bfloat16"],
)
def test_an_engine_takes_that_much_more_for_a_draft(overrides: tuple[str, ...]) -> None:
    plain = [o for o in overrides if "speculative" not in o]
    without, with_draft = (planned(load_recipe("tiny-cpu", o).recipe) for o in (plain, [*overrides, *ON]))
    measured = kept_by_engine(*overrides, *ON) - kept_by_engine(*plain)
    more = with_draft.draft + with_draft.replay + with_draft.kv - without.kv
    assert more == pytest.approx(measured, rel=TENTH)


def test_rejection_keeps_what_tokens_were_drawn_from() -> None:
    coupled, rejection = (
        planned(load_recipe("tiny-cpu", [*ON, f"rollout.speculative.accept={rule}"]).recipe).replay
        for rule in ("coupled", "rejection")
    )
    draft, requests = DraftConfig.from_folder(DRAFT), load_recipe("tiny-cpu", ON).recipe.rollout.max_running
    assert rejection - coupled == (requests + 1) * draft.block_size * draft.vocab_size * 4


def test_a_sleeping_engine_keeps_the_weights_of_its_draft_alone() -> None:
    measured = kept_by_engine(*ON, asleep=True) - kept_by_engine(asleep=True)
    recipe = load_recipe("tiny-cpu", [*ON, "rollout.sleep_while_training=true"]).recipe
    assert planned(recipe).draft == pytest.approx(measured, rel=TENTH)
    (rank,) = plan(recipe, read_config(recipe), Machine()).ranks
    awake, training = rank.device[Phase.ROLLOUT], rank.device[Phase.TRAIN]
    assert awake["replay"] == planned(recipe).replay > 0
    assert {"replay", "KV", "states"} & training.keys() == set()
    assert training["draft"] == awake["draft"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_that_is_trained(dtype: str) -> None:
    """Rollouts that fill what may be kept of them, then a step of the draft on them."""
    tokens, prompt, answer = 2048, 116, 12
    recipe = load_recipe(
        "tiny-cpu",
        [*ON, "rollout.speculative.train=true", f"rollout.speculative.train_tokens={tokens}", f"model.dtype={dtype}",
         "rollout.max_running=16"],
    ).recipe  # fmt: skip
    engine = engine_of(recipe)
    frozen = recipe.model_copy(
        update={"rollout": recipe.rollout.model_copy(
            update={"speculative": recipe.rollout.speculative.model_copy(update={"train": False})}
        )}
    )  # fmt: skip
    more = planned(recipe).draft - planned(frozen).draft
    generator = torch.Generator().manual_seed(0)
    count = tokens // (prompt + answer)
    prompts = torch.randint(3, engine.config.vocab_size, (count, prompt), generator=generator).tolist()
    params = SamplingParams(max_new_tokens=answer)

    async def roll() -> None:
        await asyncio.gather(*(engine.generate(p, params) for p in prompts))

    with allocations() as followed:
        follower = DraftFollower.of(recipe.rollout.speculative, engine, engine.runner.model.base, ALONE, seed=0)
    assert follower is not None
    with allocations() as heard, follower.listening():
        asyncio.run(roll())
    assert sum(len(e.token_ids) for e in follower._examples) == tokens
    with allocations() as stepped:
        follower.step(0)
    of_step = stepped.kept + heard.kept  # it lets go of what was heard
    assert more == pytest.approx(followed.kept + heard.kept + of_step, rel=TENTH)
    engine.close()
