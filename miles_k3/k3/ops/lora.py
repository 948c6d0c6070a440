"""Low-rank deltas on frozen weights: (alpha / r) * B (A x), applied at run time (spec 5.1, 5.4).

Shapes: T tokens, R rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LoraTerm:
    """One adapter's factors for one weight: a [R, in], b [out, R].

    `rows_T1` (float 0/1 or None for all) says which tokens of a mixed batch the adapter speaks for.
    """

    a: Tensor
    b: Tensor
    scaling: float
    rows_T1: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoraTerm:
    """One adapter's factors for the routed experts of one layer.

    Outer factors are shared by all experts, inner ones are per expert: a1, a3 [R, latent]; b1, b3 [E, inter, R];
    a2 [E, R, inter]; b2 [latent, R].
    """

    a1: Tensor
    b1: Tensor
    a3: Tensor
    b3: Tensor
    a2: Tensor
    b2: Tensor
    scaling: float
    rows_T1: Tensor | None = None


def lora_delta(x: Tensor, terms: Sequence[LoraTerm]) -> Tensor | None:
    """Sum of the terms' deltas of x [T, in] -> [T, out]; None when there is no term."""
    total = None
    for term in terms:
        low = x @ term.a.t() * term.scaling
        if term.rows_T1 is not None:
            low = low * term.rows_T1.to(low.dtype)
        delta = low @ term.b.t()
        total = delta if total is None else total + delta
    return total


def linear_lora(x: Tensor, weight: Tensor, terms: Sequence[LoraTerm] = ()) -> Tensor:
    """x W^T plus the deltas."""
    y, delta = x @ weight.t(), lora_delta(x, terms)
    return y if delta is None else y + delta
