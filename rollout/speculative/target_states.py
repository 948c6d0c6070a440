"""What a draft reads of its target. Shapes: T tokens of a sequence, W tap width, H hidden."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetStates:
    """Of one sequence: the taps that make the draft's context, and what the output head reads (its logits by row)."""

    taps_TW: Tensor
    final_TH: Tensor
