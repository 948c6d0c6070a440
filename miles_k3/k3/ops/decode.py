"""One token a sequence: the forms that an engine runs at every step. They change caches in place; inference only.

Each has its plain twin in the file of its formula (`kda_step`, `short_conv_step` and `push_window`, `mla_absorbed`).
Shapes: B sequences, N heads, K and V channels, D convolved channels, W kernel width, Q query channels, C latent,
S cached rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_k3.k3.ops.norm import L2_EPS


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.norm.rms_norm` without its copies where x is fp32."""
    scale = torch.linalg.vecdot(x, x) if x.dtype == torch.float32 else x.float().square().sum(-1)
    scale = scale.div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
    return (x * scale).to(x.dtype).mul_(weight)


def kda_step_(
    q_BNK: Tensor, k_BNK: Tensor, v_BNV: Tensor, g_BNK: Tensor, beta_BN: Tensor, state_BNKV: Tensor
) -> Tensor:
    """Advance `state_BNKV` (fp32) by one token in place and read it: fp32 [B, N, V]."""
    q = _l2(q_BNK) * q_BNK.shape[-1] ** -0.5
    kda_advance_(k_BNK, v_BNV, g_BNK, beta_BN, state_BNKV)
    return (q.unsqueeze(-1) * state_BNKV).sum(-2)


def kda_advance_(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    """`kda_step_` without the read; any leading dimensions. What replays a token must be the same operations."""
    k = _l2(k).unsqueeze(-1)
    state.mul_(g.exp().unsqueeze(-1))
    seen = (k * state).sum(-2)
    u = (v.float() - seen).mul_(beta.unsqueeze(-1))
    state.addcmul_(k, u.unsqueeze(-2))


def _l2(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.linalg.vecdot(x, x).add_(L2_EPS).rsqrt_().unsqueeze(-1)


def short_conv_step_(x_BD: Tensor, weight_D1W: Tensor, window_BWD: Tensor) -> Tensor:
    """Convolve and SiLU one token [B, D] in fp32, then push it into `window_BWD` [B, W-1, D] in place: [B, D] in x's
    dtype.
    """
    weight_WD = weight_D1W.squeeze(1).t()
    width = weight_WD.shape[0]
    y = x_BD.float() * weight_WD[-1]
    for i in range(width - 1):
        y.addcmul_(window_BWD[:, i].float(), weight_WD[i])
    for i in range(width - 2):
        window_BWD[:, i].copy_(window_BWD[:, i + 1])
    window_BWD[:, -1].copy_(x_BD)
    return F.silu(y, inplace=True).to(x_BD.dtype)


def mla_step(q_BNQ: Tensor, cache_BSC: Tensor, bias_B1S: Tensor, w_k_NPC: Tensor, w_v_NVC: Tensor) -> Tensor:
    """Absorbed attention of one query a sequence over cached [normalised latent | extra key] rows: [B, N, V].

    `bias_B1S` fp32 is 0 where the query may look and -inf elsewhere. Rows it may not look at must be finite.
    """
    nope, latent = w_k_NPC.shape[1], w_k_NPC.shape[2]
    q_latent_NBC = torch.bmm(q_BNQ[..., :nope].transpose(0, 1), w_k_NPC)
    q_full = torch.cat([q_latent_NBC.transpose(0, 1), q_BNQ[..., nope:]], dim=-1)
    # In fp32 like the trainer's: scores rounded to bf16 triple the error of the whole step.
    scores = torch.bmm(q_full.float(), cache_BSC.float().transpose(1, 2))
    scores = scores.mul_(q_BNQ.shape[-1] ** -0.5).add_(bias_B1S)
    read_BNC = torch.bmm(scores.softmax(-1).to(cache_BSC.dtype), cache_BSC[..., :latent])
    return torch.bmm(read_BNC.transpose(0, 1), w_v_NVC.transpose(1, 2)).transpose(0, 1)


def situ_(hidden_2F: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`ops.situ.situ` of a fused [..., 2F] gate/up projection, which is overwritten: [..., F] in its dtype."""
    h = hidden_2F.float()
    gate, up = h.chunk(2, dim=-1)
    out = gate.sigmoid()
    gate.mul_(1.0 / beta)
    up.mul_(1.0 / linear_beta)
    h.tanh_()
    return out.mul_(gate).mul_(up).mul_(beta * linear_beta).to(hidden_2F.dtype)
