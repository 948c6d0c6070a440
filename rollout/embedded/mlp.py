"""The MLPs: dense, shared experts, and the latent mixture of experts.

Shapes: T tokens, H hidden, F MLP width, Z latent, K chosen experts.
"""

from __future__ import annotations

from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.ops.decode import rms_norm, situ_
from miles_k3.k3.ops.latent_moe import latent_experts, route
from miles_k3.k3.ops.padded_experts import PaddedDispatch, padded_experts
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.weights import MlpWeights, MoeWeights


class MlpLayer:
    """The dense MLP of a layer, or its shared experts."""

    def __init__(self, config: K3Config, weights: MlpWeights, layer: int) -> None:
        self.w, self.layer = weights, layer
        self.betas = (config.situ_beta, config.situ_linear_beta)

    def __call__(self, x_TH: Tensor, adapters: StepAdapters) -> Tensor:
        w = self.w
        h_T2F = adapters.add_gate_up_(x_TH @ w.gate_up_t, x_TH, self.layer, w.module)
        act_TF = situ_(h_T2F, *self.betas)
        return adapters.add_(act_TF @ w.down_t, act_TF, self.layer, w.module + "down_proj")


class MoeLayer:
    """Routed experts in the latent width, without the shared ones."""

    def __init__(self, config: K3Config, weights: MoeWeights, layer: int) -> None:
        self.w, self.layer = weights, layer
        self.betas = {"situ_beta": config.situ_beta, "situ_linear_beta": config.situ_linear_beta}
        self.top_k, self.eps = config.num_experts_per_token, config.rms_norm_eps
        self.routing = {"renormalize": config.moe_renormalize, "scaling": config.routed_scaling_factor}

    def __call__(self, x_TH: Tensor, adapters: StepAdapters) -> tuple[Tensor, Tensor]:
        """(output [T, H], chosen experts int64 [T, K])."""
        w = self.w
        weights_TK, experts_TK = route(x_TH, w.gate_EH, w.bias_E, top_k=self.top_k, **self.routing)
        out_TZ = self._experts(x_TH @ w.down_t, weights_TK, experts_TK, adapters)
        if w.norm_Z is not None:
            out_TZ = rms_norm(out_TZ, w.norm_Z, self.eps)
        return out_TZ @ w.up_t, experts_TK

    def _experts(self, z_TZ: Tensor, weights_TK: Tensor, experts_TK: Tensor, adapters: StepAdapters) -> Tensor:
        """Padded to equal loads on a CPU, where that costs a host read of a host tensor; grouped elsewhere."""
        banks, terms = self.w.bank.dense(z_TZ.dtype), adapters.expert_terms(self.layer)
        if z_TZ.device.type == "cpu":
            dispatch = PaddedDispatch.of(experts_TK, banks[0].shape[0])
            if dispatch is not None:
                return padded_experts(z_TZ, weights_TK, dispatch, *banks, lora=terms, **self.betas)
        return latent_experts(z_TZ, weights_TK, experts_TK, *banks, lora=terms, **self.betas)
