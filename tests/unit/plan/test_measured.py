"""The tiny recipe, phase by phase: what is planned is what is allocated, within a tenth."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from helpers.allocations import allocations
from helpers.planned import fullest_batch

from miles_k3.adapters.transport import publish
from miles_k3.assemble import DTYPES, Model, make_engine, make_trainer
from miles_k3.k3.weights import load_base
from miles_k3.plan.phases import EXPORT_BUCKET_BYTES, rank_facts
from miles_k3.plan.planner import read_config
from miles_k3.recipe import load_recipe
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.trainer.adapter_exchange import BUCKET_BYTES
from miles_k3.types import SamplingParams

TENTH = 0.1
DRAFT = Path(__file__).resolve().parents[3] / "assets" / "tiny-k3-draft"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="as it is", marks=pytest.mark.slow),
        pytest.param(
            ("trainer.recompute=selective", "lora.rank=16", "trainer.micro_batch_tokens=2048"),
            id="selective", marks=pytest.mark.slow,
        ),
        pytest.param(
            ("trainer.recompute=full", "rollout.sampling.max_new_tokens=60"), id="full", marks=pytest.mark.slow
        ),
        pytest.param(
            ("model.dtype=bfloat16", "model.base_dtype=mxfp4", "rollout.max_running=64"), id="bfloat16"
        ),
        pytest.param(
            ("rollout.speculative.mode=verify_all", f"rollout.speculative.draft={DRAFT}"), id="speculative"
        ),
    ],
)  # fmt: skip
def test_every_phase_takes_what_is_planned(overrides: tuple[str, ...], tmp_path: Path) -> None:
    recipe = load_recipe("tiny-cpu", [*overrides, "trainer.async_checkpoint=true"]).recipe
    config = read_config(recipe)
    facts = rank_facts(recipe, config, 1, 0, cuda=False, fla=False)
    masters = 0 if recipe.model.dtype == "float32" else facts.optimizer // 3
    with allocations() as loaded:
        base = load_base(
            recipe.model.path, config, dtype=DTYPES[recipe.model.dtype], base_dtype=recipe.model.base_dtype
        )
    model = Model(config=config, base=base, tokenizer=None)
    with allocations() as trained:
        trainer = make_trainer(recipe, model)
    with allocations() as served:
        engine = make_engine(recipe, model)
    assert facts.base == pytest.approx(loaded.kept, rel=TENTH)
    assert facts.adapter + facts.gradients + masters == pytest.approx(trained.kept, rel=TENTH)
    held = facts.engine.slots + facts.engine.kv + facts.engine.states + facts.engine.draft + facts.engine.replay
    assert held == pytest.approx(served.kept, rel=TENTH)

    with allocations() as first:
        trainer.step(fullest_batch(recipe, config))
    with allocations() as second:
        trainer.step(fullest_batch(recipe, config, seed=1))
    assert facts.optimizer - masters == pytest.approx(first.kept, rel=TENTH)
    assert facts.activations == pytest.approx(second.peak, rel=TENTH)

    with allocations() as exported:
        update = trainer.export_adapter()
    assert facts.export == pytest.approx(exported.peak, rel=TENTH)
    publish(update, engine)
    with allocations() as saved:
        writing = trainer.save(tmp_path)
        assert writing is not None
        writing.wait()
    assert facts.checkpoint == pytest.approx(saved.peak, rel=TENTH)


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.max_running=1",),
        ("rollout.max_running=4", "rollout.page_size=64", "rollout.cache_pool=split"),
        ("rollout.num_pages=50", "rollout.cache_slots=9", "model.dtype=bfloat16"),
        ("rollout.prefix_cache=off", "rollout.max_running=2"),
    ],
)
def test_the_pool_of_the_engine_whatever_its_size(overrides: tuple[str, ...]) -> None:
    recipe = load_recipe("tiny-cpu", list(overrides)).recipe
    config = read_config(recipe)
    planned = rank_facts(recipe, config, 1, 0, cuda=False, fla=False).engine
    base = load_base(recipe.model.path, config, dtype=DTYPES[recipe.model.dtype])
    engine = make_engine(recipe, Model(config=config, base=base, tokenizer=None))
    assert isinstance(engine, EmbeddedEngine)
    assert planned.kv + planned.states == pytest.approx(engine.pool.num_bytes, rel=0.01)
    engine.close()


def test_a_full_prompt_step_of_the_engine() -> None:
    """Looser than the trainer's: one formula stands for all sublayers of a forward pass."""
    recipe = load_recipe("tiny-cpu").recipe
    config = read_config(recipe)
    facts = rank_facts(recipe, config, 1, 0, cuda=False, fla=False)
    base = load_base(recipe.model.path, config, dtype=torch.float32)
    engine = make_engine(recipe, Model(config=config, base=base, tokenizer=None))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, config.vocab_size, (32, 128), generator=generator).tolist()

    async def roll() -> None:
        params = SamplingParams(max_new_tokens=2)
        await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    with allocations() as rolled:
        asyncio.run(roll())
    assert facts.engine.work == pytest.approx(rolled.peak, rel=0.25)
    engine.close()


def test_an_exports_buckets_are_as_large_as_planned() -> None:
    assert EXPORT_BUCKET_BYTES == BUCKET_BYTES
