"""Widths of K3's LoRA targets. SGLang's guess has experts as wide as the model; K3's live in a latent space."""

from __future__ import annotations

from typing import Any


def module_dims(text: Any, module: str, layer: int) -> tuple[int, int]:
    """(inputs, outputs) of a module as SGLang names it, over all tensor-parallel ranks.

    `text` is the model's text_config. Raises ValueError for a module that K3 runs without asking its LoRA wrapper.
    """
    hidden, latent, expert = text.hidden_size, text.routed_expert_hidden_size, text.moe_intermediate_size
    linear = text.linear_attn_config
    is_mla = layer + 1 in linear["full_attn_layers"]  # 1-based in the file
    attention = text.num_attention_heads * text.v_head_dim if is_mla else linear["num_heads"] * linear["head_dim"]
    mlp = text.intermediate_size if layer < text.first_k_dense_replace else expert * text.num_shared_experts
    keys = text.qk_nope_head_dim + text.qk_rope_head_dim
    dims = {
        "o_proj": (attention, hidden),
        "fused_qkv_a_proj_with_mqa": (hidden, text.q_lora_rank + text.kv_lora_rank + text.qk_rope_head_dim),
        "q_b_proj": (text.q_lora_rank, text.num_attention_heads * keys),
        "kv_b_proj": (text.kv_lora_rank, text.num_attention_heads * (text.qk_nope_head_dim + text.v_head_dim)),
        "gate_up_proj": (hidden, 2 * mlp),
        "down_proj": (mlp, hidden),
        "gate_up_proj_moe": (latent, 2 * expert),
        "down_proj_moe": (expert, latent),
        "routed_expert_down_proj": (hidden, latent),
        "routed_expert_up_proj": (latent, hidden),
        "embed_tokens": (text.vocab_size, hidden),
        "lm_head": (hidden, text.vocab_size),
    }
    if module not in dims:
        raise ValueError(
            f"K3 has no LoRA on {module!r} in SGLang: it reads raw merged weights there; targets may be {sorted(dims)}"
        )
    return dims[module]


def install() -> None:
    from sglang.srt.models.kimi_k3 import KimiK3ForConditionalGeneration

    def get_hidden_dim(self: Any, module_name: str, layer_idx: int) -> tuple[int, int]:
        return module_dims(self.config.text_config, module_name, layer_idx)

    KimiK3ForConditionalGeneration.get_hidden_dim = get_hidden_dim
