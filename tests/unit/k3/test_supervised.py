"""Supervised training of small models: it learns, and a checkpoint holds what was trained."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import tiny_adapter, tiny_config
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.params import text_params
from miles_k3.k3.supervised import (
    FROZEN,
    StoredWeights,
    TrainableK3,
    fit,
    fit_adapter,
    init_weights,
    padded,
    plain_weights,
    released,
)
from miles_k3.types import AdapterConfig

CPU = torch.device("cpu")


def test_pairs_are_padded_on_the_right_and_only_answers_count() -> None:
    tokens, mask = padded([([5, 6, 7], [8, 2]), ([5], [9, 9, 2])], 0, CPU)
    assert tokens.tolist() == [[5, 6, 7, 8, 2], [5, 9, 9, 2, 0]]
    counted = [tokens[b, 1:][mask[b].bool()].tolist() for b in range(2)]
    assert counted == [[8, 2], [9, 9, 2]]


@pytest.fixture(scope="module")
def trained() -> tuple[K3Config, dict[str, Tensor], dict[str, Tensor], list[float]]:
    """(config, masters before, masters after, losses) of four steps on one batch."""
    config, losses = tiny_config(num_hidden_layers=4, mla_layers=(2,)), []
    masters = init_weights(config, 0, CPU)
    before = {name: t.clone() for name, t in masters.items()}
    batch = padded([([3, 4, 5], [6, 7, 2]), ([8, 9], [10, 2])], 0, CPU)
    heard: list[int] = []
    fit(
        config, masters, lambda: batch, steps=4, lr=5e-3, warmup=1, before=heard.append,
        after=lambda _, loss: losses.append(loss),
    )  # fmt: skip
    assert heard == [0, 1, 2, 3, 4]
    return config, before, masters, losses


def test_it_learns_and_leaves_what_is_frozen(
    trained: tuple[K3Config, dict[str, Tensor], dict[str, Tensor], list[float]],
) -> None:
    _, before, after, losses = trained
    assert losses[-1] < losses[0] - 1.0, losses
    still = {name for name, t in before.items() if torch.equal(t, after[name])}
    alone = "layers.0.self_attention_res_"  # the first mixture has one source, whatever its weights
    assert {name for name in still if alone not in name} == {name for name in before if name.endswith(FROZEN)}


def test_the_oracle_computes_with_a_checkpoint_what_was_trained(
    trained: tuple[K3Config, dict[str, Tensor], dict[str, Tensor], list[float]],
) -> None:
    """Packed experts and BF16 tensors against the straight-through weights; fp32 sums in another order."""
    config, _, masters, _ = trained
    checkpoint = {p.name: released(p, masters) for p in text_params(config)}
    assert {n: (t.shape, t.dtype) for n, t in checkpoint.items() if n.endswith("packed")} == {
        p.name: (torch.Size(p.shape), torch.uint8) for p in text_params(config) if p.name.endswith("packed")
    }
    tokens = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        expected = TrainableK3(config, StoredWeights(config, masters).weights())(tokens)
        found = NaiveK3(config, checkpoint)(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_is_trained_over_a_checkpoint_that_stays(
    trained: tuple[K3Config, dict[str, Tensor], dict[str, Tensor], list[float]],
) -> None:
    """The oracle with the factors gives what was trained; each factor moves, the experts' too."""
    config, _, masters, _ = trained
    checkpoint = {p.name: released(p, masters) for p in text_params(config)}
    weights, adapter = plain_weights(config, checkpoint), AdapterConfig(rank=2, alpha=4.0, share_gate_up_a=False)
    factors = tiny_adapter(config, adapter, dtype=torch.float32)
    before = {name: t.clone() for name, t in factors.items()}
    batch, found = padded([([3, 4, 5], [9, 2]), ([8, 9], [11, 11, 2])], 0, CPU), list[float]()
    fit_adapter(
        config, weights, factors, lambda: batch, scaling=2.0, steps=6, lr=2e-2, warmup=1,
        after=lambda _, loss: found.append(loss),
    )  # fmt: skip
    assert found[-1] < found[0] - 1.0, found
    assert not any(torch.equal(t, before[name]) for name, t in factors.items())
    tokens = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        expected = TrainableK3(config, weights, factors, 2.0)(tokens)
        torch.testing.assert_close(NaiveK3(config, checkpoint, factors, 2.0)(tokens), expected, rtol=1e-4, atol=1e-4)
