"""Where a forward leaves what a draft reads: the AttnRes mixtures after some layers, before the norm that follows.

A mixture is what the next layer's attention, or the output head, computes anyway on its way to its input; handing it
over costs one write of it. Shapes: T tokens of a step, W tap width, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taps:
    """`rows_TW` holds the mixtures after `layers`, 0-based, side by side; whole when the forward's `final` has run."""

    layers: tuple[int, ...]
    rows_TW: Tensor

    @classmethod
    def empty(cls, layers: Sequence[int], num_tokens: int, embed_VH: Tensor) -> Taps:
        """Room for so many tokens of the model whose embedding that is."""
        return cls(layers=tuple(layers), rows_TW=embed_VH.new_empty(num_tokens, len(layers) * embed_VH.shape[1]))

    def after(self, layer: int) -> Tensor | None:
        """Columns [T, H] for the mixture after `layer`; None where the draft doesn't read it."""
        if layer not in self.layers:
            return None
        hidden = self.rows_TW.shape[1] // len(self.layers)
        return self.rows_TW.narrow(1, self.layers.index(layer) * hidden, hidden)
