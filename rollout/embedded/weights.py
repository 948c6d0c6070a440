"""The engine's view of the resident base: transposed views of its matrices, and a few small vectors derived from them.

Shapes: H hidden, D KDA width, W convolution width, N heads, C latent, Z expert latent, F MLP width, E experts.
A name ending in `_t` is a weight [out, in] seen as [in, out]; it shares the base's storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.k3.ops.mla import split_kv_b
from miles_k3.k3.params import LM_HEAD, TEXT, attn_prefix, layer_prefix, mlp_prefix, moe_prefix
from miles_k3.k3.weights import ExpertBank, ResidentBase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KdaWeights:
    """One KDA layer. Derived (fp32, small): `conv_D1W` of q, k and v; `rate_NK` = e^A_log; `rate_dt_NK` = rate * dt."""

    qkv_t: tuple[Tensor, Tensor, Tensor]
    gate_t: Tensor
    f_a_t: Tensor
    f_b_t: Tensor
    beta_t: Tensor
    a_log_N: Tensor
    dt_bias_NK: Tensor
    o_norm_V: Tensor
    out_t: Tensor
    conv_D1W: Tensor
    rate_NK: Tensor
    rate_dt_NK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlaWeights:
    """One MLA layer; `w_k_NPC` and `w_v_NVC` are the two halves of kv_b, per head."""

    q_a_t: Tensor
    q_a_norm: Tensor
    q_b_t: Tensor
    kv_a_t: Tensor
    kv_a_norm_C: Tensor
    kv_b_t: Tensor
    w_k_NPC: Tensor
    w_v_NVC: Tensor
    gate_t: Tensor
    out_t: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlpWeights:
    """A dense MLP or the shared experts: gate and up fused."""

    module: str  # within its layer: "mlp." or "block_sparse_moe.shared_experts."
    gate_up_t: Tensor
    down_t: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoeWeights:
    """Router, latent projections and the experts of one MoE layer."""

    gate_EH: Tensor
    bias_E: Tensor
    down_t: Tensor
    norm_Z: Tensor | None
    up_t: Tensor
    bank: ExpertBank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One decoder layer. The two `*_query_H` (fp32, derived) are AttnRes norm weight times projection."""

    attn_query_H: Tensor
    mlp_query_H: Tensor
    attn_norm_H: Tensor
    mlp_norm_H: Tensor
    kda: KdaWeights | None
    mla: MlaWeights | None
    mlp: MlpWeights
    moe: MoeWeights | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelWeights:
    """The whole text model."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    out_query_H: Tensor
    norm_H: Tensor
    head: Tensor


def model_weights(base: ResidentBase) -> ModelWeights:
    """Views of `base`; nothing of matrix size is copied."""
    return ModelWeights(
        embed=base[TEXT + "embed_tokens.weight"],
        layers=tuple(_layer(base, i) for i in range(base.config.num_hidden_layers)),
        out_query_H=_query(base, TEXT + "output_attn_res"),
        norm_H=base[TEXT + "norm.weight"],
        head=base[LM_HEAD],
    )


def _query(base: ResidentBase, name: str) -> Tensor:
    return base[name + "_norm.weight"].float() * base[name + "_proj.weight"].float().reshape(-1)


def _layer(base: ResidentBase, i: int) -> LayerWeights:
    c, p = base.config, layer_prefix(i)
    mlp = mlp_prefix(c, i)
    return LayerWeights(
        attn_query_H=_query(base, p + "self_attention_res"),
        mlp_query_H=_query(base, p + "mlp_res"),
        attn_norm_H=base[p + "input_layernorm.weight"],
        mlp_norm_H=base[p + "post_attention_layernorm.weight"],
        kda=None if c.is_mla(i) else _kda(base, i),
        mla=_mla(base, i) if c.is_mla(i) else None,
        mlp=MlpWeights(
            module=mlp.removeprefix(p), gate_up_t=base.gate_up[mlp].t(), down_t=base[mlp + "down_proj.weight"].t()
        ),
        moe=_moe(base, i) if c.is_moe(i) else None,
    )


def _kda(base: ResidentBase, i: int) -> KdaWeights:
    c, p = base.config, attn_prefix(i)
    heads = (c.kda_num_heads, c.kda_head_dim)
    # [W, D] in memory, so that a tap of the convolution is one contiguous row.
    conv_WD = torch.cat([base[f"{p}{n}_conv1d.weight"].float().squeeze(1) for n in "qkv"]).t().contiguous()
    rate_NK = base[p + "A_log"].float().exp().unsqueeze(-1).expand(heads).contiguous()
    dt_bias_NK = base[p + "dt_bias"].float().view(heads)
    q_t, k_t, v_t = (base[f"{p}{n}_proj.weight"].t() for n in "qkv")
    return KdaWeights(
        qkv_t=(q_t, k_t, v_t),
        gate_t=base[p + "g_proj.weight"].t(),
        f_a_t=base[p + "f_a_proj.weight"].t(),
        f_b_t=base[p + "f_b_proj.weight"].t(),
        beta_t=base[p + "b_proj.weight"].t(),
        a_log_N=base[p + "A_log"],
        dt_bias_NK=dt_bias_NK,
        o_norm_V=base[p + "o_norm.weight"],
        out_t=base[p + "o_proj.weight"].t(),
        conv_D1W=conv_WD.t().unsqueeze(1),
        rate_NK=rate_NK,
        rate_dt_NK=rate_NK * dt_bias_NK,
    )


def _mla(base: ResidentBase, i: int) -> MlaWeights:
    c, p = base.config, attn_prefix(i)
    kv_b = base[p + "kv_b_proj.weight"]
    w_k, w_v = split_kv_b(kv_b, c.num_attention_heads, c.qk_nope_head_dim)
    return MlaWeights(
        q_a_t=base[p + "q_a_proj.weight"].t(),
        q_a_norm=base[p + "q_a_layernorm.weight"],
        q_b_t=base[p + "q_b_proj.weight"].t(),
        kv_a_t=base[p + "kv_a_proj_with_mqa.weight"].t(),
        kv_a_norm_C=base[p + "kv_a_layernorm.weight"],
        kv_b_t=kv_b.t(),
        w_k_NPC=w_k,
        w_v_NVC=w_v,
        gate_t=base[p + "g_proj.weight"].t(),
        out_t=base[p + "o_proj.weight"].t(),
    )


def _moe(base: ResidentBase, i: int) -> MoeWeights:
    c, p = base.config, moe_prefix(i)
    return MoeWeights(
        gate_EH=base[p + "gate.weight"],
        bias_E=base[p + "gate.e_score_correction_bias"],
        down_t=base[p + "routed_expert_down_proj.weight"].t(),
        norm_Z=base[p + "routed_expert_norm.weight"] if c.latent_moe_use_norm else None,
        up_t=base[p + "routed_expert_up_proj.weight"].t(),
        bank=base.experts[i],
    )
