"""A DSpark draft beside adapters: what SGLang is told, what is refused, and the hooks' own arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.drafts import RADIXARK
from helpers.sglang_stand_in import CONFIG, StandIn

from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.arguments import Machine, server_arguments, sglang_problems
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.rollout.sglang.hooks.draft_allowed import refuse_ragged, refuse_supposed
from miles_k3.rollout.sglang.hooks.expect import expect_parameters
from miles_k3.rollout.sglang.hooks.graph_buffers import rows_of
from miles_k3.rollout.sglang.hooks.verify_batch import rows_per_request

CLUSTER = (
    "rollout.engine=sglang", "rollout.engine_tp=16", "rollout.sglang.nodes=1", "rollout.sglang.ep=16",
    "cluster.nodes=16", "cluster.ranks_per_node=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def config() -> K3Config:
    return K3Config.from_folder("assets/kimi-k3")


def made(folder: Path, *overrides: str, **changes: Any) -> Recipe:
    """A recipe with a draft as published, but for `changes` to its config."""
    content = {key: value for key, value in {**RADIXARK, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return load_recipe("k3-64xgb300", [*CLUSTER, f"rollout.sglang.draft={folder}", *overrides]).recipe


def test_the_published_draft_is_told_with_room_for_what_is_verified(config: K3Config, tmp_path: Path) -> None:
    recipe = made(tmp_path)
    assert sglang_problems(recipe, config) == []
    told = server_arguments(recipe, config, Machine())
    assert told["speculative_algorithm"] == "DSPARK"
    assert told["speculative_draft_model_path"] == str(tmp_path)
    assert told["speculative_dspark_block_size"] == 7
    plain = server_arguments(recipe.model_copy(update={"rollout": recipe.rollout.model_copy(
        update={"sglang": recipe.rollout.sglang.model_copy(update={"draft": None})}
    )}), config, Machine())  # fmt: skip
    assert told["max_total_tokens"] - plain["max_total_tokens"] == 2 * 8 * recipe.rollout.max_running
    assert not any("speculative" in key for key in plain)


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        ((), {"hidden_size": 7000}, "can't draft for this model: .*hidden_size is 7000, the target's is 7168"),
        ((), {"num_target_layers": None}, 'takes the draft\'s own 5 .* add "num_target_layers": 93'),
        (("algorithm.routing_replay=true",), {}, "beside algorithm.routing_replay"),
        (("rollout.sglang.disaggregation.transfer=nixl",), {}, "beside rollout.sglang.disaggregation"),
        (("rollout.sglang.dcp=4", "rollout.sglang.attention=cutedsl_mla"), {}, "beside rollout.sglang.dcp"),
        (("rollout.sglang.unified_memory=true",), {}, "unified_memory is true beside rollout.sglang.draft"),
    ],
)
def test_refusals(
    config: K3Config, tmp_path: Path, overrides: tuple[str, ...], changes: dict[str, Any], message: str
) -> None:
    (found,) = sglang_problems(made(tmp_path, *overrides, **changes), config)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found)


def test_how_much_a_verify_yields_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = StandIn()
    engine = SglangEngine(backend, CONFIG, tokenizer=None, adapter_config=None, max_lora_rank=4, max_sequence_tokens=64)
    assert "tokens_per_verify" not in engine.stats(), "where nothing is drafted"
    monkeypatch.setattr(backend, "state", lambda: {"avg_spec_accept_length": 3.5})
    assert engine.stats()["tokens_per_verify"] == 3.5


def drafted(width: int, layout: object = None) -> SimpleNamespace:
    return SimpleNamespace(draft_token_num=width, ragged_verify_layout=layout)


def test_each_request_verifies_as_many() -> None:
    assert rows_per_request(24, 3, drafted(8)) == 8
    for rows, what in ((23, drafted(8)), (21, drafted(8)), (24, drafted(8, "ragged"))):
        with pytest.raises(RuntimeError, match=rf"verifies {rows} tokens of 3 requests .* SGLANG_RAGGED_VERIFY_MODE"):
            rows_per_request(rows, 3, what)


def test_other_verify_modes_are_refused() -> None:
    refuse_ragged("static")
    with pytest.raises(ValueError, match="SGLANG_RAGGED_VERIFY_MODE is compact"):
        refuse_ragged("compact")


def test_a_supposed_acceptance_is_refused() -> None:
    refuse_supposed(-1.0)
    with pytest.raises(ValueError, match=r"SGLANG_SIMULATE_ACC_LEN is 1: .* without being judged; unset it"):
        refuse_supposed(1.0)


def test_rows_of_a_captured_request() -> None:
    options = SimpleNamespace(speculative_algorithm="DSPARK", speculative_num_draft_tokens=8)
    assert rows_of(options) == 8
    options.speculative_algorithm = None
    assert rows_of(options) == 1


def test_another_signature_is_refused() -> None:
    def run(self: object, batch: object) -> None: ...

    expect_parameters(run, "self", "batch")
    with pytest.raises(RuntimeError, match=r"run takes \(self, batch\), the hook .* written for \(self, batch, rest\)"):
        expect_parameters(run, "self", "batch", "rest")
