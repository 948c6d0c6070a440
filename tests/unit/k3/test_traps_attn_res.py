"""Traps 5, 6, 7 of spec 7.3: Attention Residuals.

Each check runs on the naive model and on both models made of the ops, and must reject each planted mistake.
Tolerance: AttnRes picks sharply here (scores of several units), so fp32 noise of 1e-6 grows to about 1e-3 over eight
layers; 1e-2 of values near 4 is the limit, a mistake moves them by whole units.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from helpers.fla_oracle import naive_attnres
from helpers.mutants import assert_rejects, mutants, mutate, naive, on_ops
from helpers.ops_model import DIFFERENTIABLE, MODELS
from helpers.reference import Reference
from helpers.tiny import tiny_config, tiny_weights
from torch import Tensor

from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.ops.attn_res import attn_res_naive
from miles_k3.k3.params import TEXT, layer_prefix

CONFIG = tiny_config()
WEIGHTS = tiny_weights(CONFIG)
TOKENS = [7, 200, 31, 31, 94, 150, 3]
every_model = pytest.mark.parametrize("model", MODELS)
close = partial(torch.testing.assert_close, rtol=0, atol=1e-2)


# --- 5: order on write layers ----------------------------------------------------------------------------------------
@cache
def reference() -> tuple[list[list[Tensor]], Tensor]:
    oracle = Reference(CONFIG, WEIGHTS)
    return oracle.trace(TOKENS), oracle.logits(TOKENS)


def check_05(model: type[NaiveK3]) -> None:
    """After every layer, bank and prefix are the sums of the reference's blocks (0, 3, 6 open one; 6..7 is ragged)."""
    trace, logits = reference()
    made = model(CONFIG, WEIGHTS)
    prefix, bank = WEIGHTS[TEXT + "embed_tokens.weight"].float()[torch.tensor(TOKENS)][None], []
    for layer, blocks in enumerate(trace):
        assert len(bank) == -(-layer // 3)
        prefix, bank = made.layer(layer, prefix, bank)
        assert len(bank) == layer // 3 + 1
        for ours, block in zip([*bank, prefix], blocks, strict=True):
            close(ours[0], block.float())
    close(made(torch.tensor([TOKENS]))[0], logits.float())


@every_model
def test_trap_05_order_on_write_layers(model):
    check_05(model)


WRITE = "bank, prefix = [*bank, prefix], a"
STARTS = "i % c.attn_res_block_size == 0"
ATTENTION_MIX = 'x = self.attn_res(prefix, bank, p + "self_attention_res") if bank else prefix'


@mutants(
    {
        "prefix + a": naive((WRITE, "bank, prefix = [*bank, prefix], prefix + a")),
        "a is banked too": naive((WRITE, "bank, prefix = [*bank, prefix + a], a")),
        "bank before the attention side": naive(
            (ATTENTION_MIX, f"bank = [*bank, prefix] if {STARTS} else bank\n        " + ATTENTION_MIX),
            (WRITE, "prefix = a"),
        ),
        "attention side without the prefix": naive((ATTENTION_MIX, ATTENTION_MIX.replace("(prefix,", "(bank[-1],"))),
        "attention side ignores the bank": naive((ATTENTION_MIX, "x = prefix")),
        "one layer late": naive((STARTS, "i % c.attn_res_block_size == 1")),
        "write behind the MLP": naive(
            (
                f"if {STARTS}:\n            {WRITE}\n        else:\n            prefix = prefix + a",
                "prefix = prefix + a",
            ),
            (
                "return prefix + (self.moe(y, i) if c.is_moe(i) else self.mlp(y, mlp_prefix(c, i))), bank",
                "m = self.moe(y, i) if c.is_moe(i) else self.mlp(y, mlp_prefix(c, i))\n"
                f"        return (m, [*bank, prefix]) if {STARTS} else (prefix + m, bank)",
            ),
        ),
    }
)
def test_trap_05_rejects(plant):
    assert_rejects(check_05, plant())


# --- 6: scoring ------------------------------------------------------------------------------------------------------
def check_06(model: type[NaiveK3]) -> None:
    name = layer_prefix(4) + "mlp_res"
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 5, CONFIG.hidden_size, generator=rng) * size for size in (1.0, 3.0, 0.3)]
    made = model(CONFIG, WEIGHTS)

    def mix(*rows: Tensor) -> Tensor:
        return made.attn_res(rows[-1], list(rows[:-1]), name)

    norm, proj = (WEIGHTS[f"{name}_{n}.weight"].float() for n in ("norm", "proj"))
    expected, p = naive_attnres(proj, rows, norm, rms_eps=1e-5, return_weights=True)
    close(mix(*rows), expected, atol=1e-4)
    for i, row in enumerate(rows):  # ten times a row: the same p (up to eps), ten times its contribution
        larger = mix(*(10 * r if n == i else r for n, r in enumerate(rows)))
        close(larger - mix(*rows), 9 * p[i][..., None] * row, atol=5e-3)


