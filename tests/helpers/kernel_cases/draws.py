"""Draws of tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers.kernel_cases.common import Draw, case

from miles_k3.k3.kernels.token_draw import PART, draw_tokens
from miles_k3.rollout.embedded.sampler import SamplingBatch, sample, uniforms
from miles_k3.types import SamplingParams


@case
def token_draws(device: torch.device, dtype: torch.dtype) -> None:
    """Flat and peaked rows, strided; vocabularies of one part, of several and of a piece of one; greedy ones, ties,
    rows that aren't finite; extreme seeds. Against plain sampling: another token only where the uniform lies within
    rounding of the border of two."""
    for seed, (rows, vocab) in enumerate([(1, 7), (5, PART), (9, 2 * PART + 5), (3, 3 * PART - 1)]):
        draw = Draw(device, torch.float32, seed)
        spread = torch.linspace(0.0, 12.0, rows, device=device).unsqueeze(1)
        logits = (draw.normal(rows, vocab + 3) * spread)[:, :vocab]
        params = [
            SamplingParams(
                temperature=(0.0, 0.3, 1.0, 2.5)[(i + seed) % 4], seed=(0, 1, 2**63, 2**64 - 1, 12345)[i % 5]
            )
            for i in range(rows)
        ]
        logits[-1, vocab // 2 :: 3] = logits[-1].max()  # the likeliest several times
        params[-1] = replace(params[-1], temperature=0.0 if seed > 1 else 1.0)
        if rows > 3:
            logits[1, 5], logits[2, vocab - 1] = torch.nan, torch.inf
        positions = draw.integers(0, 1 << 20, rows)
        batch = SamplingBatch.of(params, vocab, device)
        tokens, logprobs, finite = draw_tokens(
            logits, batch.temperature_B1.squeeze(1), batch.greedy_B, batch.seeds_B, positions
        )
        plain, plain_logprobs, plain_finite = sample(logits, batch, positions)
        assert torch.equal(finite, plain_finite)
        same = tokens == plain
        torch.testing.assert_close(logprobs[same], plain_logprobs[same], rtol=0, atol=1e-5)
        assert torch.equal(tokens[batch.greedy_B | ~finite], plain[batch.greedy_B | ~finite])
        shares = (logits / batch.temperature_B1).double().softmax(-1)
        ends, drawn = shares.cumsum(-1), uniforms(batch.seeds_B, positions).double()
        for row in (finite & ~batch.greedy_B).nonzero().flatten().tolist():
            token = int(tokens[row])
            assert ends[row, token] - shares[row, token] - 1e-6 <= drawn[row] <= ends[row, token] + 1e-6
            assert shares[row, token] > 0


@case
def draws_beside_filters(device: torch.device, dtype: torch.dtype) -> None:
    """Beside requests with top-k and top-p, others draw as they do without them, to the last bit."""
    draw = Draw(device, torch.float32, 0)
    logits, positions, seeds = draw.normal(6, PART + 9) * 4, draw.integers(0, 99, 6), range(6)
    alone = [SamplingParams(temperature=(1.0, 0.0)[i % 2], seed=i) for i in seeds]
    beside = [SamplingParams(seed=i, top_k=3) if i == 2 else SamplingParams(seed=i, top_p=0.5) if i == 4 else alone[i]
              for i in seeds]  # fmt: skip
    expected, found, plain = (
        sample(logits, SamplingBatch.of(params, logits.shape[1], device, on_kernels=kernels), positions)
        for params, kernels in ((alone, True), (beside, True), (beside, False))
    )
    for theirs, ours, torchs in zip(expected, found, plain, strict=True):
        assert torch.equal(theirs[[0, 1, 3, 5]], ours[[0, 1, 3, 5]])
        assert torch.equal(torchs[[2, 4]], ours[[2, 4]])
    ranks = (logits > logits.gather(1, found[0].unsqueeze(1))).sum(1)
    assert ranks[2] < 3


LAST = 26683238  # the first position at which the uniform of seed 0 is the largest there is


@case
def draws_of_the_last_token(device: torch.device, dtype: torch.dtype) -> None:
    """The largest uniform, and sums of many rows that round either way: nothing is drawn that has no probability,
    though nothing else stands behind the last token, or part, that has any."""
    draw, rows = Draw(device, torch.float32, 0), 16
    seeds, greedy = torch.zeros(rows, dtype=torch.int64, device=device), torch.zeros(rows, device=device).bool()
    positions = torch.full_like(seeds, LAST)
    assert (uniforms(seeds, positions) == 1 - 2**-24).all()
    for vocab, end in ((PART + 5, PART // 2), (12 * PART, 10 * PART)):
        logits = draw.normal(rows, vocab)
        logits[:, end:] = -1000.0
        tokens, logprobs, finite = draw_tokens(logits, torch.ones(rows, device=device), greedy, seeds, positions)
        assert finite.all()
        assert (tokens < end).all()
        shares, at = logits.double().softmax(-1), tokens.unsqueeze(1)
        assert (shares.cumsum(-1).gather(1, at) > 1 - 2e-6).all()
        torch.testing.assert_close(logprobs.double(), shares.gather(1, at).log().squeeze(1), rtol=0, atol=1e-5)
