"""Drawing tokens: the processed distribution, its log-probabilities, and one uniform a (seed, position).

The uniform comes from a counter-based hash and picks by inverse CDF in vocabulary order, so a request's tokens don't
depend on what shares its batch nor on when it came.
Shapes: B requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles_k3.rollout.cache.device import put
from miles_k3.types import SamplingParams


def signed_seed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


# SplitMix64 (Steele, Lea, Flood 2014). Multiplications wrap around, which int64 tensors do as well.
_GOLDEN, _MIX_1, _MIX_2 = (signed_seed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _finalize(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniforms(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """fp32 [B] in [0, 1), multiples of 2^-24: a pure function of int64 seed and token position."""
    state = _finalize(seeds_B + _GOLDEN)
    bits = _finalize(state + (positions_B + 1) * _GOLDEN)
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The parameters of a batch as tensors. `filters` and `greedy` say whether any request needs that path,
    `on_kernels` whether Triton draws where none has a filter."""

    temperature_B1: Tensor  # 1 where greedy: the reported log-probability is then that of the raw logits
    top_k_B1: Tensor
    top_p_B1: Tensor
    seeds_B: Tensor
    greedy_B: Tensor
    filters: bool
    greedy: bool
    on_kernels: bool = False

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], vocab: int, device: torch.device, *, on_kernels: bool = False
    ) -> SamplingBatch:
        temperature = [p.temperature or 1.0 for p in params]
        top_k = [p.top_k or vocab for p in params]
        return cls(
            put(temperature, device).unsqueeze(1),
            put(top_k, device).unsqueeze(1),
            put([p.top_p for p in params], device).unsqueeze(1),
            put([signed_seed(p.seed) for p in params], device),
            put([p.temperature == 0 for p in params], device),
            any(p.temperature and (p.top_k or p.top_p < 1.0) for p in params),
            any(p.temperature == 0 for p in params),
            on_kernels,
        )

    def rows(self, at: Tensor) -> SamplingBatch:
        """Of the requests at these indices, which may come in any number and order."""
        return replace(
            self, temperature_B1=self.temperature_B1[at], top_k_B1=self.top_k_B1[at], top_p_B1=self.top_p_B1[at],
            seeds_B=self.seeds_B[at], greedy_B=self.greedy_B[at],
        )  # fmt: skip


def processed_logprobs(logits_BV: Tensor, batch: SamplingBatch) -> Tensor:
    """Log of the distribution that is sampled from: temperature, then top-k, then top-p, renormalised; fp32 [B, V].

    Greedy requests get the plain log-softmax.
    """
    scaled = logits_BV.float() / batch.temperature_B1
    if batch.filters:
        scaled = _filtered(scaled, batch)
    return scaled.log_softmax(-1)


def _filtered(scaled_BV: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits with -inf outside top-k and, of what is left, outside the smallest set that holds top-p."""
    ranked_BV, order_BV = torch.sort(scaled_BV, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scaled_BV.shape[-1], device=scaled_BV.device)
    ranked_BV = ranked_BV.masked_fill(rank_V >= batch.top_k_B1, -torch.inf)
    p_BV = ranked_BV.softmax(-1)
    dropped_BV = (p_BV.cumsum(-1) - p_BV >= batch.top_p_B1) & (batch.top_p_B1 < 1.0)
    dropped_BV[:, 0] = False
    dropped_BV = (dropped_BV | (ranked_BV == -torch.inf)) & ~batch.greedy_B.unsqueeze(1)
    return scaled_BV.masked_fill(torch.zeros_like(dropped_BV).scatter_(1, order_BV, dropped_BV), -torch.inf)


def sample(logits_BV: Tensor, batch: SamplingBatch, positions_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens int64 [B], their log-probabilities fp32 [B], finite bool [B]).

    `positions_B` are the sequence positions of the tokens drawn. A row with a non-finite logit gives token 0, -inf and
    False, and leaves the other rows alone.
    """
    if not batch.on_kernels:
        return _sample(logits_BV, batch, positions_B)
    from miles_k3.k3.kernels.token_draw import draw_tokens  # Triton is not everywhere

    drawn = draw_tokens(logits_BV.float(), batch.temperature_B1.squeeze(1), batch.greedy_B, batch.seeds_B, positions_B)
    if not batch.filters:
        return drawn
    # The others' draws stay the kernel's: sums round otherwise in torch, and nothing may depend on what shares a batch.
    filtered_B = ((batch.top_k_B1 < logits_BV.shape[-1]) | (batch.top_p_B1 < 1.0)).squeeze(1) & ~batch.greedy_B
    tokens_B, logprobs_B, finite_B = (
        torch.where(filtered_B, ours, theirs)
        for ours, theirs in zip(_sample(logits_BV, batch, positions_B), drawn, strict=True)
    )
    return tokens_B, logprobs_B, finite_B


def _sample(logits_BV: Tensor, batch: SamplingBatch, positions_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    finite_B = torch.isfinite(logits_BV.sum(-1))  # one infinity or NaN makes the sum so
    logprobs_BV = processed_logprobs(logits_BV, batch)
    p_BV = logprobs_BV.exp()
    cdf_BV = p_BV.cumsum(-1)
    target_B1 = uniforms(batch.seeds_B, positions_B).unsqueeze(1) * cdf_BV[:, -1:]
    tokens_B = (cdf_BV <= target_B1).sum(-1).clamp_(max=logits_BV.shape[-1] - 1)
    likeliest_B = logits_BV.argmax(-1)
    # Rounding can carry the target past the last token that has any probability.
    possible_B = p_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1) > 0
    if batch.greedy:
        possible_B = possible_B & ~batch.greedy_B
    tokens_B = torch.where(possible_B, tokens_B, likeliest_B)
    tokens_B = torch.where(finite_B, tokens_B, 0)
    logprobs_B = logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
    return tokens_B, torch.where(finite_B, logprobs_B, -torch.inf), finite_B
