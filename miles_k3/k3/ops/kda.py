"""Kimi Delta Attention: a gated delta rule with per-channel decay (spec 2.3), packed.

Shapes: T tokens, B sequences, N heads, K key channels, V value channels; state [B, N, K, V] fp32.
Every form takes raw q and k (after convolution and SiLU), the log decay `g` and a sigmoided `beta`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.k3.ops.norm import l2_norm
from miles_k3.k3.ops.packed import Packed

# Within a chunk the decays are factored around its middle. g >= -5, so 16 tokens stay within exp(+-40) and even the
# masked upper triangle within exp(75): finite in fp32, forward and backward, without a sub-chunk loop.
CHUNK = 16


def kda_gate(f_TNK: Tensor, a_log_N: Tensor, dt_bias_NK: Tensor, lower_bound: float) -> Tensor:
    """Log decay, fp32 in (lower_bound, 0): bound * sigmoid(exp(A_log) * (f + dt_bias))."""
    rate_N1 = a_log_N.float().exp().unsqueeze(-1)
    return lower_bound * torch.sigmoid(rate_N1 * (f_TNK.float() + dt_bias_NK.float()))


def kda_step(
    q_BNK: Tensor, k_BNK: Tensor, v_BNV: Tensor, g_BNK: Tensor, beta_BN: Tensor, state_BNKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token a sequence: (output fp32 [B, N, V], new state). Decay first, then the delta, then the read."""
    q = l2_norm(q_BNK) * q_BNK.shape[-1] ** -0.5
    k = l2_norm(k_BNK)
    state = state_BNKV * g_BNK.float().exp().unsqueeze(-1)
    seen_BNV = torch.matmul(k.unsqueeze(-2), state).squeeze(-2)
    u_BNV = beta_BN.float().unsqueeze(-1) * (v_BNV.float() - seen_BNV)
    state = state + k.unsqueeze(-1) * u_BNV.unsqueeze(-2)
    return torch.matmul(q.unsqueeze(-2), state).squeeze(-2), state


