"""A policy and a draft small enough to be known exactly: tokens that depend on the one before, and their statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles_k3.k3.ops.packed import Packed
from miles_k3.rollout.embedded.sampler import SamplingBatch, processed_logprobs
from miles_k3.rollout.speculative.acceptance import AcceptMode, draft_uniforms, judge
from miles_k3.types import SamplingParams

TOKENS = 3  # of each answer that are counted
BLOCK = 3


@dataclass(frozen=True)
class Chains:
    """Logits of the policy [V, V] by the token before, and the draft's probabilities [V, V]."""

    target: Tensor
    draft: Tensor
    params: SamplingParams

    @classmethod
    def draw(cls, vocab: int, params: SamplingParams, seed: int = 0, noise: float = 1.0) -> Chains:
        rng = torch.Generator().manual_seed(seed)
        target = torch.randn(vocab, vocab, generator=rng)
        return cls(target, (target + noise * torch.randn(vocab, vocab, generator=rng)).softmax(-1), params)

    def policy(self) -> Tensor:
        """What plain sampling draws from [V, V]."""
        batch = SamplingBatch.of([self.params] * len(self.target), len(self.target), torch.device("cpu"))
        return processed_logprobs(self.target, batch).exp()

    def joint(self) -> Tensor:
        """Exact probabilities of TOKENS tokens after token 0, float64 [V ** TOKENS]."""
        p = self.policy().double()
        out = p[0]
        for _ in range(TOKENS - 1):
            out = out.unsqueeze(-1) * p.view(*(1,) * (out.ndim - 1), *p.shape)
        return out.flatten()

    def shifted(self, mass: float) -> Chains:
        """A policy that has `mass` of each row less on its likeliest token and more on the least likely."""
        p = self.policy()
        moved = p.scatter_add(1, p.argmax(1, keepdim=True), torch.full((len(p), 1), -mass))
        moved = moved.scatter_add(1, p.argmin(1, keepdim=True), torch.full((len(p), 1), mass))
        return replace(self, target=moved.log(), params=SamplingParams())


def joint_counts(
    chains: Chains,
    mode: AcceptMode,
    count: int,
    *,
    drawn: bool,
    draft_mode: AcceptMode | None = None,
    lengths_of: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """How often each answer came, int64 [V ** TOKENS], of `count` seeds that speculate until they have TOKENS tokens.

    `lengths_of` gives, from anchors and drafted tokens [B, 1 + BLOCK], how many of these are verified; None: all.
    """
    vocab, cpu = len(chains.target), torch.device("cpu")
    answers = torch.zeros(count, TOKENS + BLOCK + 2, dtype=torch.int64)  # column 0 is what they begin with
    have = torch.zeros(count, dtype=torch.int64)
    while (todo := (have < TOKENS).nonzero().flatten()).numel():
        one = SamplingBatch.of([chains.params], vocab, cpu)
        alike = {n: getattr(one, n).expand(len(todo), 1) for n in ("temperature_B1", "top_k_B1", "top_p_B1")}
        sampling = replace(one, **alike, greedy_B=one.greedy_B.expand(len(todo)), seeds_B=todo)
        anchor = answers[todo, have[todo]]
        drafted = [anchor]
        for k in range(BLOCK):
            q = chains.draft[drafted[-1]]
            u = draft_uniforms(draft_mode or mode, sampling.seeds_B, have[todo] + 1 + k)
            ids = (q.cumsum(1) <= u[:, None]).sum(1).clamp(max=vocab - 1) if drawn else q.argmax(1)
            drafted.append(ids)
        fed = torch.stack(drafted, dim=1)
        verified = torch.full((len(todo),), BLOCK) if lengths_of is None else lengths_of(fed)
        packed = Packed.from_lengths((verified + 1).tolist())
        rows = fed[packed.rows_T, packed.cols_T]
        following = fed[packed.rows_T, (packed.cols_T + 1).clamp(max=BLOCK)]
        probs = chains.draft[rows] if mode is AcceptMode.REJECTION and drawn else None
        got = judge(
            chains.target[rows], following, packed, sampling, have[todo] + 1, mode=mode, draft_probs_TV=probs
        )  # fmt: skip
        at = got.committed_T
        answers[todo[packed.rows_T[at]], have[todo][packed.rows_T[at]] + 1 + packed.cols_T[at]] = got.tokens_T[at]
        have[todo] += got.accepted_B + 1
    powers = vocab ** torch.arange(TOKENS - 1, -1, -1)
    return torch.bincount((answers[:, 1 : TOKENS + 1] * powers).sum(1), minlength=vocab**TOKENS)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """How many standard deviations the statistic is above its mean; cells that expect less than 5 are one cell.

    Counts where nothing is possible give infinity.
    """
    total = counts.sum()
    if counts[probabilities == 0].any():
        return float("inf")
    rare = probabilities * total < 5
    p = torch.cat([probabilities[~rare], probabilities[rare].sum(0, keepdim=True)])
    n = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)]).double()
    p, n = p[p > 0], n[p > 0]
    statistic = ((n - total * p) ** 2 / (total * p)).sum()
    freedom = len(p) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)
