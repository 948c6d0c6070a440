# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""KDA's short convolution with SiLU over packed chunks of prompts, in one pass. The plain twin is `ops.short_conv`.

Shapes: T tokens, B sequences, D channels, W kernel width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.ops.packed import Packed


def packed_conv(x_TD: Tensor, weight_WD: Tensor, packed: Packed, window_BWD: Tensor | None = None) -> Tensor:
    """[T, D] in x's dtype, sums fp32; `window_BWD` [B, W-1, D]: raw inputs just before each sequence's first token.

    `weight_WD` is contiguous, its last row for the current token.
    """
    num_tokens, channels = x_TD.shape
    out = x_TD.new_empty(num_tokens, channels)
    if num_tokens:
        _conv[(triton.cdiv(channels, 512), triton.cdiv(num_tokens, 8))](
            x_TD, weight_WD, out, packed.rows_T, packed.cols_T, x_TD if window_BWD is None else window_BWD, num_tokens,
            channels, x_TD.stride(0), TAPS=weight_WD.shape[0], HAS_WINDOW=window_BWD is not None, TOKENS=8, BLOCK=512,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _conv(x_ptr, weight_ptr, out_ptr, seq_ptr, pos_ptr, window_ptr, num_tokens, channels, x_stride, TAPS: tl.constexpr,
          HAS_WINDOW: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, inside = token < num_tokens, d < channels
    pos = tl.load(pos_ptr + token, mask=real, other=0)
    seq = tl.load(seq_ptr + token, mask=real, other=0)
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    for back in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + (TAPS - 1 - back) * channels + d, mask=inside, other=0.0)
        own = (real & (pos >= back))[:, None] & inside[None, :]
        x = tl.load(x_ptr + (token - back)[:, None] * x_stride + d[None, :], mask=own, other=0.0).to(tl.float32)
        if HAS_WINDOW and back > 0:
            before = (real & (pos < back))[:, None] & inside[None, :]
            at = (seq * (TAPS - 1) + TAPS - 1 + pos - back)[:, None] * channels + d[None, :]
            x += tl.load(window_ptr + at, mask=before, other=0.0).to(tl.float32)
        acc += x * weight[None, :]
    out_at = out_ptr + token[:, None] * channels + d[None, :]
    tl.store(out_at, (acc * tl.sigmoid(acc)).to(out_ptr.dtype.element_ty), mask=real[:, None] & inside[None, :])
