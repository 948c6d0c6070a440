"""The commands that a recipe is told are ones that SGLang's own parser takes, with the values meant."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest

from miles_k3.k3.config import K3Config
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.commands import serve_commands
from miles_k3.sglang_ladder.drafts import draft_config

CLUSTER = ("rollout.engine=sglang", "rollout.engine_tp=16", "rollout.sglang.ep=16", "rollout.sglang.nodes=1")
PARTS = "rollout.sglang.disaggregation"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("rollout.sglang.nodes=4", "algorithm.routing_replay=true", "rollout.sglang.memory_fraction=0.5"),
        ("rollout.sglang.unified_memory=true", "rollout.prefix_cache=off"),
        ("rollout.sglang.cuda_graphs=false", "rollout.sglang.attention=flashmla"),
        (f"{PARTS}.transfer=nixl", f"{PARTS}.prefill_pp=8", "rollout.sglang.dcp=4",
         "rollout.sglang.attention=tokenspeed_mla"),
    ],
    ids=["plain", "nodes", "unified", "flashmla", "parts"],
)  # fmt: skip
def test_sglang_parses_them(overrides: tuple[str, ...]) -> None:
    from sglang.srt.server_args import ServerArgs

    recipe = load_recipe("k3-64xgb300", [*CLUSTER, *overrides]).recipe
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    lines = [line for line in serve_commands(recipe, K3Config.from_folder(recipe.model.path)) if line[0] != "#"]
    servers = [line for line in lines if "sglang.launch_server" in line]
    assert servers
    for line in servers:
        read = parser.parse_args(shlex.split(line)[3:])
        assert read.tp_size == 16
        assert read.ep_size == 16
        assert read.moe_runner_backend == "marlin"
        assert set(read.lora_target_modules) >= {"o_proj", "q_a_proj", "down_proj"}
        assert read.experts_shared_outer_loras is True
        assert read.enable_return_routed_experts == recipe.algorithm.routing_replay
    if any("nixl" in o for o in overrides):
        assert [parser.parse_args(shlex.split(line)[3:]).disaggregation_mode for line in servers] == [
            "prefill",
            "decode",
        ]


def test_sglang_parses_a_draft(tmp_path: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    config = K3Config.from_folder(load_recipe("k3-64xgb300").recipe.model.path)
    (tmp_path / "config.json").write_text(json.dumps(draft_config(config).to_json()))
    recipe = load_recipe("k3-64xgb300", [*CLUSTER, f"rollout.sglang.draft={tmp_path}"]).recipe
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    read = parser.parse_args(shlex.split(serve_commands(recipe, config)[1])[3:])
    assert read.speculative_algorithm == "DSPARK"
    assert (read.speculative_draft_model_path, read.speculative_dspark_block_size) == (str(tmp_path), 7)
    rollout = recipe.rollout
    assert read.max_total_tokens == rollout.num_pages * rollout.page_size + 2 * 8 * rollout.max_running
