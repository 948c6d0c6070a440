"""A K3 of spec 7.1's "tiny-A": every feature, every dimension distinct where it can be, weights that hide no formula.

Import as `from helpers.tiny import tiny_config, tiny_weights, ...`; pytest puts `tests/` on the path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from miles_k3.adapters.layout import adapter_layout, gate_up_pairs
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import LM_HEAD, Param, text_params
from miles_k3.k3.safetensors_io import write_checkpoint
from miles_k3.k3.weights import ResidentBase, build_base
from miles_k3.types import AdapterConfig

_DIMS: Mapping[str, Any] = {
    "vocab_size": 256, "hidden_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 160,
    "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "mla_latent_norm_eps": 1e-5, "q_lora_rank": 40,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "attn_res_block_size": 3,
    "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 2, "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64, "latent_moe_use_norm": True, "moe_renormalize": True,
    "routed_scaling_factor": 1.0, "situ_beta": 4.0, "situ_linear_beta": 25.0, "kda_num_heads": 4, "kda_head_dim": 16,
    "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "mla_layers": (3, 6, 7), "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_RAW = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "text_config": {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]},
}

# Standard deviation of a weight [out, in], as a multiple of in**-0.5; anything not named here has 1. Chosen so that
# gates reach 4..8 and up projections 25..50 (SiTU saturates), attention is peaked, and every sublayer adds about as
# much to the residual as the embedding did.
_GAINS: Mapping[str, float] = {
    "mlp.gate_proj": 4.0, "mlp.up_proj": 12.0, "mlp.down_proj": 0.1,
    "shared_experts.gate_proj": 4.0, "shared_experts.up_proj": 12.0, "shared_experts.down_proj": 0.1,
    "self_attn.q_b_proj": 1.6, "self_attn.kv_b_proj": 1.6, "self_attn.o_proj": 3.0, "self_attn.g_proj": 1.5,
    "block_sparse_moe.gate": 1.5, "routed_expert_up_proj": 1.0, "lm_head": 2.0,
}  # fmt: skip
_EXPERT_EXPONENTS = {"w1": (-3, -2), "w2": (-5, -4), "w3": (-1, 0)}  # of the MXFP4 group scales, drawn per group


def tiny_config(**changes: Any) -> K3Config:
    """Spec 7.1 tiny-A: 8 layers, MLA at 3, 6, 7 (0-based), bank writes at 0, 3, 6, last block ragged."""
    return K3Config(**{**_DIMS, "raw": _RAW, **changes})


def draw_seed(seed: int, name: str) -> int:
    """Torch's CPU generator reads the low 32 bits only, so the seed is mixed into them."""
    return crc32(f"{seed}".encode(), crc32(name.encode())) if seed else crc32(name.encode())


def tiny_weights(config: K3Config, seed: int = 0) -> dict[str, Tensor]:
    """Every text tensor in checkpoint form: BF16, F32, and U8 for packed experts; A_log padded with zeros.

    A tensor depends on `seed`, its name and its shape only, so models that differ in other parts share it.
    """
    return {p.name: _draw(p, config, seed) for p in text_params(config)}


# Where a bound is one of rounding the model must not amplify it: spec 7.1's weights with every sublayer brought to the
# size of what it is added to, no activation saturated, soft distributions, and states that last. KDA's decays are
# factored inside a chunk, so rounding grows with them: context parallelism, which cuts chunks elsewhere, moves a
# gradient by 4e-6 to 5e-6 with these, and by 8e-6 to 10e-6 with decays as drawn and logits twice as large.
_MILD = {
    "res_proj.weight": 0.1, "o_proj.weight": 0.2, "gate_proj.weight": 0.25, "up_proj.weight": 0.1,
    "down_proj.weight": 2.0, "q_b_proj.weight": 0.6, "lm_head.weight": 0.25, "dt_bias": 5.0,
}  # fmt: skip


def mild_weights(config: K3Config, seed: int = 0) -> dict[str, Tensor]:
    """`tiny_weights` scaled as `_MILD` says."""
    found = tiny_weights(config, seed)
    return {n: next(((t * f).to(t.dtype) for end, f in _MILD.items() if n.endswith(end)), t) for n, t in found.items()}


def _draw(p: Param, config: K3Config, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw_seed(seed, p.name))
    leaf = p.name.rpartition(".")[2]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if leaf == "weight_packed":
        return torch.randint(0, 256, p.shape, generator=generator, dtype=torch.uint8)
    if leaf == "weight_scale":
        exponents = torch.tensor(_EXPERT_EXPONENTS[p.module.rpartition(".")[2]], dtype=torch.uint8)
        return exponents[torch.randint(0, 2, p.shape, generator=generator)] + 127
    if leaf == "A_log":
        heads = torch.rand(config.kda_num_heads, generator=generator) * 1.5
        return torch.cat([heads, torch.zeros(p.shape[0] - len(heads))])
    if leaf == "dt_bias":
        return normal(*p.shape) - 1.0
    if leaf == "e_score_correction_bias":
        return 0.3 * normal(*p.shape)
    if p.module.endswith("conv1d"):
        return 0.5 * normal(*p.shape)
    if p.module.endswith("o_norm"):
        return 1.0 + 0.3 * normal(*p.shape)
    return _bf16_weight(p, normal(*p.shape)).to(torch.bfloat16)


def _bf16_weight(p: Param, normal: Tensor) -> Tensor:
    if len(p.shape) == 1:
        return 1.0 + 0.3 * normal  # norms
    if p.module.endswith("embed_tokens"):
        return normal
    if p.module.endswith("_res_proj"):
        return 0.5 * normal
    name = LM_HEAD if p.name == LM_HEAD else p.module
    gains = [gain for suffix, gain in _GAINS.items() if f".{name.removesuffix('.weight')}".endswith("." + suffix)]
    return normal * (gains[0] if gains else 1.0) * p.shape[1] ** -0.5


def tiny_base(config: K3Config, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32,
              base_dtype: str = "bf16", device: str = "cpu") -> ResidentBase:  # fmt: skip
    """The resident base of `weights`, as a loader would build it."""
    return build_base(config, text_params(config), lambda p: weights[p.name], dtype=dtype, device=device,
                      base_dtype=base_dtype)  # fmt: skip


def tiny_adapter(config: K3Config, adapter_config: AdapterConfig, seed: int = 0, scale: float = 0.05,
                 dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:  # fmt: skip
    """A whole adapter by exported names; A and B are both normal * `scale`, exact in BF16 whatever `dtype` is."""
    layout = adapter_layout(config, adapter_config)
    tensors = {}
    for name, tensor in layout.items():
        generator = torch.Generator().manual_seed(draw_seed(seed, name))
        tensors[name] = (torch.randn(tensor.shape, generator=generator) * scale).to(torch.bfloat16).to(dtype)
    if adapter_config.share_gate_up_a:
        for gate, up in gate_up_pairs(layout):
            tensors[up] = tensors[gate].clone()
    return tensors


def write_tiny_checkpoint(folder: str | Path, config: K3Config, weights: Mapping[str, Tensor]) -> None:
    """A Hugging Face folder (weights and config.json, no tokenizer) that `load_base` reads."""
    extra = {"config.json": json.dumps(config.to_json(), indent=1)}
    write_checkpoint(folder, list(text_params(config)), lambda p: weights[p.name], extra_files=extra)
