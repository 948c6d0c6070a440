"""Kimi K3's forward over a step's batch and the caches.

Shapes: T tokens, B requests, H hidden, V vocabulary, M MoE layers, K chosen experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_k3.k3.ops.residual_bank import ResidualBank
from miles_k3.k3.weights import ResidentBase
from miles_k3.rollout.embedded.attention import KdaLayer, MlaLayer
from miles_k3.rollout.embedded.batch import StepBatch
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.mlp import MlpLayer, MoeLayer
from miles_k3.rollout.embedded.taps import Taps
from miles_k3.rollout.embedded.weights import LayerWeights, model_weights


class EngineModel:
    """The whole text model on the resident base's own tensors, in plain torch. `fused.model` runs it on kernels."""

    kda_layer: type[KdaLayer] = KdaLayer
    mla_layer: type[MlaLayer] = MlaLayer
    mlp_layer: type[MlpLayer] = MlpLayer
    moe_layer: type[MoeLayer] = MoeLayer
    residual: type[ResidualBank] = ResidualBank
    on_kernels = False
    unrecordable: str | None = None  # why a step of it can't be a CUDA graph

    def __init__(self, base: ResidentBase) -> None:
        self.base, self.weights = base, model_weights(base)
        c = self.config = base.config
        kda, mla = {l: n for n, l in enumerate(c.kda_layers)}, {l: n for n, l in enumerate(c.mla_layers)}
        self.attentions: list[KdaLayer | MlaLayer] = []
        for layer, w in enumerate(self.weights.layers):
            if w.kda is not None:
                self.attentions.append(self.kda_layer(c, w.kda, layer, kda[layer]))
            elif w.mla is not None:
                self.attentions.append(self.mla_layer(c, w.mla, layer, mla[layer]))
        self.mlps = [self.mlp_layer(c, w.mlp, layer) for layer, w in enumerate(self.weights.layers)]
        self.moes = [self.moe_layer(c, w.moe, layer) if w.moe else None for layer, w in enumerate(self.weights.layers)]

    def hidden(
        self, batch: StepBatch, adapters: StepAdapters, *, capture: bool = False, taps: Taps | None = None
    ) -> tuple[ResidualBank, Tensor | None]:
        """Run every layer; (residual rows of all tokens, chosen experts int16 [T, M, K] if `capture`).

        Writes the new tokens into the caches that the batch names, and what layers hand over into `taps`; that of the
        last layer comes from `final`.
        """
        residual = self.residual(self.weights.embed[batch.tokens_T], self.config.bank_rows(len(self.mlps)) + 1)
        chosen: list[Tensor] = []
        for layer, w in enumerate(self.weights.layers):
            self._attention(layer, w, residual, batch, adapters, taps)
            experts_TK = self._mlp(layer, w, residual, adapters)
            if capture and experts_TK is not None:
                chosen.append(experts_TK.to(torch.int16))
        if not capture:
            return residual, None
        return residual, torch.stack(chosen, dim=1) if chosen else self._no_routes(batch)

    def _no_routes(self, batch: StepBatch) -> Tensor:
        return batch.tokens_T.new_empty(len(batch.tokens_T), 0, self.config.num_experts_per_token, dtype=torch.int16)

    def _attention(
        self, layer: int, w: LayerWeights, residual: ResidualBank, batch: StepBatch, adapters: StepAdapters,
        taps: Taps | None,
    ) -> None:  # fmt: skip
        tap_TH = None if taps is None else taps.after(layer - 1)
        x_TH = residual.mix_norm(w.attn_query_H, w.attn_norm_H, self.config.rms_norm_eps, tap_TH)
        out_TH = self.attentions[layer](x_TH, batch, adapters)
        if self.config.starts_block(layer):
            residual.bank(out_TH)
        else:
            residual.add(out_TH)

    def _mlp(self, layer: int, w: LayerWeights, residual: ResidualBank, adapters: StepAdapters) -> Tensor | None:
        x_TH = residual.mix_norm(w.mlp_query_H, w.mlp_norm_H, self.config.rms_norm_eps)
        moe, experts_TK = self.moes[layer], None
        out_TH = self.mlps[layer](x_TH, adapters)
        if moe is not None:
            routed_TH, experts_TK = moe(x_TH, adapters)
            out_TH = out_TH.add_(routed_TH)
        residual.add(out_TH)
        return experts_TK

    def conv_weights(self) -> list[Tensor]:
        """Of the KDA layers, [D, 1, W] each."""
        return [w.kda.conv_D1W for w in self.weights.layers if w.kda is not None]

    def final(self, residual: ResidualBank, rows: Tensor | None = None, taps: Taps | None = None) -> Tensor:
        """What the output head reads, [rows, H], of the tokens at stream indices `rows` (None: all).

        Writes the last layer's mixture of all tokens into `taps`, where the draft reads it.
        """
        w, eps = self.weights, self.config.rms_norm_eps
        tap_TH = None if taps is None else taps.after(len(w.layers) - 1)
        if tap_TH is not None:
            x_TH = residual.mix_norm(w.out_query_H, w.norm_H, eps, tap_TH)
            return x_TH if rows is None else x_TH.index_select(0, rows)
        if rows is not None:
            residual = residual.select(rows)
        return residual.mix_norm(w.out_query_H, w.norm_H, eps)

    def head(self, x_BH: Tensor) -> Tensor:
        """Logits, fp32 [B, V]."""
        return _fp32_product(x_BH, self.weights.head)

    def logits(self, residual: ResidualBank, rows: Tensor | None = None) -> Tensor:
        """fp32 [rows, V] of the tokens at stream indices `rows` (None: all)."""
        return self.head(self.final(residual, rows))


def _fp32_product(x: Tensor, head_VH: Tensor) -> Tensor:
    """x W^T with an fp32 result: a BF16 logit near 10 would be off by up to 0.03."""
    if x.dtype == torch.float32:
        return x @ head_VH.t()
    if x.is_cuda:
        return torch.mm(x, head_VH.t(), out_dtype=torch.float32)
    return x.float() @ head_VH.float().t()
