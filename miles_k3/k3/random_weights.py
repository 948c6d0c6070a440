"""Random weights of any K3 size, drawn where they will stay: true widths without a checkpoint.

They keep activations of a plausible size and every part of the model at work: routers choose widely, gates and decays
vary. A tensor depends on the seed, its name and its shape only, but differs between a CPU and a GPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import Param, text_params
from miles_k3.k3.weights import ResidentBase, build_base

# Codes of four bits have a root mean square of 2.9; with these scales weights are near (inputs)^-0.5 at K3's widths.
_SCALES = (119, 122)


def random_base(config: K3Config, *, dtype: torch.dtype, device: torch.device | str = "cpu", base_dtype: str = "mxfp4",
                seed: int = 0, progress: Callable[[int], None] | None = None) -> ResidentBase:  # fmt: skip
    """A whole resident base; `progress` gets the bytes drawn so far."""
    params = text_params(config)
    return build_base(
        config, params, lambda p: draw(p, config, torch.device(device), seed), dtype=dtype, device=device,
        base_dtype=base_dtype, progress=progress,
    )  # fmt: skip


def draw(p: Param, config: K3Config, device: torch.device, seed: int = 0) -> Tensor:
    """One checkpoint tensor on `device`."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {p.name}".encode()))
    if p.is_scale:
        return torch.randint(*_SCALES, p.shape, generator=generator, dtype=torch.uint8, device=device)
    if p.name.endswith("weight_packed"):
        return torch.randint(0, 256, p.shape, generator=generator, dtype=torch.uint8, device=device)
    if p.name.endswith("A_log"):
        rates = torch.rand(p.shape, generator=generator, device=device) * 1.5
        rates[config.kda_num_heads :] = 0
        return rates
    x = torch.randn(p.shape, generator=generator, device=device)
    if p.name.endswith("dt_bias"):
        return x - 1.0
    if p.name.endswith("e_score_correction_bias"):
        return x.mul_(0.01)
    if len(p.shape) == 1:
        return x.mul_(0.1).add_(1.0)  # norms
    return x.mul_(0.5 if p.module.endswith("conv1d") else 1.0 if "embed_tokens" in p.name else p.shape[-1] ** -0.5)
