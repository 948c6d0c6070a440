"""MLA's core attention sequence by sequence: own queries in zigzag order, everybody's keys in natural order.

Shape legend: L tokens of this rank, P tokens of the whole padded stream, N heads, Q query channels, V value channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from miles_k3.trainer.distributed import Axis
from miles_k3.trainer.model.collectives import gather_context
from miles_k3.trainer.model.context import TokenLayout


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Queries `queries` of this rank are the last tokens of the keys `keys`, and may see all those before them."""

    queries: slice
    keys: slice


@dataclass(frozen=True, slots=True, eq=False)
class MlaContext:
    """`natural_P`: where each token of the stream is among the gathered ones; None without context parallelism."""

    spans: tuple[Span, ...]
    natural_P: Tensor | None
    cp: Axis

    @classmethod
    def of(cls, layout: TokenLayout, device: torch.device | str) -> MlaContext | None:
        """None on a CPU without context parallelism: there one padded batch is faster than many small products."""
        if layout.cp.size == 1:
            whole = (Span(slice(a, b), slice(a, b)) for a, b in pairwise(layout.cu_seqlens))
            return cls(tuple(whole), None, layout.cp) if torch.device(device).type == "cuda" else None
        spans, at = [], 0
        for start, stop in pairwise(layout.cu_seqlens):
            chunk = (stop - start) // (2 * layout.cp.size)
            for i in (layout.cp.rank, 2 * layout.cp.size - 1 - layout.cp.rank):
                spans.append(Span(slice(at, at + chunk), slice(start, start + (i + 1) * chunk)))
                at += chunk
        return cls(tuple(spans), layout.place_P.to(device), layout.cp)

    def gather(self, latents_LD: Tensor) -> Tensor:
        """Every rank's rows in the stream's order: [L, D] -> [P, D]. Latents are narrower than keys and values."""
        if self.natural_P is None:
            return latents_LD
        return gather_context(latents_LD, self.cp).index_select(0, self.natural_P)

    def attend(self, q_LNQ: Tensor, k_PNQ: Tensor, v_PNV: Tensor) -> Tensor:
        """Causal attention within each sequence, [L, N, V]; scale Q^-0.5."""
        out = [self._span(span, q_LNQ, k_PNQ, v_PNV) for span in self.spans]
        return torch.cat(out)

    def _span(self, span: Span, q_LNQ: Tensor, k_PNQ: Tensor, v_PNV: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_LNQ[span.queries], k_PNQ[span.keys], v_PNV[span.keys]))
        scale = q.shape[-1] ** -0.5
        if q.shape[2] == k.shape[2]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            mask = causal_lower_right(q.shape[2], k.shape[2])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.squeeze(0).transpose(0, 1)
