"""The two attention layers on kernels: one launch reads all weights of an input, LoRA's A included.

Shapes as in `embedded.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.kernels.dense_lora import expand_, low_products
from miles_k3.k3.kernels.kda_decode import KdaDecodeWeights, kda_decode
from miles_k3.k3.kernels.kda_prefill import kda_prefill
from miles_k3.k3.kernels.kda_verify import kda_verify_positions
from miles_k3.k3.kernels.mla_decode import mla_decode
from miles_k3.k3.kernels.packed_conv import packed_conv
from miles_k3.k3.kernels.row_norms import gated_heads, mla_norms_
from miles_k3.k3.kernels.skinny import Product, products_
from miles_k3.k3.ops.kda import kda_chunk, kda_gate
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.embedded.attention import OUT, KdaLayer, MlaLayer, joined
from miles_k3.rollout.embedded.batch import ChunkBatch, StepBatch
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.weights import KdaWeights


def output_(x_TD: Tensor, weight_t: Tensor, adapters: StepAdapters, layer: int, module: str) -> Tensor:
    """x W^T plus each token's delta, in two launches."""
    y_TH = x_TD.new_empty(x_TD.shape[0], weight_t.shape[1])
    factors = adapters.factors(layer, module)
    low_STR, lows = low_products(x_TD, [f.a for f in factors])
    products_(x_TD, [Product(weight_t.t(), y_TH), *lows])
    return add_delta_(y_TH, low_STR, adapters, layer, module)


def add_delta_(y_TO: Tensor, low_STR: Tensor, adapters: StepAdapters, layer: int, module: str) -> Tensor:
    """y += scaling B low of each token's adapter."""
    if adapters.slot_T is None:
        return y_TO
    bs = [f.b for f in adapters.factors(layer, module)]
    return expand_(y_TO, low_STR, adapters.slot_T, bs, adapters.scalings)


class FusedKda(KdaLayer):
    """Decoding tokens in one launch between the projections; chunks through fla in bfloat16 on CUDA."""

    def __init__(self, config: K3Config, weights: KdaWeights, layer: int, index: int) -> None:
        super().__init__(config, weights, layer, index)
        self._decode_weights = KdaDecodeWeights(
            conv_D1W=weights.conv_D1W.contiguous(), rate_N=weights.a_log_N.float().exp(),
            dt_bias_NK=weights.dt_bias_NK, o_norm_V=weights.o_norm_V.float(), eps=self.eps, lower_bound=self.bound,
        )  # fmt: skip
        self._conv_WD = weights.conv_D1W.squeeze(1).t().contiguous()

    def __call__(self, x_TH: Tensor, batch: StepBatch, adapters: StepAdapters) -> Tensor:
        w, num_tokens = self.w, x_TH.shape[0]
        raw_TD, gate_TD, low_TK, beta_TN, f_TD = (
            x_TH.new_empty(num_tokens, width)
            for width in (self._conv_WD.shape[1], *(t.shape[1] for t in (w.gate_t, w.f_a_t, w.beta_t, w.f_b_t)))
        )
        parts = [Product(t.t(), part) for t, part in zip(w.qkv_t, raw_TD.chunk(3, dim=-1), strict=True)]
        small = ((w.gate_t, gate_TD), (w.f_a_t, low_TK), (w.beta_t, beta_TN))
        products_(x_TH, [*parts, *(Product(t.t(), out) for t, out in small)])
        products_(low_TK, [Product(w.f_b_t.t(), f_TD)])
        f_TNK, out, n = f_TD.view(num_tokens, self.heads, -1), [], batch.num_decodes
        if (at := batch.verify_rows) is not None and batch.pool is not None:
            gate_TNV = gate_TD[:n].view(n, self.heads, -1)
            o_TNV = kda_verify_positions(
                raw_TD[:n], f_TNK[:n], beta_TN[:n], gate_TNV, self._decode_weights, batch.pool.states[self.index],
                batch.pool.windows[self.index], at.slots_B, at.cu_B1, at.replay, self.index,
            )  # fmt: skip
            out.append(o_TNV.flatten(1))
        if batch.decode is not None and batch.pool is not None:
            gate_BNV = gate_TD[:n].view(n, self.heads, -1)
            states, windows = batch.pool.states[self.index], batch.pool.windows[self.index]
            rows_B, weights = batch.decode.states.rows_B, self._decode_weights
            o_BNV = kda_decode(raw_TD[:n], f_TNK[:n], beta_TN[:n], gate_BNV, weights, states, windows, rows_B)
            out.append(o_BNV.flatten(1))
        if batch.chunks is not None:
            o_TNV = self._prefill(raw_TD[n:], f_TNK[n:], beta_TN[n:], batch.chunks, batch.pool)
            out.append(gated_heads(o_TNV, gate_TD[n:], w.o_norm_V, self.eps))
        return output_(joined(out), w.out_t, adapters, self.layer, OUT)

    def _prefill(
        self, raw_TD: Tensor, f_TNK: Tensor, beta_TN: Tensor, batch: ChunkBatch, pool: BlockPool | None
    ) -> Tensor:
        state, window = self._carried(batch, pool)
        q, k, v = self._split(packed_conv(raw_TD, self._conv_WD, batch.packed, window))
        w, beta = self.w, beta_TN.float().sigmoid_()
        if q.is_cuda and q.dtype == torch.bfloat16:
            o_TNV, state = kda_prefill(
                q, k, v, f_TNK, beta, w.a_log_N, w.dt_bias_NK, self.bound, batch.packed.cu_seqlens,
                batch.pieces_C2, state,
            )  # fmt: skip
        else:
            g = kda_gate(f_TNK, w.a_log_N, w.dt_bias_NK, self.bound)
            o_TNV, state = kda_chunk(q, k, v, g, beta, batch.packed, state, batch.chunks)
        self._carry(raw_TD, state, window, batch, pool)
        return o_TNV


