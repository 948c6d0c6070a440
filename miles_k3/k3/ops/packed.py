"""Packed sequences: one stream of T tokens cut by cu_seqlens, and its padded [B, L] view.

Shapes: T tokens of the stream, B sequences, L the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

PREFILL_CHUNK = 64  # tokens that the prefill kernel of KDA takes at once


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Index maps of one packed stream, made once a forward and shared by every layer.

    `rows_T`, `cols_T`: sequence and position of each token. `max_len` is a Python int, so nothing waits for a device.
    """

    cu_seqlens: Tensor  # int64 [B+1]
    rows_T: Tensor
    cols_T: Tensor
    num_seqs: int
    max_len: int

    @classmethod
    def from_lengths(cls, lengths: list[int] | tuple[int, ...], device: torch.device | str = "cpu") -> Packed:
        """From Python lengths (each >= 1); no device synchronisation."""
        lens = torch.tensor(lengths, dtype=torch.int64)
        cu = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lens, 0, out=cu[1:])
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lens)
        cols = torch.arange(int(cu[-1])) - cu[:-1].repeat_interleave(lens)
        cu, rows, cols = (x.to(device, non_blocking=True) for x in (cu, rows, cols))
        return cls(cu, rows, cols, len(lengths), max(lengths, default=0))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> Packed:
        """From cu_seqlens [B+1] of any integer type; reads it on the host once."""
        cu = cu_seqlens.tolist()
        return cls.from_lengths([b - a for a, b in pairwise(cu)], cu_seqlens.device)

    @property
    def num_tokens(self) -> int:
        return self.rows_T.shape[0]

    @property
    def lengths_B(self) -> Tensor:
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def pad(self, x: Tensor, value: float = 0.0) -> Tensor:
        """[T, ...] -> [B, L, ...], right-padded with `value`."""
        out = x.new_full((self.num_seqs, self.max_len, *x.shape[1:]), value)
        return out.index_put((self.rows_T, self.cols_T), x)

    def unpad(self, x: Tensor) -> Tensor:
        """[B, L, ...] -> [T, ...]."""
        return x[self.rows_T, self.cols_T]

    def sums(self, x_T: Tensor) -> Tensor:
        """Of each sequence: int64 [B] of integers or truth values [T]."""
        return torch.zeros_like(self.cu_seqlens[1:]).index_add_(0, self.rows_T, x_T.long())

    def pieces(self, size: int) -> Tensor:
        """(sequence, piece) of every `size` tokens, the last piece of each shorter: like cu_seqlens, [C, 2]."""
        counts_B = (self.lengths_B + size - 1) // size
        rows_C = torch.repeat_interleave(torch.arange(self.num_seqs), counts_B)
        firsts_B = counts_B.cumsum(0) - counts_B
        return torch.stack([rows_C, torch.arange(len(rows_C)) - firsts_B[rows_C]], dim=1)

    def last_index_B(self) -> Tensor:
        """Stream index of each sequence's last token."""
        return self.cu_seqlens[1:] - 1
