"""Random weights: every tensor of the table, the same for a seed, and a model that computes sensible numbers."""

from __future__ import annotations

import asyncio

import pytest
import torch
from helpers.tiny import tiny_config

from miles_k3.assemble import load_model, make_embedded_engine
from miles_k3.k3.params import text_params
from miles_k3.k3.random_weights import draw, random_base
from miles_k3.k3.weights import ResidentBase
from miles_k3.recipe import load_recipe
from miles_k3.types import SamplingParams
from miles_k3.world import ALONE


def tensors(base: ResidentBase) -> list[torch.Tensor]:
    return [*base.tensors.values(), *(t for bank in base.experts.values() for t in bank.tensors)]


@pytest.mark.parametrize("base_dtype", ["bf16", "mxfp4"])
def test_a_seed_decides_every_tensor(base_dtype: str) -> None:
    config = tiny_config()
    bases = [random_base(config, dtype=torch.float32, base_dtype=base_dtype, seed=seed) for seed in (0, 0, 1)]
    assert bases[0].num_params() == sum(p.num_params for p in text_params(config))
    assert all(torch.isfinite(t).all() for t in tensors(bases[0]) if t.is_floating_point())
    one, again, other = (tensors(base) for base in bases)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_tensors_are_drawn_by_name() -> None:
    params = [p for p in text_params(tiny_config()) if p.name.endswith("q_proj.weight")]
    drawn = [draw(p, tiny_config(), torch.device("cpu")) for p in params]
    assert len(drawn) > 1
    assert not torch.equal(drawn[0], drawn[1])


def test_a_recipe_runs_on_them_with_a_tokenizer_of_elsewhere() -> None:
    tokenizer = load_recipe("tiny-cpu").recipe.model.path
    recipe = load_recipe(
        "tiny-cpu", ["model.weights=random", f"model.tokenizer={tokenizer}", "model.dtype=float32"]
    ).recipe
    model = load_model(recipe, ALONE)
    engine = make_embedded_engine(recipe, model, 64)
    answer = asyncio.run(engine.generate(model.tokenizer.encode("1 + 2"), SamplingParams(max_new_tokens=8)))
    assert all(-25 < logprob < 0 for logprob in answer.logprobs)
    engine.close()
