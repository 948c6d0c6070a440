"""What every layer is told about the packed stream that it computes.

Shape legend: T tokens, L MoE layers, K chosen experts per token, M tokens whose log-probability is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles_k3.k3.ops.packed import Packed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """One micro-batch's tokens on the model's device.

    `tokens_T` int64. `routed_TLK` int16: experts that the engine chose, -1 where it chose none; None routes afresh.
    """

    tokens_T: Tensor
    packed: Packed
    routed_TLK: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """Which predictions the last stage must price: the stream's places `places_M` and the tokens `targets_M` there.

    `entropy_gradient`: whether the entropies must carry a gradient.
    """

    places_M: Tensor
    targets_M: Tensor
    temperature: float
    entropy_gradient: bool = False
