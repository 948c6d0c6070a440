# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""The routed experts of an inference step in three launches beside the routing: gate/up with SiTU, down, combine.

LoRA is in them: B1(A1 z) and B3(A3 z) enter before SiTU, A2 reads the activation beside the down product, and B2,
which all experts share, comes once a token after the weighted sum (spec 5.4). The plain twin is
`ops.latent_moe.latent_experts`.

Shapes: T tokens, K chosen experts, M = T * K rows sorted by expert, E experts, Z latent, I inner width, R rank,
S adapters of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.expert_lora import front_low
from miles_k3.k3.kernels.expert_tiles import down_kernel, gate_up_kernel
from miles_k3.k3.kernels.grouped_mxfp4 import Shape, forward_shape, uses_assembly
from miles_k3.k3.kernels.launch import check_whole, dependent, dividing_block, power_of_two, wait_for_inputs
from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts, nibble_order
from miles_k3.k3.kernels.tiles import SMALL_ROWS, Routed, dispatch
from miles_k3.k3.ops.lora import ExpertLoraTerm


def fused_experts(
    z_TZ: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    *,
    situ_beta: float,
    situ_linear_beta: float,
    lora: Sequence[ExpertLoraTerm] = (),
    shape: Shape | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts, [T, Z] in z's dtype (bfloat16 or float32).

    w13 [E, 2I, Z] holds w1 (gate) rows then w3 (up) rows; w2 [E, Z, I]; Z and I are multiples of 64. All terms
    have one rank. Nothing waits for the device and no size depends on the routing, so that
    a CUDA graph may hold it. Raises ValueError on inputs with gaps.
    """
    check_whole(z_TZ=z_TZ, weights_TK=weights_TK)
    top_k, out = experts_TK.shape[1], z_TZ.new_empty(z_TZ.shape[0], w2.out_width)
    if not z_TZ.shape[0]:
        return out
    shape = shape or forward_shape(experts_TK.numel(), w13.num_experts)
    routed = dispatch(experts_TK, w13.num_experts, shape.block)
    low_PS2TR, scale_ST = front_low(z_TZ, lora)
    act_MI = _gate_up(nibble_order(z_TZ), routed, w13, shape, (situ_beta, situ_linear_beta), low_PS2TR, lora)
    y_MZ, low_SPMR = _down(act_MI, routed, w2, shape, lora)
    block = power_of_two(w2.out_width, at_most=1024)
    _combine[(triton.cdiv(w2.out_width, block), z_TZ.shape[0])](
        y_MZ, low_SPMR, tuple(t.b2 for t in lora), scale_ST, weights_TK, out, w2.out_width,
        experts_TK.numel(), RANK=low_SPMR.shape[-1], RANK_BLOCK=power_of_two(low_SPMR.shape[-1]),
        SPLITS=low_SPMR.shape[1], TOP_K_BLOCK=power_of_two(top_k), TERMS=len(lora), TOP_K=top_k,
        BLOCK=block, num_warps=4, **dependent(),
    )  # fmt: skip
    return out


def _gate_up(z_TZ: Tensor, routed: Routed, w13: PackedExperts, shape: Shape, betas: tuple[float, float],
             low_PS2TR: Tensor, lora: Sequence[ExpertLoraTerm]) -> Tensor:  # fmt: skip
    """SiTU of both projections, rows sorted by expert, in nibble order for the next product: [M, I]."""
    inner, columns = w13.out_width // 2, z_TZ.shape[1] // 4
    act = z_TZ.new_empty(routed.order_M.shape[0], inner)
    tiles = routed.tiles
    gate_up_kernel[(triton.cdiv(2 * inner, shape.outputs), tiles.expert_G.shape[0])](
        z_TZ, w13.codes_EOC, w13.scale_EOG, act, routed.order_M, tiles.expert_G, tiles.start_G, tiles.rows_G,
        low_PS2TR, tuple(t.b1 for t in lora), tuple(t.b3 for t in lora), z_TZ.shape[0], *betas,
        INNER=inner, COLUMNS=columns, RANK=low_PS2TR.shape[-1],
        RANK_BLOCK=power_of_two(low_PS2TR.shape[-1], at_least=16),
        TERMS=len(lora), SPLITS=low_PS2TR.shape[0], TOP_K=routed.top_k, OUT_BLOCK=shape.outputs,
        COLUMN_BLOCK=dividing_block(columns, shape.columns),
        ROW_BLOCK=shape.rows, MORE_ROWS=shape.more_rows, WIDE=w13.wide, ASSEMBLY=uses_assembly(z_TZ),
        **shape.launch, **dependent(),
    )  # fmt: skip
    return act


def _down(act_MI: Tensor, routed: Routed, w2: PackedExperts, shape: Shape, lora: Sequence[ExpertLoraTerm]
          ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(down product [M, Z], parts of A2 of the activation fp32 [S, splits, M, R]), rows as in [T * K]."""
    num_rows, columns = act_MI.shape[0], act_MI.shape[1] // 4
    rank = lora[0].a2.shape[1] if lora else 1
    # Few rows: A2 must not outlast the down product. Many: it hides behind it, and its parts would cost memory.
    splits = 8 if num_rows <= SMALL_ROWS else 1
    y = act_MI.new_empty(num_rows, w2.out_width)
    low = torch.empty(len(lora), splits, num_rows, rank, device=y.device)
    tiles, blocks = routed.tiles, triton.cdiv(w2.out_width, shape.outputs)
    down_kernel[(blocks + len(lora) * splits, tiles.expert_G.shape[0])](
        act_MI, w2.codes_EOC, w2.scale_EOG, y, routed.order_M, tiles.expert_G, tiles.start_G, tiles.rows_G,
        low, tuple(t.a2 for t in lora), num_rows, OUTPUTS=w2.out_width, COLUMNS=columns, RANK=rank,
        RANK_BLOCK=power_of_two(rank, at_least=16), TERMS=len(lora), SPLITS=splits, OUT_BLOCK=shape.outputs,
        COLUMN_BLOCK=dividing_block(columns, shape.columns), ROW_BLOCK=shape.rows, MORE_ROWS=shape.more_rows,
        WIDE=w2.wide, ASSEMBLY=uses_assembly(act_MI), **shape.launch, **dependent(),
    )  # fmt: skip
    return y, low


@triton.jit
def _combine(y_ptr, low_ptr, b2s, scale_ptr, weight_ptr, out_ptr, width, num_rows, RANK: tl.constexpr,
             RANK_BLOCK: tl.constexpr, SPLITS: tl.constexpr, TOP_K_BLOCK: tl.constexpr, TERMS: tl.constexpr,
             TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """One token's rows times its router weights, in fp32, and B2 of its weighted low rows."""
    wait_for_inputs(PDL)
    token = tl.program_id(1).to(tl.int64)
    z = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weight_ptr + token * TOP_K + k)
        total += weight * tl.load(y_ptr + (token * TOP_K + k) * width + z, mask=z < width, other=0.0).to(tl.float32)
    r = tl.arange(0, RANK_BLOCK)
    for s in tl.static_range(TERMS):
        k, split = tl.arange(0, TOP_K_BLOCK), tl.arange(0, SPLITS)
        weight = tl.load(weight_ptr + token * TOP_K + k, mask=k < TOP_K, other=0.0)
        at = (s * SPLITS + split)[None, :, None] * num_rows + token * TOP_K + k[:, None, None]
        ok = (k < TOP_K)[:, None, None] & (r < RANK)[None, None, :]
        parts = tl.load(low_ptr + at * RANK + r[None, None, :], mask=ok, other=0.0)
        low = tl.sum(tl.sum(parts * weight[:, None, None], 0), 0)
        b2 = tl.load(
            b2s[s] + z[:, None] * RANK + r[None, :], mask=(z < width)[:, None] & (r < RANK)[None, :], other=0.0
        )
        scale = tl.load(scale_ptr + s * (num_rows // TOP_K) + token)
        total += scale * tl.sum(b2.to(tl.float32) * low[None, :], 1)
    tl.store(out_ptr + token * width + z, total.to(out_ptr.dtype.element_ty), mask=z < width)
