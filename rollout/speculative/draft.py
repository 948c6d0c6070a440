"""The DSpark draft (spec 6.3): one forward drafts a block, the Markov head chooses its tokens one after the other.

What the target computed of a token, its taps, becomes keys and values in every draft layer; it is never a query. The
block is the last committed token, the anchor, and masks behind it: all of them see each other and the context before
the anchor. Embedding and output head are the target's.

Shapes: S sequences, A blocks of each, G tokens of a block, T context tokens, W tap width, H hidden, V vocabulary,
N heads, M key-value heads, D head width, L draft layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_k3.errors import CheckpointError
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.k3.draft_params import (
    CONFIDENCE_BIAS,
    CONFIDENCE_WEIGHT,
    FC,
    HIDDEN_NORM,
    MARKOV_W1,
    MARKOV_W2,
    NORM,
    draft_layer,
    draft_params,
)
from miles_k3.k3.ops.norm import rms_norm
from miles_k3.rollout.speculative.rotary import Rotary

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Of a layer: queries [S, A * G, N, D] and the blocks' own keys and values [S, A * G, M, D] to [S, A * G, N, D]."""


class Context(Protocol):
    """What blocks see of committed tokens."""

    def attention(self, anchors_SA: Tensor, block_size: int) -> Attention:
        """Of the blocks behind these positions: each sees its own tokens and the context before its anchor."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftContext:
    """Keys (normed, rotated) and values of the committed tokens, a [S, T, M, D] each for every draft layer.

    Row t is the token at position t; a block sees the rows before its anchor.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def attention(self, anchors_SA: Tensor, block_size: int) -> Attention:
        num_sequences, num_blocks = anchors_SA.shape
        device = anchors_SA.device
        before = torch.arange(self.keys[0].shape[1], device=device) < anchors_SA.unsqueeze(-1)
        same_QQ = torch.block_diag(*[torch.ones(block_size, block_size, device=device)] * num_blocks).bool()
        visible = torch.cat([before.repeat_interleave(block_size, dim=1), same_QQ.expand(num_sequences, -1, -1)], -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = torch.cat([self.keys[layer], k], dim=1), torch.cat([self.values[layer], v], dim=1)
            return F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible.unsqueeze(1), enable_gqa=True
            ).transpose(1, 2)

        return attend


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftedBlocks:
    """Drafted tokens [S, G], the logits [S, G, V] they were chosen by, and confidences [S, G] (None without a head)."""

    tokens_SG: Tensor
    logits_SGV: Tensor
    confidence_SG: Tensor | None


