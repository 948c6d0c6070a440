"""Stable LatentMoE (spec 2.6): frozen router and experts, factors on the routed and the shared experts.

Shape legend: T tokens, H hidden, Z latent, L MoE layers, K chosen experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miles_k3.k3.ops.latent_moe import route
from miles_k3.k3.params import mlp_prefix, moe_prefix
from miles_k3.trainer.lora import ExpertLora, Factory
from miles_k3.trainer.model.experts import Factors, Rows, collect, expert_rows, spread, spread_weights
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.mlp import Mlp
from miles_k3.trainer.model.stream import Stream


class LatentMoe(nn.Module):
    """[T, H] -> [T, H]: routed experts in the latent width, plus the shared experts."""

    def __init__(self, frozen: FrozenWeights, factory: Factory, layer: int):
        super().__init__()
        p, self.k3 = moe_prefix(layer), frozen.k3
        self.index = self.k3.moe_layers.index(layer)
        self.gate = frozen.parameter(p + "gate.weight")
        self.bias = frozen.parameter(p + "gate.e_score_correction_bias")
        self.down_proj, self.up_proj = (frozen.linear(f"{p}routed_expert_{n}_proj") for n in ("down", "up"))
        self.norm = frozen.norm(p + "routed_expert_norm") if self.k3.latent_moe_use_norm else nn.Identity()
        self.experts = frozen.base.experts[layer]
        self.experts_lora = ExpertLora(factory, p + "experts.")
        self.shared_experts = Mlp(frozen, factory, mlp_prefix(self.k3, layer))

    def forward(self, x_TH: Tensor, stream: Stream) -> Tensor:
        k3 = self.k3
        forced_TK = None if stream.routed_TLK is None else stream.routed_TLK[:, self.index]
        weights_TK, experts_TK = route(
            x_TH, self.gate, self.bias, top_k=k3.num_experts_per_token, renormalize=k3.moe_renormalize,
            scaling=k3.routed_scaling_factor, forced_TK=forced_TK,
        )  # fmt: skip
        c_TZ = self._routed(self.down_proj(x_TH), weights_TK, Rows.of(experts_TK, k3.num_experts))
        return self.up_proj(self.norm(c_TZ)) + self.shared_experts(x_TH)

    def _routed(self, z_TZ: Tensor, weights_TK: Tensor, rows: Rows) -> Tensor:
        """The weighted sum of each token's experts, [T, Z]: router weight after the down projection, sum in fp32."""
        lora = self.experts_lora
        factors = None
        if lora.switch.on:
            low1_MR, low3_MR = spread(z_TZ @ torch.cat([lora.a1, lora.a3]).t() * lora.scaling, rows).chunk(2, dim=-1)
            factors = Factors(low1_MR, low3_MR, lora.b1, lora.b3, lora.a2, lora.b2)
        weight_M = spread_weights(weights_TK, rows)
        y_MZ = expert_rows(
            spread(z_TZ, rows), weight_M, rows.ends_E, self.experts, (self.k3.situ_beta, self.k3.situ_linear_beta),
            lora.scaling, factors,
        )  # fmt: skip
        return collect(y_MZ, rows).to(z_TZ.dtype)
