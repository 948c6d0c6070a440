"""A KDA layer (spec 2.3) with factors on its output projection.

Shape legend: T tokens, H hidden, N heads, K channels of a head, D = N * K.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miles_k3.k3.params import attn_prefix
from miles_k3.trainer.lora import DenseLora, Factory
from miles_k3.trainer.lora_rules import Site
from miles_k3.trainer.model.elementwise import gated_norm, kda_gate
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.kda_core import delta_rule, short_conv_silu
from miles_k3.trainer.model.stream import Stream


class KdaAttention(nn.Module):
    """[T, H] -> [T, H] over a packed stream; no token sees another sequence."""

    def __init__(self, frozen: FrozenWeights, factory: Factory, layer: int):
        super().__init__()
        p, k3 = attn_prefix(layer), frozen.k3
        self.head_dim, self.lower_bound, self.eps = k3.kda_head_dim, k3.gate_lower_bound, k3.rms_norm_eps
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (frozen.linear(f"{p}{n}_proj") for n in "qkvg")
        self.f_a_proj, self.f_b_proj, self.b_proj = (frozen.linear(f"{p}{n}_proj") for n in ("f_a", "f_b", "b"))
        self.q_conv, self.k_conv, self.v_conv = (frozen.parameter(f"{p}{n}_conv1d.weight") for n in "qkv")
        self.a_log, self.dt_bias = frozen.parameter(p + "A_log"), frozen.parameter(p + "dt_bias")
        self.o_norm = frozen.parameter(p + "o_norm.weight")
        self.o_proj = frozen.linear(p + "o_proj")
        self.o_lora = DenseLora(factory, p + "o_proj", Site.O_PROJ)

    def forward(self, x_TH: Tensor, stream: Stream) -> Tensor:
        q, k, v = (
            self._heads(short_conv_silu(proj(x_TH), conv, stream.kda_maps))
            for proj, conv in ((self.q_proj, self.q_conv), (self.k_proj, self.k_conv), (self.v_proj, self.v_conv))
        )
        f_TNK = self._heads(self.f_b_proj(self.f_a_proj(x_TH)))
        g_TNK = kda_gate(f_TNK, self.a_log, self.dt_bias.unflatten(0, (-1, self.head_dim)), self.lower_bound)
        beta_TN = torch.sigmoid(self.b_proj(x_TH).float())
        o_TNK = delta_rule(q, k, v, g_TNK, beta_TN, stream.kda_maps)
        o_TD = gated_norm(o_TNK, self.o_norm, self._heads(self.g_proj(x_TH)), self.eps).flatten(1)
        return self.o_lora(o_TD, self.o_proj(o_TD))

    def _heads(self, x_TD: Tensor) -> Tensor:
        return x_TD.unflatten(-1, (-1, self.head_dim))