def kda_recurrent(q_TNK: Tensor, k_TNK: Tensor, v_TNV: Tensor, g_TNK: Tensor, beta_TN: Tensor, packed: Packed,
                  state_BNKV: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The plain twin: token by token, sequence by sequence. (output fp32 [T, N, V], final state)."""
    cu, outs, states = packed.cu_seqlens.tolist(), [], []
    for b in range(packed.num_seqs):
        state = zero_state(1, q_TNK, v_TNV) if state_BNKV is None else state_BNKV[b : b + 1].float()
        for t in range(cu[b], cu[b + 1]):
            at = slice(t, t + 1)
            out, state = kda_step(q_TNK[at], k_TNK[at], v_TNV[at], g_TNK[at], beta_TN[at], state)
            outs.append(out)
        states.append(state)
    return torch.cat(outs), torch.cat(states)


def zero_state(batch: int, q_TNK: Tensor, v_TNV: Tensor) -> Tensor:
    """S = 0, fp32 [B, N, K, V]."""
    return torch.zeros(batch, q_TNK.shape[1], q_TNK.shape[2], v_TNV.shape[2], device=q_TNK.device)


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Where each token goes when sequences are cut into chunks; made once a forward, shared by its layers.

    Chunks are ordered by their place in the sequence, longest sequences first, so that the chunks of scan step c are
    one contiguous slice and belong to the first `active[c]` sequences of `order_B`.
    """

    slot_T: Tensor  # chunk * CHUNK + offset of each token
    order_B: Tensor  # sequences, longest first
    unorder_B: Tensor
    active: list[int]  # sequences still running at each scan step

    @classmethod
    def of(cls, packed: Packed) -> Chunks:
        device = packed.cu_seqlens.device
        per_seq_B = (packed.lengths_B + CHUNK - 1) // CHUNK
        order_B = torch.argsort(per_seq_B, descending=True, stable=True)
        rank_B = torch.empty_like(order_B)
        rank_B[order_B] = torch.arange(packed.num_seqs, device=device)
        steps = -(-packed.max_len // CHUNK)
        active_C = (per_seq_B[None] > torch.arange(steps, device=device)[:, None]).sum(1)
        first_C = torch.cumsum(active_C, 0) - active_C
        place_T = packed.cols_T // CHUNK
        slot_T = (first_C[place_T] + rank_B[packed.rows_T]) * CHUNK + packed.cols_T % CHUNK
        return cls(slot_T, order_B, rank_B, active_C.tolist())

    def to(self, device: torch.device) -> Chunks:
        """The same maps for tensors on `device`: made on the host, they cost no synchronisation."""
        slot_T, order_B, unorder_B = (
            x.to(device, non_blocking=True) for x in (self.slot_T, self.order_B, self.unorder_B)
        )
        return Chunks(slot_T, order_B, unorder_B, self.active)

    def scatter(self, x: Tensor) -> Tensor:
        """[T, N, ...] -> [M, N, CHUNK, ...], zeros at the padded ends."""
        out = x.new_zeros((sum(self.active) * CHUNK, *x.shape[1:]))
        out = out.index_copy(0, self.slot_T, x)
        return out.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        """The inverse: [M, N, CHUNK, V] -> [T, N, V]."""
        return x.transpose(1, 2).flatten(0, 1)[self.slot_T]


def kda_chunk(q_TNK: Tensor, k_TNK: Tensor, v_TNV: Tensor, g_TNK: Tensor, beta_TN: Tensor, packed: Packed,
              state_BNKV: Tensor | None = None, chunks: Chunks | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Chunk-parallel form in torch, differentiable: same results as `kda_recurrent` up to fp32 rounding.

    Inside a chunk (I + A) U = beta (V - (K e^G) S0) with A[t,j] = beta_t sum_d k_t k_j e^(G_t - G_j), j < t, is solved
    for the deltas U; only the state crosses chunks. Padded slots have k = beta = g = 0 and change nothing.
    """
    chunks = Chunks.of(packed) if chunks is None else chunks
    q, k = (chunks.scatter(x) for x in (l2_norm(q_TNK) * q_TNK.shape[-1] ** -0.5, l2_norm(k_TNK)))
    v, cum = chunks.scatter(v_TNV.float()), chunks.scatter(g_TNK.float()).cumsum(2)
    beta = chunks.scatter(beta_TN.float().unsqueeze(-1))
    middle = cum[:, :, CHUNK // 2 - 1 : CHUNK // 2]
    late, early = (cum - middle).exp(), (middle - cum).exp()
    k_early_t = (k * early).transpose(-1, -2)
    a = (beta * (k * late) @ k_early_t).tril(-1)
    p = ((q * late) @ k_early_t).tril()
    decay = cum.exp()
    eye = torch.eye(CHUNK, device=a.device)
    rhs = torch.cat([beta * v, beta * k * decay], dim=-1)
    solved = torch.linalg.solve_triangular(a + eye, rhs, upper=False, unitriangular=True)
    u0, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    end = cum[:, :, -1:]
    k_end_t = (k * (end - cum).exp()).transpose(-1, -2)
    state = zero_state(packed.num_seqs, q_TNK, v_TNV) if state_BNKV is None else state_BNKV.float()[chunks.order_B]
    out, state = _scan(q * decay, p, u0, w, k_end_t, end.exp().transpose(-1, -2), state, chunks.active)
    return chunks.gather(out), state[chunks.unorder_B]


def _scan(q: Tensor, p: Tensor, u0: Tensor, w: Tensor, k_end_t: Tensor, end_decay: Tensor, state: Tensor,
          active: list[int]) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Carry the state over the chunks; sequences leave from the back as they end."""
    outs, ended = [], []
    parts = zip(*(x.split(active) for x in (q, p, u0, w, k_end_t, end_decay)), strict=True)
    for count, (q_c, p_c, u0_c, w_c, k_c, d_c) in zip(active, parts, strict=True):
        if count < state.shape[0]:
            ended.append(state[count:])
            state = state[:count]
        u = u0_c - w_c @ state
        outs.append(q_c @ state + p_c @ u)
        state = d_c * state + k_c @ u
    return torch.cat(outs), torch.cat([state, *reversed(ended)])
