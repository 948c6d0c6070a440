"""MXFP4: E2M1 codes, two a byte along the input dimension, with one E8M0 scale byte per 32 inputs (spec 3.1).

Shapes: D inputs, the last dimension; D/2 code bytes; D/32 scale bytes.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from miles_k3.k3.config import MXFP4_GROUP

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Half-way points between levels; a value must be strictly above one to take the upper level, so ties go down.
THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SCALE_BIAS = 127
ZERO_GROUP_SCALE = 127  # an all-zero group stores scale 1, never 2^-127
NAN_SCALE = 255  # E8M0's only code that is no power of two
LARGEST = 3.5 * 2.0**126  # above it the nearest level is 2^128, which neither float32 nor bfloat16 holds
_CHUNK = 1 << 24  # numbers decoded at a time: what is in flight stays small beside the result


def unpack_codes(packed: Tensor) -> Tensor:
    """u8 [..., D/2] -> 4-bit codes u8 [..., D]; element 2j is the low nibble of byte j."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def pack_codes(codes: Tensor) -> Tensor:
    """4-bit codes u8 [..., D] -> u8 [..., D/2]; the inverse of `unpack_codes`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed u8 [..., D/2], scale u8 [..., D/32] -> [..., D] values, exact in float32 and in bfloat16.

    Infinite above 2^128 (scale byte 254 with levels from 2, 253 with levels from 4), NaN where the scale byte is 255.
    Raises ValueError when the two tensors don't belong together.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"packed is {packed.dtype} and scale {scale.dtype}; both must be torch.uint8")
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * MXFP4_GROUP:
        raise ValueError(
            f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} don't match: "
            f"one scale byte per {MXFP4_GROUP} codes, two codes a byte"
        )
    width, groups = packed.shape[-1] * 2, scale.shape[-1]
    out = torch.empty(*packed.shape[:-1], width, dtype=dtype, device=packed.device)
    if out.numel() == 0:
        return out
    exact = dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32
    pairs, powers = _pairs(exact, packed.device), _powers(exact, packed.device)
    packed, scale, flat = packed.reshape(-1, width // 2), scale.reshape(-1, groups), out.view(-1, groups, MXFP4_GROUP)
    step = max(1, _CHUNK // width)
    for start in range(0, len(packed), step):
        rows = slice(start, start + step)
        values = pairs[packed[rows].int()].view(-1, groups, MXFP4_GROUP)
        torch.mul(values, powers[scale[rows].int()].unsqueeze(-1), out=flat[rows])
    return out


def quantize(weight: Tensor, *, least_error: bool = False) -> tuple[Tensor, Tensor]:
    """[..., D] -> (packed u8 [..., D/2], scale u8 [..., D/32]): exponent ceil(log2(amax/6)), nearest level, ties down.

    `least_error`: one less where the group's squared error is then smaller, though its largest values are clipped.
    Value-exact on anything that was MXFP4 already. Raises ValueError on weights that are not finite or above
    `LARGEST`, and on a D that is no multiple of 32.
    """
    if weight.ndim == 0 or weight.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; the last must be a multiple of {MXFP4_GROUP}")
    groups = weight.detach().float().unflatten(-1, (weight.shape[-1] // MXFP4_GROUP, MXFP4_GROUP))
    amax = groups.abs().amax(-1)
    if not (amax <= LARGEST).all():
        raise ValueError(f"weight holds NaN, infinity or a magnitude above {LARGEST:.3g}, which MXFP4 can't express")
    exponent = scale_exponent(amax)
    scaled = _scaled(groups, exponent)
    if least_error:
        double, smaller = scaled * 2, exponent > -SCALE_BIAS  # errors in units of the smaller scale
        better = smaller & (_squared_error(double) < 4 * _squared_error(scaled))
        exponent = exponent - better.int()
        scaled = torch.where(better.unsqueeze(-1), double, scaled)
    codes = _magnitudes(scaled) | (torch.signbit(scaled).to(torch.uint8) << 3)
    return pack_codes(codes.flatten(-2)), (exponent + SCALE_BIAS).to(torch.uint8)


def _scaled(groups: Tensor, exponent: Tensor) -> Tensor:
    """Values [..., G, 32] in units of 2^exponent [..., G]; exact, but for what float32 can't hold so small."""
    return groups * _powers(torch.float32, groups.device)[SCALE_BIAS - exponent].unsqueeze(-1)


def _magnitudes(scaled: Tensor) -> Tensor:
    """Number of the nearest level, u8; beyond the last level that one."""
    thresholds = torch.tensor(THRESHOLDS, device=scaled.device)
    return torch.bucketize(scaled.abs(), thresholds, out_int32=True).to(torch.uint8)


def _squared_error(scaled: Tensor) -> Tensor:
    """Of each group [..., G], in units of its scale's square."""
    magnitude = scaled.abs()
    return nearest_level(magnitude).sub_(magnitude).square_().sum(-1)


def nearest_level(magnitude: Tensor) -> Tensor:
    """The E2M1 value next to each magnitude, up to the last; of two at the same distance, either."""
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (magnitude / step).round_().mul_(step).clamp_(max=LEVELS[-1])


def scale_exponent(amax: Tensor) -> Tensor:
    """The published rule's, for a group's largest magnitude: ceil(log2(amax / 6)).

    Exact where a float log2 is not: amax = m 2^e with 1/2 <= m < 1, and 6 = 3/4 2^3.
    """
    mantissa, exponent = torch.frexp(amax)
    exponent = torch.where(mantissa <= 0.75, exponent - 3, exponent - 2).clamp(min=-SCALE_BIAS)
    return torch.where(amax == 0, ZERO_GROUP_SCALE - SCALE_BIAS, exponent)


@functools.cache
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scale byte -> factor [256]. A table, since exp2 on a device need not be exact."""
    powers = [2.0 ** (byte - SCALE_BIAS) for byte in range(NAN_SCALE)]
    with torch.inference_mode(False):
        return torch.tensor([*powers, math.nan], dtype=dtype, device=device)


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Code byte -> its two values [256, 2]."""
    levels = (*LEVELS, *(-v for v in LEVELS))
    with torch.inference_mode(False):
        return torch.tensor([(levels[b & 15], levels[b >> 4]) for b in range(256)], dtype=dtype, device=device)
