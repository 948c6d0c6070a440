"""All that a KDA layer is told about its stream: index maps, the way into its order and back, who hands it the state.

Shape legend: L tokens of this rank in zigzag order, C tokens of its slice of the stream, H hidden, N heads of this
rank, K key channels, V value channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from miles_k3.errors import LaunchError
from miles_k3.k3.config import K3Config
from miles_k3.k3.ops.packed import Packed
from miles_k3.trainer.distributed import Ranks
from miles_k3.trainer.model.context import Relayout, TokenLayout, kda_relayouts
from miles_k3.trainer.model.kda_core import KdaMaps, delta_rule
from miles_k3.trainer.model.state_handover import StateHandover

KdaKernel = Literal["torch", "fla"]


def pick_kernel(wanted: Literal["auto", "torch", "fla"], device: torch.device, dtype: torch.dtype) -> KdaKernel:
    """auto: fla's Triton kernels on CUDA in bfloat16 where fla is installed, torch otherwise.

    Raises LaunchError when fla is asked for where it can't run.
    """
    installed = find_spec("fla") is not None
    if wanted == "fla" and (device.type != "cuda" or not installed):
        reason = "flash-linear-attention is not installed" if device.type == "cuda" else f"the model is on {device}"
        raise LaunchError(f"trainer.kda_kernel is fla, but {reason}; set trainer.kda_kernel: auto or torch")
    if wanted == "auto":
        return "fla" if device.type == "cuda" and dtype == torch.bfloat16 and installed else "torch"
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KdaContext:
    """Made once a micro-batch, shared by its KDA layers. Without context parallelism all optional parts are None.

    `lengths`: the whole stream's sequences, for fla, which derives its own maps from them.
    """

    maps: KdaMaps
    lengths: tuple[int, ...]
    kernel: KdaKernel = "torch"
    into: Relayout | None = None
    back: Relayout | None = None
    handover: StateHandover | None = None

    @classmethod
    def of(
        cls, layout: TokenLayout, k3: K3Config, ranks: Ranks, device: torch.device | str, kernel: KdaKernel = "torch"
    ) -> KdaContext:
        """Computed on the host, so that no device is waited for."""
        width, rank = k3.short_conv_kernel_size, ranks.cp.rank
        packed = Packed.from_lengths(tuple(layout.slice_lengths(rank)))
        maps = KdaMaps.of(packed, k3.kda_num_heads // ranks.tp.size, width, layout.halo(rank, width)).to(device)
        if ranks.cp.size == 1:
            return cls(maps=maps, lengths=layout.lengths, kernel=kernel)
        into, back = kda_relayouts(layout, width)
        return cls(
            maps=maps, lengths=layout.lengths, kernel=kernel, into=into.to(device), back=back.to(device),
            handover=StateHandover.of(layout),
        )  # fmt: skip

    def take(self, x_LH: Tensor) -> Tensor:
        """[L, H] in zigzag order -> [halo + C, H] in the stream's."""
        return x_LH if self.into is None else self.into(x_LH)

    def give_back(self, y_CH: Tensor) -> Tensor:
        """[C, H] -> [L, H]."""
        return y_CH if self.back is None else self.back(y_CH)

    def delta_rule(self, q_CNK: Tensor, k_CNK: Tensor, v_CNV: Tensor, g_CNK: Tensor, beta_CN: Tensor) -> Tensor:
        """The slice's part of the whole stream's delta rule: fp32 [C, N, V]; arguments as `kda_chunk`."""
        return delta_rule(q_CNK, k_CNK, v_CNV, g_CNK, beta_CN, self.maps, self.handover)