@every_model
def test_trap_06_scoring(model):
    check_06(model)


FOLDED = 'self.weight(name + "_norm.weight") * self.weight(name + "_proj.weight")[0]'
OP_SCORES = "keys_TNH * norm_weight_H.float() * proj_weight_1H.float().reshape(-1)"


@mutants(
    {
        "1/sqrt(H)": naive(("(keys @ query)", "(keys @ query * keys.shape[-1] ** -0.5)")),
        "normalised values": naive(("(p.unsqueeze(-1) * rows)", "(p.unsqueeze(-1) * keys)")),
        "raw keys": naive(("keys = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)", "keys = rows")),
        "L2 keys": naive(("keys = rows * torch.rsqrt(rows.pow(2).mean(", "keys = rows * torch.rsqrt(rows.pow(2).sum(")),
        "norm weight left out": naive((FOLDED, 'self.weight(name + "_proj.weight")[0]')),
        "norm weight on the values": naive(
            (FOLDED, 'self.weight(name + "_proj.weight")[0]'),
            ("(p.unsqueeze(-1) * rows)", '(p.unsqueeze(-1) * rows * self.weight(name + "_norm.weight"))'),
        ),
        "op with 1/sqrt(H)": on_ops(
            op_attn_res=mutate(attn_res_naive, (OP_SCORES, OP_SCORES + " * keys_TNH.shape[-1] ** -0.5"))
        ),
        "op with normalised values": on_ops(op_attn_res=mutate(attn_res_naive, ("-1) * rows_TNH", "-1) * keys_TNH"))),
    }
)
def test_trap_06_rejects(plant):
    assert_rejects(check_06, plant())


# --- 7: two aggregations a layer, one at the end, layer 0's attention side unused ------------------------------------
UNUSED = layer_prefix(0) + "self_attention_res"
USED = [
    TEXT + "output_attn_res",
    *(f"{layer_prefix(i)}{side}_res" for i in range(8) for side in ("self_attention", "mlp")),
]
USED.remove(UNUSED)


def check_07(model: type[NaiveK3]) -> None:
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    logits = model(CONFIG, WEIGHTS)(tokens)
    for name in (UNUSED, *USED[::2], USED[-1]):
        zero = torch.zeros_like(WEIGHTS[name + "_proj.weight"])
        moved = (model(CONFIG, WEIGHTS | {name + "_proj.weight": zero})(tokens) - logits).abs().max()
        assert moved == 0 if name == UNUSED else moved > 0.1, name


@every_model
def test_trap_07_aggregations(model):
    check_07(model)


@pytest.mark.parametrize("model", DIFFERENTIABLE)
def test_trap_07_only_layer_0s_attention_side_has_no_gradient(model):
    names = [f"{name}_{part}.weight" for name in (*USED, UNUSED) for part in ("norm", "proj")]
    leaves = {n: WEIGHTS[n].float().requires_grad_() for n in names}
    loss = model(CONFIG, WEIGHTS | leaves)(torch.tensor([TOKENS])).square().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    silent = {n for n, grad in zip(names, grads, strict=True) if grad is None or not grad.any()}
    assert silent == {f"{UNUSED}_norm.weight", f"{UNUSED}_proj.weight"}


@mutants(
    {
        "none before the MLP": naive(('y = self.attn_res(prefix, bank, p + "mlp_res")', "y = prefix")),
        "none before attention": naive((ATTENTION_MIX, "x = prefix")),
        "none at the end": naive(("found[layer] = self.attn_res(prefix, bank, reader)", "found[layer] = prefix")),
        "layer 0 aggregates": naive(
            (ATTENTION_MIX, ATTENTION_MIX.replace("(prefix, bank,", "(prefix, bank or [2 * prefix],").split(" if ")[0])
        ),
        "one set of weights a layer": naive((ATTENTION_MIX, ATTENTION_MIX.replace("self_attention_res", "mlp_res"))),
    }
)
def test_trap_07_rejects(plant):
    assert_rejects(check_07, plant())
