from dataclasses import replace

import pytest

from miles_k3.adapters.layout import (
    adapter_layout,
    by_module,
    gate_up_pairs,
    join_expert,
    layout_bytes,
    parameter_count,
    split_expert,
    split_name,
)
from miles_k3.errors import AdapterError
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import text_params
from miles_k3.types import AdapterConfig


def published() -> K3Config:
    return K3Config(
        vocab_size=163840, hidden_size=7168, num_hidden_layers=93, num_attention_heads=96, intermediate_size=33792,
        first_k_dense_replace=1, rms_norm_eps=1e-5, mla_latent_norm_eps=1e-5, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, attn_res_block_size=12, num_experts=896,
        num_experts_per_token=16, num_shared_experts=2, moe_intermediate_size=3072, routed_expert_hidden_size=3584,
        latent_moe_use_norm=True, moe_renormalize=True, routed_scaling_factor=1.0, situ_beta=4.0, situ_linear_beta=25.0,
        kda_num_heads=96, kda_head_dim=128, short_conv_kernel_size=4, gate_lower_bound=-5.0,
        mla_layers=(*range(3, 92, 4), 92), max_position_embeddings=1 << 20, bos_token_id=163584, eos_token_id=163586,
        pad_token_id=163839,
    )  # fmt: skip


def spec_names_and_shapes(c: K3Config, r: int) -> dict[str, tuple[int, ...]]:
    """Spec 5.1 and 5.2 restated without the parameter table."""
    out: dict[str, tuple[int, ...]] = {}

    def put(module: str, width_in: int, width_out: int) -> None:
        out[module + ".lora_A.weight"], out[module + ".lora_B.weight"] = (r, width_in), (width_out, r)

    for n in range(c.num_hidden_layers):
        p = f"language_model.model.layers.{n}."
        if n in c.mla_layers:
            put(p + "self_attn.q_a_proj", c.hidden_size, c.q_lora_rank)
            put(p + "self_attn.kv_a_proj_with_mqa", c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
            put(p + "self_attn.o_proj", c.num_attention_heads * c.v_head_dim, c.hidden_size)
        else:
            put(p + "self_attn.o_proj", c.kda_num_heads * c.kda_head_dim, c.hidden_size)
        dense = n < c.first_k_dense_replace
        mlp = p + ("mlp." if dense else "block_sparse_moe.shared_experts.")
        width = c.intermediate_size if dense else c.num_shared_experts * c.moe_intermediate_size
        put(mlp + "gate_proj", c.hidden_size, width)
        put(mlp + "up_proj", c.hidden_size, width)
        put(mlp + "down_proj", width, c.hidden_size)
        if not dense:
            e, inter, latent = c.num_experts, c.moe_intermediate_size, c.routed_expert_hidden_size
            x = p + "block_sparse_moe.experts."
            for w in ("w1", "w3"):
                out[f"{x}{w}.lora_A.weight"], out[f"{x}{w}.lora_B.weight"] = (1, r, latent), (e, inter, r)
            out[x + "w2.lora_A.weight"], out[x + "w2.lora_B.weight"] = (e, r, inter), (1, latent, r)
    return out


def test_names_and_shapes_are_those_of_the_spec(config, adapter):
    for c, a in ((config, adapter), (published(), AdapterConfig(rank=16, alpha=32.0))):
        layout = adapter_layout(c, a)
        assert {name: t.shape for name, t in layout.items()} == spec_names_and_shapes(c, a.rank)
        assert all(name == t.name for name, t in layout.items())
        assert [t.layer for t in layout.values()] == sorted(t.layer for t in layout.values())


def test_every_target_of_the_parameter_table_and_no_other(config, adapter):
    targets = {split_expert(p.module)[0] for p in text_params(config) if p.lora}
    assert {t.module for t in adapter_layout(config, adapter).values()} == targets


def test_size_of_the_published_adapter():
    layout = adapter_layout(published(), AdapterConfig(rank=16, alpha=32.0))
    experts = {name: t for name, t in layout.items() if t.kind == "expert"}
    one_layer = {name: t for name, t in experts.items() if t.layer == 40}
    assert parameter_count(one_layer) == 896 * 3 * 3072 * 16 + 3 * 3584 * 16 == 132_292_608
    assert parameter_count(experts) == 92 * 132_292_608  # 12.2 B
    assert round(layout_bytes(experts) / 1e9, 1) == 24.3


def test_outer_factors_are_shared(config, adapter):
    for a, b in by_module(adapter_layout(config, adapter)).values():
        if a.kind == "dense":
            assert not a.shared
            assert not b.shared
        else:
            outer, inner = (b, a) if a.module.endswith("w2") else (a, b)
            assert (outer.shared, inner.shared) == (True, False)
            assert (outer.shape[0], inner.shape[0]) == (1, config.num_experts)
        assert (a.rank_dim, b.rank_dim) == (-2, -1)
        assert a.shape[a.rank_dim] == b.shape[b.rank_dim] == adapter.rank
        assert a.module == f"language_model.model.layers.{a.layer}.{a.local_module}"


def test_one_gate_up_pair_per_layer(config, adapter):
    pairs = gate_up_pairs(adapter_layout(config, adapter))
    assert len(pairs) == config.num_hidden_layers
    assert all(gate.replace("gate_proj", "up_proj") == up for gate, up in pairs)
    assert all(".block_sparse_moe.gate." not in name for pair in pairs for name in pair)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"rank": -4}, {"alpha": 0.0}, {"alpha": float("nan")}])
def test_impossible_configs_are_refused(config, adapter, wrong):
    with pytest.raises(AdapterError, match="expected"):
        adapter_layout(config, replace(adapter, **wrong))


def test_names_come_apart_and_together():
    module = "language_model.model.layers.3.block_sparse_moe.experts"
    assert split_expert(f"{module}.17.w2") == (f"{module}.w2", 17)
    assert join_expert(f"{module}.w2", 17) == f"{module}.17.w2"
    shared = "language_model.model.layers.3.block_sparse_moe.shared_experts.gate_proj"
    assert split_expert(shared) == (shared, None)
    assert split_name(f"{module}.w2.lora_A.weight") == (f"{module}.w2", "A")
    with pytest.raises(AdapterError, match="not an adapter tensor"):
        split_name(f"{module}.w2.lora_a.weight")
