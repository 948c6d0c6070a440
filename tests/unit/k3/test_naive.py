"""NaiveK3 against a second reading of the specification, and what any K3 must hold to.

The comparison is made in float64, where both readings agree to 1e-9; in fp32 a sharp AttnRes choice amplifies rounding
to about 1e-3 of a logit.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers.ops_model import MODELS, OpsK3, StepK3
from helpers.oracle64 import Oracle64
from helpers.reference import Reference
from helpers.tiny import tiny_adapter, tiny_config, tiny_weights
from torch import Tensor

from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.params import LM_HEAD, TEXT, expert_prefix, layer_prefix
from miles_k3.types import AdapterConfig

TOKENS = [7, 200, 31, 31, 94, 150, 3, 66, 181]

# Tiny-A has equal widths in places (q_lora = kv_lora + extra, MLA values = hidden, KDA = latent): here none are equal.
DISTINCT = {
    "hidden_size": 72, "intermediate_size": 104, "q_lora_rank": 20, "kv_lora_rank": 28, "num_attention_heads": 3,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14, "kda_num_heads": 5, "kda_head_dim": 12,
    "num_shared_experts": 3, "routed_expert_hidden_size": 128, "num_experts": 6, "num_experts_per_token": 3,
    "vocab_size": 230,
}  # fmt: skip
CONFIGS = {
    "tiny-A": {},
    "distinct widths": DISTINCT,
    "blocks of 1": {"attn_res_block_size": 1},
    "blocks of 2": {"attn_res_block_size": 2},
    "one block": {"attn_res_block_size": 12},
    "two dense layers": {"first_k_dense_replace": 2},
    "no latent norm": {"latent_moe_use_norm": False, "routed_scaling_factor": 0.05},
    "other betas": {"situ_beta": 2.0, "situ_linear_beta": 7.0},
    "conv of 2": {"short_conv_kernel_size": 2},
    "MLA first and alone": {"mla_layers": (0, 1)},
}


@cache
def model(kind: type[NaiveK3] = NaiveK3, name: str = "tiny-A") -> NaiveK3:
    config = tiny_config(**CONFIGS[name])
    return kind(config, tiny_weights(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_float64_matches_the_second_reading(name):
    made = model(Oracle64, name)
    actual = made(torch.tensor([TOKENS]))[0]
    torch.testing.assert_close(actual, Reference(made.config, made.weights).logits(TOKENS), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["distinct widths", "one block", "two dense layers", "conv of 2"])
def test_fp32_models_match_float64(kind, name):
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    error = (model(kind, name)(tokens) - model(Oracle64, name)(tokens)).abs()
    assert error.mean() < 1e-4
    assert error.max() < 2e-2


@pytest.mark.parametrize("kind", [OpsK3, StepK3])
def test_models_of_the_ops_match_with_an_adapter(kind):
    config, adapter_config = tiny_config(), AdapterConfig(rank=3, alpha=6.0)
    adapter = tiny_adapter(config, adapter_config, scale=0.1)
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    made = [k(config, model().weights, adapter, adapter_config.scaling)(tokens) for k in (kind, Oracle64)]
    assert (made[0] - made[1]).abs().mean() < 1e-4
    assert (made[1] - model()(tokens)).abs().mean() > 0.3


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_looks_ahead(kind):
    """Earlier logits stay (experts' rows are grouped anew, which rounds anew); later ones move."""
    before = model(kind)(torch.tensor([TOKENS]))
    after = model(kind)(torch.tensor([[*TOKENS[:5], 99, *TOKENS[6:]]]))
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=5e-3)
    assert ((before - after)[:, 5:].abs().amax(-1) > 0.05).all()


def test_right_padding_and_batch_mates_are_harmless():
    alone = model()(torch.tensor([TOKENS]))
    batch = model()(torch.tensor([[*TOKENS, 1, 2, 3], [5] * 12]))
    torch.testing.assert_close(batch[:1, : len(TOKENS)], alone, rtol=0, atol=5e-3)


def test_logprobs_are_those_of_the_next_tokens():
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    logprobs = model().logprobs(tokens)
    full = model()(tokens).log_softmax(-1)
    assert logprobs.shape == (2, len(TOKENS) - 1)
    for t in range(len(TOKENS) - 1):
        torch.testing.assert_close(logprobs[0, t], full[0, t, TOKENS[t + 1]], rtol=0, atol=5e-3)


@cache
def plain_experts() -> dict[str, Tensor]:
    """Tiny-A's checkpoint with its experts as plain weights instead of codes."""
    config, weights = model().config, model().weights
    oracle, plain = Reference(config, weights), {n: t for n, t in weights.items() if t.dtype != torch.uint8}
    for layer in config.moe_layers:
        for e in range(config.num_experts):
            for which in ("w1", "w2", "w3"):
                plain[f"{expert_prefix(layer, e)}{which}.weight"] = oracle.expert_weight(layer, e, which).float()
    return plain


@pytest.mark.parametrize("kind", MODELS)
def test_packed_experts_equal_plain_ones(kind):
    config = model().config
    tokens = torch.tensor([TOKENS])
    plain = kind(config, plain_experts())
    assert torch.equal(plain(tokens), model(kind)(tokens))


def test_every_tensor_reaches_the_logits():
    """No formula is invisible in the tiny weights: with every expert chosen each tensor has a gradient, but for the two
    that the specification says are unused and the biases that only choose.
    """
    config = tiny_config(num_experts_per_token=8)
    leaves = {n: t.float().requires_grad_() for n, t in plain_experts().items()}
    rng = torch.Generator().manual_seed(0)
    logits = NaiveK3(config, leaves)(torch.randint(0, 256, (3, 16), generator=rng))
    loss = (logits * torch.randn(logits.shape, generator=rng)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    silent = {n for n, g in zip(leaves, grads, strict=True) if g is None or g.abs().max() < 1e-3}
    unused = {f"{layer_prefix(0)}self_attention_res_{part}.weight" for part in ("norm", "proj")}
    assert silent == unused | {n for n in leaves if n.endswith("e_score_correction_bias")}
    rows = {n: g for n, g in zip(leaves, grads, strict=True) if n in (LM_HEAD, TEXT + "norm.weight")}
    assert all(bool((g != 0).all()) for g in rows.values())


def test_the_checkpoint_is_only_read():
    config = tiny_config()
    weights = tiny_weights(config)
    for kind in MODELS:
        kind(config, weights)(torch.tensor([TOKENS]))
    assert all(torch.equal(t, weights[n]) for n, t in tiny_weights(config).items())
