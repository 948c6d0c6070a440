"""The naive model against the log-probabilities of real SGLang, and the mistakes that they would show."""

from __future__ import annotations

import pytest
from helpers.golden import CORRELATION_LIMIT, MEAN_LIMIT, SCALING, Golden, assert_agrees
from helpers.mutants import mutants, naive

from miles_k3.k3.naive import NaiveK3


@pytest.mark.parametrize("adapter", [False, True], ids=["base", "lora"])
def test_naive_agrees_with_sglang(golden: Golden, adapter: bool):
    model = NaiveK3(golden.config, golden.weights, golden.adapter if adapter else None, SCALING)
    scores = golden.lora if adapter else golden.base
    assert_agrees(scores.compare(model.logprobs(scores.tokens_BT)))


def test_the_adapter_moves_logprobs(golden: Golden):
    """SGLang's own scores of the same prompts differ by 0.93 on average, so a lost adapter can't pass."""
    assert golden.base.tokens_BT[:, :200].equal(golden.lora.tokens_BT[:, :200])
    mean, _ = golden.base.compare(golden.lora.logprobs_BT)["prompt"]
    assert mean > 0.8


GATE = 'o * torch.sigmoid(self.linear(x, p + "g_proj"))'
KDA_GATE = "c.rms_norm_eps).flatten(-2)\n        return self.linear(" + GATE
MLA_GATE = "o = o.transpose(1, 2).flatten(-2)\n        return self.linear(" + GATE
SITU = "b * torch.tanh(gate / b) * torch.sigmoid(gate) * lb * torch.tanh(up / lb)"
FOLDED = 'self.weight(name + "_norm.weight") * self.weight(name + "_proj.weight")[0]'
MISTAKES = {
    "prefix + a on a write layer": naive(("[*bank, prefix], a", "[*bank, prefix], prefix + a")),
    "attention side ignores the bank": naive(
        ('x = self.attn_res(prefix, bank, p + "self_attention_res") if bank else prefix', "x = prefix")
    ),
    "AttnRes 1/sqrt(H)": naive(("(keys @ query)", "(keys @ query * 1024**-0.5)")),
    "AttnRes mixes normalised rows": naive(("(p.unsqueeze(-1) * rows)", "(p.unsqueeze(-1) * keys)")),
    "AttnRes norm weight not folded in": naive((FOLDED, 'self.weight(name + "_proj.weight")[0]')),
    "no MLA output gate": naive((MLA_GATE, MLA_GATE.replace(GATE, "o"))),
    "MLA scale 128^-0.5": naive(("c.qk_head_dim**-0.5", "128**-0.5")),
    "kv_b all keys first": naive(
        (
            "kv = kv.unflatten(-1, (heads, -1)).transpose(1, 2)",
            "kv = torch.cat([part.unflatten(-1, (heads, -1)) for part in kv.chunk(2, -1)], -1).transpose(1, 2)",
        )
    ),
    "SiLU KDA gate": naive((KDA_GATE, KDA_GATE.replace("torch.sigmoid", "torch.nn.functional.silu"))),
    "softplus decay": naive(
        ("c.gate_lower_bound * torch.sigmoid(rate * f.unflatten(-1, (heads, dim)))",
         "-rate * torch.nn.functional.softplus(f.unflatten(-1, (heads, dim)))")
    ),
    "no SiLU behind the convolution": naive(("return y * torch.sigmoid(y)", "return y")),
    "SwiGLU": naive((SITU, "torch.nn.functional.silu(gate) * up")),
    "up not clipped": naive((SITU, SITU.replace("lb * torch.tanh(up / lb)", "up"))),
    "no latent norm": naive(("if c.latent_moe_use_norm:", "if False:")),
    "bias in the weights": naive(
        ("weights = scores.gather(-1, chosen)",
         'weights = (scores + self.weight(p + "gate.e_score_correction_bias")).gather(-1, chosen)')
    ),
    "high nibble first": naive(("packed & 15, packed >> 4", "packed >> 4, packed & 15")),
}  # fmt: skip


def is_inside(golden: Golden, model: type[NaiveK3]) -> bool:
    """On one prompt, the limits of the whole test."""
    one = golden.base.first(1)
    mean, correlation = one.compare(model(golden.config, golden.weights).logprobs(one.tokens_BT))["prompt"]
    return mean <= MEAN_LIMIT and correlation >= CORRELATION_LIMIT


@pytest.mark.slow
def test_the_right_model_is_inside_on_one_prompt(golden: Golden):
    assert is_inside(golden, NaiveK3)


@pytest.mark.slow
@mutants(MISTAKES)
def test_each_mistake_falls_outside_the_limits(golden: Golden, plant):
    """README's table, against SGLang's scores."""
    assert not is_inside(golden, plant())
