"""The keys explained, and the schema that editors check recipes with."""

from __future__ import annotations

import json

import pytest
import yaml
from jsonschema import Draft7Validator

from miles_k3.errors import ConfigError
from miles_k3.judge import recipe_fields
from miles_k3.recipe import RECIPES_FOLDER, shipped_recipes
from miles_k3.recipe_keys import defaults, explain_key, recipe_schema

SCHEMA_FILE = RECIPES_FOLDER / "recipe.schema.json"


def test_every_key_and_section_is_explained() -> None:
    for key in recipe_fields():
        first, *rest = explain_key(key)
        assert first.startswith(f"{key}: "), key
        assert len(first) > len(key) + 8, key
        assert rest, key


def test_an_explanation_says_type_default_bounds_note_and_who_sets_it() -> None:
    lines = explain_key("trainer.recompute")
    assert '  default: "none"' in lines
    assert "  allowed: none, selective, full" in lines
    assert any(line.startswith("  note: none, selective (recompute_sublayers) or full") for line in lines)
    assert any(line.startswith("  k3-64xgb300 (line ") and "recompute: full" in line for line in lines)
    assert "  type: whole number or null" in explain_key("rollout.reserve_tokens")
    assert "  allowed: > 0.0, <= 1.0" in explain_key("rollout.sampling.top_p")
    assert "  default: none" in explain_key("model.path")


def test_a_section_lists_its_keys() -> None:
    lines = explain_key("rollout")
    assert any(line.startswith("  rollout.sampling ") for line in lines)
    assert not any("rollout.sampling.top_p" in line for line in lines), "only its own"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("trainer.lrr", "did you mean trainer.lr?"),
        ("lr", "did you mean trainer.lr?"),
        ("task.params.min_terms", "arguments of the task"),
        ("zzz.qqq", "lists all keys"),
    ],
)
def test_an_unknown_key_gets_a_guess(key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain_key(key)
    assert said in str(caught.value)


def test_defaults_are_those_of_the_models() -> None:
    found = defaults()
    assert found["trainer.lr"] == "1e-05"
    assert "model.path" not in found


def test_the_shipped_schema_is_current() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == recipe_schema(), (
        "miles-k3 recipe schema --out recipes/recipe.schema.json"
    )


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_follow_the_schema_and_name_it(name: str) -> None:
    text = (RECIPES_FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    problems = [error.message for error in Draft7Validator(recipe_schema()).iter_errors(yaml.safe_load(text))]
    assert problems == []


@pytest.mark.parametrize(
    "text",
    [
        "trainer: {lrr: 1.0}",
        "trainer: {lr: fast}",
        "trainer: {recompute: some}",
        "rollout: {group_size: 0}",
        "lora: {rank: 1.5}",
        "nonsense: 1",
    ],
)
def test_the_schema_refuses_what_the_models_refuse(text: str) -> None:
    assert list(Draft7Validator(recipe_schema()).iter_errors(yaml.safe_load(text)))
