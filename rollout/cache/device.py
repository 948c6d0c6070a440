"""Small index tensors on their way from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def put(values: Tensor | Sequence[float], device: torch.device) -> Tensor:
    """Values on `device`, without waiting for what the device still computes."""
    host = values if isinstance(values, Tensor) else torch.tensor(values)
    return host.to(device, non_blocking=True)
