"""A KDA layer (spec 2.3) with factors on its output projection.

Shape legend: T tokens of this rank in zigzag order, C tokens of its slice of the stream (T without context
parallelism), H hidden, N heads of this rank, K channels of a head, D = N * K.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miles_k3.k3.params import attn_prefix
from miles_k3.trainer.lora import DenseLora, Factory
from miles_k3.trainer.lora_rules import Site
from miles_k3.trainer.model.collectives import enter, leave
from miles_k3.trainer.model.elementwise import gated_norm
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.kda_context import Decay
from miles_k3.trainer.model.kda_core import short_conv_silu
from miles_k3.trainer.model.stream import Stream


class KdaAttention(nn.Module):
    """[T / sp, H] -> [T / sp, H] over a packed stream; no token sees another sequence."""

    def __init__(self, frozen: FrozenWeights, factory: Factory, layer: int):
        super().__init__()
        p, k3 = attn_prefix(layer), frozen.k3
        self.ranks = frozen.ranks
        self.head_dim, self.lower_bound, self.eps = k3.kda_head_dim, k3.gate_lower_bound, k3.rms_norm_eps
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (frozen.linear(f"{p}{n}_proj") for n in "qkvg")
        self.f_a_proj, self.f_b_proj, self.b_proj = (frozen.linear(f"{p}{n}_proj") for n in ("f_a", "f_b", "b"))
        self.q_conv, self.k_conv, self.v_conv = (frozen.parameter(f"{p}{n}_conv1d.weight") for n in "qkv")
        self.a_log, self.dt_bias = frozen.parameter(p + "A_log"), frozen.parameter(p + "dt_bias")
        self.o_norm = frozen.parameter(p + "o_norm.weight")
        self.o_proj = frozen.linear(p + "o_proj")
        self.o_lora = DenseLora(factory, p + "o_proj", Site.O_PROJ)

    def forward(self, x_TH: Tensor, stream: Stream) -> Tensor:
        kda = stream.kda
        wide_CH = kda.take(enter(x_TH, self.ranks))  # the slice, with its convolutions' halo before it
        x_CH = wide_CH[kda.maps.halo :]
        q, k, v = (
            self._heads(short_conv_silu(proj(wide_CH), conv, kda.maps))
            for proj, conv in ((self.q_proj, self.q_conv), (self.k_proj, self.k_conv), (self.v_proj, self.v_conv))
        )
        # f_a is whole on every rank, but nothing in it is trained: its gradient may stay in parts until `enter` sums.
        f_CNK = self._heads(self.f_b_proj(self.f_a_proj(x_CH)))
        beta_CN = torch.sigmoid(self.b_proj(x_CH).float())
        o_CNK = kda.delta_rule(q, k, v, f_CNK, self.decay, beta_CN)
        o_CD = gated_norm(o_CNK, self.o_norm, self._heads(self.g_proj(x_CH)), self.eps).flatten(1)
        return leave(kda.give_back(self.o_lora(o_CD, self.o_proj(o_CD))), self.ranks)

    @property
    def decay(self) -> Decay:
        dt_bias_NK = self.dt_bias.unflatten(0, (-1, self.head_dim))
        return Decay(a_log_N=self.a_log, dt_bias_NK=dt_bias_NK, lower_bound=self.lower_bound)

    def _heads(self, x_TD: Tensor) -> Tensor:
        return x_TD.unflatten(-1, (-1, self.head_dim))
