"""A gated MLA layer without rotation (spec 2.4), with factors on q_a, kv_a and the output projection.

Shape legend: T tokens of this rank, S tokens whose keys it needs (T without context parallelism), H hidden, N heads of
this rank, Q = P + X query channels (P own, X shared extra), V value channels, A and C latents.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miles_k3.k3.ops.mla import mla_expanded
from miles_k3.k3.params import attn_prefix
from miles_k3.trainer.lora import DenseLora, Factory
from miles_k3.trainer.lora_rules import Site
from miles_k3.trainer.model.collectives import enter, leave, replicated, shared
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.mla_te import TeAttention
from miles_k3.trainer.model.stream import Stream


class MlaAttention(nn.Module):
    """[T / sp, H] -> [T / sp, H] over a packed stream; causal within each sequence."""

    def __init__(self, frozen: FrozenWeights, factory: Factory, layer: int):
        super().__init__()
        p, k3 = attn_prefix(layer), frozen.k3
        self.ranks = frozen.ranks
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
        te = frozen.mla_attention == "transformer_engine"
        self.te = TeAttention(frozen.config, k3, layer, frozen.base.device) if te else None

    def forward(self, x_TH: Tensor, stream: Stream) -> Tensor:
        x_TH = enter(x_TH, self.ranks)
        q_TNQ, latents_TD = self._latents(replicated(x_TH, self.ranks))
        if self.te is not None:
            o_TNV = self.te(q_TNQ, *self._expand(latents_TD), stream.layout)
        elif stream.mla is None:
            o_TNV = mla_expanded(q_TNQ, *self._expand(latents_TD), stream.packed)
        else:
            o_TNV = stream.mla.attend(q_TNQ, *self._expand(stream.mla.gather(latents_TD)))
        o_TD = o_TNV.flatten(1) * torch.sigmoid(self.g_proj(x_TH))
        return leave(self.o_lora(o_TD, self.o_proj(o_TD)), self.ranks)

    def _latents(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, N, Q], and what keys and values are made of: [normalised latent | extra key], [T, C + X]."""
        q_TA = shared(self.q_a_lora(x_TH, self.q_a_proj(x_TH)), self.ranks)
        q_TNQ = self.q_b_proj(self.q_a_norm(q_TA)).unflatten(-1, (-1, self.query_dim))
        latents = shared(self.kv_a_lora(x_TH, self.kv_a_proj(x_TH)), self.ranks)
        c_TC, extra_TX = latents.split([self.latent_dim, self.extra_dim], dim=-1)
        return q_TNQ, torch.cat([self.kv_a_norm(c_TC), extra_TX], dim=-1)

    def _expand(self, latents_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, N, Q] and values [S, N, V] of this rank's heads."""
        c_SC, extra_SX = latents_SD.split([self.latent_dim, self.extra_dim], dim=-1)
        kv = self.kv_b_proj(c_SC).unflatten(-1, (-1, self.key_dim + self.value_dim))
        k_SNP, v_SNV = kv.split([self.key_dim, self.value_dim], dim=-1)
        return torch.cat([k_SNP, extra_SX.unsqueeze(1).expand(-1, k_SNP.shape[1], -1)], dim=-1), v_SNV
