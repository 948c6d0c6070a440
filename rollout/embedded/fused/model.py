"""Kimi K3's forward on kernels: the same results as `EngineModel`'s up to rounding.

Shapes as in `embedded.model`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.kernels.skinny import Product, products_
from miles_k3.k3.ops.residual_bank import ResidualBank
from miles_k3.k3.weights import ResidentBase
from miles_k3.rollout.embedded.fused.attention import FusedKda, FusedMla
from miles_k3.rollout.embedded.fused.mlp import FusedMlp, FusedMoe
from miles_k3.rollout.embedded.fused.residual import FusedResidual
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.model import EngineModel
from miles_k3.rollout.embedded.weights import LayerWeights


def misfit(config: K3Config) -> str | None:
    """Why the kernels can't run a model of these widths; None where they can."""
    head = config.kda_head_dim
    if head & (head - 1):
        return f"KDA heads of {head} channels; the decode kernel takes powers of two"
    if config.short_conv_kernel_size != 4:
        return f"a convolution over {config.short_conv_kernel_size} tokens; the decode kernel takes 4"
    return None


class FusedModel(EngineModel):
    """On CUDA, or in Triton's interpreter."""

    kda_layer = FusedKda
    mla_layer = FusedMla
    mlp_layer = FusedMlp
    moe_layer = FusedMoe
    residual = FusedResidual
    on_kernels = True

    def __init__(self, base: ResidentBase) -> None:
        super().__init__(base)
        if base.dtype == torch.float32 and any(isinstance(m, FusedMoe) and not m.on_codes for m in self.moes):
            # torch's grouped_mm of fp32 reads the segments' ends on the host.
            self.unrecordable = "experts that aren't packed are multiplied expert by expert in float32"

    def _mlp(self, layer: int, w: LayerWeights, residual: ResidualBank, adapters: StepAdapters) -> Tensor | None:
        x_TH = residual.mix_norm(w.mlp_query_H, w.mlp_norm_H, self.config.rms_norm_eps)
        mlp, moe, experts_TK = self.mlps[layer], self.moes[layer], None
        assert isinstance(mlp, FusedMlp)
        if moe is None:
            out_TH = mlp(x_TH, adapters)
        else:
            assert isinstance(moe, FusedMoe)
            out_TH, experts_TK = moe.with_shared(x_TH, mlp, adapters)
        residual.add(out_TH)
        return experts_TK

    def head(self, x_BH: Tensor) -> Tensor:
        """Logits, fp32 [B, V]."""
        logits_BV = torch.empty(x_BH.shape[0], self.weights.head.shape[0], device=x_BH.device)
        products_(x_BH, [Product(self.weights.head, logits_BV)])
        return logits_BV
