"""The two attention layers against the caches: single tokens (decode) and chunks of prompts (packed), in one stream.

Shapes: T tokens (of the whole step, or of the part that a method is given), B requests, H hidden, N heads, K and V
channels, D three times the KDA width, C cached latent, Q query channels, S context rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.ops.decode import kda_step_, mla_step, rms_norm, short_conv_step_
from miles_k3.k3.ops.kda import kda_chunk, kda_gate
from miles_k3.k3.ops.mla import mla_chunk, mla_expanded
from miles_k3.k3.ops.short_conv import next_window, short_conv
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.embedded.batch import Bucket, ChunkBatch, DecodeBatch, StepBatch, VerifyBatch
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.weights import KdaWeights, MlaWeights
from miles_k3.rollout.speculative.verify import kda_verify, mla_verify, short_conv_verify

OUT = "self_attn.o_proj"


class KdaLayer:
    """`index` counts the KDA layers only: it is this layer's place in the state pool."""

    def __init__(self, config: K3Config, weights: KdaWeights, layer: int, index: int) -> None:
        self.w, self.layer, self.index = weights, layer, index
        self.heads, self.head_dim = config.kda_num_heads, config.kda_head_dim
        self.eps, self.bound = config.rms_norm_eps, config.gate_lower_bound

    def __call__(self, x_TH: Tensor, batch: StepBatch, adapters: StepAdapters) -> Tensor:
        w = self.w
        raw_TD = x_TH.new_empty(x_TH.shape[0], w.conv_D1W.shape[0])
        for part_TD, weight_t in zip(raw_TD.chunk(3, dim=-1), w.qkv_t, strict=True):
            torch.mm(x_TH, weight_t, out=part_TD)
        f_TNK = ((x_TH @ w.f_a_t) @ w.f_b_t).view(-1, self.heads, self.head_dim)
        beta_TN = (x_TH @ w.beta_t).float().sigmoid_()
        parts, n = [], batch.num_decodes
        if batch.decode is not None and batch.pool is not None:
            parts.append(self._step(raw_TD[:n], f_TNK[:n], beta_TN[:n], batch.decode, batch.pool))
        if batch.verify is not None and batch.pool is not None:
            parts.append(self._verify(raw_TD[:n], f_TNK[:n], beta_TN[:n], batch.verify, batch.pool))
        if batch.chunks is not None:
            parts.append(self._chunk(raw_TD[n:], f_TNK[n:], beta_TN[n:], batch.chunks, batch.pool))
        o_TNV = joined(parts)
        gate_TD = (x_TH @ w.gate_t).float().sigmoid_()
        o_TD = rms_norm(o_TNV, w.o_norm_V, self.eps).view(gate_TD.shape).mul_(gate_TD).to(x_TH.dtype)
        return adapters.add_(o_TD @ w.out_t, o_TD, self.layer, OUT)

    def _split(self, y_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = y_TD.view(-1, 3, self.heads, self.head_dim).unbind(1)
        return q, k, v

    def _step(self, raw_TD: Tensor, f_TNK: Tensor, beta_TN: Tensor, batch: DecodeBatch, pool: BlockPool) -> Tensor:
        """One token a request. States of consecutive rows change in place; others are gathered and put back."""
        at, states, windows = batch.states, pool.states[self.index], pool.windows[self.index]
        if at.span:
            state, window = states[at.span], windows[at.span]
        else:
            state, window = states.index_select(0, at.rows_B), windows.index_select(0, at.rows_B)
        q, k, v = self._split(short_conv_step_(raw_TD, self.w.conv_D1W, window))
        g = torch.addcmul(self.w.rate_dt_NK, f_TNK.float(), self.w.rate_NK).sigmoid_().mul_(self.bound)
        o_TNV = kda_step_(q, k, v, g, beta_TN, state)
        if not at.span:
            states.index_copy_(0, at.rows_B, state)
            windows.index_copy_(0, at.rows_B, window)
        return o_TNV

    def _verify(self, raw_TD: Tensor, f_TNK: Tensor, beta_TN: Tensor, batch: VerifyBatch, pool: BlockPool) -> Tensor:
        """A few tokens a request. States and windows stay as they are; what moves them is recorded."""
        window = pool.windows[self.index].index_select(0, batch.slots_B)
        q, k, v = self._split(short_conv_verify(raw_TD, self.w.conv_D1W, window, batch.steps))
        g = torch.addcmul(self.w.rate_dt_NK, f_TNK.float(), self.w.rate_NK).sigmoid_().mul_(self.bound)
        batch.replay.record(self.index, raw_TD, k, v, g, beta_TN)
        return kda_verify(q, k, v, g, beta_TN, pool.states[self.index], batch.steps, batch.ordered_B)

    def _chunk(
        self, raw_TD: Tensor, f_TNK: Tensor, beta_TN: Tensor, batch: ChunkBatch, pool: BlockPool | None
    ) -> Tensor:
        """Chunks of prompts, from the cached state where there is context."""
        state, window = self._carried(batch, pool)
        q, k, v = self._split(short_conv(raw_TD, self.w.conv_D1W, batch.packed, window))
        g = kda_gate(f_TNK, self.w.a_log_N, self.w.dt_bias_NK, self.bound)
        o_TNV, state = kda_chunk(q, k, v, g, beta_TN, batch.packed, state, batch.chunks)
        self._carry(raw_TD, state, window, batch, pool)
        return o_TNV

    def _carried(self, batch: ChunkBatch, pool: BlockPool | None) -> tuple[Tensor | None, Tensor | None]:
        """States and windows that chunks go on from; None where all begin their sequence."""
        if pool is None or batch.states is None or not batch.has_context:
            return None, None
        rows_B = batch.states.rows_B
        return pool.states[self.index].index_select(0, rows_B), pool.windows[self.index].index_select(0, rows_B)

    def _carry(
        self, raw_TD: Tensor, state: Tensor, window: Tensor | None, batch: ChunkBatch, pool: BlockPool | None
    ) -> None:
        """What the next chunks go on from; `window` is what these went on from."""
        if pool is not None and batch.states is not None:
            window = next_window(raw_TD, batch.packed, self.w.conv_D1W.shape[-1], window)
            pool.states[self.index].index_copy_(0, batch.states.rows_B, state)
            pool.windows[self.index].index_copy_(0, batch.states.rows_B, window)


class MlaLayer:
    """`index` counts the MLA layers only: it is this layer's place in the page pool."""

    def __init__(self, config: K3Config, weights: MlaWeights, layer: int, index: int) -> None:
        self.w, self.layer, self.index = weights, layer, index
        self.heads, self.nope = config.num_attention_heads, config.qk_nope_head_dim
        self.latent, self.eps = config.kv_lora_rank, config.mla_latent_norm_eps

    def __call__(self, x_TH: Tensor, batch: StepBatch, adapters: StepAdapters) -> Tensor:
        w = self.w
        q = adapters.add_(x_TH @ w.q_a_t, x_TH, self.layer, "self_attn.q_a_proj")
        q_TNQ = (rms_norm(q, w.q_a_norm, self.eps) @ w.q_b_t).view(x_TH.shape[0], self.heads, -1)
        row_TC = adapters.add_(x_TH @ w.kv_a_t, x_TH, self.layer, "self_attn.kv_a_proj_with_mqa")
        row_TC[:, : self.latent] = rms_norm(row_TC[:, : self.latent], w.kv_a_norm_C, self.eps)
        kv_PZC = None
        if batch.pool is not None and batch.write_T is not None:
            kv_PZC = batch.pool.kv[self.index]
            kv_PZC.flatten(0, 1).index_copy_(0, batch.write_T, row_TC)
        parts, n = [], batch.num_decodes
        if batch.decode is not None and kv_PZC is not None:
            cache_BSC = _gather(kv_PZC, batch.decode.table_BP)
            parts.append(mla_step(q_TNQ[:n], cache_BSC, batch.decode.bias_B1S, w.w_k_NPC, w.w_v_NVC))
        if batch.verify is not None and kv_PZC is not None:
            parts.append(self._verify(q_TNQ[:n], kv_PZC, batch.verify))
        if batch.chunks is not None:
            parts.append(self._chunks(q_TNQ[n:], row_TC[n:], batch.chunks, kv_PZC))
        o_TNV = joined(parts)
        o_TD = o_TNV.flatten(1) * (x_TH @ w.gate_t).sigmoid_()
        return adapters.add_(o_TD @ w.out_t, o_TD, self.layer, OUT)

    def _verify(self, q_TNQ: Tensor, kv_PZC: Tensor, batch: VerifyBatch) -> Tensor:
        cache_BSC = _gather(kv_PZC, batch.table_BP)
        return mla_verify(q_TNQ, cache_BSC, batch.biases, self.w.w_k_NPC, self.w.w_v_NVC, batch.steps)

    def _chunks(self, q_TNQ: Tensor, row_TC: Tensor, batch: ChunkBatch, kv_PZC: Tensor | None) -> Tensor:
        if len(batch.buckets) == 1:
            return self._bucket(q_TNQ, row_TC, batch.buckets[0], kv_PZC)
        out_TNV = q_TNQ.new_empty(*q_TNQ.shape[:2], self.w.w_v_NVC.shape[1])
        for bucket in batch.buckets:
            assert bucket.rows_T is not None  # several buckets share the stream
            q, row = q_TNQ.index_select(0, bucket.rows_T), row_TC.index_select(0, bucket.rows_T)
            out_TNV.index_copy_(0, bucket.rows_T, self._bucket(q, row, bucket, kv_PZC))
        return out_TNV

    def _bucket(self, q_TNQ: Tensor, row_TC: Tensor, bucket: Bucket, kv_PZC: Tensor | None) -> Tensor:
        """Expanded keys and values: of the chunk alone where nothing is cached, else of everything cached so far."""
        context = bucket.context
        if context is None or kv_PZC is None:
            k_TNQ, v_TNV = self._expand(row_TC)
            return mla_expanded(q_TNQ, k_TNQ, v_TNV, bucket.packed)
        cache_BSC = torch.where(context.stale_BS1, 0.0, _gather(kv_PZC, context.table_BP))
        k, v = (x.unflatten(0, cache_BSC.shape[:2]) for x in self._expand(cache_BSC.flatten(0, 1)))
        return mla_chunk(q_TNQ, k, v, context.visible_B1LS, bucket.packed)

    def _expand(self, row_TC: Tensor) -> tuple[Tensor, Tensor]:
        latent, extra = row_TC[:, : self.latent], row_TC[:, self.latent :]
        kv = (latent @ self.w.kv_b_t).view(latent.shape[0], self.heads, -1)
        k = torch.cat([kv[..., : self.nope], extra.unsqueeze(1).expand(-1, self.heads, -1)], dim=-1)
        return k, kv[..., self.nope :]


def _gather(kv_PZC: Tensor, table_BP: Tensor) -> Tensor:
    """[P, page_size, C], [B, P'] -> [B, P' * page_size, C]."""
    picked = kv_PZC.index_select(0, table_BP.flatten())
    return picked.view(table_BP.shape[0], -1, kv_PZC.shape[-1])


def joined(parts: list[Tensor]) -> Tensor:
    """The stream's parts in order, without a copy where there is one only."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
