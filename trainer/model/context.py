"""Which rank computes which token of a packed stream, and the way between the two orders (spec 4.4).

Outside KDA, tokens lie in zigzag order: each sequence is cut into 2 * cp chunks and rank r holds chunks r and
2 * cp - 1 - r, so that causal attention is the same work on every rank. Around KDA, rank r holds slice r of the whole
stream in natural order, with the few tokens before it that the convolution looks back to. Everything here is computed
on the host from the sequences' lengths, alike on every rank.

Shape legend: T tokens of the caller's stream, P padded ones (a multiple of cp * sp, each sequence one of 2 * cp),
L = P / cp tokens of a rank, D any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from miles_k3.trainer.distributed import Axis, Ranks
from miles_k3.trainer.mcore import all_to_all
from miles_k3.trainer.model.permute import permute


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Places of one packed stream's tokens over the context-parallel ranks; index tensors on the host.

    `lengths`: of the padded sequences, the last one may be padding only; `natural_T`: padded position of each of the
    caller's tokens; `zigzag_P`: padded positions in the order rank after rank; `place_P`: its inverse.
    """

    lengths: tuple[int, ...]
    natural_T: Tensor
    zigzag_P: Tensor
    place_P: Tensor
    cp: Axis

    @classmethod
    def of(cls, lengths: Sequence[int], ranks: Ranks) -> TokenLayout:
        """From the caller's sequence lengths."""
        cp, chunks = ranks.cp, 2 * ranks.cp.size if ranks.cp.size > 1 else 1
        padded = [-(-n // chunks) * chunks for n in lengths]
        tail = -sum(padded) % (chunks * ranks.sp.size)
        padded += [tail] if tail else []
        starts = list(accumulate(padded, initial=0))
        natural = [torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=False)]
        zigzag = torch.cat([_zigzag(starts, cp.size, rank) for rank in range(cp.size)])
        place = torch.empty_like(zigzag)
        place[zigzag] = torch.arange(zigzag.shape[0])
        return cls(tuple(padded), torch.cat(natural), zigzag, place, cp)

    @property
    def num_padded(self) -> int:
        return self.zigzag_P.shape[0]

    @property
    def num_local(self) -> int:
        return self.num_padded // self.cp.size

    @property
    def home_T(self) -> Tensor:
        """Where each of the caller's tokens is in the order rank after rank."""
        return self.place_P[self.natural_T]

    def local(self, x_T: Tensor, blank: int) -> Tensor:
        """This rank's part, in zigzag order, of something that is given for each of the caller's tokens: [L, ...].

        Padding gets `blank`.
        """
        if x_T.shape[0] == self.num_padded == self.num_local:
            return x_T  # neither padding nor other ranks
        whole = x_T.new_full((self.num_padded, *x_T.shape[1:]), blank)
        whole[self.natural_T] = x_T
        return whole[self.zigzag_P[self.cp.part(self.num_padded)]]

    @cached_property
    def cu_seqlens(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))

    def slice_lengths(self, rank: int) -> list[int]:
        """Lengths of the sequences, or of their pieces, in rank's slice of the stream."""
        start, stop = rank * self.num_local, (rank + 1) * self.num_local
        cuts = [max(start, min(stop, edge)) for edge in self.cu_seqlens]
        return [b - a for a, b in pairwise(cuts) if b > a]

    def sequence_at(self, position: int) -> tuple[int, int]:
        """Start and end of the sequence that holds a padded position."""
        return next((a, b) for a, b in pairwise(self.cu_seqlens) if a <= position < b)

    def halo(self, rank: int, width: int) -> int:
        """Tokens before rank's slice that a convolution of `width` looks back to: those of the same sequence."""
        start = rank * self.num_local
        return min(width - 1, start - self.sequence_at(start)[0])


