"""TransformerEngine's attention behind its switch: refused where it can't run, and given what it expects.

TransformerEngine itself isn't installed where these tests run; a stand-in with its interface computes from what our
module hands over.
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from helpers.batches import micro_batch, mini_batch, random_tokens
from helpers.trainers import adapter_tensors, gradients, relative_difference, tiny_trainer
from torch import Tensor, nn

from miles_k3.errors import LaunchError
from miles_k3.k3.ops.mla import mla_expanded_naive
from miles_k3.k3.ops.packed import Packed
from miles_k3.trainer.model import mla_te


class StandIn(nn.Module):
    """TEDotProductAttention's signature; the arithmetic is the naive twin's, from the boundaries it is given."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any):
        super().__init__()
        assert layer_number >= 1
        assert (attn_mask_type.name, attention_type) == ("padding_causal", "self")
        assert options["k_channels"] ** -0.5 == options["softmax_scale"]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: None, attn_mask_type: Any, packed_seq_params: Any
    ) -> Tensor:
        assert packed_seq_params.qkv_format == "thd"
        assert packed_seq_params.max_seqlen_q == 17
        return mla_expanded_naive(q, k, v, Packed.from_cu_seqlens(packed_seq_params.cu_seqlens_q)).flatten(1)


def test_it_is_refused_with_the_reason() -> None:
    with pytest.raises(LaunchError, match="TransformerEngine is not installed"):
        tiny_trainer(section={"mla_attention": "transformer_engine"})


def test_it_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_te, "find_spec", lambda name: ModuleSpec(name, None))
    assert "computes on CUDA" in (mla_te.te_problem("cpu") or "")
    assert mla_te.te_problem("cuda") is None


def test_it_gets_the_whole_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.TEDotProductAttention", StandIn)
    monkeypatch.setattr(mla_te, "te_problem", lambda device: None)
    mini = mini_batch(micro_batch(random_tokens((9, 17, 5))))
    found = []
    for attention in ("torch", "transformer_engine"):
        trainer = tiny_trainer(calm=True, section={"mla_attention": attention})
        trainer.load_adapter(adapter_tensors())
        found.append(gradients(trainer, mini))
    assert max(relative_difference(found[1], found[0]).values()) <= 1e-5
