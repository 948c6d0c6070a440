"""Multi-head latent attention without rotation (spec 2.4): expanded over packed sequences, absorbed over a cache.

Shapes: T tokens, B sequences, L queries, S cached tokens, N heads, Q = nope + extra, C latent, V value channels.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_k3.k3.ops.packed import Packed


def mla_expanded(q_TNQ: Tensor, k_TNQ: Tensor, v_TNV: Tensor, packed: Packed) -> Tensor:
    """Causal attention inside each packed sequence; scale Q^-0.5; [T, N, V].

    Padding sits behind every real token, so the causal mask alone keeps it out.
    """
    q, k, v = (packed.pad(x).transpose(1, 2) for x in (q_TNQ, k_TNQ, v_TNV))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=q_TNQ.shape[-1] ** -0.5)
    return packed.unpad(out.transpose(1, 2))


def mla_chunk(q_TNQ: Tensor, k_BSNQ: Tensor, v_BSNV: Tensor, visible_B1LS: Tensor, packed: Packed) -> Tensor:
    """Attention of each packed sequence's tokens over its own S keys: [T, N, V].

    `visible_B1LS` bool: which keys the l-th query of each sequence may see, at least one each, padding included.
    """
    q, k, v = packed.pad(q_TNQ).transpose(1, 2), k_BSNQ.transpose(1, 2), v_BSNV.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_B1LS, scale=q_TNQ.shape[-1] ** -0.5)
    return packed.unpad(out.transpose(1, 2))


def mla_expanded_naive(q_TNQ: Tensor, k_TNQ: Tensor, v_TNV: Tensor, packed: Packed) -> Tensor:
    """The plain twin: explicit scores in fp32, one sequence at a time."""
    cu, out = packed.cu_seqlens.tolist(), []
    for a, b in pairwise(cu):
        q, k, v = (x[a:b].float().transpose(0, 1) for x in (q_TNQ, k_TNQ, v_TNV))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        future = torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).triu(1)
        out.append((scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out).to(q_TNQ.dtype)


def split_kv_b(kv_b_weight: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """kv_b [N*(nope+V), C] -> W_k [N, nope, C], W_v [N, V, C]: keys then values within each head."""
    per_head = kv_b_weight.unflatten(0, (heads, -1))
    return per_head[:, :nope], per_head[:, nope:]


def mla_absorbed(q_BLNQ: Tensor, cache_BSD: Tensor, visible_BLS: Tensor, w_k_NPC: Tensor, w_v_NVC: Tensor) -> Tensor:
    """Attention straight over cached [normalised latent | extra key] rows: [B, L, N, V] in q's dtype.

    `visible_BLS` bool: which cached tokens each query may see; rows that see nothing give zeros, and what lies in
    invisible cache rows, NaN included, never reaches the result.
    """
    latent_dim, nope = w_k_NPC.shape[-1], w_k_NPC.shape[1]
    q_latent = torch.einsum("blnp,npc->blnc", q_BLNQ[..., :nope], w_k_NPC)
    q_full = torch.cat([q_latent, q_BLNQ[..., nope:]], dim=-1)
    cache_BSD = torch.where(visible_BLS.any(1).unsqueeze(-1), cache_BSD, 0.0)
    scores = torch.einsum("blnd,bsd->bnls", q_full.float(), cache_BSD.float()) * q_BLNQ.shape[-1] ** -0.5
    hidden = ~visible_BLS.unsqueeze(1)
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    p = torch.where(hidden, 0.0, p)
    read_BLNC = torch.einsum("bnls,bsc->blnc", p, cache_BSD[..., :latent_dim].float()).to(q_BLNQ.dtype)
    return torch.einsum("blnc,nvc->blnv", read_BLNC, w_v_NVC)
