"""The MLPs on kernels: shared experts, latent projection, router and LoRA's A in one launch, experts from packed codes.

Shapes: T tokens, H hidden, F MLP width, Z latent, E experts, K chosen experts, S adapters, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.kernels.dense_lora import low_products, situ_with_lora
from miles_k3.k3.kernels.fused_experts import fused_experts
from miles_k3.k3.kernels.router import choose_experts
from miles_k3.k3.kernels.row_norms import rms_norm_rows
from miles_k3.k3.kernels.skinny import Product, products_
from miles_k3.rollout.embedded.fused.attention import output_
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.mlp import MlpLayer, MoeLayer
from miles_k3.rollout.embedded.weights import MoeWeights


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """A gate/up projection that is being made: `products` fill `h_T2F` and what LoRA's A makes of the input."""

    h_T2F: Tensor
    low_STR: Tensor
    low_up_STR: Tensor | None
    products: list[Product]


class FusedMlp(MlpLayer):
    """The dense MLP of a layer, or its shared experts, in four launches."""

    def __call__(self, x_TH: Tensor, adapters: StepAdapters) -> Tensor:
        front = self.front(x_TH, adapters)
        products_(x_TH, front.products)
        return self.finish(front, adapters)

    def front(self, x_TH: Tensor, adapters: StepAdapters) -> Front:
        """What the caller makes in one launch with its own products of x."""
        gate, up = (adapters.factors(self.layer, f"{self.w.module}{half}_proj") for half in ("gate", "up"))
        low_STR, products = low_products(x_TH, [f.a for f in gate])
        low_up_STR = None
        if not all(slot.config is not None and slot.config.share_gate_up_a for slot, _ in adapters.parts):
            low_up_STR, more = low_products(x_TH, [f.a for f in up])
            products += more
        h_T2F = x_TH.new_empty(x_TH.shape[0], self.w.gate_up_t.shape[1])
        return Front(h_T2F, low_STR, low_up_STR, [Product(self.w.gate_up_t.t(), h_T2F), *products])

    def finish(self, front: Front, adapters: StepAdapters) -> Tensor:
        """The MLP's output, once the front's products are made."""
        gate, up = (adapters.factors(self.layer, f"{self.w.module}{half}_proj") for half in ("gate", "up"))
        act_TF = situ_with_lora(
            front.h_T2F, self.betas, front.low_STR, front.low_up_STR, adapters.slot_T, [f.b for f in gate],
            [f.b for f in up], adapters.scalings,
        )  # fmt: skip
        return output_(act_TF, self.w.down_t, adapters, self.layer, self.w.module + "down_proj")


class FusedMoe(MoeLayer):
    """Routed experts beside the shared ones. Inside a CUDA graph the shared experts are a branch of their own."""

    branches = True  # `miles-k3 bench variants` measures what that is worth

    def __init__(self, config: K3Config, weights: MoeWeights, layer: int) -> None:
        super().__init__(config, weights, layer)
        self._packed = weights.bank.for_kernels()
        self._bias_E = weights.bias_E.float()
        self._side = torch.cuda.Stream() if weights.gate_EH.is_cuda else None

    @property
    def on_codes(self) -> bool:
        """Whether the routed experts run on packed weights as they are."""
        return self._packed is not None

    def with_shared(self, x_TH: Tensor, shared: FusedMlp, adapters: StepAdapters) -> tuple[Tensor, Tensor]:
        """(output [T, H] of routed and shared experts, chosen experts int64 [T, K])."""
        w, num_tokens = self.w, x_TH.shape[0]
        front = shared.front(x_TH, adapters)
        z_TZ = x_TH.new_empty(num_tokens, w.down_t.shape[1])
        logits_TE = torch.empty(num_tokens, w.gate_EH.shape[0], device=x_TH.device)
        products_(x_TH, [*front.products, Product(w.down_t.t(), z_TZ), Product(w.gate_EH, logits_TE)])
        branch = self._side if self.branches and x_TH.is_cuda and torch.cuda.is_current_stream_capturing() else None
        if branch is None:
            out_TH = shared.finish(front, adapters)
        else:
            branch.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(branch):
                out_TH = shared.finish(front, adapters)
        weights_TK, experts_TK = choose_experts(logits_TE, self._bias_E, top_k=self.top_k, **self.routing)
        out_TZ = self._experts(z_TZ, weights_TK, experts_TK, adapters)
        if w.norm_Z is not None:
            out_TZ = rms_norm_rows(out_TZ, w.norm_Z, self.eps)
        if branch is not None:
            torch.cuda.current_stream().wait_stream(branch)
        products_(out_TZ, [Product(w.up_t.t(), out_TH, add=True)])
        return out_TH, experts_TK

    def _experts(self, z_TZ: Tensor, weights_TK: Tensor, experts_TK: Tensor, adapters: StepAdapters) -> Tensor:
        """Codes as they are; banks that hold none, or of odd widths, take the plain way."""
        if self._packed is None:
            return super()._experts(z_TZ, weights_TK, experts_TK, adapters)
        w13, w2 = self._packed
        terms, (beta, linear_beta) = adapters.expert_terms(self.layer), self.betas.values()
        return fused_experts(
            z_TZ, weights_TK, experts_TK, w13, w2, lora=terms, situ_beta=beta, situ_linear_beta=linear_beta
        )
