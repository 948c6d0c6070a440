"""Arguments and refusals: what a recipe becomes in SGLang's words, and each reason why it can't."""

from __future__ import annotations

from typing import Any

import pytest

from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.arguments import Machine, server_arguments, sglang_problems
from miles_k3.rollout.sglang.commands import serve_commands

K3 = "assets/kimi-k3"


def made(*overrides: str) -> Recipe:
    usual = [
        "rollout.engine=sglang",
        "rollout.engine_tp=16",
        "rollout.sglang.nodes=1",
        "cluster.nodes=16",
        "cluster.ranks_per_node=4",
    ]
    return load_recipe("k3-64xgb300", [*usual, *overrides]).recipe


def config(**changes: Any) -> K3Config:
    import dataclasses

    return dataclasses.replace(K3Config.from_folder(K3), **changes)


def test_the_shipped_cluster_recipe_can_be_served() -> None:
    assert sglang_problems(made("rollout.sglang.ep=16"), config()) == []


def test_what_a_recipe_says_is_what_sglang_is_told() -> None:
    recipe = made("rollout.sglang.ep=4", "algorithm.routing_replay=true", "rollout.sglang.memory_fraction=0.4")
    told = server_arguments(recipe, config(), Machine(first_gpu=2))
    assert (told["tp_size"], told["ep_size"], told["base_gpu_id"]) == (16, 4, 2)
    assert told["max_total_tokens"] == recipe.rollout.num_pages * recipe.rollout.page_size
    assert told["max_mamba_cache_size"] == 5 * recipe.rollout.max_running
    assert (told["max_lora_rank"], told["max_loras_per_batch"], told["experts_shared_outer_loras"]) == (32, 3, True)
    assert told["moe_runner_backend"] == "marlin"
    assert told["attention_backend"] == "triton", "on Hopper"
    assert told["enable_return_routed_experts"]
    assert told["enable_memory_saver"]
    assert told["mem_fraction_static"] == 0.4
    assert "attention_backend" not in server_arguments(recipe, config(), Machine(hopper=False))


def test_off_means_off() -> None:
    told = server_arguments(made("rollout.prefix_cache=off", "rollout.sglang.cuda_graphs=false"), config(), Machine())
    assert told["disable_radix_cache"]
    assert told["disable_cuda_graph"]
    assert "mamba_radix_cache_strategy" not in told
    assert "enable_return_routed_experts" not in told


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        ([], {"hidden_size": 7000}, "hidden_size is 7000.*multiples of 1024"),
        ([], {"attn_res_block_size": 4}, r"keeps \d+ residual snapshots.*takes 15"),
        ([], {"kda_head_dim": 64}, "KDA head_dim is 64"),
        ([], {"kv_lora_rank": 256}, "caches 320 numbers a token"),
        ([], {"routed_expert_hidden_size": 3456}, "routed_expert_hidden_size is 3456"),
        (["model.dtype=float32"], {}, "model.dtype is float32"),
        (["model.weights=random"], {}, "model.weights is random.*SGLang reads model.path"),
        ([], {"mla_latent_norm_eps": 1e-6}, "mla_latent_norm_eps is 1e-06"),
        (["rollout.sglang.ep=32"], {}, r"rollout.sglang.ep 32 doesn't divide rollout.engine_tp 16"),
        (["rollout.engine_tp=64", "rollout.sglang.ep=64"], {"kda_num_heads": 64},
         "doesn't divide the model's 96 attention heads"),
        (["rollout.engine_tp=32", "rollout.sglang.ep=1"], {"num_attention_heads": 32, "kda_num_heads": 32},
         "96 columns of an expert"),
        (["rollout.max_lora_rank=128"], {}, "max_lora_rank is 128.*up to 64"),
        (["rollout.sampling.top_p=0.9"], {}, "log-probabilities leave both out"),
        (["rollout.sglang.draft=somewhere"], {}, "can't draft for this model: .*/somewhere/config.json does not exist"),
        (["rollout.sglang.dcp=4"], {}, "dcp is 4 with attention auto"),
        (["rollout.sglang.unified_memory=true", "rollout.sglang.dcp=4", "rollout.sglang.attention=cutedsl_mla"], {},
         "unified_memory is true beside rollout.sglang.dcp"),
        (["rollout.sglang.unified_memory=true", "rollout.sglang.attention=flashmla"], {},
         "unified_memory is true with"),
        (["rollout.cache_pool=split"], {}, "rollout.cache_pool is split, which only the embedded"),
        (["rollout.prefix_cache=paged"], {}, "prefix_cache is paged"),
        (["rollout.track_interval=64"], {}, "rollout.track_interval is 64, which only the embedded"),
        (["rollout.max_running=16"], {}, "hold 65536 tokens, 16 whole requests need 98304"),
    ],
)  # fmt: skip
def test_refusals(overrides: list[str], changes: dict[str, Any], message: str) -> None:
    usual = [] if any("sglang.ep=" in o for o in overrides) else ["rollout.sglang.ep=16"]
    found = sglang_problems(made(*usual, *overrides), config(**changes))
    assert len(found) == 1, found
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found[0])


def test_one_engine_over_several_nodes_has_a_command_for_each() -> None:
    lines = serve_commands(made("rollout.sglang.ep=16", "rollout.sglang.nodes=4"), config())
    assert [line for line in lines if line.startswith("#")] == [f"# engine, node {i} of 4" for i in range(4)]
    assert all("--nnodes 4" in line and "--dist-init-addr NODE_0:20000" in line for line in lines[1::2])
    assert ["--node-rank 3" in line for line in lines[1::2]] == [False, False, False, True]


def test_prefill_and_decode_workers() -> None:
    parts = "rollout.sglang.disaggregation"
    recipe = made(
        "rollout.sglang.ep=16", f"{parts}.transfer=nixl", f"{parts}.prefill_workers=2", f"{parts}.prefill_pp=8",
        "rollout.sglang.dcp=4", "rollout.sglang.attention=cutedsl_mla",
    )  # fmt: skip
    lines = serve_commands(recipe, config())
    prefill = [line for line in lines if "--disaggregation-mode prefill" in line]
    decode = [line for line in lines if "--disaggregation-mode decode" in line]
    assert (len(prefill), len(decode)) == (2, 1)
    assert all("--pp-size 8" in line and "--dcp-size" not in line for line in prefill)
    assert "--dcp-size 4" in decode[0]
    assert "--decode-attention-backend cutedsl_mla" in decode[0]
    assert lines[-1].count("--prefill http") == 2
    assert lines[-1].count("--decode http") == 1
