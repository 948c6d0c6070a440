"""MXFP4: E2M1 codes, two a byte along the input dimension, with one E8M0 scale byte per 32 inputs (spec 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_k3.k3.config import MXFP4_GROUP

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Half-way points between levels; a value must be strictly above one to take the upper level, so ties go down.
THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SCALE_BIAS = 127
ZERO_GROUP_SCALE = 127  # an all-zero group stores scale 1, never 2^-127


def unpack_codes(packed: Tensor) -> Tensor:
    """u8 [..., D/2] -> 4-bit codes u8 [..., D]; element 2j is the low nibble of byte j."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed u8 [..., D/2], scale u8 [..., D/32] -> [..., D] values, exact in float32 and (but for extremes) bfloat16.

    Raises ValueError when the two shapes don't belong together.
    """
    if packed.shape[-1] * 2 != scale.shape[-1] * MXFP4_GROUP or packed.shape[:-1] != scale.shape[:-1]:
        raise ValueError(
            f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} don't match: one scale byte per {MXFP4_GROUP} codes"
        )
    levels = torch.tensor([*LEVELS, *(-v for v in LEVELS)], device=packed.device)
    values = levels[unpack_codes(packed).int()].unflatten(-1, (-1, MXFP4_GROUP))
    factor = torch.exp2(scale.float() - SCALE_BIAS).unsqueeze(-1)
    return (values * factor).flatten(-2).to(dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> (packed u8 [..., D/2], scale u8 [..., D/32]): exponent ceil(log2(amax/6)), nearest level, ties down.

    Value-exact on anything that was MXFP4 already. Raises ValueError on non-finite weights or D not a multiple of 32.
    """
    if weight.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"last dimension {weight.shape[-1]} is not a multiple of {MXFP4_GROUP}")
    if not torch.isfinite(weight).all():
        raise ValueError("weight holds NaN or infinity; MXFP4 has neither")
    groups = weight.float().unflatten(-1, (-1, MXFP4_GROUP))
    amax = groups.abs().amax(-1)
    exponent = _ceil_log2(amax / LEVELS[-1]).clamp(-SCALE_BIAS, 254 - SCALE_BIAS)
    exponent = torch.where(amax == 0, torch.full_like(exponent, ZERO_GROUP_SCALE - SCALE_BIAS), exponent)
    scaled = groups / torch.exp2(exponent.float()).unsqueeze(-1)
    magnitude = torch.bucketize(scaled.abs(), torch.tensor(THRESHOLDS, device=weight.device), right=False)
    codes = (magnitude.to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)).flatten(-2)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed, (exponent + SCALE_BIAS).to(torch.uint8)


def _ceil_log2(x: Tensor) -> Tensor:
    """Exact for powers of two, which a float log2 is not: x = m * 2^e with m in [0.5, 1)."""
    mantissa, exponent = torch.frexp(x)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)
