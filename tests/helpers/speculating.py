"""Embedded engines that speculate: with a draft that knows nothing, and with one that knows most of every answer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drafts import small_config, small_weights
from helpers.engines import ask, assert_idle, make_engine, poison_before_steps, random_prompts, tokens_of

from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.proposal import Speculative
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.speculative.audit import CommitAudit
from miles_k3.rollout.speculative.taps import target_states
from miles_k3.types import Completion, SamplingParams

Key = tuple[tuple[int, ...], SamplingParams, int]  # prompt, parameters, adapter version
Book = Mapping[Key, tuple[int, ...]]
VOCAB = 256
ALL = 8  # experts: a router that rates two alike to the last bit decides nothing then
PROMPTS = random_prompts(14, high=40, seed=41)
PARAMS = [
    SamplingParams(
        max_new_tokens=5 + i % 13, seed=i, temperature=(0.0, 1.0, 1.3)[i % 3], top_p=(1.0, 0.9)[i % 2],
        top_k=(0, 40)[i % 2],
    )
    for i in range(len(PROMPTS))
]  # fmt: skip


def speculating_engine(book: Book | None = None, *, every: int = 3, how: Mapping[str, Any] | None = None,
                       **options: Any) -> EmbeddedEngine:  # fmt: skip
    """Free memory holds NaN and every commit is audited. With a `book` of whole answers the draft proposes what they
    say, with a mistake about every `every` positions; without, it is a random one. `how`: fields of `Speculative`."""
    config = small_config()
    engine = make_engine(
        speculative=Speculative(config=config, weights=small_weights(config), **(how or {})), **options
    )  # fmt: skip
    poison_before_steps(engine)
    assert engine.speculator is not None
    engine.speculator.audit = CommitAudit(engine.runner.model.conv_weights())
    if book is not None:
        engine.speculator.drafts_ahead = False
        engine.speculator._draft = Knowing(book, every, config.block_size)  # type: ignore[method-assign]
    return engine


class Knowing:
    """In place of `Speculator._draft`. What it proposes depends on request and position alone."""

    def __init__(self, book: Book, every: int, size: int) -> None:
        self.book, self.every, self.size = book, every, size

    def __call__(self, model, memory, requests: Sequence[Request], sampling, probs_RGV, at_S):
        tokens = np.zeros((len(requests), self.size), dtype=np.int64)
        for row, request in zip(tokens, requests, strict=True):
            known = self.book[request.prompt, request.params, request.version]
            for k in range(self.size):
                n = len(request.token_ids) + k
                wrong = (n * 7 + len(request.prompt) + request.params.seed) % self.every == 0
                row[k] = (known[n] + wrong) % VOCAB if n < len(known) else 0
        if probs_RGV is not None:
            probs_RGV[at_S] = torch.nn.functional.one_hot(torch.from_numpy(tokens), VOCAB).float()
        return tokens, np.full(tokens.shape, 0.8)


def book_of(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], answers: Sequence[Completion]
) -> dict[Key, tuple[int, ...]]:
    return {
        (tuple(prompt), p, answer.adapter_version): answer.token_ids
        for prompt, p, answer in zip(prompts, params, answers, strict=True)
    }


def assert_same(engine: EmbeddedEngine, answers: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert tokens_of(answers) == tokens_of(expected)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert (answer.finish_reason, answer.text) == (other.finish_reason, other.text)
        assert answer.adapter_version == other.adapter_version
    assert_idle(engine)
    assert engine.speculator is not None
    assert engine.speculator.audit is not None
    assert engine.speculator.audit.wrong == 0


def check_pages(follows: Sequence[bool] = (True,), **options: Any) -> EmbeddedEngine:
    """After every step: the draft's keys and values in the pages of a request that it follows are those of an uncached
    forward's taps, and nothing is in its pages behind its last token. `follows` says, in turn, which ones it follows;
    those of the others hold NaN instead."""
    prompts = [PROMPTS[0], *PROMPTS[:5]]
    params = [SamplingParams(max_new_tokens=12, seed=i) for i in range(6)]
    plain = ask(make_engine(top_k=ALL), prompts, params)
    engine = speculating_engine(book_of(prompts, params, plain), every=4, top_k=ALL, page_size=4, **options)
    turns = itertools.cycle(follows)
    engine.scheduler._follows = lambda *_: next(turns)
    speculator, step, seen = engine.speculator, engine.runner.step, Counter[bool]()
    assert speculator is not None

    def checked_step() -> Any:
        done = step()
        engine.pool.flush()
        for request in [*engine.scheduler.decoding, *engine.scheduler.prefilling]:
            count, capacity = request.num_cached, engine.memory.capacity(request)
            at = engine.memory.token_rows([request], torch.zeros(capacity, dtype=torch.int64), torch.arange(capacity))
            rows = engine.pool.draft[0].flatten(0, 1)
            assert not rows[at[count:]].nan_to_num(0.0).any()
            assert not engine.pool.kv.flatten(1, 2)[:, at[count:]].any()
            seen[bool(request.followed)] += 1
            if request.followed:
                torch.testing.assert_close(rows[at[:count]], context_of(engine, request), rtol=1e-4, atol=1e-4)
            else:
                rows[at[:count]] = torch.nan
        return done

    engine.runner.step = checked_step  # type: ignore[method-assign]
    assert_same(engine, ask(engine, prompts, params), plain)
    again = [*prompts[:3], [*prompts[3], *plain[3].token_ids, 5]]  # turns, and prompts that are cached to their ends
    more = ask(make_engine(top_k=ALL), again, params[:4])
    speculator._draft.book.update(book_of(again, params[:4], more))  # type: ignore[attr-defined]
    assert_same(engine, ask(engine, again, params[:4]), more)
    assert all(seen[kind] > 20 for kind in set(follows))
    return engine


def context_of(engine: EmbeddedEngine, request: Request) -> torch.Tensor:
    """The draft's keys and values of a request's cached tokens, by a forward without caches."""
    assert engine.speculator is not None
    draft = engine.speculator.drafts.of(request.version)
    (states,) = target_states(engine, [request.tokens[: request.num_cached]], draft.config.target_layer_ids)
    context = draft.context(states.taps_TW.unsqueeze(0))
    pairs = [part[0] for pair in zip(context.keys, context.values, strict=True) for part in pair]
    return torch.stack(pairs, dim=1).flatten(1)
