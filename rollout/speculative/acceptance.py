"""Which drafted tokens stay: lossless acceptance, all requests of a verify at once.

Row j of a request says what follows its anchor (j = 0) or its j-th drafted token. Two rules, both exact:

- `coupled`, the default: draw the policy's token of every row as plain sampling does, with the same uniform, and keep
  drafted tokens while they are that token. What is committed is plain sampling's answer, token for token, whatever was
  drafted and however much of it was verified. A draft that uses the same uniforms (`draft_uniforms`) agrees most often.
- `rejection` (Leviathan et al. 2023; Chen et al. 2023): keep a drafted token with probability min(1, p/q), else draw
  from what p has more than q. It keeps as many as any rule can, sum min(p, q), and commits other tokens than plain
  sampling does, of the same distribution; it needs the draft's distributions.

Shapes: T rows of the verify, B requests, G drafted tokens of the batch (T - B), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.k3.ops.packed import Packed
from miles_k3.rollout.embedded.sampler import SamplingBatch, processed_logprobs, sample, uniforms

# Streams of a seed beside plain sampling's own; any numbers of 64 mixed bits.
_DRAFT_STREAM, _JUDGE_STREAM, _LUCK_STREAM = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x14057B7EF767814F


class AcceptMode(StrEnum):
    """How temperature > 0 is judged; greedy requests keep what equals the likeliest token in both."""

    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Committed:
    """Rows whose token is committed come first in each request: `accepted_B` drafted ones and one of the policy's.

    `tokens_T`, `logprobs_T` (of the processed distribution, as plain sampling reports them) and `finite_T` mean
    something where `committed_T`. A row with non-finite logits ends its request: token 0, -inf, False.
    """

    accepted_B: Tensor
    committed_T: Tensor
    tokens_T: Tensor
    logprobs_T: Tensor
    finite_T: Tensor


def draft_uniforms(mode: AcceptMode, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """What the draft draws the tokens at `positions_B` with: fp32 [B] in [0, 1).

    Coupled: the policy's own, which is the point. Rejection: others, since a draft that knows what the judge will draw
    isn't an independent proposal.
    """
    return uniforms(draft_seeds(mode, seeds_B), positions_B)


def draft_seeds(mode: AcceptMode, seeds_B: Tensor) -> Tensor:
    """The seeds of `draft_uniforms`: with them `sampler.sample` draws the draft's tokens."""
    return seeds_B if mode is AcceptMode.COUPLED else seeds_B ^ _DRAFT_STREAM


def judge(
    logits_TV: Tensor,
    drafted_T: Tensor,
    packed: Packed,
    sampling: SamplingBatch,
    positions_B: Tensor,
    *,
    mode: AcceptMode = AcceptMode.COUPLED,
    draft_probs_TV: Tensor | None = None,
) -> Committed:
    """Judge what was drafted.

    `drafted_T[i]` is the token drafted behind row i; a request's last row has none and its entry is not read.
    `sampling` has one row a request, `positions_B` are the sequence positions that the first rows speak of.
    `draft_probs_TV` (rejection only): what drafted_T[i] was drawn from, anything in a request's last row; None means a
    draft that draws nothing. Raises EngineError where these don't fit one another.
    """
    _refuse_misfits(logits_TV, drafted_T, packed, sampling, mode, draft_probs_TV)
    rows = sampling.rows(packed.rows_T)
    positions_T = positions_B[packed.rows_T] + packed.cols_T
    is_last_T = packed.cols_T + 1 == packed.lengths_B[packed.rows_T]
    tokens_T, logprobs_T, finite_T = sample(logits_TV, rows, positions_T)
    if mode is AcceptMode.COUPLED:
        kept_T = (tokens_T == drafted_T) & finite_T & ~is_last_T
        accepted_B = _prefix(kept_T, packed)
        return _committed(accepted_B, packed, tokens_T, logprobs_T, finite_T)
    all_TV = processed_logprobs(logits_TV, rows)
    p_TV = _probs(all_TV, logits_TV, rows, finite_T)
    q_TV = _one_hot(drafted_T, is_last_T, p_TV) if draft_probs_TV is None else draft_probs_TV
    kept_T = _survives(p_TV, q_TV, drafted_T, rows, positions_T) & finite_T & ~is_last_T
    accepted_B = _prefix(kept_T, packed)
    ends_B = (packed.cu_seqlens[:-1] + accepted_B).clamp(max=packed.num_tokens - 1)  # an empty request's is another's
    redrawn_B = _redraw(p_TV[ends_B], q_TV[ends_B], uniforms(sampling.seeds_B, positions_T[ends_B]))
    tokens_T = torch.where(is_last_T, tokens_T, drafted_T)
    refused_T = (packed.cols_T == accepted_B[packed.rows_T]) & ~is_last_T
    tokens_T = torch.where(refused_T, redrawn_B[packed.rows_T], tokens_T)
    tokens_T = torch.where(finite_T, tokens_T, 0)
    reported_T = all_TV.gather(1, tokens_T.unsqueeze(1)).squeeze(1)
    reported_T = torch.where(finite_T, reported_T, -torch.inf)
    return _committed(accepted_B, packed, tokens_T, reported_T, finite_T)


