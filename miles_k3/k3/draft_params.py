"""The parameter table of a DSpark draft, under the names that RadixArk publishes (spec 6.3). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from miles_k3.k3.draft_config import DraftConfig
from miles_k3.k3.params import DType, GradRule, Param, Part

FC, HIDDEN_NORM, NORM = "fc.weight", "hidden_norm.weight", "norm.weight"
MARKOV_W1, MARKOV_W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE_WEIGHT, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


def draft_layer(layer: int) -> str:
    """Prefix of a draft layer's names."""
    return f"layers.{layer}."


def draft_params(config: DraftConfig) -> Iterator[Param]:
    """Every tensor of the draft, in model order. Embedding and output head are the target's, and not here."""
    c, h = config, config.hidden_size
    yield _tensor(FC, h, c.tap_width)
    yield _tensor(HIDDEN_NORM, h)
    for layer in range(c.num_hidden_layers):
        yield from _layer(c, layer)
    yield _tensor(NORM, h)
    yield _tensor(MARKOV_W1, c.vocab_size, c.markov_rank)
    yield _tensor(MARKOV_W2, c.vocab_size, c.markov_rank)
    if c.use_confidence_head:
        yield _tensor(CONFIDENCE_WEIGHT, 1, h + c.markov_rank)
        yield _tensor(CONFIDENCE_BIAS, 1)


def _layer(c: DraftConfig, layer: int) -> Iterator[Param]:
    p, h, q, kv = draft_layer(layer), c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    yield _tensor(p + "self_attn.q_proj.weight", q * c.head_dim, h, layer=layer)
    yield _tensor(p + "self_attn.k_proj.weight", kv * c.head_dim, h, layer=layer)
    yield _tensor(p + "self_attn.v_proj.weight", kv * c.head_dim, h, layer=layer)
    yield _tensor(p + "self_attn.o_proj.weight", h, q * c.head_dim, layer=layer)
    yield _tensor(p + "self_attn.q_norm.weight", c.head_dim, layer=layer)
    yield _tensor(p + "self_attn.k_norm.weight", c.head_dim, layer=layer)
    yield _tensor(p + "mlp.gate_proj.weight", c.intermediate_size, h, layer=layer)
    yield _tensor(p + "mlp.up_proj.weight", c.intermediate_size, h, layer=layer)
    yield _tensor(p + "mlp.down_proj.weight", h, c.intermediate_size, layer=layer)
    yield _tensor(p + "input_layernorm.weight", h, layer=layer)
    yield _tensor(p + "post_attention_layernorm.weight", h, layer=layer)


def _tensor(name: str, *shape: int, layer: int | None = None) -> Param:
    return Param(name=name, shape=shape, dtype=DType.BF16, part=Part.DRAFT, layer=layer, grad=GradRule.COMPLETE)
