"""Rotary positions of the draft's attention, plain or stretched by YaRN (Peng et al. 2023, arXiv 2309.00071)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from miles_k3.k3.draft_config import DraftConfig, Yarn


class Rotary:
    """Turns halves of each head by angles that grow with the position; angles in fp32."""

    def __init__(self, config: DraftConfig, device: torch.device | str = "cpu") -> None:
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequency = 1.0 / config.rope_theta**half
        self.scale = 1.0
        if config.yarn is not None:
            frequency = _stretched(frequency, config.rope_theta, config.head_dim, config.yarn)
            factor = config.yarn.attention_factor
            self.scale = 0.1 * math.log(config.yarn.factor) + 1.0 if factor is None else factor
        self.frequency_D = frequency.to(device)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., N, D] at int64 positions [...] -> the same shape and dtype."""
        angle = positions.unsqueeze(-1).float() * self.frequency_D
        cos, sin = (f(angle).unsqueeze(-2) for f in (torch.cos, torch.sin))
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _stretched(frequency_D: Tensor, theta: float, dim: int, yarn: Yarn) -> Tensor:
    """Slow rotations slowed by the factor, fast ones as they were, a ramp between."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(len(frequency_D), dtype=torch.float32) - low) / max(high - low, 0.001)
    slow = ramp.clamp(0.0, 1.0)
    return frequency_D / yarn.factor * slow + frequency_D * (1.0 - slow)
