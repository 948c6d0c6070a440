"""What every layer is told about the packed stream that it computes.

Shape legend: T tokens, L MoE layers, K chosen experts per token, M tokens whose log-probability is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.ops.packed import Packed
from miles_k3.trainer.model.kda_core import KdaMaps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """One micro-batch's tokens on the model's device.

    `tokens_T` int64; `kda_maps` are made once for all KDA layers. `routed_TLK` int16: experts that the engine chose, -1
    where it chose none; None routes afresh.
    """

    tokens_T: Tensor
    packed: Packed
    kda_maps: KdaMaps
    routed_TLK: Tensor | None = None

    @classmethod
    def of(
        cls, tokens_T: Tensor, lengths: Sequence[int], k3: K3Config, device: torch.device | str = "cpu",
        routed_TLK: Tensor | None = None,
    ) -> Stream:  # fmt: skip
        """From host tensors and the sequences' lengths; the maps are made on the host, so no device is waited for."""
        maps = KdaMaps.of(Packed.from_lengths(tuple(lengths)), k3.kda_num_heads, k3.short_conv_kernel_size)
        return cls(
            tokens_T=tokens_T.to(device),
            packed=Packed.from_lengths(tuple(lengths), device),
            kda_maps=maps.to(device),
            routed_TLK=None if routed_TLK is None else routed_TLK.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """Which predictions the last stage must price: the stream's places `places_M` and the tokens `targets_M` there.

    `entropy_gradient`: whether the entropies must carry a gradient.
    """

    places_M: Tensor
    targets_M: Tensor
    temperature: float
    entropy_gradient: bool = False