class DraftModel:
    """`weights` by published name; `embed_VH` and `head_VH` are the target's own tensors, and stay frozen."""

    def __init__(self, config: DraftConfig, weights: Mapping[str, Tensor], embed_VH: Tensor, head_VH: Tensor) -> None:
        refuse_misfits(config, weights)
        self.config, self.weights = config, weights
        self.embed_VH, self.head_VH = embed_VH, head_VH
        self.rotary = Rotary(config, embed_VH.device)

    # --- context ------------------------------------------------------------------------------------------------
    def context(self, taps_STW: Tensor, first_position: int = 0) -> DraftContext:
        """Keys and values of tokens whose taps are [S, T, W], the first of them at `first_position`."""
        x_STH = self._norm(taps_STW @ self.weights[FC].t(), HIDDEN_NORM)
        positions_ST = (torch.arange(x_STH.shape[1], device=x_STH.device) + first_position).expand(x_STH.shape[:2])
        pairs = [self._keys_values(layer, x_STH, positions_ST) for layer in range(self.config.num_hidden_layers)]
        return DraftContext(keys=tuple(k for k, _ in pairs), values=tuple(v for _, v in pairs))

    def _keys_values(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        p, heads = draft_layer(layer) + "self_attn.", (-1, self.config.head_dim)
        k = self._norm((x @ self.weights[p + "k_proj.weight"].t()).unflatten(-1, heads), p + "k_norm.weight")
        v = (x @ self.weights[p + "v_proj.weight"].t()).unflatten(-1, heads)
        return self.rotary(k, positions), v

    # --- block --------------------------------------------------------------------------------------------------
    def hidden(self, anchor_tokens_SA: Tensor, anchors_SA: Tensor, context: Context) -> Tensor:
        """What head, Markov head and confidence head read: [S, A, G, H]; row k is about position anchor + 1 + k.

        `anchors_SA` are the positions of the anchors. Blocks of a sequence don't see each other.
        """
        c, num_blocks = self.config, anchors_SA.shape[1]
        tokens_SAG = F.pad(anchor_tokens_SA.unsqueeze(-1), (0, c.block_size - 1), value=c.mask_token_id)
        x = self.embed_VH[tokens_SAG].to(self.weights[NORM].dtype).flatten(1, 2)
        offsets_G = torch.arange(c.block_size, device=x.device)
        positions = (anchors_SA.unsqueeze(-1) + offsets_G).flatten(1)
        attend = context.attention(anchors_SA, c.block_size)
        for layer in range(c.num_hidden_layers):
            x = self._layer(layer, x, positions, attend)
        return self._norm(x, NORM).unflatten(1, (num_blocks, c.block_size))

    def _layer(self, layer: int, x: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        p, w = draft_layer(layer), self.weights
        normed = self._norm(x, p + "input_layernorm.weight")
        q = (normed @ w[p + "self_attn.q_proj.weight"].t()).unflatten(-1, (-1, self.config.head_dim))
        q = self.rotary(self._norm(q, p + "self_attn.q_norm.weight"), positions)
        out = attend(layer, q, *self._keys_values(layer, normed, positions))
        x = x + out.flatten(2) @ w[p + "self_attn.o_proj.weight"].t()
        normed = self._norm(x, p + "post_attention_layernorm.weight")
        gate, up = (normed @ w[f"{p}mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].t()

    # --- heads --------------------------------------------------------------------------------------------------
    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """fp32 [..., V] for rows [..., H] that follow the tokens `previous` [...]: output head plus Markov head."""
        return self.head(hidden) + self.bias(previous)

    def head(self, hidden: Tensor) -> Tensor:
        """The target's output head on rows [..., H]: fp32 [..., V]."""
        if hidden.is_cuda and hidden.dtype != torch.float32 and not hidden.requires_grad:
            rows = torch.mm(hidden.flatten(0, -2), self.head_VH.t(), out_dtype=torch.float32)
            return rows.view(*hidden.shape[:-1], -1)
        return hidden.float() @ self.head_VH.float().t()

    def bias(self, previous: Tensor) -> Tensor:
        """The Markov head: what the tokens `previous` [...] add to the logits of those behind them, fp32 [..., V]."""
        low, high = self.weights[MARKOV_W1][previous], self.weights[MARKOV_W2]
        if low.is_cuda and low.dtype != torch.float32 and not high.requires_grad:
            return torch.mm(low.view(-1, low.shape[-1]), high.t(), out_dtype=torch.float32).view(*low.shape[:-1], -1)
        return low.float() @ high.float().t()

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """fp32 [...]: log-odds that the token drafted after `previous` is accepted."""
        features = torch.cat([hidden, self.weights[MARKOV_W1][previous]], dim=-1).float()
        out = features @ self.weights[CONFIDENCE_WEIGHT].float().t() + self.weights[CONFIDENCE_BIAS].float()
        return out.squeeze(-1)

    @torch.no_grad()
    def draft(
        self,
        anchor_tokens_S: Tensor,
        anchors_S: Tensor,
        context: Context,
        choose: Callable[[Tensor, int], Tensor] | None = None,
    ) -> DraftedBlocks:
        """One block for each sequence. `choose(logits [S, V], k)` gives token k of each; None takes the likeliest."""
        hidden_SGH = self.hidden(anchor_tokens_S.unsqueeze(1), anchors_S.unsqueeze(1), context).squeeze(1)
        logits_SGV = self.head(hidden_SGH)  # without what the tokens before add: 1.2 GB at 256 requests of K3
        previous_S, tokens, confidences = anchor_tokens_S, [], []
        for k in range(self.config.block_size):
            logits_SV = logits_SGV[:, k].add_(self.bias(previous_S))
            if self.config.use_confidence_head:
                confidences.append(self.confidence_logits(hidden_SGH[:, k], previous_S).sigmoid())
            previous_S = logits_SV.argmax(-1) if choose is None else choose(logits_SV, k)
            tokens.append(previous_S)
        return DraftedBlocks(
            tokens_SG=torch.stack(tokens, dim=1), logits_SGV=logits_SGV,
            confidence_SG=torch.stack(confidences, dim=1) if confidences else None,
        )  # fmt: skip

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name], self.config.rms_norm_eps)


def drawn(logits_SV: Tensor, uniforms_S: Tensor) -> Tensor:
    """The token at which the cumulative probability passes the uniform."""
    cdf_SV = logits_SV.softmax(-1).cumsum(-1)
    return (cdf_SV <= uniforms_S.unsqueeze(1) * cdf_SV[:, -1:]).sum(-1).clamp(max=logits_SV.shape[1] - 1)


def refuse_misfits(config: DraftConfig, weights: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for weights of another draft."""
    wanted = {p.name: p.shape for p in draft_params(config)}
    problems = [
        f"the draft's tensor {name} is missing; config.json asks for it" for name in wanted.keys() - weights.keys()
    ]
    problems += [f"the draft has no place for tensor {name}; leave it out" for name in weights.keys() - wanted.keys()]
    problems += [
        f"the draft's tensor {name} has shape {list(weights[name].shape)}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        raise CheckpointError("\n".join(sorted(problems)))
