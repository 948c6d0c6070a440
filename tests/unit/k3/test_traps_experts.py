"""Traps 12, 13, 14, 15, 17, 18, 22 of spec 7.3 as far as one rank goes: the latent mixture of experts and LoRA.

Each check runs on the naive model and on both models made of the ops, and must reject each planted mistake.
Tolerance: fp32 sums within one sublayer, 1e-3 of values near 2 to 8 (SiTU saturates, so noise is amplified by its
slopes of up to 12); a mistake shows above 1e-1.
"""

from __future__ import annotations

import math
from functools import cache, partial

import pytest
import torch
from helpers.mutants import assert_rejects, mutants, naive, on_ops
from helpers.ops_model import MODELS
from helpers.reference import Reference
from helpers.tiny import tiny_adapter, tiny_config, tiny_weights
from torch import Tensor

from miles_k3.adapters.layout import adapter_layout, by_module
from miles_k3.k3.config import K3Config
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.ops.latent_moe import route
from miles_k3.k3.params import mlp_prefix, moe_prefix
from miles_k3.types import AdapterConfig

MOE = 5
CONFIG = tiny_config()
WEIGHTS = tiny_weights(CONFIG)
P, BIAS = moe_prefix(MOE), moe_prefix(MOE) + "gate.e_score_correction_bias"
every_model = pytest.mark.parametrize("model", MODELS)
close = partial(torch.testing.assert_close, rtol=0, atol=1e-3)


@cache
def hidden() -> Tensor:
    return torch.randn(1, 24, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))


def moe(model: type[NaiveK3], config: K3Config = CONFIG, **changed: Tensor) -> Tensor:
    weights = WEIGHTS | {P + name.replace("__", "."): t for name, t in changed.items()}
    return model(config, weights).moe(hidden(), MOE)[0]


@cache
def moe_reference() -> Tensor:
    return Reference(CONFIG, WEIGHTS).moe(hidden()[0].double(), MOE).float()


# --- 12: router ------------------------------------------------------------------------------------------------------
def check_12(model: type[NaiveK3]) -> None:
    """The bias chooses and never weighs."""
    close(moe(model), moe_reference())
    bias = WEIGHTS[BIAS]
    close(moe(model, gate__e_score_correction_bias=bias + 0.75), moe(model))
    assert (moe(model, gate__e_score_correction_bias=0 * bias) - moe(model)).abs().max() > 0.5
    every = tiny_config(num_experts_per_token=CONFIG.num_experts)
    close(moe(model, every, gate__e_score_correction_bias=3 * bias), moe(model, every))


@every_model
def test_trap_12_router(model):
    check_12(model)


SCORES = 'torch.sigmoid(x @ self.weight(p + "gate.weight").t())'


def biased(x: Tensor, gate: Tensor, bias: Tensor, **options) -> tuple[Tensor, Tensor]:
    _, experts = route(x, gate, bias, **options)
    weights = (torch.sigmoid(x @ gate.t()) + bias).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True), experts


@mutants(
    {
        "bias in the weights": naive(
            ("scores.gather(-1, chosen)", f'(scores + self.weight("{BIAS}")).gather(-1, chosen)'),
        ),
        "bias ignored": naive(('(scores + self.weight(p + "gate.e_score_correction_bias")).topk', "scores.topk")),
        "softmax scores": naive(
            (SCORES, SCORES.replace("torch.sigmoid(", "torch.softmax(").replace(".t())", ".t(), -1)"))
        ),
        "equal weights": naive(("weights = scores.gather(-1, chosen)", "weights = chosen * 0.0 + 1")),
        "op: bias in the weights": on_ops(op_route=biased),
        "op: bias ignored": on_ops(op_route=lambda x, gate, bias, **options: route(x, gate, 0 * bias, **options)),
    }
)
def test_trap_12_rejects(plant):
    assert_rejects(check_12, plant())


# --- 13: the latent norm's place -------------------------------------------------------------------------------------
def check_13(model: type[NaiveK3]) -> None:
    """Three times the router's weights change nothing, since the norm comes after the weighted sum."""
    tripled = tiny_config(routed_scaling_factor=3.0)
    close(moe(model, tripled), moe(model))
    close(moe(model), moe_reference())
    without = tiny_config(latent_moe_use_norm=False)
    assert (moe(model, without) - moe(model)).abs().max() > 1
    assert (moe(model, tiny_config(latent_moe_use_norm=False, routed_scaling_factor=3.0))
            - moe(model, without)).abs().max() > 1  # fmt: skip


@every_model
def test_trap_13_latent_norm(model):
    check_13(model)


WEIGHED = 'weights[..., e : e + 1] * self.expert_linear(hidden, i, e, "w2")'
NORM = 'self.norm(combined, p + "routed_expert_norm.weight", c.rms_norm_eps)'


