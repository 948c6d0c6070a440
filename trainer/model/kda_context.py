"""All that a KDA layer is told about its stream: index maps, the way into its order and back, who hands it the state.

Shape legend: L tokens of this rank in zigzag order, C tokens of its slice of the stream, H hidden, N heads of this
rank, K key channels, V value channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from miles_k3.errors import LaunchError
from miles_k3.k3.config import K3Config
from miles_k3.k3.ops.packed import Packed
from miles_k3.trainer.distributed import Axis, Ranks
from miles_k3.trainer.model.context import Relayout, TokenLayout, kda_relayouts
from miles_k3.trainer.model.elementwise import kda_gate
from miles_k3.trainer.model.kda_core import KdaMaps, delta_rule
from miles_k3.trainer.model.kda_fla import fla_context, fla_gated_delta_rule
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
class Decay:
    """The frozen numbers of one layer's gate: g = lower_bound * sigmoid(exp(a_log) * (f + dt_bias))."""

    a_log_N: Tensor
    dt_bias_NK: Tensor
    lower_bound: float


@dataclass(frozen=True, slots=True, eq=False)
class FlaStream:
    """What fla's kernels want to know of the stream: its boundaries, and fla's own context where ranks share it."""

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    context: Any

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, cp: Axis, device: torch.device | str) -> FlaStream:
        host = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
        own = host.to(device)
        return cls(own, host, fla_context(own, host, cp.group, width) if cp.size > 1 else None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KdaContext:
    """Made once a micro-batch, shared by its KDA layers. `into`, `back`, `handover`: None without context parallelism.

    `fla`: for fla's kernels, which hand the state over themselves; None where torch computes.
    """

    maps: KdaMaps
    fla: FlaStream | None = None
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
        halo, fla = layout.halo(rank, width), None
        if kernel == "fla":
            fla = FlaStream.of(layout.lengths, width, ranks.cp, device)
            maps = KdaMaps.of_convolution(packed, width, halo).to(device)
        else:
            maps = KdaMaps.of(packed, k3.kda_num_heads // ranks.tp.size, width, halo).to(device)
        if ranks.cp.size == 1:
            return cls(maps=maps, fla=fla)
        into, back = kda_relayouts(layout, width)
        return cls(
            maps=maps, fla=fla, into=into.to(device), back=back.to(device),
            handover=None if fla else StateHandover.of(layout),
        )  # fmt: skip

    def take(self, x_LH: Tensor) -> Tensor:
        """[L, H] in zigzag order -> [halo + C, H] in the stream's."""
        return x_LH if self.into is None else self.into(x_LH)

    def give_back(self, y_CH: Tensor) -> Tensor:
        """[C, H] -> [L, H]."""
        return y_CH if self.back is None else self.back(y_CH)

    def delta_rule(
        self, q_CNK: Tensor, k_CNK: Tensor, v_CNV: Tensor, f_CNK: Tensor, decay: Decay, beta_CN: Tensor
    ) -> Tensor:
        """The slice's part of the whole stream's delta rule: fp32 [C, N, V].

        Raw q, k and gate input f, sigmoided fp32 beta; sequences start from a zero state.
        """
        if self.fla is not None:
            return fla_gated_delta_rule(
                q_CNK, k_CNK, v_CNV, f_CNK, decay.a_log_N, decay.dt_bias_NK, decay.lower_bound, beta_CN,
                self.fla.cu_seqlens, self.fla.cu_seqlens_cpu, self.fla.context,
            )  # fmt: skip
        g_CNK = kda_gate(f_CNK, decay.a_log_N, decay.dt_bias_NK, decay.lower_bound)
        return delta_rule(q_CNK, k_CNK, v_CNV, g_CNK, beta_CN, self.maps, self.handover)
