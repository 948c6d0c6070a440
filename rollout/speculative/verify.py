"""The target's recurrent and attention layers over a few drafted positions of many requests at once.

The positions of a request go one after the other with decode's own operations, so what a layer gives equals decode's
bit for bit; requests go side by side. Checkpoints (states, windows) are read and never written: `replay` moves them on.

Shapes: T positions of the whole verify, B requests, A of them that are still there at a step, N heads, K and V
channels, D convolved channels, W kernel width, Q query channels, C latent, S cached rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.k3.ops.decode import kda_step_, mla_step
from miles_k3.k3.ops.packed import Packed
from miles_k3.rollout.cache.device import put


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifySteps:
    """Index maps of one verify, shared by its layers. Request b feeds its anchor and what was drafted behind it.

    `order_B`: requests, most positions first. `rows[j]`: stream indices of position j of the first so many of them.
    `past[i]`: of each position, the row in [all windows; the stream] that the convolution's weight i multiplies.
    """

    packed: Packed
    lengths: tuple[int, ...]
    order: tuple[int, ...]
    order_B: Tensor
    rows: tuple[Tensor, ...]
    past: tuple[Tensor, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], conv_width: int, device: torch.device | str = "cpu") -> VerifySteps:
        """From the number of positions of each request, 1 (the anchor alone) or more. Raises EngineError."""
        if not lengths or min(lengths) < 1:
            raise EngineError(f"a verify needs one position or more of each request, got {list(lengths)}")
        order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
        firsts = [sum(lengths[:b]) for b in range(len(lengths))]
        target = torch.device(device)
        rows = [[firsts[b] + j for b in order if lengths[b] > j] for j in range(lengths[order[0]])]
        host = Packed.from_lengths(tuple(lengths))
        past = [_past_rows(host, conv_width - 1, back) for back in range(conv_width - 1, 0, -1)]
        return cls(
            packed=Packed.from_lengths(tuple(lengths), device), lengths=tuple(lengths), order=tuple(order),
            order_B=put(order, target), rows=tuple(put(r, target) for r in rows),
            past=tuple(put(p, target) for p in past),
        )  # fmt: skip


def short_conv_verify(x_TD: Tensor, weight_D1W: Tensor, window_BWD: Tensor, steps: VerifySteps) -> Tensor:
    """`short_conv_step_` at every position, from windows [B, W-1, D] that stay as they are: [T, D] in x's dtype.

    Equal bits need a D of whole vectors (64 is enough): torch's SiLU rounds the rest of a tensor in another way, so
    that decode's own numbers would depend on its batch.
    """
    weight_WD = weight_D1W.squeeze(1).t()
    past_RD = torch.cat([window_BWD.flatten(0, 1), x_TD.to(window_BWD.dtype)])
    y = x_TD.float() * weight_WD[-1]
    for rows_T, weight_D in zip(steps.past, weight_WD, strict=False):
        y.addcmul_(past_RD.index_select(0, rows_T).float(), weight_D)
    return F.silu(y, inplace=True).to(x_TD.dtype)


def _past_rows(packed: Packed, taps: int, back: int) -> Tensor:
    """Of each position, where what came `back` positions earlier is: in its request's window, or in the stream."""
    in_stream_T = packed.num_seqs * taps + torch.arange(packed.num_tokens) - back
    in_window_T = (packed.rows_T + 1) * taps + packed.cols_T - back
    return torch.where(packed.cols_T >= back, in_stream_T, in_window_T)


def kda_verify(
    q_TNK: Tensor,
    k_TNK: Tensor,
    v_TNV: Tensor,
    g_TNK: Tensor,
    beta_TN: Tensor,
    state_BNKV: Tensor,
    steps: VerifySteps,
    rows_B: Tensor | None = None,
) -> Tensor:
    """`kda_step_` at every position, from fp32 checkpoints that stay as they are: fp32 [T, N, V].

    `rows_B`: where the checkpoints are among more of them, in the order of `steps.order`; None: row b is request b's.

    On a CPU a request's rows don't depend on what shares its batch. A kernel that keeps the state in registers must
    keep the order: decay, k^T S summed over K in one order for any batch, delta, rank-one update, read.
    """
    state = state_BNKV.index_select(0, steps.order_B if rows_B is None else rows_B)
    out_TNV = torch.empty(v_TNV.shape, dtype=torch.float32, device=v_TNV.device)
    for rows in steps.rows:
        q, k, v, g, beta = (x.index_select(0, rows) for x in (q_TNK, k_TNK, v_TNV, g_TNK, beta_TN))
        out_TNV.index_copy_(0, rows, kda_step_(q, k, v, g, beta, state[: len(rows)]))
    return out_TNV


def verify_biases(contexts: Sequence[int], steps: VerifySteps, page_size: int, device: torch.device) -> list[Tensor]:
    """For `mla_verify`, once for all its layers: 0 where a position may look, -inf elsewhere; fp32 [A, 1, S] a step.

    `contexts`: tokens cached before each request's anchor. S is what decode would gather at that step: whole pages.
    """
    biases = []
    for j, rows in enumerate(steps.rows):
        ends_A = torch.tensor([contexts[b] + j for b in steps.order[: len(rows)]])
        length = -(-(int(ends_A.max()) + 1) // page_size) * page_size
        bias_AS = torch.zeros(len(rows), length).masked_fill_(torch.arange(length) > ends_A[:, None], -torch.inf)
        biases.append(put(bias_AS.unsqueeze(1), device))
    return biases


def mla_verify(
    q_TNQ: Tensor, cache_BSC: Tensor, biases: Sequence[Tensor], w_k_NPC: Tensor, w_v_NVC: Tensor, steps: VerifySteps
) -> Tensor:
    """`mla_step` at every position over cached rows that hold the verify's own as well: [T, N, V] in q's dtype.

    Bit for bit what decode gives to the same requests side by side: a matrix product of few rows rounds by their
    number on a CPU, in decode as here.
    """
    cache_BSC = cache_BSC.index_select(0, steps.order_B)
    out_TNV = q_TNQ.new_empty(*q_TNQ.shape[:2], w_v_NVC.shape[1])
    for rows, bias in zip(steps.rows, biases, strict=True):
        seen = cache_BSC[: len(rows), : bias.shape[-1]]
        out_TNV.index_copy_(0, rows, mla_step(q_TNQ.index_select(0, rows), seen, bias, w_k_NPC, w_v_NVC))
    return out_TNV