@mutants(
    {
        "dropped": naive((NORM, "combined")),
        "per expert": naive(
            (
                WEIGHED,
                'weights[..., e : e + 1] * self.norm(self.expert_linear(hidden, i, e, "w2"), '
                'moe_prefix(i) + "routed_expert_norm.weight", self.config.rms_norm_eps)',
            ),
            (NORM, "combined"),
        ),
        "without its weight": naive((NORM, "torch.nn.functional.rms_norm(combined, combined.shape[-1:], eps=1e-5)")),
        "always on": naive(("if c.latent_moe_use_norm:", "if True:")),
    }
)
def test_trap_13_rejects(plant):
    assert_rejects(check_13, plant())


# --- 14: SiTU --------------------------------------------------------------------------------------------------------
def check_14(model: type[NaiveK3]) -> None:
    def situ(gate: float, up: float, **betas: float) -> float:
        return model(tiny_config(**betas), WEIGHTS).situ(torch.tensor([gate]), torch.tensor([up])).item()

    assert situ(100.0, 100.0) == pytest.approx(100 * math.tanh(4), rel=1e-5)  # 99.93
    assert situ(-100.0, 100.0) == pytest.approx(0.0, abs=1e-6)
    assert situ(0.05, 0.1) == pytest.approx(0.05 / (1 + math.exp(-0.05)) * 0.1, rel=1e-3)
    assert situ(-6.0, 3.0) == pytest.approx(4 * math.tanh(-1.5) / (1 + math.exp(6)) * 25 * math.tanh(0.12), rel=1e-4)
    assert situ(9.0, 90.0, situ_beta=2.0, situ_linear_beta=10.0) == pytest.approx(
        2 * math.tanh(4.5) / (1 + math.exp(-9)) * 10 * math.tanh(9), rel=1e-5
    )


@every_model
def test_trap_14_situ(model):
    check_14(model)


SITU = "b * torch.tanh(gate / b) * torch.sigmoid(gate) * lb * torch.tanh(up / lb)"


@mutants(
    {
        "up not clipped": naive((SITU, SITU.replace("lb * torch.tanh(up / lb)", "up"))),
        "sigmoid of the clipped gate": naive(
            (SITU, SITU.replace("torch.sigmoid(gate)", "torch.sigmoid(b * torch.tanh(gate / b))"))
        ),
        "SwiGLU": naive((SITU, "torch.nn.functional.silu(gate) * up")),
        "clamped SwiGLU": naive((SITU, "torch.nn.functional.silu(gate.clamp(max=4)) * up.clamp(-25, 25)")),
        "betas fixed": naive(("b, lb = self.config.situ_beta, self.config.situ_linear_beta", "b, lb = 4.0, 25.0")),
        "gate and up swapped": naive(
            ("def situ(self, gate: Tensor, up: Tensor)", "def situ(self, up: Tensor, gate: Tensor)")
        ),
        "op: up not clipped": on_ops(op_situ=lambda g, u, b, lb: b * torch.tanh(g / b) * torch.sigmoid(g) * u),
    }
)
def test_trap_14_rejects(plant):
    assert_rejects(check_14, plant())


# --- 15: shared experts ----------------------------------------------------------------------------------------------
def check_15(model: type[NaiveK3]) -> None:
    """With the routed path shut: one plain MLP, twice as wide as an expert, on the full hidden; else their sum."""
    shared = mlp_prefix(CONFIG, MOE)
    assert WEIGHTS[shared + "gate_proj.weight"].shape == (2 * 32, 96)
    alone = Reference(CONFIG, WEIGHTS).mlp(hidden()[0].double(), shared).float()
    close(moe(model, routed_expert_up_proj__weight=torch.zeros(96, 64)), alone)
    close(moe(model, shared_experts__down_proj__weight=torch.zeros(96, 64)), moe_reference() - alone)


@every_model
def test_trap_15_shared_experts(model):
    check_15(model)


class HalfShared(NaiveK3):
    """Reads the shared experts as one expert wide."""

    def weight(self, name: str) -> Tensor:
        w = super().weight(name)
        if ".shared_experts." not in name:
            return w
        return w[:, :32] if "down_proj" in name else w[:32]


SHARED = "+ self.mlp(x, mlp_prefix(c, i))"


@mutants(
    {
        "left out": naive((SHARED, "")),
        "gated": naive((SHARED, SHARED.replace("self.mlp", "torch.sigmoid(x.mean(-1, keepdim=True)) * self.mlp"))),
        "one expert wide": lambda: HalfShared,
        "averaged": naive((SHARED, SHARED + " / c.num_shared_experts")),
    }
)
def test_trap_15_rejects(plant):
    assert_rejects(check_15, plant())


# --- 18: w1 and w3 ---------------------------------------------------------------------------------------------------
def check_18(model: type[NaiveK3]) -> None:
    """w1 and gate_proj are the gate: SiTU is not symmetric, so a swap shows. (TP halves: with the ranks.)"""
    close(moe(model), moe_reference())
    swapped = dict(WEIGHTS)
    for e in range(CONFIG.num_experts):
        for kind in ("weight_packed", "weight_scale"):
            one, three = f"{P}experts.{e}.w1.{kind}", f"{P}experts.{e}.w3.{kind}"
            swapped[one], swapped[three] = WEIGHTS[three], WEIGHTS[one]
    assert (model(CONFIG, swapped).moe(hidden(), MOE)[0] - moe_reference()).abs().max() > 0.5