def supposed(
    found: Committed, drafted_T: Tensor, packed: Packed, seeds_B: Tensor, positions_B: Tensor, chance: float
) -> Committed:
    """The same verify if each drafted token were accepted with this chance, whatever the policy says: what drafting
    would be worth with a draft that one doesn't have. Its answers are nobody's."""
    is_last_T = packed.cols_T + 1 == packed.lengths_B[packed.rows_T]
    luck_T = uniforms((seeds_B ^ _LUCK_STREAM)[packed.rows_T], positions_B[packed.rows_T] + packed.cols_T)
    accepted_B = _prefix((luck_T < chance) & found.finite_T & ~is_last_T, packed)
    tokens_T = torch.where(packed.cols_T < accepted_B[packed.rows_T], drafted_T, found.tokens_T)
    return _committed(accepted_B, packed, tokens_T, found.logprobs_T, found.finite_T)


def _prefix(kept_T: Tensor, packed: Packed) -> Tensor:
    """Of each request, how many rows in a row are kept from its first one on. No shape depends on the lengths."""
    return packed.sums(_before(~kept_T, packed) + ~kept_T == 0)


def kept_positions(c: Committed, packed: Packed, stops_BS: Tensor) -> Tensor:
    """Positions of each request that stay: those of its committed tokens up to the first one that is among its
    `stops_BS` (-1: none), 0 where it isn't finite; int64 [B]. No shape depends on the lengths."""
    stops_T = (c.tokens_T.unsqueeze(1) == stops_BS[packed.rows_T]).any(1) & c.committed_T
    kept_B = packed.sums(c.committed_T & (_before(stops_T, packed) == 0))
    last_B = (packed.cu_seqlens[:-1] + c.accepted_B).clamp(max=packed.num_tokens - 1)
    return torch.where(c.finite_T[last_B], kept_B, 0)


def _before(marked_T: Tensor, packed: Packed) -> Tensor:
    """How many earlier rows of the same request are marked: int64 [T]."""
    marked = marked_T.long()
    earlier_T = marked.cumsum(0) - marked
    # An empty request begins where another one does, or behind the last row: nobody reads its entry.
    firsts_B = packed.cu_seqlens[:-1].clamp(max=packed.num_tokens - 1)
    return earlier_T - earlier_T[firsts_B][packed.rows_T]


def _committed(accepted_B: Tensor, packed: Packed, tokens: Tensor, logprobs: Tensor, finite: Tensor) -> Committed:
    return Committed(
        accepted_B=accepted_B, committed_T=packed.cols_T <= accepted_B[packed.rows_T], tokens_T=tokens,
        logprobs_T=logprobs, finite_T=finite,
    )  # fmt: skip


# --- rejection ------------------------------------------------------------------------------------------------------
def policy_probs(logits_TV: Tensor, rows: SamplingBatch, finite_T: Tensor) -> Tensor:
    """What plain sampling draws from, greedy rows included; zeros in rows that aren't finite."""
    return _probs(processed_logprobs(logits_TV, rows), logits_TV, rows, finite_T)


def _probs(logprobs_TV: Tensor, logits_TV: Tensor, rows: SamplingBatch, finite_T: Tensor) -> Tensor:
    p_TV = logprobs_TV.exp()
    if rows.greedy:
        ids_V = torch.arange(logits_TV.shape[-1], device=logits_TV.device)
        likeliest_TV = ids_V == logits_TV.nan_to_num().argmax(-1, keepdim=True)
        p_TV = torch.where(rows.greedy_B.unsqueeze(1), likeliest_TV.to(p_TV.dtype), p_TV)
    return torch.where(finite_T.unsqueeze(1), p_TV, 0.0)


def _one_hot(drafted_T: Tensor, is_last_T: Tensor, like_TV: Tensor) -> Tensor:
    ids_T = torch.where(is_last_T, 0, drafted_T)
    return torch.zeros_like(like_TV).scatter_(1, ids_T.unsqueeze(1), 1.0)


def _survives(p_TV: Tensor, q_TV: Tensor, drafted_T: Tensor, rows: SamplingBatch, positions_T: Tensor) -> Tensor:
    """Kept with probability min(1, p/q), by a uniform that neither the draft nor the redraw has seen."""
    ids_T1 = drafted_T.clamp(0, p_TV.shape[-1] - 1).unsqueeze(1)
    u_T = uniforms(rows.seeds_B ^ _JUDGE_STREAM, positions_T)
    return u_T * q_TV.gather(1, ids_T1).squeeze(1) < p_TV.gather(1, ids_T1).squeeze(1)


def _redraw(p_BV: Tensor, q_BV: Tensor, u_B: Tensor) -> Tensor:
    """From the positive part of p - q, by inverse CDF; its likeliest token where rounding leaves the uniform none."""
    rest_BV = (p_BV - q_BV).clamp_(min=0.0)
    cdf_BV = rest_BV.cumsum(-1)
    tokens_B = (cdf_BV <= u_B.unsqueeze(1) * cdf_BV[:, -1:]).sum(-1).clamp_(max=p_BV.shape[-1] - 1)
    possible_B = rest_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1) > 0
    return torch.where(possible_B, tokens_B, rest_BV.argmax(-1))


def _refuse_misfits(
    logits: Tensor, drafted: Tensor, packed: Packed, sampling: SamplingBatch, mode: AcceptMode, probs: Tensor | None
) -> None:
    want = packed.num_tokens
    if len(logits) != want or len(drafted) != want or len(sampling.seeds_B) != packed.num_seqs:
        raise EngineError(
            f"a verify of {want} rows of {packed.num_seqs} requests got {len(logits)} rows of logits, {len(drafted)} "
            f"drafted tokens and sampling parameters of {len(sampling.seeds_B)} requests"
        )
    if probs is not None and (mode is AcceptMode.COUPLED or probs.shape != logits.shape):
        raise EngineError(
            f"the draft's probabilities belong to mode rejection and need shape {list(logits.shape)}; "
            f"mode is {mode}, their shape {list(probs.shape)}"
        )
