"""Spec section 2 read a second time: float64, one sequence, loops over tokens, heads and experts where it helps.

Written from the specification's words in other forms than the product uses (absorbed MLA, blocks of sublayer outputs
for AttnRes, sorted experts per token), so a mistake would have to be made twice. Slow; for tiny models only.
Shapes: T tokens, H hidden; `x` is always [T, H].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import LM_HEAD, TEXT, attn_prefix, expert_prefix, layer_prefix, mlp_prefix, moe_prefix

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Reference:
    """The forward of one checkpoint (no adapter)."""

    def __init__(self, config: K3Config, weights: Mapping[str, Tensor]) -> None:
        self.config, self.weights = config, weights

    def w(self, name: str) -> Tensor:
        return self.weights[name + ".weight"].double()

    # --- pieces -------------------------------------------------------------------------------------------------
    @staticmethod
    def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * weight

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        b, lb = self.config.situ_beta, self.config.situ_linear_beta
        return (b * (gate / b).tanh() / (1 + (-gate).exp())) * (lb * (up / lb).tanh())

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        hidden = self.situ(x @ self.w(prefix + "gate_proj").T, x @ self.w(prefix + "up_proj").T)
        return hidden @ self.w(prefix + "down_proj").T

    def mix(self, rows: Sequence[Tensor], name: str) -> Tensor:
        """Aggregator A over rows: raw values, weighted by the softmax of the normalised keys' scores."""
        query = self.w(name + "_norm") * self.w(name + "_proj").reshape(-1)
        scores = torch.stack([(r / ((r**2).mean(-1, keepdim=True) + 1e-5).sqrt() * query).sum(-1) for r in rows])
        p = scores.exp() / scores.exp().sum(0)
        return torch.stack([p_n[:, None] * r for p_n, r in zip(p, rows, strict=True)]).sum(0)

    # --- attention ----------------------------------------------------------------------------------------------
    def conv(self, x: Tensor, name: str) -> Tensor:
        """The last tap multiplies the current token; zeros before the start; SiLU."""
        weight, width = self.weights[name + ".weight"].double(), self.config.short_conv_kernel_size
        y = torch.zeros_like(x)
        for t in range(len(x)):
            for back in range(min(width, t + 1)):
                y[t] += weight[:, 0, width - 1 - back] * x[t - back]
        return y / (1 + (-y).exp())

    def kda(self, x: Tensor, layer: int) -> Tensor:
        c, p = self.config, attn_prefix(layer)
        n, d = c.kda_num_heads, c.kda_head_dim
        q, k, v = (self.conv(x @ self.w(f"{p}{s}_proj").T, f"{p}{s}_conv1d").view(-1, n, d) for s in "qkv")
        q, k = (z / ((z**2).sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
        f = x @ self.w(p + "f_a_proj").T @ self.w(p + "f_b_proj").T + self.weights[p + "dt_bias"].double()
        beta = torch.sigmoid(x @ self.w(p + "b_proj").T)
        gate = torch.sigmoid(x @ self.w(p + "g_proj").T).view(-1, n, d)
        out = torch.zeros(len(x), n, d, dtype=torch.float64)
        for h in range(n):
            log_decay = -5.0 * torch.sigmoid(self.weights[p + "A_log"][h].double().exp() * f.view(-1, n, d)[:, h])
            state = torch.zeros(d, d, dtype=torch.float64)
            for t in range(len(x)):
                state = torch.diag(log_decay[t].exp()) @ state
                state = state + torch.outer(k[t, h], beta[t, h] * (v[t, h] - state.T @ k[t, h]))
                out[t, h] = state.T @ (q[t, h] / d**0.5)
        out = self.rms(out, self.w(p + "o_norm"), c.rms_norm_eps) * gate
        return out.flatten(1) @ self.w(p + "o_proj").T

    def mla(self, x: Tensor, layer: int) -> Tensor:
        """Absorbed form, head by head and query by query."""
        c, p = self.config, attn_prefix(layer)
        n, nope, extra, v_dim = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        latent_q = self.rms(x @ self.w(p + "q_a_proj").T, self.w(p + "q_a_layernorm"), c.mla_latent_norm_eps)
        q = (latent_q @ self.w(p + "q_b_proj").T).view(-1, n, nope + extra)
        down = x @ self.w(p + "kv_a_proj_with_mqa").T
        latent = self.rms(down[:, : c.kv_lora_rank], self.w(p + "kv_a_layernorm"), c.mla_latent_norm_eps)
        shared_key = down[:, c.kv_lora_rank :]
        up = self.w(p + "kv_b_proj").view(n, nope + v_dim, c.kv_lora_rank)
        out = torch.zeros(len(x), n, v_dim, dtype=torch.float64)
        for h in range(n):
            for t in range(len(x)):
                in_latent = q[t, h, :nope] @ up[h, :nope]
                scores = latent[: t + 1] @ in_latent + shared_key[: t + 1] @ q[t, h, nope:]
                out[t, h] = up[h, nope:] @ (latent[: t + 1].T @ (scores / (nope + extra) ** 0.5).softmax(0))
        return (out.flatten(1) * torch.sigmoid(x @ self.w(p + "g_proj").T)) @ self.w(p + "o_proj").T

    # --- experts ------------------------------------------------------------------------------------------------
    def expert_weight(self, layer: int, expert: int, which: str) -> Tensor:
        name = f"{expert_prefix(layer, expert)}{which}.weight_"
        packed, scale = self.weights[name + "packed"], self.weights[name + "scale"]
        table = torch.tensor([*CODES, *(-c for c in CODES)], dtype=torch.float64)
        out = torch.zeros(packed.shape[0], 2 * packed.shape[1], dtype=torch.float64)
        out[:, 0::2], out[:, 1::2] = table[(packed % 16).long()], table[(packed // 16).long()]
        for group in range(scale.shape[1]):
            out[:, 32 * group : 32 * (group + 1)] *= 2.0 ** (scale[:, group, None].double() - 127)
        return out

    def choice(self, x: Tensor, layer: int) -> list[list[tuple[int, float]]]:
        """Per token, the chosen (expert, weight) pairs."""
        c, gate = self.config, moe_prefix(layer) + "gate"
        scores_TE = torch.sigmoid(x @ self.w(gate).T)
        biased_TE = scores_TE + self.weights[gate + ".e_score_correction_bias"].double()
        out = []
        for scores, biased in zip(scores_TE.tolist(), biased_TE.tolist(), strict=True):
            chosen = sorted(range(c.num_experts), key=biased.__getitem__, reverse=True)[: c.num_experts_per_token]
            total = sum(scores[e] for e in chosen)
            out.append([(e, scores[e] / total * c.routed_scaling_factor) for e in chosen])
        return out

    def moe(self, x: Tensor, layer: int) -> Tensor:
        c, p = self.config, moe_prefix(layer)
        experts = [[self.expert_weight(layer, e, w) for w in ("w1", "w2", "w3")] for e in range(c.num_experts)]
        z = x @ self.w(p + "routed_expert_down_proj").T
        combined = torch.zeros_like(z)
        for t, pairs in enumerate(self.choice(x, layer)):
            for e, weight in pairs:
                w1, w2, w3 = experts[e]
                combined[t] += weight * (w2 @ self.situ(w1 @ z[t], w3 @ z[t]))
        if c.latent_moe_use_norm:
            combined = self.rms(combined, self.w(p + "routed_expert_norm"), c.rms_norm_eps)
        return combined @ self.w(p + "routed_expert_up_proj").T + self.mlp(x, mlp_prefix(c, layer))

    # --- model --------------------------------------------------------------------------------------------------
    def trace(self, tokens: Sequence[int]) -> list[list[Tensor]]:
        """The sums of the blocks after each layer; the last one is the prefix, the others are the bank.

        Block 0 is the embedding alone; a write step opens a block; a block holds its sublayers' outputs.
        """
        c = self.config
        blocks, trace = [[self.w(TEXT + "embed_tokens")[list(tokens)]]], []
        for layer in range(c.num_hidden_layers):
            p = layer_prefix(layer)
            rows = _sums(blocks)
            x = rows[0] if layer == 0 else self.mix(rows, p + "self_attention_res")
            x = self.rms(x, self.w(p + "input_layernorm"), c.rms_norm_eps)
            if layer % c.attn_res_block_size == 0:
                blocks.append([])
            blocks[-1].append(self.mla(x, layer) if layer in c.mla_layers else self.kda(x, layer))
            y = self.mix(_sums(blocks), p + "mlp_res")
            y = self.rms(y, self.w(p + "post_attention_layernorm"), c.rms_norm_eps)
            dense = layer < c.first_k_dense_replace
            blocks[-1].append(self.mlp(y, mlp_prefix(c, layer)) if dense else self.moe(y, layer))
            trace.append(_sums(blocks))
        return trace

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float64 [T, vocab]."""
        mixed = self.mix(self.trace(tokens)[-1], TEXT + "output_attn_res")
        normed = self.rms(mixed, self.w(TEXT + "norm"), self.config.rms_norm_eps)
        return normed @ self.weights[LM_HEAD].double().T


def _sums(blocks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(list(block)).sum(0) for block in blocks]
