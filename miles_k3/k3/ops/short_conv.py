"""Depthwise causal convolution over the last W tokens with SiLU (spec 2.3), packed.

Shapes: T tokens, B sequences, D channels, W kernel width; weight [D, 1, W], last column for the current token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_k3.k3.ops.packed import Packed


def short_conv_naive(x_TD: Tensor, weight_D1W: Tensor, packed: Packed, window_BWD: Tensor | None = None) -> Tensor:
    """The plain twin: torch's conv1d, one sequence at a time."""
    width, out, cu = weight_D1W.shape[-1], [], packed.cu_seqlens.tolist()
    for i in range(packed.num_seqs):
        x_LD = x_TD[cu[i] : cu[i + 1]].float()
        past = x_LD.new_zeros(width - 1, x_LD.shape[1]) if window_BWD is None else window_BWD[i].float()
        y = F.conv1d(torch.cat([past, x_LD]).t()[None], weight_D1W.float(), groups=x_LD.shape[1])
        out.append(F.silu(y[0].t()))
    return torch.cat(out).to(x_TD.dtype)


def short_conv(x_TD: Tensor, weight_D1W: Tensor, packed: Packed, window_BWD: Tensor | None = None) -> Tensor:
    """Convolve and SiLU a packed stream in fp32; [T, D] in x's dtype.

    `window_BWD` [B, W-1, D]: the raw inputs just before each sequence's first token (chunked prefill); None means
    zeros. A token never sees its neighbour sequence.
    """
    width = weight_D1W.shape[-1]
    x32 = x_TD.float()
    weight_WD = weight_D1W.float().squeeze(1).t()
    y = x32 * weight_WD[-1]
    for back in range(1, width):
        y = y + _shifted(x32, packed, back, window_BWD) * weight_WD[width - 1 - back]
    return F.silu(y).to(x_TD.dtype)


def _shifted(x_TD: Tensor, packed: Packed, back: int, window_BWD: Tensor | None) -> Tensor:
    """The token `back` positions earlier in the same sequence; from the window, or zero, before its start."""
    shifted = F.pad(x_TD, (0, 0, back, 0))[: x_TD.shape[0]]
    inside_T1 = (packed.cols_T >= back).unsqueeze(1)
    if window_BWD is None:
        return torch.where(inside_T1, shifted, 0.0)
    slot_T = (window_BWD.shape[1] + packed.cols_T - back).clamp(max=window_BWD.shape[1] - 1)
    return torch.where(inside_T1, shifted, window_BWD[packed.rows_T, slot_T].float())


def next_window(x_TD: Tensor, packed: Packed, width: int, window_BWD: Tensor | None = None) -> Tensor:
    """The last W-1 raw inputs of each sequence [B, W-1, D], what the next chunk's convolution starts from."""
    want_BW = (
        packed.lengths_B[:, None] - torch.arange(width - 1, 0, -1, device=x_TD.device)[None]
    )  # position in sequence
    index_BW = (packed.cu_seqlens[:-1, None] + want_BW).clamp(min=0)
    taken = x_TD[index_BW]
    inside = (want_BW >= 0).unsqueeze(-1)
    if window_BWD is None:
        return torch.where(inside, taken, 0.0)
    past_BW = (window_BWD.shape[1] + want_BW).clamp(0, window_BWD.shape[1] - 1)
    rows_B1 = torch.arange(packed.num_seqs, device=x_TD.device)[:, None]
    return torch.where(inside, taken, window_BWD[rows_B1, past_BW].to(taken.dtype))


def short_conv_step(x_BD: Tensor, weight_D1W: Tensor, window_BWD: Tensor) -> Tensor:
    """One token a sequence: [B, D]; the caller's window is not changed (see `push_window`)."""
    weight_WD = weight_D1W.float().squeeze(1).t()
    y = x_BD.float() * weight_WD[-1] + (window_BWD.float() * weight_WD[:-1]).sum(1)
    return F.silu(y).to(x_BD.dtype)


def push_window(x_BD: Tensor, window_BWD: Tensor) -> Tensor:
    """The window after one more token."""
    return torch.cat([window_BWD[:, 1:], x_BD.to(window_BWD.dtype)[:, None]], dim=1)
