"""`miles-k3 bench speculative`: a line for each batch and mode, and costs that a recipe can name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from miles_k3.bench import speculation
from miles_k3.cli import app
from miles_k3.errors import ConfigError
from miles_k3.recipe import load_recipe
from miles_k3.rollout.speculative.planner.cost import CostProfile


@pytest.mark.slow
@pytest.mark.parametrize("known", ["0.0", "1.0"])
def test_modes_side_by_side(known: str, tmp_path: Path) -> None:
    """Random weights and a random draft, which is made to know everything or nothing."""
    arguments = [
        "bench", "speculative", "tiny-cpu", "--random-weights", "--random-draft", "--known", known, "--batch", "1",
        "--batch", "3", "--tokens", "17", "--rounds", "1", "--temperature", "0", "--out", str(tmp_path),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    rates = json.loads((tmp_path / "speculative.json").read_text())["rates"]
    assert [(r["batch"], r["mode"]) for r in rates] == [(b, m) for b in (1, 3) for m in ("off", "verify_all", "trim")]
    assert all(0 < r["lowest"] <= r["median"] <= r["highest"] for r in rates)
    accepted = [r["accepted"] for r in rates if r["mode"] == "verify_all"]
    assert accepted == ([0.0, 0.0] if known == "0.0" else [7.0, 7.0])
    assert [c.requests for c in CostProfile.load(tmp_path / "costs.json").curves] == [1, 3]
    assert "| 3 | trim |" in result.output


def test_no_draft_is_refused_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "load_model", lambda *_: pytest.fail("loads the model"))
    with pytest.raises(ConfigError, match="or measure with --random-draft"):
        CliRunner().invoke(app, ["bench", "speculative", "tiny-cpu", "--out", str(tmp_path)], catch_exceptions=False)


def test_a_random_draft_is_measured_as_the_recipe_says() -> None:
    keys = {"accept": "rejection", "num_draft_tokens": 3, "verify_tokens": 900}
    recipe = load_recipe("tiny-cpu", [f"rollout.speculative.{key}={value}" for key, value in keys.items()]).recipe
    plan = speculation.BenchPlan(
        batches=(1,), new_tokens=2, rounds=1, known=None, random_draft=True, random_weights=True, temperature=1.0,
        past_stop=False,
    )  # fmt: skip
    found = speculation._speculative(recipe, speculation._random_model(recipe), plan)
    assert {key: getattr(found, key) for key in keys} == keys


@pytest.mark.slow
def test_an_end_at_the_next_batch_leaves_the_last_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = speculation._rates

    def ends(engines, prompts, plan):
        if len(prompts) == 2:
            raise MemoryError("out of memory at batch 2")
        return rates(engines, prompts, plan)

    monkeypatch.setattr(speculation, "_rates", ends)
    arguments = [
        "bench", "speculative", "tiny-cpu", "--random-weights", "--random-draft", "--batch", "1", "--batch", "2",
        "--tokens", "5", "--rounds", "1", "--out", str(tmp_path),
    ]  # fmt: skip
    with pytest.raises(MemoryError):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    found = json.loads((tmp_path / "speculative.json").read_text())["rates"]
    assert [r["batch"] for r in found] == [1, 1, 1]
    assert [c.requests for c in CostProfile.load(tmp_path / "costs.json").curves] == [1, 2]


def test_warm_ups_draw_with_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as graphs are recorded, and none that a round that counts draws with again, nor below zero."""
    plan = speculation.BenchPlan(
        batches=[2], new_tokens=4, rounds=3, known=0.8, random_draft=True, random_weights=True, temperature=1.0,
        past_stop=False, learning=2,
    )  # fmt: skip
    turns, recorded = [], iter([0, 4, 4, 6, 6, 6])
    monkeypatch.setattr(speculation, "_round", lambda engines, prompts, plan, turn: turns.append(turn))
    monkeypatch.setattr(speculation, "_num_recorded", lambda engines: next(recorded))
    speculation._warm_up({}, [[1], [2]], plan)
    assert turns == [5, 6, 7]
