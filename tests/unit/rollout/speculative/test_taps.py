"""Taps: the AttnRes mixture after a layer, in the oracle and in the engine (spec 6.2, trap 24)."""

from __future__ import annotations

import pytest
import torch
from helpers.engines import adapter_update, make_engine, oracle, random_prompts, weights
from helpers.tiny import tiny_config
from torch import Tensor

from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.ops.attn_res import attn_res_naive
from miles_k3.k3.ops.residual_bank import ResidualBank
from miles_k3.k3.params import TEXT
from miles_k3.rollout.speculative.taps import target_states

LAYERS = [4, 0, 7, 2]  # any order; after a banking layer, before one, the last


class Watched(NaiveK3):
    """Notes prefix and bank after each layer."""

    def __init__(self) -> None:
        super().__init__(tiny_config(), weights())
        self.seen: list[tuple[Tensor, list[Tensor]]] = []

    def layer(self, i: int, prefix: Tensor, bank: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        self.seen.append(super().layer(i, prefix, bank))
        return self.seen[-1]


def test_the_oracles_taps_are_what_the_next_layer_reads() -> None:
    model = Watched()
    taps = model.taps(torch.tensor(random_prompts(1, low=9, high=9)), LAYERS)[0].chunk(len(LAYERS), dim=-1)
    for layer, tap in zip(LAYERS, taps, strict=True):
        prefix, bank = (model.seen[layer][0][0], [row[0] for row in model.seen[layer][1]])
        reader = TEXT + "output_attn_res" if layer == 7 else f"{TEXT}layers.{layer + 1}.self_attention_res"
        norm, proj = (weights()[f"{reader}_{part}.weight"] for part in ("norm", "proj"))
        torch.testing.assert_close(tap, attn_res_naive(prefix, bank, norm, proj), atol=1e-5, rtol=1e-5)
        assert (tap - prefix).abs().max() > 0.1  # the prefix itself is another thing


@pytest.mark.parametrize("adapted", [False, True])
def test_the_engines_taps_are_the_oracles(adapted: bool) -> None:
    engine, update = make_engine(), adapter_update(0)
    if adapted:
        engine.load_adapter(update)
    model = oracle(adapter=update if adapted else None)
    prompts = random_prompts(6)
    states = target_states(engine, prompts, LAYERS, chunk_tokens=50)
    assert [len(s.taps_TW) for s in states] == [len(p) for p in prompts]
    for prompt, state in zip(prompts, states, strict=True):
        tokens = torch.tensor([prompt])
        torch.testing.assert_close(state.taps_TW.double(), model.taps(tokens, LAYERS)[0], atol=5e-4, rtol=5e-4)
        logits = engine.runner.model.head(state.final_TH).double()
        torch.testing.assert_close(logits, model(tokens)[0], atol=5e-4, rtol=5e-4)


def test_they_are_the_mixtures_that_were_computed_anyway() -> None:
    """To the last bit, before the norm, and no mixture more than without them."""
    engine, mixtures = make_engine(), []

    class Noted(ResidualBank):
        def mix(self, query_H: Tensor) -> Tensor:
            mixtures.append(super().mix(query_H).clone())
            return mixtures[-1]

    engine.runner.model.residual = Noted
    (state,) = target_states(engine, random_prompts(1, low=9, high=9), LAYERS)
    assert len(mixtures) == 2 * tiny_config().num_hidden_layers + 1  # before each sublayer, and before the head
    for layer, tap in zip(LAYERS, state.taps_TW.chunk(len(LAYERS), dim=-1), strict=True):
        assert torch.equal(tap, mixtures[2 * (layer + 1)])


def test_they_can_enter_autograd() -> None:
    (state,) = target_states(make_engine(), [[1, 2, 3]], [0])
    weight = torch.ones(96, requires_grad=True)
    (state.taps_TW * weight).sum().backward()
    assert weight.grad is not None
