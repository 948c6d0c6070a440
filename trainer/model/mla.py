"""A gated MLA layer without rotation (spec 2.4), with factors on q_a, kv_a and the output projection.

Shape legend: T tokens, H hidden, N heads, Q = P + X query channels (P own, X shared extra), V value channels, C latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miles_k3.k3.ops.mla import mla_expanded
from miles_k3.k3.params import attn_prefix
from miles_k3.trainer.lora import DenseLora, Factory
from miles_k3.trainer.lora_rules import Site
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.stream import Stream


class MlaAttention(nn.Module):
    """[T, H] -> [T, H] over a packed stream; causal within each sequence."""

    def __init__(self, frozen: FrozenWeights, factory: Factory, layer: int):
        super().__init__()
        p, k3 = attn_prefix(layer), frozen.k3
        self.query_dim, self.value_dim = k3.qk_head_dim, k3.v_head_dim
        self.key_dim, self.extra_dim, self.latent_dim = k3.qk_nope_head_dim, k3.qk_rope_head_dim, k3.kv_lora_rank
        self.q_a_proj, self.kv_a_proj = frozen.linear(p + "q_a_proj"), frozen.linear(p + "kv_a_proj_with_mqa")
        self.q_a_lora = DenseLora(factory, p + "q_a_proj", Site.LATENT)
        self.kv_a_lora = DenseLora(factory, p + "kv_a_proj_with_mqa", Site.LATENT)
        self.q_a_norm = frozen.norm(p + "q_a_layernorm", k3.mla_latent_norm_eps)
        self.kv_a_norm = frozen.norm(p + "kv_a_layernorm", k3.mla_latent_norm_eps)
        self.q_b_proj, self.kv_b_proj = frozen.linear(p + "q_b_proj"), frozen.linear(p + "kv_b_proj")
        self.g_proj, self.o_proj = frozen.linear(p + "g_proj"), frozen.linear(p + "o_proj")
        self.o_lora = DenseLora(factory, p + "o_proj", Site.O_PROJ)

    def forward(self, x_TH: Tensor, stream: Stream) -> Tensor:
        q_TA = self.q_a_norm(self.q_a_lora(x_TH, self.q_a_proj(x_TH)))
        q_TNQ = self.q_b_proj(q_TA).unflatten(-1, (-1, self.query_dim))
        c_TC, extra_TX = self.kv_a_lora(x_TH, self.kv_a_proj(x_TH)).split([self.latent_dim, self.extra_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_norm(c_TC)).unflatten(-1, (-1, self.key_dim + self.value_dim))
        k_TNP, v_TNV = kv.split([self.key_dim, self.value_dim], dim=-1)
        k_TNQ = torch.cat([k_TNP, extra_TX.unsqueeze(1).expand(-1, k_TNP.shape[1], -1)], dim=-1)
        o_TD = mla_expanded(q_TNQ, k_TNQ, v_TNV, stream.packed).flatten(1)
        o_TD = o_TD * torch.sigmoid(self.g_proj(x_TH))
        return self.o_lora(o_TD, self.o_proj(o_TD))