class FusedMla(MlaLayer):
    """Decoding tokens over pages where they lie; chunks as in the plain layer."""

    def __call__(self, x_TH: Tensor, batch: StepBatch, adapters: StepAdapters) -> Tensor:
        w, num_tokens = self.w, x_TH.shape[0]
        low_TA, row_TC, gate_TD, q_TD = (
            x_TH.new_empty(num_tokens, t.shape[1]) for t in (w.q_a_t, w.kv_a_t, w.gate_t, w.q_b_t)
        )
        products = [Product(t.t(), y) for t, y in ((w.q_a_t, low_TA), (w.kv_a_t, row_TC), (w.gate_t, gate_TD))]
        adapted = []
        for module, y in (("self_attn.q_a_proj", low_TA), ("self_attn.kv_a_proj_with_mqa", row_TC)):
            low_STR, lows = low_products(x_TH, [f.a for f in adapters.factors(self.layer, module)])
            adapted.append((y, low_STR, module))
            products += lows
        products_(x_TH, products)
        for y, low_STR, module in adapted:
            add_delta_(y, low_STR, adapters, self.layer, module)
        kv_PZC = None
        if batch.pool is not None and batch.write_T is not None:
            kv_PZC = batch.pool.kv[self.index]
        mla_norms_(low_TA, w.q_a_norm, row_TC, w.kv_a_norm_C, self.eps, kv_PZC, batch.write_T)
        products_(low_TA, [Product(w.q_b_t.t(), q_TD)])
        q_TNQ, parts, n = q_TD.view(num_tokens, self.heads, -1), [], batch.num_decodes
        if batch.decode is not None and kv_PZC is not None:
            at = batch.decode
            parts.append(mla_decode(q_TNQ[:n], kv_PZC, at.table_BP, at.lengths_B, w.w_k_NPC, w.w_v_NVC))
        if (rows := batch.verify_rows) is not None and kv_PZC is not None:
            parts.append(mla_decode(q_TNQ[:n], kv_PZC, rows.table_TP, rows.seen_T, w.w_k_NPC, w.w_v_NVC))
        if batch.chunks is not None:
            parts.append(self._chunks(q_TNQ[n:], row_TC[n:], batch.chunks, kv_PZC))
        return output_(gated_heads(joined(parts), gate_TD), w.out_t, adapters, self.layer, OUT)
