"""Stable LatentMoE (spec 2.6): frozen router and experts, factors on the routed and the shared experts.

Shape legend: T tokens, H hidden, Z latent, L MoE layers, K chosen experts per token.
"""

from __future__ import annotations

from torch import Tensor, nn

from miles_k3.k3.ops.latent_moe import latent_experts, route
from miles_k3.k3.ops.lora import ExpertLoraTerm
from miles_k3.k3.params import mlp_prefix, moe_prefix
from miles_k3.trainer.lora import ExpertLora, Factory
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
        z_TZ = self.down_proj(x_TH)
        w13, w2 = self.experts.dense(x_TH.dtype)
        c_TZ = latent_experts(
            z_TZ, weights_TK, experts_TK, w13, w2, situ_beta=k3.situ_beta, situ_linear_beta=k3.situ_linear_beta,
            lora=self._terms(),
        )  # fmt: skip
        return self.up_proj(self.norm(c_TZ)) + self.shared_experts(x_TH)

    def _terms(self) -> tuple[ExpertLoraTerm, ...]:
        lora = self.experts_lora
        if not lora.switch.on:
            return ()
        return (ExpertLoraTerm(**dict(lora.named_parameters()), scaling=lora.scaling),)
