"""The oracle: Kimi K3's whole forward in plain fp32 torch. No cache, no packing, no cleverness, nothing from `ops`.

One formula after the other as in spec section 2, so that a reader can hold the two side by side.
Shapes: B sequences, T tokens each (right padding is harmless: nothing looks ahead), H hidden, N heads, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import LM_HEAD, TEXT, attn_prefix, expert_prefix, layer_prefix, mlp_prefix, moe_prefix

_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class NaiveK3:
    """Forward of a checkpoint given as {name: tensor}, with or without an adapter given by its exported names.

    `weights` may hold MXFP4 experts packed (weight_packed, weight_scale) or plain (`...wN.weight`).
    `adapter` values: dense A [r, in], B [out, r]; experts 3-D as in spec 5.2. `scaling` is alpha / r.
    """

    def __init__(
        self,
        config: K3Config,
        weights: Mapping[str, Tensor],
        adapter: Mapping[str, Tensor] | None = None,
        scaling: float = 1.0,
    ):
        self.config, self.weights, self.scaling = config, weights, scaling
        self.adapter = adapter or {}

    # --- weights ------------------------------------------------------------------------------------------------
    def weight(self, name: str) -> Tensor:
        return self.weights[name].float()

    def linear(self, x: Tensor, module: str) -> Tensor:
        """x W^T, plus scaling * B (A x) where the adapter targets the module."""
        y = x @ self.weight(module + ".weight").t()
        a = self.adapter.get(module + ".lora_A.weight")
        if a is not None:
            y = y + self.scaling * (x @ a.float().t()) @ self.adapter[module + ".lora_B.weight"].float().t()
        return y

    def expert_linear(self, x: Tensor, layer: int, expert: int, which: str) -> Tensor:
        y = x @ self.expert_weight(layer, expert, which).t()
        name = f"{moe_prefix(layer)}experts.{which}"
        a = self.adapter.get(name + ".lora_A.weight")
        if a is not None:
            b = self.adapter[name + ".lora_B.weight"]
            a, b = (f[expert if f.shape[0] > 1 else 0].float() for f in (a, b))
            y = y + self.scaling * (x @ a.t()) @ b.t()
        return y

    def expert_weight(self, layer: int, expert: int, which: str) -> Tensor:
        name = f"{expert_prefix(layer, expert)}{which}.weight"
        if name in self.weights:
            return self.weight(name)
        packed, scale = self.weights[name + "_packed"], self.weights[name + "_scale"]
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
        values = torch.tensor(_LEVELS, device=packed.device)[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        return values * (2.0 ** (scale.float() - 127)).repeat_interleave(32, dim=-1)

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight(name)

    # --- model --------------------------------------------------------------------------------------------------
    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Logits fp32 [B, T, vocab]."""
        return self.head(self.hidden(tokens_BT))

    def head(self, x: Tensor) -> Tensor:
        """Final norm and lm_head."""
        return self.norm(x, TEXT + "norm.weight", self.config.rms_norm_eps) @ self.weight(LM_HEAD).t()

    def logprobs(self, tokens_BT: Tensor) -> Tensor:
        """Log-probabilities of tokens 1..T-1: fp32 [B, T-1]."""
        logp = self(tokens_BT[:, :-1]).log_softmax(-1)
        return logp.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The last AttnRes mixture [B, T, H]."""
        return self.taps(tokens_BT, [self.config.num_hidden_layers - 1])

    def taps(self, tokens_BT: Tensor, layers: Sequence[int]) -> Tensor:
        """The mixtures after `layers` (0-based), which the next layer's attention, or the output, reads before its
        norm: [B, T, len(layers) * H] in the order given (spec 6.2)."""
        prefix, bank = self.weight(TEXT + "embed_tokens.weight")[tokens_BT], []
        found = {}
        for layer in range(self.config.num_hidden_layers):
            prefix, bank = self.layer(layer, prefix, bank)
            if layer in layers:
                last = layer + 1 == self.config.num_hidden_layers
                reader = TEXT + "output_attn_res" if last else layer_prefix(layer + 1) + "self_attention_res"
                found[layer] = self.attn_res(prefix, bank, reader)
        return torch.cat([found[layer] for layer in layers], dim=-1)

    def layer(self, i: int, prefix: Tensor, bank: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        c, p = self.config, layer_prefix(i)
        x = self.attn_res(prefix, bank, p + "self_attention_res") if bank else prefix
        x = self.norm(x, p + "input_layernorm.weight", c.rms_norm_eps)
        a = self.mla(x, i) if c.is_mla(i) else self.kda(x, i)
        if i % c.attn_res_block_size == 0:
            bank, prefix = [*bank, prefix], a
        else:
            prefix = prefix + a
        y = self.attn_res(prefix, bank, p + "mlp_res")
        y = self.norm(y, p + "post_attention_layernorm.weight", c.rms_norm_eps)
        return prefix + (self.moe(y, i) if c.is_moe(i) else self.mlp(y, mlp_prefix(c, i))), bank

    def attn_res(self, prefix: Tensor, bank: list[Tensor], name: str) -> Tensor:
        rows = torch.stack([*bank, prefix], dim=-2)
        keys = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)
        query = self.weight(name + "_norm.weight") * self.weight(name + "_proj.weight")[0]
        p = (keys @ query).softmax(-1)
        return (p.unsqueeze(-1) * rows).sum(-2)

    def kda(self, x: Tensor, i: int) -> Tensor:
        c, p = self.config, attn_prefix(i)
        heads, dim = c.kda_num_heads, c.kda_head_dim
        q, k, v = (
            self.conv_silu(self.linear(x, f"{p}{n}_proj"), f"{p}{n}_conv1d.weight").unflatten(-1, (heads, dim))
            for n in "qkv"
        )
        q, k = (z * torch.rsqrt(z.pow(2).sum(-1, keepdim=True) + 1e-6) for z in (q, k))
        q = q * dim**-0.5
        f = self.linear(self.linear(x, p + "f_a_proj"), p + "f_b_proj") + self.weight(p + "dt_bias")
        rate = self.weight(p + "A_log")[:heads].exp().unsqueeze(-1)
        g = c.gate_lower_bound * torch.sigmoid(rate * f.unflatten(-1, (heads, dim)))
        beta = torch.sigmoid(self.linear(x, p + "b_proj"))
        o = self.delta_rule(q, k, v, g, beta)
        o = self.norm(o, p + "o_norm.weight", c.rms_norm_eps).flatten(-2)
        return self.linear(o * torch.sigmoid(self.linear(x, p + "g_proj")), p + "o_proj")

    @staticmethod
    def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """S <- diag(e^g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q, token by token; all [B, T, N, D]."""
        state = q.new_zeros(q.shape[0], q.shape[2], k.shape[3], v.shape[3])
        outs = []
        for t in range(q.shape[1]):
            state = g[:, t].exp().unsqueeze(-1) * state
            u = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bnkv,bnk->bnv", state, k[:, t]))
            state = state + torch.einsum("bnk,bnv->bnkv", k[:, t], u)
            outs.append(torch.einsum("bnkv,bnk->bnv", state, q[:, t]))
        return torch.stack(outs, dim=1)

    def conv_silu(self, x: Tensor, name: str) -> Tensor:
        w = self.weight(name)
        x = torch.nn.functional.pad(x.transpose(1, 2), (w.shape[-1] - 1, 0))
        y = torch.nn.functional.conv1d(x, w, groups=w.shape[0]).transpose(1, 2)
        return y * torch.sigmoid(y)

    def mla(self, x: Tensor, i: int) -> Tensor:
        c, p = self.config, attn_prefix(i)
        heads, nope, eps = c.num_attention_heads, c.qk_nope_head_dim, c.mla_latent_norm_eps
        q = self.norm(self.linear(x, p + "q_a_proj"), p + "q_a_layernorm.weight", eps)
        q = self.linear(q, p + "q_b_proj").unflatten(-1, (heads, -1)).transpose(1, 2)
        latent, extra = self.linear(x, p + "kv_a_proj_with_mqa").split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv = self.linear(self.norm(latent, p + "kv_a_layernorm.weight", eps), p + "kv_b_proj")
        kv = kv.unflatten(-1, (heads, -1)).transpose(1, 2)
        k = torch.cat([kv[..., :nope], extra.unsqueeze(1).expand(-1, heads, -1, -1)], dim=-1)
        scores = q @ k.transpose(-1, -2) * c.qk_head_dim**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        o = scores.masked_fill(future, -torch.inf).softmax(-1) @ kv[..., nope:]
        o = o.transpose(1, 2).flatten(-2)
        return self.linear(o * torch.sigmoid(self.linear(x, p + "g_proj")), p + "o_proj")

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        b, lb = self.config.situ_beta, self.config.situ_linear_beta
        return b * torch.tanh(gate / b) * torch.sigmoid(gate) * lb * torch.tanh(up / lb)

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        return self.linear(
            self.situ(self.linear(x, prefix + "gate_proj"), self.linear(x, prefix + "up_proj")), prefix + "down_proj"
        )

    def moe(self, x: Tensor, i: int) -> Tensor:
        c, p = self.config, moe_prefix(i)
        scores = torch.sigmoid(x @ self.weight(p + "gate.weight").t())
        chosen = (
            (scores + self.weight(p + "gate.e_score_correction_bias")).topk(c.num_experts_per_token, dim=-1).indices
        )
        weights = scores.gather(-1, chosen)
        if c.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = torch.zeros_like(scores).scatter(-1, chosen, weights * c.routed_scaling_factor)
        z = self.linear(x, p + "routed_expert_down_proj")
        combined = self.experts(z, weights, i)
        if c.latent_moe_use_norm:
            combined = self.norm(combined, p + "routed_expert_norm.weight", c.rms_norm_eps)
        return self.linear(combined, p + "routed_expert_up_proj") + self.mlp(x, mlp_prefix(c, i))

    def experts(self, z: Tensor, weights: Tensor, i: int) -> Tensor:
        """Every expert on every token, weighted; `weights` [B, T, E] is 0 where an expert was not chosen."""
        combined = torch.zeros_like(z)
        for e in range(self.config.num_experts):
            hidden = self.situ(self.expert_linear(z, i, e, "w1"), self.expert_linear(z, i, e, "w3"))
            combined = combined + weights[..., e : e + 1] * self.expert_linear(hidden, i, e, "w2")
        return combined
