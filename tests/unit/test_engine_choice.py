"""What commands do with a recipe whose engine is SGLang: use it, or say what to do before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from helpers.sglang_stand_in import StandIn

from miles_k3 import assemble, loop
from miles_k3.bench.speculation import bench_modes
from miles_k3.config import Recipe
from miles_k3.drafting import DraftPlan, train_draft
from miles_k3.errors import ConfigError
from miles_k3.losslessness import verify_lossless
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.engine import SglangEngine

ANY: Any = None  # refused before it is looked at


def recipe(*overrides: str) -> Recipe:
    return load_recipe("tiny-cpu", ["rollout.engine=sglang", *overrides]).recipe


def _train(out: Path) -> object:
    plan = DraftPlan(
        training=ANY, num_prompts=1, group_size=1, eval_prompts=1, past_stop=False, start=None, save_every=0
    )
    return train_draft(recipe(), None, out, plan, resume=False)


@pytest.mark.parametrize(
    ("command", "ask"),
    [
        ("draft train", _train),
        ("bench speculative", lambda out: bench_modes(recipe(), None, ANY, out, ANY)),
        (
            "verify-lossless",
            lambda out: verify_lossless(recipe(), None, out, num_prompts=1, samples=100, sampled_prompts=1),
        ),
    ],
)
def test_what_needs_the_embedded_engine_says_so(command: str, ask: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"rollout.engine is sglang, but {command} .*--set rollout.engine_tp=1"):
        ask(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_eval_asks_sglang_and_loads_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = StandIn()

    def engine(recipe: Recipe, model: assemble.Model, *_: object) -> SglangEngine:
        return SglangEngine(
            backend, model.config, tokenizer=model.tokenizer, adapter_config=None, max_lora_rank=16,
            max_sequence_tokens=512,
        )  # fmt: skip

    def no_base(*_: object, **__: object) -> None:
        raise AssertionError("the base is SGLang's affair")

    monkeypatch.setattr(assemble, "make_sglang_engine", engine)
    monkeypatch.setattr(assemble, "load_base", no_base)
    monkeypatch.setattr(assemble, "refuse_launch", lambda *_, **__: None)
    monkeypatch.setattr(assemble, "RewardPool", lambda *_: nullcontext())
    monkeypatch.setattr(loop, "held_out_quality", lambda _, parts: (type(parts.engine), parts.model.base))
    assert loop.run_eval(recipe(), None) == (SglangEngine, None)
    assert backend.told == [("close",)]
