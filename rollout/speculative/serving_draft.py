"""A draft as an engine keeps it: its weights stay, and what the context needs of all its layers lies side by side.

Shapes: S sequences, T context tokens, P pages of a cache, Z tokens of a page, W tap width, H hidden, L draft layers,
M key-value heads, D head width, C numbers of a token's context: keys and values of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.k3.draft_config import DraftConfig
from miles_k3.k3.draft_params import FC, HIDDEN_NORM, draft_layer
from miles_k3.k3.ops.decode import rms_norm
from miles_k3.rollout.speculative.draft import Attention, Context, DraftContext, DraftModel, refuse_misfits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedContext:
    """Rows of `ServingDraft.context_rows` where a cache keeps them; one block a sequence."""

    pages_PZC: Tensor
    table_SP: Tensor

    def attention(self, anchors_SA: Tensor, block_size: int) -> Attention:
        from miles_k3.k3.kernels.block_attention import block_attention  # Triton is not everywhere

        lengths_S = anchors_SA.squeeze(1)  # the tokens before the anchor

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            first = layer * 2 * k.shape[2] * k.shape[3]
            return block_attention(q, k, v, self.pages_PZC, self.table_SP, lengths_S, first)

        return attend


class ServingDraft(DraftModel):
    """`DraftModel` whose context is made of single tokens, and kept as one row [C] of each."""

    def __init__(self, config: DraftConfig, weights: Mapping[str, Tensor], embed_VH: Tensor, head_VH: Tensor) -> None:
        super().__init__(config, weights, embed_VH, head_VH)
        attention = [draft_layer(layer) + "self_attn." for layer in range(config.num_hidden_layers)]
        names = [f"{p}{kind}_proj.weight" for p in attention for kind in "kv"]
        self._context_CH = torch.cat([weights[name] for name in names])
        self._k_norm_L1D = torch.stack([weights[p + "k_norm.weight"] for p in attention]).unsqueeze(1)
        # The weights are views of these from here on, so that nothing is held twice.
        names += [p + "k_norm.weight" for p in attention]
        views = (*self._context_CH.chunk(2 * len(attention)), *self._k_norm_L1D.squeeze(1))
        self.weights = {**weights, **dict(zip(names, views, strict=True))}

    @torch.no_grad()
    def refill(self, weights: Mapping[str, Tensor]) -> None:
        """Other weights of the same config, copied to where these are. Raises CheckpointError for another draft's."""
        refuse_misfits(self.config, weights)
        for name, own in self.weights.items():
            own.copy_(weights[name])

    def context_rows(self, taps_TW: Tensor, positions_T: Tensor) -> Tensor:
        """`context` of tokens at any positions: rows [T, C], layer by layer keys, then values."""
        c, eps = self.config, self.config.rms_norm_eps
        x_TH = rms_norm(taps_TW.to(self._context_CH.dtype) @ self.weights[FC].t(), self.weights[HIDDEN_NORM], eps)
        rows_TC = x_TH @ self._context_CH.t()
        keys_TLMD = rows_TC.unflatten(-1, self._heads)[:, :, 0]
        normed = rms_norm(keys_TLMD, self._k_norm_L1D, eps)
        heads = c.num_hidden_layers * c.num_key_value_heads
        turned = self.rotary(normed.view(-1, heads, c.head_dim), positions_T)
        keys_TLMD.copy_(turned.view_as(keys_TLMD))
        return rows_TC

    def context_of(self, rows_STC: Tensor) -> DraftContext:
        """Rows of `context_rows`, put side by side as sequences."""
        layers = rows_STC.unflatten(-1, self._heads).unbind(2)
        return DraftContext(keys=tuple(l[:, :, 0] for l in layers), values=tuple(l[:, :, 1] for l in layers))

    def context_in(self, pages_PZC: Tensor, table_SP: Tensor, *, on_kernels: bool) -> Context:
        """Of sequences whose rows lie in these pages of a cache: read there by a kernel, or gathered."""
        if on_kernels:
            return PagedContext(pages_PZC=pages_PZC, table_SP=table_SP)
        rows_SPZC = pages_PZC.index_select(0, table_SP.flatten())
        return self.context_of(rows_SPZC.view(table_SP.shape[0], -1, pages_PZC.shape[-1]))

    @property
    def _heads(self) -> tuple[int, int, int, int]:
        c = self.config
        return c.num_hidden_layers, 2, c.num_key_value_heads, c.head_dim
