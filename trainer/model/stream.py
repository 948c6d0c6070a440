"""What every layer is told about the packed stream that it computes, and where in it the loss wants numbers.

Shape legend: T tokens of the caller's stream, L tokens of this rank (all of them without context parallelism; padded),
E MoE layers, K chosen experts per token, M predictions that the loss wants, m of them on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.ops.packed import Packed
from miles_k3.trainer.distributed import Ranks
from miles_k3.trainer.model.context import TokenLayout
from miles_k3.trainer.model.kda_context import KdaContext, KdaKernel
from miles_k3.trainer.model.mla_context import MlaContext


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """One micro-batch's tokens on this rank.

    `tokens_L` int64 in zigzag order. `routed_LEK` int16: experts that the engine chose for the tokens between
    sublayers (this rank's part under sequence parallelism), -1 where it chose none; None routes afresh.
    """

    layout: TokenLayout
    tokens_L: Tensor
    packed: Packed
    kda: KdaContext
    mla: MlaContext | None = None
    routed_LEK: Tensor | None = None

    @classmethod
    def of(
        cls, tokens_T: Tensor, lengths: Sequence[int], k3: K3Config, device: torch.device | str = "cpu",
        routed_TEK: Tensor | None = None, *, ranks: Ranks | None = None, kernel: KdaKernel = "torch",
    ) -> Stream:  # fmt: skip
        """From host tensors and the sequences' lengths; the maps are made on the host, so no device is waited for."""
        ranks = Ranks() if ranks is None else ranks
        layout = TokenLayout.of(lengths, ranks)
        routed = None
        if routed_TEK is not None:
            routed = layout.local(routed_TEK, -1)[ranks.sp.part(layout.num_local)].to(device)
        return cls(
            layout=layout,
            tokens_L=layout.local(tokens_T, 0).to(device),
            packed=Packed.from_lengths(layout.lengths, device),
            kda=KdaContext.of(layout, k3, ranks, device, kernel),
            mla=MlaContext.of(layout, device),
            routed_LEK=routed,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """Which predictions of this rank's tokens the last stage must price.

    `rows_m`: this rank's tokens in ascending order, `targets_m` the tokens to predict there; `own`: the part of them
    whose hidden states this rank holds between sublayers, `counts` how many each of the sequence-parallel ranks holds.
    `entropy_gradient`: whether the entropies must carry a gradient.
    """

    rows_m: Tensor
    targets_m: Tensor
    own: slice
    counts: tuple[int, ...]
    temperature: float
    entropy_gradient: bool = False

    @classmethod
    def of(
        cls, layout: TokenLayout, places_M: Tensor, targets_M: Tensor, temperature: float, *,
        device: torch.device | str = "cpu", ranks: Ranks | None = None, entropy_gradient: bool = False,
    ) -> Wanted:  # fmt: skip
        """From host tensors: places in the caller's stream, ascending."""
        ranks = Ranks() if ranks is None else ranks
        home_M = layout.home_T[places_M]
        mine = (home_M // layout.num_local == ranks.cp.rank).nonzero().squeeze(1)
        mine = mine[torch.argsort(home_M[mine])]
        rows = home_M[mine] % layout.num_local
        counts = torch.bincount(rows // (layout.num_local // ranks.sp.size), minlength=ranks.sp.size).tolist()
        first = sum(counts[: ranks.sp.rank])
        return cls(
            rows_m=rows.to(device), targets_m=targets_M[mine].to(device), temperature=temperature,
            own=slice(first, first + counts[ranks.sp.rank]), counts=tuple(counts), entropy_gradient=entropy_gradient,
        )  # fmt: skip