@every_model
def test_trap_18_gate_and_up(model):
    check_18(model)


@mutants(
    {
        "w1 and w3 swapped": naive(
            (
                'self.expert_linear(z, i, e, "w1"), self.expert_linear(z, i, e, "w3")',
                'self.expert_linear(z, i, e, "w3"), self.expert_linear(z, i, e, "w1")',
            )
        ),
        "gate_proj and up_proj swapped": naive(
            (
                'self.situ(self.linear(x, prefix + "gate_proj"), self.linear(x, prefix + "up_proj"))',
                'self.situ(self.linear(x, prefix + "up_proj"), self.linear(x, prefix + "gate_proj"))',
            )
        ),
    }
)
def test_trap_18_rejects(plant):
    assert_rejects(check_18, plant())


# --- 22: LoRA, on one rank -------------------------------------------------------------------------------------------
ADAPTER_CONFIG = AdapterConfig(rank=4, alpha=6.0)


@cache
def adapter() -> dict[str, Tensor]:
    return tiny_adapter(CONFIG, ADAPTER_CONFIG, scale=0.15)


@cache
def merged() -> dict[str, Tensor]:
    """W + alpha/r * B A of every target, experts one by one, in float64 rounded to fp32."""
    weights, oracle = dict(WEIGHTS), Reference(CONFIG, WEIGHTS)
    for module, (a, b) in by_module(adapter_layout(CONFIG, ADAPTER_CONFIG)).items():
        down, up = adapter()[a.name].double(), adapter()[b.name].double()
        if a.kind == "dense":
            weights[module + ".weight"] = (WEIGHTS[module + ".weight"].double() + 1.5 * up @ down).float()
            continue
        experts, _, which = module.rpartition(".")
        for e in range(CONFIG.num_experts):
            delta = 1.5 * up[e if len(up) > 1 else 0] @ down[e if len(down) > 1 else 0]
            weights[f"{experts}.{e}.{which}.weight"] = (oracle.expert_weight(a.layer, e, which) + delta).float()
    return weights


def check_22(model: type[NaiveK3]) -> None:
    """alpha/r enters once everywhere, the outer factor is shared, the inner one each expert's own.

    Over the whole model fp32 noise grows to 1e-2 at single tokens (AttnRes picks sharply); a mistake moves the mean.
    """
    tokens = torch.tensor([[9, 120, 33, 250, 1, 77, 8, 61]])
    with_adapter = model(CONFIG, WEIGHTS, adapter(), ADAPTER_CONFIG.scaling)(tokens)
    assert (with_adapter - model(CONFIG, merged())(tokens)).abs().mean() < 1e-3
    for i in range(CONFIG.num_hidden_layers):
        made, plain = model(CONFIG, WEIGHTS, adapter(), ADAPTER_CONFIG.scaling), model(CONFIG, merged())
        close(made.mlp(hidden(), mlp_prefix(CONFIG, i)), plain.mlp(hidden(), mlp_prefix(CONFIG, i)))
        attention = "mla" if CONFIG.is_mla(i) else "kda"
        close(getattr(made, attention)(hidden(), i), getattr(plain, attention)(hidden(), i))
        if CONFIG.is_moe(i):
            close(made.moe(hidden(), i), plain.moe(hidden(), i), atol=5e-3)


@every_model
def test_trap_22_merged_equals_unmerged(model):
    check_22(model)


@every_model
def test_trap_22_a_fresh_adapter_is_exactly_the_base(model):
    fresh = {n: torch.zeros_like(t) if "lora_B" in n else t for n, t in adapter().items()}
    tokens = torch.tensor([[9, 120, 33, 250, 1, 77, 8, 61]])
    assert torch.equal(model(CONFIG, WEIGHTS, fresh, 1.5)(tokens), model(CONFIG, WEIGHTS)(tokens))


DENSE = "y = y + self.scaling * (x @ a.float().t())"
EXPERT = "y = y + self.scaling * (x @ a.t()) @ b.t()"


@mutants(
    {
        "dense without scaling": naive((DENSE, DENSE.replace("self.scaling * ", ""))),
        "experts without scaling": naive((EXPERT, EXPERT.replace("self.scaling * ", ""))),
        "scaling twice on experts": naive((EXPERT, EXPERT.replace("self.scaling", "self.scaling**2"))),
        "expert 0's factors for all": naive(("expert if f.shape[0] > 1 else 0", "0")),
        "experts left out": naive((EXPERT, "pass")),
        "dense left out": naive((DENSE, "return y\n            " + DENSE)),
        "only the first expert's w2": naive(
            (
                "if a is not None:\n            b =",
                'if a is not None and (which != "w2" or expert == 0):\n            b =',
            )
        ),
    }
)
def test_trap_22_rejects(plant):
    assert_rejects(check_22, plant())
