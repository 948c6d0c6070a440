"""K3's forward on the functions of `miles_k3.k3.ops`, packed: what a trainer or an engine computes, without either.

`OpsK3` uses the trainer's forms, `StepK3` the plain twins, `DecodeK3` an engine's, one token at a time. All keep
NaiveK3's layer structure and interface, so every check runs on all four. Each op is an attribute: a mutant replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.ops import attn_res, decode, kda, latent_moe, lora, mla, mxfp4, norm, short_conv, situ
from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.ops.padded_experts import PaddedDispatch, padded_experts
from miles_k3.k3.ops.residual_bank import ResidualBank
from miles_k3.k3.params import attn_prefix, expert_prefix, mlp_prefix, moe_prefix


class OpsK3(NaiveK3):
    """The fast forms. `x` is [T, H] of a packed stream, or [B, T, H], which is B sequences of equal length."""

    op_norm = staticmethod(norm.rms_norm)
    op_gate = staticmethod(kda.kda_gate)
    op_kda = staticmethod(kda.kda_chunk)
    op_conv = staticmethod(short_conv.short_conv)
    op_attn_res = staticmethod(attn_res.attn_res)
    op_situ = staticmethod(situ.situ)
    op_route = staticmethod(latent_moe.route)
    op_experts = staticmethod(latent_moe.latent_experts)
    op_dequantize = staticmethod(mxfp4.dequantize)
    op_split_kv_b = staticmethod(mla.split_kv_b)
    packed: Packed | None = None

    def packed_logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """One packed forward of all sequences: logits [T, vocab] of each."""
        self.packed = Packed.from_lengths([len(s) for s in sequences])
        try:
            logits = self(torch.tensor([t for s in sequences for t in s]))
        finally:
            self.packed = None
        return list(logits.split([len(s) for s in sequences]))

    def flat(self, x: Tensor) -> tuple[Packed, Tensor]:
        if x.dim() == 2:
            return self.packed or Packed.from_lengths([x.shape[0]]), x
        return Packed.from_lengths([x.shape[1]] * x.shape[0]), x.flatten(0, 1)

    # --- pieces -------------------------------------------------------------------------------------------------
    def linear(self, x: Tensor, module: str) -> Tensor:
        a = self.adapter.get(module + ".lora_A.weight")
        b = self.adapter.get(module + ".lora_B.weight")
        terms = [] if a is None or b is None else [lora.LoraTerm(a.float(), b.float(), self.scaling)]
        return lora.linear_lora(x, self.weight(module + ".weight"), terms)

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return self.op_norm(x, self.weight(name), eps)

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.op_situ(gate, up, self.config.situ_beta, self.config.situ_linear_beta)

    def attn_res(self, prefix: Tensor, bank: list[Tensor], name: str) -> Tensor:
        weights = self.weight(name + "_norm.weight"), self.weight(name + "_proj.weight")
        rows = [r.reshape(-1, r.shape[-1]) for r in (*bank, prefix)]
        return self.op_attn_res(rows[-1], rows[:-1], *weights).view(prefix.shape)

    # --- attention ----------------------------------------------------------------------------------------------
    def conv_silu(self, x: Tensor, name: str) -> Tensor:
        packed, flat = self.flat(x)
        return self.op_conv(flat, self.weight(name), packed).view(x.shape)

    def kda(self, x: Tensor, i: int) -> Tensor:
        c, p = self.config, attn_prefix(i)
        heads = (c.kda_num_heads, c.kda_head_dim)
        packed, flat = self.flat(x)
        q, k, v = (
            self.conv_silu(self.linear(x, f"{p}{n}_proj"), f"{p}{n}_conv1d.weight").reshape(-1, *heads) for n in "qkv"
        )
        f = self.linear(self.linear(flat, p + "f_a_proj"), p + "f_b_proj").unflatten(-1, heads)
        a_log = self.weight(p + "A_log")[: c.kda_num_heads]
        g = self.op_gate(f, a_log, self.weight(p + "dt_bias").view(heads), c.gate_lower_bound)
        o, _ = self.op_kda(q, k, v, g, self.linear(flat, p + "b_proj").sigmoid(), packed)
        o = self.norm(o, p + "o_norm.weight", c.rms_norm_eps).flatten(-2)
        return self.linear(o * self.linear(flat, p + "g_proj").sigmoid(), p + "o_proj").view(x.shape)

    def mla(self, x: Tensor, i: int) -> Tensor:
        c, p, eps = self.config, attn_prefix(i), self.config.mla_latent_norm_eps
        packed, flat = self.flat(x)
        q = self.norm(self.linear(flat, p + "q_a_proj"), p + "q_a_layernorm.weight", eps)
        q = self.linear(q, p + "q_b_proj").unflatten(-1, (c.num_attention_heads, -1))
        latent, extra = self.linear(flat, p + "kv_a_proj_with_mqa").split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        latent = self.norm(latent, p + "kv_a_layernorm.weight", eps)
        w_k, w_v = self.op_split_kv_b(self.weight(p + "kv_b_proj.weight"), c.num_attention_heads, c.qk_nope_head_dim)
        o = self.attention(q, latent, extra, w_k, w_v, packed).flatten(-2)
        return self.linear(o * self.linear(flat, p + "g_proj").sigmoid(), p + "o_proj").view(x.shape)

    def attention(self, q: Tensor, latent: Tensor, extra: Tensor, w_k: Tensor, w_v: Tensor, packed: Packed) -> Tensor:
        k, v = (torch.einsum("tc,ndc->tnd", latent, w) for w in (w_k, w_v))
        k = torch.cat([k, extra.unsqueeze(1).expand(-1, k.shape[1], -1)], dim=-1)
        return mla.mla_expanded(q, k, v, packed)

    # --- experts ------------------------------------------------------------------------------------------------
    def expert_weight(self, layer: int, expert: int, which: str) -> Tensor:
        name = f"{expert_prefix(layer, expert)}{which}.weight"
        if name in self.weights:
            return self.weight(name)
        return self.op_dequantize(self.weights[name + "_packed"], self.weights[name + "_scale"])

    def expert_terms(self, layer: int) -> list[lora.ExpertLoraTerm]:
        name = moe_prefix(layer) + "experts.w{}.lora_{}.weight"
        if name.format(1, "A") not in self.adapter:
            return []
        a1, a2, a3 = (self.adapter[name.format(n, "A")].float() for n in (1, 2, 3))
        b1, b2, b3 = (self.adapter[name.format(n, "B")].float() for n in (1, 2, 3))
        return [lora.ExpertLoraTerm(a1=a1[0], b1=b1, a3=a3[0], b3=b3, a2=a2, b2=b2[0], scaling=self.scaling)]

    def moe(self, x: Tensor, i: int) -> Tensor:
        c, p = self.config, moe_prefix(i)
        flat = x.reshape(-1, x.shape[-1])
        weights, experts = self.op_route(
            flat, self.weight(p + "gate.weight"), self.weight(p + "gate.e_score_correction_bias"),
            top_k=c.num_experts_per_token, renormalize=c.moe_renormalize, scaling=c.routed_scaling_factor,
        )  # fmt: skip
        w1, w2, w3 = (
            torch.stack([self.expert_weight(i, e, w) for e in range(c.num_experts)]) for w in ("w1", "w2", "w3")
        )
        combined = self.op_experts(
            self.linear(flat, p + "routed_expert_down_proj"), weights, experts, torch.cat([w1, w3], 1), w2,
            situ_beta=c.situ_beta, situ_linear_beta=c.situ_linear_beta, lora=self.expert_terms(i),
        )  # fmt: skip
        if c.latent_moe_use_norm:
            combined = self.norm(combined, p + "routed_expert_norm.weight", c.rms_norm_eps)
        return self.linear(combined, p + "routed_expert_up_proj").view(x.shape) + self.mlp(x, mlp_prefix(c, i))


class StepK3(OpsK3):
    """The plain twins: conv1d a sequence, KDA token by token, MLA straight over the latent cache."""

    op_kda = staticmethod(kda.kda_recurrent)
    op_conv = staticmethod(short_conv.short_conv_naive)
    op_attn_res = staticmethod(attn_res.attn_res_naive)

    def attention(self, q: Tensor, latent: Tensor, extra: Tensor, w_k: Tensor, w_v: Tensor, packed: Packed) -> Tensor:
        cache = packed.pad(torch.cat([latent, extra], dim=-1), value=float("nan"))
        real = torch.arange(packed.max_len) < packed.lengths_B[:, None]
        visible = torch.ones(packed.max_len, packed.max_len, dtype=torch.bool).tril() & real[:, None]
        return packed.unpad(mla.mla_absorbed(packed.pad(q), cache, visible, w_k, w_v))


def _each_token(step: Callable[..., Tensor], packed: Packed, *inputs: Tensor) -> Tensor:
    """Feed the tokens of each sequence one by one to step(sequence, *rows [1, ...])."""
    rows = zip(packed.rows_T.tolist(), *(x.split(1) for x in inputs), strict=True)
    return torch.cat([step(*row) for row in rows])


def _decode_kda(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, packed = args
    state = kda.zero_state(packed.num_seqs, inputs[0], inputs[2])

    def step(b: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return decode.kda_step_(q, k, v, g, beta, state[b : b + 1])

    return _each_token(step, packed, *inputs), state


def _decode_conv(x: Tensor, weight: Tensor, packed: Packed) -> Tensor:
    window = x.new_zeros(packed.num_seqs, weight.shape[-1] - 1, x.shape[1])
    return _each_token(lambda b, row: decode.short_conv_step_(row, weight, window[b : b + 1]), packed, x)


def _decode_attn_res(prefix: Tensor, bank: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor) -> Tensor:
    query, (first, *others) = norm_weight * proj_weight.reshape(-1), (*bank, prefix)
    residual = ResidualBank(first, 1 + len(others))
    for row in others:
        residual.mix(query)
        residual.bank(torch.zeros_like(row))
        residual.add(row)
    return residual.mix(query)


def _decode_experts(z: Tensor, weights: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, **options: Any) -> Tensor:
    dispatch = PaddedDispatch.of(experts, w13.shape[0])
    if dispatch is None:
        return latent_moe.latent_experts(z, weights, experts, w13, w2, **options)
    return padded_experts(z, weights, dispatch, w13, w2, **options)


class DecodeK3(OpsK3):
    """The in-place forms that an engine runs at every step. Not differentiable."""

    op_norm = staticmethod(decode.rms_norm)
    op_kda = staticmethod(_decode_kda)
    op_conv = staticmethod(_decode_conv)
    op_attn_res = staticmethod(_decode_attn_res)
    op_situ = staticmethod(lambda gate, up, b, lb: decode.situ_(torch.cat([gate, up], dim=-1), b, lb))
    op_experts = staticmethod(_decode_experts)

    def attention(self, q: Tensor, latent: Tensor, extra: Tensor, w_k: Tensor, w_v: Tensor, packed: Packed) -> Tensor:
        cache = packed.pad(torch.cat([latent, extra], dim=-1), value=1e3)  # what isn't visible must only be finite
        future = torch.full((packed.max_len, packed.max_len), -torch.inf).triu(1)

        def step(b: int, row: Tensor, column: Tensor) -> Tensor:
            return decode.mla_step(row, cache[b : b + 1], future[column][None], w_k, w_v)

        return _each_token(step, packed, q, packed.cols_T)


DIFFERENTIABLE = (NaiveK3, OpsK3, StepK3)
MODELS = (*DIFFERENTIABLE, DecodeK3)
