# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""Which rows of which expert each program of a grouped product works on.

Shapes: T tokens, K chosen experts, M = T * K rows sorted by expert, E experts, G tiles (an upper bound: rows 0 = none).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import dependent, power_of_two, wait_for_inputs

SMALL_ROWS = 4096  # up to here, counting smaller ids for each row is one quick launch and a sort is several


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Each tile is up to `block` consecutive sorted rows of one expert."""

    expert_G: Tensor
    start_G: Tensor
    rows_G: Tensor
    block: int

    @classmethod
    def of(cls, ends_E: Tensor, num_rows: int, block: int) -> Tiles:
        """From the segments' ends, without waiting for the device."""
        num_experts, ends = ends_E.shape[0], ends_E.int()
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        tiles_E = (ends - starts + block - 1) // block
        last_E = tiles_E.cumsum(0, dtype=torch.int32)
        index_G = torch.arange(num_rows // block + min(num_experts, num_rows), device=ends.device, dtype=torch.int32)
        expert_G = torch.searchsorted(last_E, index_G, right=True, out_int32=True).clamp_(max=num_experts - 1)
        start_G = starts[expert_G] + (index_G - last_E[expert_G] + tiles_E[expert_G]) * block
        rows_G = (ends[expert_G] - start_G).clamp(0, block)
        return cls(expert_G, start_G, rows_G, block)


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """Rows sorted by expert, with their tiles: `order_M` is the place in [T * K] of each sorted row."""

    order_M: Tensor
    tiles: Tiles
    top_k: int


def dispatch(experts_TK: Tensor, num_experts: int, block: int) -> Routed:
    """Sort the chosen experts and cut tiles: one launch where rows are few, torch's sort elsewhere.

    The plain twin is `ops.latent_moe.Dispatch` with `Tiles.of`.
    """
    num_rows, top_k = experts_TK.numel(), experts_TK.shape[1]
    flat = experts_TK.reshape(-1)
    if num_rows > SMALL_ROWS:
        order = torch.argsort(flat, stable=True)
        ends = torch.searchsorted(flat[order], torch.arange(num_experts, device=flat.device), right=True)
        return Routed(order.int(), Tiles.of(ends, num_rows, block), top_k)
    order, expert, start, rows = torch.empty(4, num_rows, dtype=torch.int32, device=flat.device)
    per_program = 16
    _dispatch[(triton.cdiv(num_rows, per_program),)](
        flat, order, expert, start, rows, num_rows, block, PER_PROGRAM=per_program,
        BLOCK=power_of_two(num_rows, at_least=16, at_most=256), **dependent(),
    )  # fmt: skip
    return Routed(order, Tiles(expert, start, rows, block), top_k)


@triton.jit
def _dispatch(id_ptr, order_ptr, expert_ptr, start_ptr, rows_ptr, num_rows, block, PER_PROGRAM: tl.constexpr,
              BLOCK: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """The sorted place of a row is the number of smaller ids, plus earlier rows of its own; a tile starts there where
    a multiple of `block` of its expert's rows lie before it."""
    wait_for_inputs(PDL)
    i = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    own = tl.load(id_ptr + i, mask=i < num_rows, other=-1).to(tl.int32)
    smaller = tl.zeros([PER_PROGRAM], tl.int32)
    before = tl.zeros([PER_PROGRAM], tl.int32)
    same = tl.zeros([PER_PROGRAM], tl.int32)
    first = 0
    while first < num_rows:  # a range would not take a run-time bound in Triton's interpreter
        j = first + tl.arange(0, BLOCK)
        other = tl.load(id_ptr + j, mask=j < num_rows, other=1 << 30).to(tl.int32)
        equal = other[None, :] == own[:, None]
        smaller += tl.sum((other[None, :] < own[:, None]).to(tl.int32), 1)
        before += tl.sum((equal & (j[None, :] < i[:, None])).to(tl.int32), 1)
        same += tl.sum(equal.to(tl.int32), 1)
        first += BLOCK
    place = smaller + before
    tl.store(order_ptr + place, i, mask=i < num_rows)
    tl.store(expert_ptr + place, own, mask=i < num_rows)
    tl.store(start_ptr + place, place, mask=i < num_rows)
    left = tl.minimum(same - before, block)
    tl.store(rows_ptr + place, tl.where(before % block == 0, left, 0), mask=i < num_rows)
