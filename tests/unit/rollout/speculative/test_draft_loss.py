"""The loss and its gradients against a formulation row by row."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.drafts import random_examples, small_draft
from torch import Tensor

from miles_k3.rollout.speculative.blocks import Example, make_blocks
from miles_k3.rollout.speculative.draft import DraftModel
from miles_k3.rollout.speculative.draft_loss import LossWeights, draft_loss

WEIGHTS = LossWeights(cross_entropy=0.3, distance=0.7, confidence=0.6, gamma_decay=2.5)


def row_by_row(model: DraftModel, examples: list[Example], anchors: list[list[int]]) -> dict[str, Tensor]:
    """Spec 6.4 with a loop over blocks and rows, one sequence at a time."""
    size, sums, share, taus = model.config.block_size, dict.fromkeys(("ce", "l1", "bce"), torch.zeros(())), 0.0, []
    w = model.weights
    for example, chosen in zip(examples, anchors, strict=True):
        tokens, end = example.token_ids, len(example.token_ids)
        context = model.context(example.states.taps_TW.unsqueeze(0))
        for anchor in chosen:
            hidden = model.hidden(torch.tensor([[tokens[anchor]]]), torch.tensor([[anchor]]), context)[0, 0]
            survival, tau = torch.ones(()), torch.zeros(())
            for k in range(size):
                if anchor + 1 + k >= end:
                    break
                markov = w["markov_head.markov_w1.weight"][tokens[anchor + k]]
                logits = hidden[k] @ model.head_VH.t() + markov @ w["markov_head.markov_w2.weight"].t()
                q = logits.exp() / logits.exp().sum()
                scores = example.states.final_TH[anchor + k] @ model.head_VH.t()
                p = scores.exp() / scores.exp().sum()
                l1 = (q - p).abs().sum()
                accept = (1 - l1 / 2).detach()
                features = torch.cat([hidden[k], markov])
                c = 1 / (1 + (-(features @ w["confidence_head.proj.weight"][0])
                              - w["confidence_head.proj.bias"][0]).exp())  # fmt: skip
                weight = math.exp(-k / WEIGHTS.gamma_decay)
                share += weight
                sums["ce"] = sums["ce"] - weight * q[tokens[anchor + 1 + k]].log()
                sums["l1"] = sums["l1"] + weight * l1
                sums["bce"] = sums["bce"] - weight * (accept * c.log() + (1 - accept) * (1 - c).log())
                survival = survival * accept
                tau = tau + survival
            taus.append(tau)
    out = {name: total / share for name, total in sums.items()}
    out["total"] = 0.3 * out["ce"] + 0.7 * out["l1"] + 0.6 * out["bce"]
    out["tau"] = torch.stack(taus).mean()
    return out


def test_terms_and_gradients_are_those_of_the_specification() -> None:
    model = small_draft()
    examples = random_examples([(4, 9), (6, 2), (3, 4), (5, 1)], model.config)
    batch = make_blocks(examples, model.config.block_size, max_blocks=3, generator=torch.Generator().manual_seed(0))
    on = batch.supervised_SAG.any(-1)
    anchors = [batch.anchors_SA[row][on[row]].tolist() for row in range(len(examples))]
    assert [len(a) for a in anchors] == [3, 1, 3, 0]
    parameters = list(model.weights.values())
    for parameter in parameters:
        parameter.requires_grad_(True)
    found, wanted = draft_loss(model, batch, WEIGHTS), row_by_row(model, examples, anchors)
    for name, value in (("ce", found.cross_entropy), ("l1", found.distance), ("bce", found.confidence),
                        ("tau", found.expected_accepted), ("total", found.total)):  # fmt: skip
        torch.testing.assert_close(value, wanted[name], atol=1e-5, rtol=1e-5)
    got = torch.autograd.grad(found.total, parameters)
    expected = torch.autograd.grad(wanted["total"], parameters)
    for name, a, b in zip(model.weights, got, expected, strict=True):
        assert b.abs().max() > 1e-4, name
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def fields_of(batch: object) -> dict[str, Tensor]:
    return {name: getattr(batch, name) for name in type(batch).__dataclass_fields__}  # type: ignore[attr-defined]


def test_anchors_and_labels_stay_inside_answers() -> None:
    model = small_draft()
    examples = random_examples([(4, 9), (6, 2)], model.config)
    for seed in range(20):
        batch = make_blocks(examples, 5, max_blocks=4, generator=torch.Generator().manual_seed(seed))
        for row, example in enumerate(examples):
            on = batch.supervised_SAG[row]
            anchors = batch.anchors_SA[row][on.any(-1)].tolist()
            assert len(anchors) == len(set(anchors)) == min(4, example.num_anchors)
            assert all(example.num_prompt_tokens <= a < len(example.token_ids) - 1 for a in anchors)
            for a, labels, rows in zip(batch.anchors_SA[row].tolist(), batch.labels_SAG[row], on, strict=True):
                told = labels[rows].tolist()
                assert told == list(example.token_ids[a + 1 : a + 1 + len(told)])
                assert not rows.any() or len(told) == min(5, len(example.token_ids) - 1 - a)


@pytest.mark.parametrize("padding", [0.0, 1e3])
def test_padding_does_not_count(padding: float) -> None:
    model = small_draft()
    examples = random_examples([(4, 9), (3, 3)], model.config)
    batch = make_blocks(examples, 5, max_blocks=2, generator=torch.Generator().manual_seed(0))
    taps = batch.taps_STW.clone()
    taps[1, 6:] = padding
    target = batch.target_SAGH.clone()
    target[~batch.supervised_SAG] = padding
    other = type(batch)(**{**fields_of(batch), "taps_STW": taps, "target_SAGH": target})
    assert torch.equal(draft_loss(model, batch, WEIGHTS).total, draft_loss(model, other, WEIGHTS).total)
