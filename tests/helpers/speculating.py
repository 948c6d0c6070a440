"""Embedded engines that speculate: with a draft that knows nothing, and with one that knows most of every answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from helpers.drafts import small_config, small_weights
from helpers.engines import make_engine, poison_before_steps

from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.proposal import Speculative
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.speculative.audit import CommitAudit
from miles_k3.types import Completion, SamplingParams

Key = tuple[tuple[int, ...], SamplingParams, int]  # prompt, parameters, adapter version
Book = Mapping[Key, tuple[int, ...]]
VOCAB = 256


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
