"""SiTU, the saturating gated activation of every K3 MLP (spec 2.5)."""

from __future__ import annotations

import torch
from torch import Tensor


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """[beta tanh(g/beta) sigmoid(g)] * [lb tanh(u/lb)], elementwise in fp32, cast back to gate's dtype."""
    # Contiguous: torch's vectorised sigmoid differs in the last bit from the scalar one that a strided half of a fused
    # projection gets, and a fresh adapter (whose sum makes the halves contiguous) must not change a bit.
    g, u = gate.float().contiguous(), up.float().contiguous()
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)
