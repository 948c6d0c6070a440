"""Acceptance by brute force, held against drafts whose acceptance is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.drafts import small_draft
from helpers.engines import ask, make_engine, random_prompts
from torch import Tensor

from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.speculative.draft import Context, DraftedBlocks, DraftModel
from miles_k3.rollout.speculative.draft_eval import judge_block, measure_acceptance
from miles_k3.types import SamplingParams

NEW = 14


class Scripted(DraftModel):
    """Proposes what `tokens_of` says for a sequence that ends in an anchor at a position."""

    tokens_of: Callable[[int, int], list[int]]

    def draft(self, anchor_tokens_S: Tensor, anchors_S: Tensor, context: Context,
              choose: Callable[[Tensor, int], Tensor] | None = None) -> DraftedBlocks:  # fmt: skip
        rows = [self.tokens_of(*at) for at in zip(anchor_tokens_S.tolist(), anchors_S.tolist(), strict=True)]
        tokens = torch.tensor(rows)
        logits = torch.nn.functional.one_hot(tokens, self.config.vocab_size).float() * 1e4
        return DraftedBlocks(tokens_SG=tokens, logits_SGV=logits, confidence_SG=None)


def scripted(tokens_of: Callable[[int, int], list[int]]) -> Scripted:
    base = small_draft()
    model = Scripted(base.config, base.weights, base.embed_VH, base.head_VH)
    model.tokens_of = tokens_of
    return model


def greedy_answers(engine: EmbeddedEngine, prompts: list[list[int]], stop: tuple[int, ...]) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW, stop_token_ids=stop)
    return [c.token_ids for c in ask(engine, prompts, params)]


def test_a_draft_that_knows_is_accepted_whole() -> None:
    engine, prompt = make_engine(), random_prompts(1)[0]
    (answer,) = greedy_answers(engine, [prompt], ())

    def knows(_: int, position: int) -> list[int]:
        rest = answer[position + 1 - len(prompt) :][:5]
        return [*rest, *[0] * (5 - len(rest))]

    found = measure_acceptance(
        scripted(knows), engine, [prompt], max_new_tokens=NEW, stop_token_ids=(), sampled=False
    )  # fmt: skip
    assert found.answers == (answer,)
    # 1 token at first, then 5 accepted and one of the target's: 13 left, 7 left, 1 left
    assert (found.rounds, found.mean_accepted, found.room) == (3, 11 / 3, 11 / 3)
    assert found.reached == found.accepted == (3, 2, 2, 2, 2)


def test_a_draft_wrong_at_one_place_is_accepted_up_to_there() -> None:
    engine, prompt = make_engine(), random_prompts(1)[0]
    (answer,) = greedy_answers(engine, [prompt], ())

    def errs(_: int, position: int) -> list[int]:
        rest = [*answer[position + 1 - len(prompt) :][:5], 0, 0, 0, 0, 0][:5]
        rest[2] = (rest[2] + 1) % 256
        return rest

    found = measure_acceptance(scripted(errs), engine, [prompt], max_new_tokens=NEW, stop_token_ids=(), sampled=False)
    assert found.answers == (answer,)
    assert found.rates[:3] == (1.0, 1.0, 0.0)
    assert found.reached[3:] == (0, 0)


@pytest.mark.parametrize("stops", [False, True])
def test_greedy_answers_are_the_engines_whatever_is_drafted(stops: bool) -> None:
    engine, prompts = make_engine(), random_prompts(6)
    plain = greedy_answers(engine, prompts, ())
    stop = tuple({a[5] for a in plain}) if stops else ()
    found = measure_acceptance(
        small_draft(), engine, prompts, max_new_tokens=NEW, stop_token_ids=stop, sampled=False
    )  # fmt: skip
    assert found.answers == tuple(greedy_answers(engine, prompts, stop))
    assert 0.0 <= found.mean_accepted <= found.room <= 5.0


def test_rejection_sampling_keeps_the_targets_distribution() -> None:
    """Pairs of tokens committed from blocks of a draft that is far off, by a chi-square test."""
    rng, count = torch.Generator().manual_seed(3), 6000
    q = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]])
    p = torch.tensor([[0.2, 0.5, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    seen, lengths = torch.zeros(2, 4), []
    for _ in range(count):
        drafted = torch.multinomial(q, 1, generator=rng)[:, 0]
        committed = judge_block(drafted, q, p, rng)
        lengths.append(len(committed) - 1)
        for k, token in enumerate(committed[:2]):
            seen[k, token] += 1
    expected = p[:2] * seen.sum(-1, keepdim=True)
    assert ((seen - expected).square() / expected).sum(-1).max() < 16.3  # 0.999 of chi-square with 3 degrees
    overlap = torch.minimum(p[:2], q).sum(-1)
    assert sum(lengths) / count == pytest.approx(float(overlap[0] + overlap.prod()), abs=0.03)
    planted = judge_block(torch.tensor([0, 3]), q * 0.0, p, rng)  # q that claims nothing: all is accepted
    assert len(planted) == 3


def test_sampled_answers_end_as_asked_and_differ() -> None:
    engine, prompts = make_engine(), [random_prompts(1)[0]] * 4
    found = measure_acceptance(
        small_draft(), engine, prompts, max_new_tokens=5, stop_token_ids=(), sampled=True, seed=3
    )  # fmt: skip
    assert [len(a) for a in found.answers] == [5] * 4
    assert len(set(found.answers)) == 4