def _zigzag(starts: Sequence[int], cp: int, rank: int) -> Tensor:
    """Padded positions that `rank` holds, in its order."""
    if cp == 1:
        return torch.arange(starts[-1])
    parts = []
    for a, b in pairwise(starts):
        chunk = (b - a) // (2 * cp)
        for i in (rank, 2 * cp - 1 - rank):
            parts.append(torch.arange(a + i * chunk, a + (i + 1) * chunk))
    return torch.cat(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Relayout:
    """Rows sent from one order to another in one all-to-all; the way back sums rows that were sent twice.

    `send_R`: own rows in the order of sending, `send_counts` to each rank; `place_S`: which received row each row of
    the result is. `twice`: positions in `send_R` of rows that another rank needs as its halo too.
    """

    send_R: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    place_S: Tensor
    unplace_S: Tensor
    twice: Tensor
    once: Tensor
    num_rows: int
    cp: Axis

    @classmethod
    def between(cls, have: Sequence[Tensor], want: Sequence[Tensor], own_from: Sequence[int], cp: Axis) -> Relayout:
        """`have[r]`, `want[r]`: padded positions on each rank before and after; `own_from[r]`: rows of `want[r]` before
        it are a halo."""
        mine, rank = have[cp.rank], cp.rank
        place = torch.full((sum(len(h) for h in have),), -1)
        place[mine] = torch.arange(len(mine))
        sends, halo = [], []
        for r, positions in enumerate(want):
            rows = place[positions]
            sends.append(rows[rows >= 0])
            halo.append((torch.arange(len(positions)) < own_from[r])[rows >= 0])
        owner = torch.empty_like(place)
        for r, positions in enumerate(have):
            owner[positions] = r
        from_rank = owner[want[rank]]
        place_S = torch.empty(len(want[rank]), dtype=torch.int64)
        place_S[torch.argsort(from_rank, stable=True)] = torch.arange(len(want[rank]))
        unplace = torch.argsort(place_S)
        doubled = torch.cat(halo)
        return cls(
            torch.cat(sends), [len(s) for s in sends], torch.bincount(from_rank, minlength=cp.size).tolist(), place_S,
            unplace, doubled.nonzero().squeeze(1), (~doubled).nonzero().squeeze(1), len(mine), cp,
        )  # fmt: skip

    def to(self, device: torch.device | str) -> Relayout:
        maps = (self.place_S, self.unplace_S, self.twice, self.once)
        place, unplace, twice, once = (m.to(device) for m in maps)
        return Relayout(
            self.send_R.to(device), self.send_counts, self.receive_counts, place, unplace, twice, once, self.num_rows,
            self.cp,
        )  # fmt: skip

    def __call__(self, x_LD: Tensor) -> Tensor:
        """[rows before, D] -> [rows after, D]."""
        sent = _Send.apply(x_LD, self)
        received = all_to_all(self.cp.group, sent, self.receive_counts, self.send_counts)
        return permute(received, self.place_S, self.unplace_S)

    @property
    def num_sent(self) -> int:
        """Rows that leave this rank."""
        return sum(n for r, n in enumerate(self.send_counts) if r != self.cp.rank)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_LD: Tensor, maps: Relayout):
        ctx.maps = maps
        return x_LD.index_select(0, maps.send_R)

    @staticmethod
    def backward(ctx, grad_RD: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        maps: Relayout = ctx.maps
        grad_LD = grad_RD.new_zeros(maps.num_rows, *grad_RD.shape[1:])
        grad_LD.index_copy_(0, maps.send_R[maps.once], grad_RD[maps.once])
        return grad_LD.index_add_(0, maps.send_R[maps.twice], grad_RD[maps.twice]), None


def kda_relayouts(layout: TokenLayout, width: int) -> tuple[Relayout, Relayout]:
    """(zigzag -> slices with their halo, slices -> zigzag)."""
    cp, each = layout.cp, layout.num_local
    zigzag = layout.zigzag_P.split(each)
    halos = [layout.halo(r, width) for r in range(cp.size)]
    with_halo = [torch.arange(r * each - halos[r], (r + 1) * each) for r in range(cp.size)]
    slices = [torch.arange(r * each, (r + 1) * each) for r in range(cp.size)]
    return (
        Relayout.between(zigzag, with_halo, halos, cp),
        Relayout.between(slices, zigzag, [0] * cp.size, cp),
    )
