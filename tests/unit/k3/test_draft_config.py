"""The draft's config.json and parameter table against what is published."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.drafts import RADIXARK, small_config
from helpers.tiny import tiny_config

from miles_k3.errors import CheckpointError
from miles_k3.k3.config import K3Config
from miles_k3.k3.draft_config import DraftConfig, Yarn
from miles_k3.k3.draft_params import draft_params

KIMI_K3 = Path(__file__).parents[3] / "assets" / "kimi-k3"


def changed(**changes: Any) -> dict[str, Any]:
    raw = {**copy.deepcopy(RADIXARK), **changes}
    return {key: value for key, value in raw.items() if value is not None}


def test_the_published_draft_has_the_published_number_of_parameters() -> None:
    config = DraftConfig.from_json(RADIXARK)
    assert sum(p.num_params for p in draft_params(config)) == 2_249_289_601
    assert config.target_layer_ids == (7, 23, 51, 67, 83)
    assert config.yarn == Yarn(factor=16.0, original_max_position_embeddings=65536)
    config.refuse_target(K3Config.from_folder(KIMI_K3), "draft")


def test_json_comes_back_as_it_was_with_unknown_fields() -> None:
    raw = changed(something_new={"a": 1})
    assert DraftConfig.from_json(raw).to_json() == raw


@pytest.mark.parametrize("yarn", [None, Yarn(factor=4.0, original_max_position_embeddings=128, attention_factor=1.5)])
def test_a_new_config_round_trips(yarn: Yarn | None) -> None:
    config = small_config(yarn=yarn, rope_theta=500.0)
    assert DraftConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "raw",
    [
        changed(dflash_config=None, mask_token_id=163824, target_layer_ids=[7, 23, 51, 67, 83]),
        changed(dspark_config=RADIXARK["dflash_config"], dflash_config=None),
        changed(dspark_block_size=7, block_size=3),
        changed(enable_confidence_head=None, use_confidence_head=True),
        changed(rope_parameters=None, rope_theta=10000.0,
                rope_scaling={"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}),
    ],
)  # fmt: skip
def test_every_spelling_is_read(raw: dict[str, Any]) -> None:
    found = DraftConfig.from_json(raw)
    assert found == DraftConfig.from_json(RADIXARK)
    assert DraftConfig.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": None}, "block_size is missing"),
        ({"block_size": "7"}, "whole number"),
        ({"model_type": "k3_dspark"}, "not drafts with MLA layers"),
        ({"markov_head_type": "rnn"}, 'only "vanilla" is supported'),
        ({"sample_from_anchor": False}, "sample_from_anchor is false"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_attention"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [4, 4]}}, "different layers"),
        ({"dflash_config": {"mask_token_id": 163840, "target_layer_ids": [4]}}, "beyond the vocabulary"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, '"llama3" is not supported'),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale of yarn"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor of yarn is missing"),
        ({"num_key_value_heads": 15}, "no multiple of 15"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as error:
        DraftConfig.from_json(changed(**changes), "there/config.json")
    assert all(line.startswith("there/config.json: ") for line in str(error.value).splitlines())


def test_how_many_layers_the_target_has_is_said_where_it_is_known() -> None:
    assert DraftConfig.from_json(RADIXARK).num_target_layers == 93
    assert "num_target_layers" not in small_config().to_json()
    new = small_config(num_target_layers=8)
    assert new.to_json()["num_target_layers"] == 8
    assert DraftConfig.from_json(new.to_json()) == new
    with pytest.raises(CheckpointError, match="num_target_layers is 0; expected a whole number from 1"):
        DraftConfig.from_json({**RADIXARK, "num_target_layers": 0})


def test_another_targets_draft_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"hidden_size is 96.*\n.*target_layer_ids has 9"):
        small_config(hidden_size=96, target_layer_ids=(1, 9)).refuse_target(tiny_config(hidden_size=128), "draft")


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        DraftConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="holds a list"):
        DraftConfig.from_folder(tmp_path)
