# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""LoRA of the routed experts of a decode step: a row of the batch at a time, nothing sorted, nothing asked of the host.

SGLang sorts the rows by adapter and expert into blocks of 64, of which a decode step fills a few in each. Here each row
reads its own factors. All shapes are known at the launch, so that CUDA graphs may hold it. The shared factors are
applied once a token, behind the weighted sum for w2, as in spec 5.4.

Shapes: T tokens, K experts a token, S adapter slots, E experts, Z latent width, I an expert's width, R rank of the
slots, P splits of a sum. Slots of the base and ranks beyond an adapter's own hold zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 128  # above, SGLang's blocks fill up: each row here reads factors that others share there
_SPLITS, _INPUTS, _OUTPUTS = 8, 128, 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertFactors:
    """A layer's slots: a13 [S, 1, 2R, Z], b13 [S, E, 2I, R], a2 [S, E, R, I], b2 [S, 1, Z, R]; the Bs are scaled."""

    a13: Tensor
    b13: Tensor
    a2: Tensor
    b2: Tensor


class RowHooks:
    """What a layer's runner calls before its activation and before its sum; adds to what it is given, in place."""

    def __init__(self, factors: ExpertFactors, slot_T: Tensor) -> None:
        self._factors, self._slot_T = factors, slot_T

    def after_gate_up(self, z_TZ: Tensor, gate_up_TKO: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> None:
        """gate_up += B13_e (A13 z)."""
        a13, b13 = self._factors.a13, self._factors.b13
        (tokens, k, outputs), rank = gate_up_TKO.shape, b13.shape[-1]
        low = z_TZ.new_empty(_SPLITS, tokens, 2 * rank, dtype=torch.float32)
        _shrink[(tokens, _SPLITS)](
            z_TZ, a13, self._slot_T, chosen_TK, low, tokens, 1, WIDTH=a13.shape[-1], RANK=2 * rank,
            RANK_BLOCK=triton.next_power_of_2(2 * rank), EXPERTS=1, SPLITS=_SPLITS, INPUTS=_INPUTS, num_warps=4,
        )  # fmt: skip
        _expand[(tokens * k, triton.cdiv(outputs, _OUTPUTS))](
            gate_up_TKO, b13, self._slot_T, chosen_TK, low, tokens, k, HALF=outputs // 2, RANK=rank,
            RANK_BLOCK=triton.next_power_of_2(rank), EXPERTS=b13.shape[1], SPLITS=_SPLITS, OUTPUTS=_OUTPUTS,
            num_warps=4,
        )  # fmt: skip

    def after_down(self, rows_RI: Tensor, down_TKZ: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> None:
        """The first expert's row of each token += B2 (sum over K of weight * A2_e row); the sum over K comes next."""
        a2, b2 = self._factors.a2, self._factors.b2
        (tokens, k, latent), rank = down_TKZ.shape, b2.shape[-1]
        low = rows_RI.new_empty(_SPLITS, tokens * k, rank, dtype=torch.float32)
        _shrink[(tokens * k, _SPLITS)](
            rows_RI, a2, self._slot_T, chosen_TK, low, tokens * k, k, WIDTH=a2.shape[-1], RANK=rank,
            RANK_BLOCK=triton.next_power_of_2(rank), EXPERTS=a2.shape[1], SPLITS=_SPLITS, INPUTS=_INPUTS, num_warps=4,
        )  # fmt: skip
        _expand_sum[(tokens, triton.cdiv(latent, _OUTPUTS))](
            down_TKZ, b2, self._slot_T, weights_TK, low, tokens * k, K=k, WIDTH=latent, RANK=rank,
            RANK_BLOCK=triton.next_power_of_2(rank), SPLITS=_SPLITS, OUTPUTS=_OUTPUTS, num_warps=4,
        )  # fmt: skip


def row_hooks(info: Any, tokens: int) -> RowHooks | None:
    """For SGLang's LoRAInfo of a batch; None where its own hooks must do: many tokens, or factors not as K3's are."""
    factors = ExpertFactors(
        a13=info.gate_up_lora_a_weights, b13=info.gate_up_lora_b_weights, a2=info.down_lora_a_weights,
        b2=info.down_lora_b_weights,
    )  # fmt: skip
    rank = factors.b13.shape[-1]
    as_k3 = factors.a13.shape[1] == factors.b2.shape[1] == 1 and factors.a13.shape[2] == 2 * rank
    whole = factors.b13.shape[2] % (2 * _OUTPUTS) == 0
    return RowHooks(factors, info.token_lora_mapping) if as_k3 and whole and tokens <= MAX_TOKENS else None


@triton.jit
def _shrink(x_ptr, a_ptr, slot_ptr, chosen_ptr, low_ptr, rows, rows_per_token, WIDTH: tl.constexpr,
            RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, EXPERTS: tl.constexpr, SPLITS: tl.constexpr,
            INPUTS: tl.constexpr):  # fmt: skip
    """low [P, rows, R]: a split's part of A x for each row; its factor is that of its token's slot and its expert."""
    row, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + row // rows_per_token).to(tl.int64)
    r, i = tl.arange(0, RANK_BLOCK), tl.arange(0, INPUTS)
    acc = tl.zeros([RANK_BLOCK, INPUTS], tl.float32)
    expert = tl.zeros([], tl.int64)
    if EXPERTS > 1:
        expert = tl.load(chosen_ptr + row).to(tl.int64)
    if (slot >= 0) & (expert >= 0):
        factor = a_ptr + (slot * EXPERTS + expert) * RANK * WIDTH
        for step in range(0, WIDTH, SPLITS * INPUTS):
            at = step + split * INPUTS + i
            x = tl.load(x_ptr + row.to(tl.int64) * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            a_at = factor + r[:, None] * WIDTH + at[None, :]
            a = tl.load(a_at, mask=(r < RANK)[:, None] & (at < WIDTH)[None, :], other=0.0).to(tl.float32)
            acc += a * x[None, :]
    tl.store(low_ptr + (split * rows + row) * RANK + r, tl.sum(acc, 1), mask=r < RANK)


@triton.jit
def _expand(y_ptr, b_ptr, slot_ptr, chosen_ptr, low_ptr, tokens, k, HALF: tl.constexpr, RANK: tl.constexpr,
            RANK_BLOCK: tl.constexpr, EXPERTS: tl.constexpr, SPLITS: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """y += B_e low; the upper half of the outputs takes the upper half of low."""
    row, block = tl.program_id(0), tl.program_id(1)
    token = row // k
    slot, expert = tl.load(slot_ptr + token).to(tl.int64), tl.load(chosen_ptr + row).to(tl.int64)
    if (slot >= 0) & (expert >= 0):
        r, out = tl.arange(0, RANK_BLOCK), block * OUTPUTS + tl.arange(0, OUTPUTS)
        half = (block * OUTPUTS >= HALF).to(tl.int32) * RANK
        low = tl.zeros([RANK_BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            low += tl.load(low_ptr + (split * tokens + token) * 2 * RANK + half + r, mask=r < RANK, other=0.0)
        factor = b_ptr + (slot * EXPERTS + expert) * 2 * HALF * RANK
        b_at = factor + out[:, None] * RANK + r[None, :]
        b = tl.load(b_at, mask=(out < 2 * HALF)[:, None] & (r < RANK)[None, :], other=0.0).to(tl.float32)
        y_at = y_ptr + row.to(tl.int64) * 2 * HALF + out
        y = tl.load(y_at, mask=out < 2 * HALF, other=0.0).to(tl.float32) + tl.sum(b * low[None, :], 1)
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=out < 2 * HALF)


@triton.jit
def _expand_sum(y_ptr, b_ptr, slot_ptr, weight_ptr, low_ptr, rows, K: tl.constexpr, WIDTH: tl.constexpr,
                RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
                OUTPUTS: tl.constexpr):  # fmt: skip
    """The first of a token's K rows of y += B (sum over K of weight * low)."""
    token, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        r, out = tl.arange(0, RANK_BLOCK), block * OUTPUTS + tl.arange(0, OUTPUTS)
        low = tl.zeros([RANK_BLOCK], tl.float32)
        for j in range(K):
            row = token * K + j
            part = tl.zeros([RANK_BLOCK], tl.float32)
            for split in tl.static_range(SPLITS):
                part += tl.load(low_ptr + (split * rows + row) * RANK + r, mask=r < RANK, other=0.0)
            low += part * tl.load(weight_ptr + row).to(tl.float32)
        b_at = b_ptr + slot * WIDTH * RANK + out[:, None] * RANK + r[None, :]
        b = tl.load(b_at, mask=(out < WIDTH)[:, None] & (r < RANK)[None, :], other=0.0).to(tl.float32)
        y_at = y_ptr + token.to(tl.int64) * K * WIDTH + out
        y = tl.load(y_at, mask=out < WIDTH, other=0.0).to(tl.float32) + tl.sum(b * low[None, :], 1)
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=out < WIDTH)
