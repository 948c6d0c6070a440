"""The same K3 layers as one writes them with torch, peft and fla: what bench_trainer_layers.py compares with.

nn.Linear modules over the given weights, peft's LoRA on them, autograd throughout, fla's chunk_kda with its gate
inside, scaled_dot_product_attention sequence by sequence, a loop over experts. Packed like ours.
Shape legend: T tokens, H hidden, N heads, K channels of a head, R rows of an AttnRes mix, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fla.ops.kda import chunk_kda
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from miles_k3.k3.config import K3Config
from miles_k3.k3.ops.attn_res import KEY_EPS
from miles_k3.k3.params import attn_prefix, layer_prefix, mlp_prefix, moe_prefix
from miles_k3.k3.weights import ResidentBase

TARGETS = ["o_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"]


def linear(weight: Tensor) -> nn.Linear:
    """A module over `weight` itself."""
    with torch.device("meta"):
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


class Norm(nn.Module):
    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    g, u = gate.float(), up.float()
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)).to(gate.dtype)


class Kda(nn.Module):
    def __init__(self, base: ResidentBase, k3: K3Config, layer: int):
        super().__init__()
        p, self.k3 = attn_prefix(layer), k3
        names = [n + "_proj" for n in ("q", "k", "v", "g", "f_a", "f_b", "b", "o")]
        self.linears = nn.ModuleDict({n: linear(base[f"{p}{n}.weight"]) for n in names})
        self.convs = [base[f"{p}{n}_conv1d.weight"].to(base.dtype) for n in "qkv"]
        self.a_log, self.dt_bias, self.o_norm = (base[p + n] for n in ("A_log", "dt_bias", "o_norm.weight"))

    def forward(self, x: Tensor, lengths: Sequence[int], cu_seqlens: Tensor) -> Tensor:
        k3, m, heads = self.k3, self.linears, (1, x.shape[0], self.k3.kda_num_heads, self.k3.kda_head_dim)
        q, k, v = (
            self._conv(proj(x), weight, lengths).view(heads)
            for proj, weight in zip((m["q_proj"], m["k_proj"], m["v_proj"]), self.convs, strict=True)
        )
        delta_rule: Any = chunk_kda  # its decorators hide its signature
        out, _ = delta_rule(
            q, k, v, m["f_b_proj"](m["f_a_proj"](x)).view(heads), torch.sigmoid(m["b_proj"](x).float()).unsqueeze(0),
            A_log=self.a_log, dt_bias=self.dt_bias, lower_bound=k3.gate_lower_bound, use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True, safe_gate=True, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        o = out.squeeze(0).float()
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + k3.rms_norm_eps) * self.o_norm
        return m["o_proj"]((o * torch.sigmoid(m["g_proj"](x).view_as(o).float())).to(x.dtype).flatten(1))

    def _conv(self, x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
        width = weight.shape[-1]
        parts = [F.conv1d(F.pad(s.t(), (width - 1, 0)), weight, groups=len(weight)).t() for s in x.split(list(lengths))]
        return F.silu(torch.cat(parts))


class Mla(nn.Module):
    def __init__(self, base: ResidentBase, k3: K3Config, layer: int):
        super().__init__()
        p, self.k3 = attn_prefix(layer), k3
        names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj")
        self.linears = nn.ModuleDict({n: linear(base[f"{p}{n}.weight"]) for n in names})
        self.q_norm, self.kv_norm = (
            Norm(base[f"{p}{n}_a_layernorm.weight"], k3.mla_latent_norm_eps) for n in ("q", "kv")
        )

    def forward(self, x: Tensor, lengths: Sequence[int], cu_seqlens: Tensor) -> Tensor:
        k3, m, heads = self.k3, self.linears, self.k3.num_attention_heads
        q = m["q_b_proj"](self.q_norm(m["q_a_proj"](x))).unflatten(-1, (heads, -1))
        latent, extra = m["kv_a_proj_with_mqa"](x).split([k3.kv_lora_rank, k3.qk_rope_head_dim], dim=-1)
        kv = m["kv_b_proj"](self.kv_norm(latent)).unflatten(-1, (heads, -1))
        k, v = kv.split([k3.qk_nope_head_dim, k3.v_head_dim], dim=-1)
        k = torch.cat([k, extra.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
        parts = [
            F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in qkv), is_causal=True)[0].transpose(0, 1)
            for qkv in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
        ]
        return m["o_proj"](torch.cat(parts).flatten(1) * torch.sigmoid(m["g_proj"](x)))


class Mlp(nn.Module):
    def __init__(self, base: ResidentBase, k3: K3Config, prefix: str):
        super().__init__()
        self.act = partial(situ, beta=k3.situ_beta, linear_beta=k3.situ_linear_beta)
        names = ("gate_proj", "up_proj", "down_proj")
        self.linears = nn.ModuleDict({n: linear(base[f"{prefix}{n}.weight"]) for n in names})

    def forward(self, x: Tensor) -> Tensor:
        m = self.linears
        return m["down_proj"](self.act(m["gate_proj"](x), m["up_proj"](x)))


class Expert(nn.Module):
    def __init__(self, w13: Tensor, w2: Tensor, k3: K3Config):
        super().__init__()
        self.act = partial(situ, beta=k3.situ_beta, linear_beta=k3.situ_linear_beta)
        w1, w3 = w13.chunk(2)
        self.w1, self.w2, self.w3 = linear(w1), linear(w2), linear(w3)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x), self.w3(x)))


class Moe(nn.Module):
    def __init__(self, base: ResidentBase, k3: K3Config, layer: int):
        super().__init__()
        p, self.k3 = moe_prefix(layer), k3
        self.gate, self.bias = base[p + "gate.weight"], base[p + "gate.e_score_correction_bias"]
        self.down, self.up = (linear(base[f"{p}routed_expert_{n}_proj.weight"]) for n in ("down", "up"))
        self.norm = Norm(base[p + "routed_expert_norm.weight"], k3.rms_norm_eps)
        w13, w2 = base.experts[layer].dense(base.dtype)
        self.experts = nn.ModuleList(Expert(*pair, k3) for pair in zip(w13, w2, strict=True))
        self.shared_experts = Mlp(base, k3, mlp_prefix(k3, layer))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(F.linear(x.float(), self.gate.float()))
        chosen = torch.topk(scores + self.bias, self.k3.num_experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        z = self.down(x)
        out = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
        for i, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == i)
            y = expert(z[rows]).float() * weights[rows, places, None]
            out = out.index_add(0, rows, y) if len(rows) else out
        return self.up(self.norm(out.to(x.dtype))) + self.shared_experts(x)


class AttnRes(nn.Module):
    def __init__(self, base: ResidentBase, name: str):
        super().__init__()
        self.query = base[name + "_norm.weight"].float() * base[name + "_proj.weight"].float().reshape(-1)

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(rows), dim=1).float()  # [T, R, H]
        keys = stacked * torch.rsqrt(stacked.pow(2).mean(-1, keepdim=True) + KEY_EPS)
        p = torch.softmax(keys @ self.query, dim=-1)
        return (p.unsqueeze(-1) * stacked).sum(1).to(rows[0].dtype)


class Layer(nn.Module):
    """As `trainer.model.layer.K3Layer`; the prefix only."""

    def __init__(self, base: ResidentBase, k3: K3Config, layer: int):
        super().__init__()
        p, self.starts_block = layer_prefix(layer), k3.starts_block(layer)
        self.attention_res, self.mlp_res = (AttnRes(base, p + n) for n in ("self_attention_res", "mlp_res"))
        self.input_norm, self.mlp_norm = (
            Norm(base[f"{p}{n}.weight"], k3.rms_norm_eps) for n in ("input_layernorm", "post_attention_layernorm")
        )
        self.attention = (Mla if k3.is_mla(layer) else Kda)(base, k3, layer)
        self.mlp = Moe(base, k3, layer) if k3.is_moe(layer) else Mlp(base, k3, mlp_prefix(k3, layer))

    def forward(self, prefix: Tensor, bank: Sequence[Tensor], lengths: Sequence[int], cu_seqlens: Tensor) -> Tensor:
        a = self.attention(self.input_norm(self.attention_res([*bank, prefix])), lengths, cu_seqlens)
        bank, prefix = ([*bank, prefix], a) if self.starts_block else (bank, prefix + a)
        return prefix + self.mlp(self.mlp_norm(self.mlp_res([*bank, prefix])))


def layer_with_lora(base: ResidentBase, k3: K3Config, layer: int, *, rank: int, alpha: float) -> nn.Module:
    """One layer with peft's adapters in the base's dtype; only they are trained."""
    config = LoraConfig(r=rank, lora_alpha=int(alpha), target_modules=TARGETS, lora_dropout=0.0)
    return inject_adapter_in_model(config, Layer(base, k3, layer))


def head_logprobs(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of the targets through whole logits in fp32."""
    logits = F.linear(x, weight).float()
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)
