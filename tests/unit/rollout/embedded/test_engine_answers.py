"""Greedy answers and log-probabilities against the oracle: batched, alone, in any order, at any chunk size."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from helpers.engines import (
    GREEDY,
    adapter_update,
    answer_logits,
    ask,
    assert_greedy,
    assert_idle,
    make_engine,
    oracle,
    random_prompts,
    tokens_of,
)

from miles_k3.types import Completion, SamplingParams

PROMPTS = random_prompts(64)


@pytest.fixture(scope="module")
def batched() -> list[Completion]:
    engine = make_engine()
    answers = ask(engine, PROMPTS)
    assert_idle(engine)
    return answers


def test_greedy_equals_the_oracle(batched: list[Completion]) -> None:
    assert_greedy(answer_logits(oracle(), PROMPTS, tokens_of(batched)), batched)


def test_greedy_equals_the_oracle_where_activations_saturate() -> None:
    """The specification's own weights: NaiveK3 in fp32 is off by up to 2e-3 nats there, so the tolerance is wider."""
    answers = ask(make_engine(calm=False), PROMPTS)
    logits = answer_logits(oracle(calm=False), PROMPTS, tokens_of(answers))
    assert_greedy(logits, answers, tie=1e-3, tolerance=2e-2)


def test_alone_equals_batched(batched: list[Completion]) -> None:
    engine = make_engine(max_running=1)
    for prompt, expected in zip(PROMPTS[:12], batched, strict=False):
        (alone,) = ask(engine, [prompt])
        assert alone.token_ids == expected.token_ids
        assert alone.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("seed", [1, 2])
def test_any_arrival_order(batched: list[Completion], seed: int) -> None:
    order = list(range(64))
    random.Random(seed).shuffle(order)
    answers = ask(make_engine(max_running=20), [PROMPTS[i] for i in order])
    assert tokens_of(answers) == [batched[i].token_ids for i in order]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 333])
def test_any_chunk_size(batched: list[Completion], chunk: int) -> None:
    count = 3 if chunk == 1 else 12
    engine = make_engine(prefill_chunk_tokens=chunk)
    assert tokens_of(ask(engine, PROMPTS[:count])) == tokens_of(batched[:count])
    assert_idle(engine)


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_any_page_size(batched: list[Completion], page_size: int) -> None:
    assert tokens_of(ask(make_engine(page_size=page_size), PROMPTS[:24])) == tokens_of(batched[:24])


def test_experts_may_stay_packed(batched: list[Completion]) -> None:
    assert tokens_of(ask(make_engine(base_dtype="mxfp4"), PROMPTS[:8])) == tokens_of(batched[:8])


@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_prompt_lengths_around_boundaries(length: int) -> None:
    """Pages of 16, KDA chunks of 16, prefill chunks of 64, convolution windows of 3."""
    (prompt,) = random_prompts(1, low=length, high=length, seed=length)
    answers = ask(make_engine(prefill_chunk_tokens=64), [prompt])
    assert_greedy(answer_logits(oracle(), [prompt], tokens_of(answers)), answers)


def test_long_context_decodes_over_many_pages() -> None:
    (prompt,) = random_prompts(1, low=150, high=150, seed=5)
    answers = ask(make_engine(page_size=8), [prompt], dataclasses.replace(GREEDY, max_new_tokens=40))
    assert_greedy(answer_logits(oracle(), [prompt], tokens_of(answers)), answers)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampled_logprobs_are_those_of_the_tempered_distribution(temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, max_new_tokens=8, seed=i) for i in range(16)]
    answers = ask(make_engine(), PROMPTS[:16], params)
    for row, completion in zip(answer_logits(oracle(), PROMPTS[:16], tokens_of(answers)), answers, strict=True):
        expected = (row / temperature).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])
        assert completion.logprobs == pytest.approx(expected.squeeze(1).tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_score_equals_the_oracle(temperature: float) -> None:
    engine = make_engine(prefill_chunk_tokens=100)
    model = oracle()
    for sequence, scored in zip(PROMPTS[:12], engine.score(PROMPTS[:12], temperature=temperature), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([sequence[:-1] or [0]]))[0] / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:] or [0])[:, None]).squeeze(1)
        assert scored.dtype == torch.float32
        assert scored.shape == (len(sequence) - 1,)
        assert scored.double().tolist() == pytest.approx(expected[: len(scored)].tolist(), abs=1e-4)


def test_score_with_adapter_equals_generation() -> None:
    engine = make_engine()
    engine.load_adapter(adapter_update(0))
    answers = ask(engine, PROMPTS[:8], [SamplingParams(max_new_tokens=8, seed=i) for i in range(8)])
    rows = engine.score([[*p, *a.token_ids] for p, a in zip(PROMPTS, answers, strict=False)])
    for prompt, row, completion in zip(PROMPTS, rows, answers, strict=False):
        assert completion.logprobs == pytest.approx(row[len(prompt) - 1 :].tolist(), abs=1e-4)


def test_bf16_is_off_by_its_rounding_only() -> None:
    """BF16 rounds 2^16 times coarser than fp32, so it differs from the oracle about 2^16 times as much, and no more.

    What that is in nats depends on the model: this random one amplifies rounding far more than a trained one.
    """
    sequences = [p for p in PROMPTS if len(p) > 30]
    model, errors = oracle(), {}
    for dtype in (torch.float32, torch.bfloat16):
        scored = torch.cat(make_engine(dtype=dtype).score(sequences))
        logits = answer_logits(model, [s[:1] for s in sequences], [s[1:] for s in sequences])
        expected = torch.cat(
            [
                row.log_softmax(-1).gather(1, torch.tensor(s[1:])[:, None]).squeeze(1)
                for row, s in zip(logits, sequences, strict=True)
            ]
        )
        errors[dtype] = (scored - expected).abs().mean().item()
    assert errors[torch.bfloat16] <= 1.5 * 2**16 * errors[torch.float32]


def test_bf16_generates_what_it_scores() -> None:
    """Caches, batching and single-token steps in BF16 against one packed forward in BF16."""
    engine = make_engine(dtype=torch.bfloat16)
    answers = ask(engine, PROMPTS[:16], [SamplingParams(max_new_tokens=8, seed=i) for i in range(16)])
    rows = engine.score([[*p, *a.token_ids] for p, a in zip(PROMPTS, answers, strict=False)])
    gaps = [
        (torch.tensor(a.logprobs) - row[len(p) - 1 :]).abs() for p, a, row in zip(PROMPTS, answers, rows, strict=False)
    ]
    assert torch.cat(gaps).mean() <= 0.1
