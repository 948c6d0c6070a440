"""Stable LatentMoE (spec 2.6): frozen router and experts, factors on the routed and the shared experts.

Shape legend: T tokens of this rank between sublayers, H hidden, Z latent, E MoE layers, K chosen experts per token,
M = T * K rows, R rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miles_k3.k3.ops.latent_moe import route
from miles_k3.k3.params import mlp_prefix, moe_prefix
from miles_k3.trainer.lora import ExpertLora, Factory
from miles_k3.trainer.model.expert_parallel import ExpertExchange
from miles_k3.trainer.model.experts import Factors, Rows, aligned_rank, combine, expert_rows, spread, spread_weights
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.mlp import Mlp
from miles_k3.trainer.model.stream import Stream


class LatentMoe(nn.Module):
    """[T, H] -> [T, H]: routed experts in the latent width, plus the shared experts."""

    def __init__(self, frozen: FrozenWeights, factory: Factory, layer: int):
        super().__init__()
        p, self.k3, self.ranks = moe_prefix(layer), frozen.k3, frozen.ranks
        self.index = self.k3.moe_layers.index(layer)
        self.gate = frozen.parameter(p + "gate.weight")
        self.bias = frozen.parameter(p + "gate.e_score_correction_bias")
        self.down_proj, self.up_proj = (frozen.linear(f"{p}routed_expert_{n}_proj") for n in ("down", "up"))
        self.norm = frozen.norm(p + "routed_expert_norm") if self.k3.latent_moe_use_norm else nn.Identity()
        self.experts = frozen.experts(layer)
        self.experts_lora = ExpertLora(factory, p + "experts.")
        self.shared_experts = Mlp(frozen, factory, mlp_prefix(self.k3, layer))

    def forward(self, x_TH: Tensor, stream: Stream) -> Tensor:
        k3 = self.k3
        forced_TK = None if stream.routed_LEK is None else stream.routed_LEK[:, self.index]
        weights_TK, experts_TK = route(
            x_TH, self.gate, self.bias, top_k=k3.num_experts_per_token, renormalize=k3.moe_renormalize,
            scaling=k3.routed_scaling_factor, forced_TK=forced_TK,
        )  # fmt: skip
        c_TZ = self._routed(self.down_proj(x_TH), weights_TK, Rows.of(experts_TK, k3.num_experts))
        return self.up_proj(self.norm(c_TZ)) + self.shared_experts(x_TH)

    def _routed(self, z_TZ: Tensor, weights_TK: Tensor, rows: Rows) -> Tensor:
        """The weighted sum of each token's experts, [T, Z]. What goes to the experts is the latent and, beside it, its
        products with the factors that they share."""
        lora, width = self.experts_lora, z_TZ.shape[-1]
        rank = aligned_rank(lora.rank, z_TZ.dtype) if lora.switch.on else 0
        if rank:
            outer = torch.cat([F.pad(a, (0, 0, 0, rank - lora.rank)) for a in (lora.a1, lora.a3)])
            z_TZ = torch.cat([z_TZ, z_TZ @ outer.t() * lora.scaling], dim=-1)
        exchange = ExpertExchange.of(rows, self.ranks.ep)
        x_MD, weight_M = exchange.send(spread(z_TZ, rows)), exchange.send(spread_weights(weights_TK, rows))
        x_MZ, low1_MR, low3_MR = x_MD.split([width, rank, rank], dim=-1)
        factors = Factors(low1_MR, low3_MR, lora.b1, lora.b3, lora.a2, lora.b2) if rank else None
        y_MZ = expert_rows(
            x_MZ, weight_M, exchange.ends_E, self.experts, (self.k3.situ_beta, self.k3.situ_linear_beta), lora.scaling,
            factors,
        )  # fmt: skip
        return combine(exchange.give_back(y_MZ), weights_TK, rows)
