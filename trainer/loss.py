"""The policy loss on packed tokens, and the numbers that say how training goes. Pure torch, no process group.

Shape legend: T tokens of a packed stream, B sequences in it, V vocabulary. All [T] tensors are aligned as in
`MicroBatch`: entry t speaks of predicting token t+1, and counts where `loss_mask` is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.config import AlgorithmSection

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: no real policy ratio comes near it, and fp32 holds its products

SUM, MAX = "_sum", "_max"  # how an entry of `LossOutput.sums` is combined; names without either are plain counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """`loss` is this micro-batch's share of the mini-batch loss, ready for backward: shares add up.

    `sums` are detached scalars for `finalize_metrics`: float64 sums over the loss tokens (`*_sum`), maxima over them
    (`*_max`), and the counts `tokens` and `sequences`.
    """

    loss: Tensor
    sums: dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    algorithm: AlgorithmSection,
    num_loss_tokens: int,
    num_sequences: int,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossOutput:
    """One micro-batch's share of the GRPO/PPO loss; everything [T] but cu_seqlens [B+1].

    `logprobs` are those of the policy being trained, `old_logprobs` the trainer's before the harvest's first update,
    `rollout_logprobs` the engine's, `ref_logprobs` the base's; gradients reach `logprobs` and `entropy` only.
    `num_loss_tokens` and `num_sequences` are the mini-batch's (see `MiniBatch`), so the shares of its micro-batches add
    up to the loss, and their gradients to the gradient, of one big batch.

    Per token: w * surrogate + kl_coef * ratio * k3 - entropy_coef * H, with w = min(exp(old - rollout), cap), the
    truncated importance correction of Yao et al. 2025 (TRL's token_truncate). Entries outside the mask may be anything,
    NaN too. Sequences must be whole: under context parallelism gather the [T] inputs first. Raises ValueError when a
    term is switched on and its input is missing.
    """
    if algorithm.kl_coef > 0 and ref_logprobs is None:
        raise ValueError(
            f"kl_coef is {algorithm.kl_coef} but ref_logprobs is missing; score the batch with the adapter off"
        )
    if algorithm.entropy_coef > 0 and entropy is None:
        raise ValueError(f"entropy_coef is {algorithm.entropy_coef} but entropy is missing; pass token_entropy(...)")
    mask = loss_mask > 0
    new = _inside(mask, logprobs)
    old = _inside(mask, old_logprobs).detach()
    rollout = _inside(mask, rollout_logprobs).detach()
    gain = _inside(mask, advantages).detach()

    ratio = bounded_exp(new - old)
    mismatch = old - rollout
    per_token = surrogate_loss(ratio, gain, algorithm)
    if algorithm.importance_cap is not None:
        per_token = per_token * bounded_exp(mismatch).clamp(max=algorithm.importance_cap)
    sums = _diagnostics(mask, new.detach() - old, ratio.detach(), gain, mismatch, algorithm)
    if ref_logprobs is not None:
        kl = k3(_inside(mask, ref_logprobs).detach() - new)
        sums["kl_base_sum"] = _sum(mask, kl)
        if algorithm.kl_coef > 0:
            per_token = per_token + algorithm.kl_coef * ratio * kl
    if entropy is not None:
        inside = _inside(mask, entropy)
        sums["entropy_sum"] = _sum(mask, inside)
        if algorithm.entropy_coef > 0:
            per_token = per_token - algorithm.entropy_coef * inside
    weights, sequences = token_weights(
        mask, cu_seqlens, algorithm.loss_normalization, num_loss_tokens=num_loss_tokens, num_sequences=num_sequences
    )
    sums["sequences"] = sequences
    return LossOutput(loss=(per_token * weights.to(per_token.dtype)).sum(), sums=sums)


def surrogate_loss(ratio: Tensor, advantages: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """PPO's clipped loss per token, [T]: -min(r A, clip(r, 1 - low, 1 + high) A), arXiv 1707.06347 eq. 7.

    Separate bounds are DAPO's clip-higher (arXiv 2503.14476). Dual clip (arXiv 1912.09729) bounds the loss of a
    negative advantage by c |A|.
    """
    clipped = ratio.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if algorithm.dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -algorithm.dual_clip * advantages), loss)


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's k3, exp(d) - d - 1 >= 0 with d = log q - log p on samples of p: an estimate of KL(p || q) each.

    Its own gradient isn't the KL's: on samples of p the mean of dk3/dtheta is the gradient of KL(q || p). With the
    factor p / p_old, as `policy_loss` has it, the score term is there and the mean is the gradient of KL(p || q)
    (DeepSeek-V3.2, arXiv 2512.02556 eq. 7). Beyond MAX_LOG_RATIO it goes on as its tangent: finite, and the gradient
    keeps its sign.
    """
    near = log_ratio.clamp(max=MAX_LOG_RATIO)
    slope = torch.expm1(near)
    return slope - near + slope * (log_ratio - near)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, with the argument held within ±MAX_LOG_RATIO; no gradient outside."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_weights(
    mask: Tensor, cu_seqlens: Tensor, normalization: str, *, num_loss_tokens: int, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """What each token's loss is multiplied by, float64 [T], and the number of sequences with a loss token.

    token: 1 / num_loss_tokens. sequence: 1 / (own sequence's loss tokens * num_sequences). 0 outside the mask; tokens
    beyond cu_seqlens[-1] are padding and must be outside it. Zero denominators belong to empty masks and count as 1.
    """
    position = torch.arange(mask.numel(), device=mask.device, dtype=cu_seqlens.dtype)
    sequence_of = torch.bucketize(position, cu_seqlens[1:], right=True)
    tokens_of = torch.zeros(cu_seqlens.numel(), dtype=torch.float64, device=mask.device)
    tokens_of = tokens_of.index_add(0, sequence_of, mask.double())
    if normalization == "token":
        weights = mask.double() / max(num_loss_tokens, 1)
    elif normalization == "sequence":
        weights = mask.double() / (tokens_of.clamp(min=1.0)[sequence_of] * max(num_sequences, 1))
    else:
        raise ValueError(f"loss_normalization is {normalization!r}; known are token, sequence")
    return weights, (tokens_of > 0).sum().double()


def token_logprobs(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of `targets_T` under softmax(logits / temperature): fp32 [T] (float64 stays float64).

    The naive form: the whole vocabulary on one rank. Raises ValueError for a temperature that isn't above 0.
    """
    scaled_TV = _scaled(logits_TV, temperature)
    chosen_T = scaled_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
    return chosen_T - scaled_TV.logsumexp(-1)


def token_entropy(logits_TV: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature) in nats: fp32 [T] (float64 stays float64). Logits of -inf are fine."""
    logp_TV = _scaled(logits_TV, temperature).log_softmax(-1)
    return -(logp_TV.exp() * torch.where(logp_TV.isinf(), 0.0, logp_TV)).sum(-1)


def merge_sums(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Combine `LossOutput.sums` of micro-batches or ranks into one of the same form: maxima by max, the rest by sum."""
    merged: dict[str, Tensor] = {}
    for i, part in enumerate(parts):
        if i and part.keys() != merged.keys():
            raise ValueError(
                f"the parts measure different things: {sorted(part.keys() ^ merged.keys())} are not in all of them"
            )
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = torch.maximum(merged[name], value) if name.endswith(MAX) else merged[name] + value
    return merged


def finalize_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Metrics over all micro-batches, ranks and updates: means weigh every loss token alike, maxima stay maxima.

    Without a single loss token only the counts are left.
    """
    merged = merge_sums(parts)
    tokens = float(merged.get("tokens", 0.0))
    metrics = {}
    for name, value in merged.items():
        if not name.endswith((SUM, MAX)):
            metrics[name] = float(value)
        elif tokens:
            metrics[name.removesuffix(SUM)] = float(value) / tokens if name.endswith(SUM) else float(value)
    return metrics


@torch.no_grad()
def _diagnostics(
    mask: Tensor, drift: Tensor, ratio: Tensor, gain: Tensor, mismatch: Tensor, algorithm: AlgorithmSection
) -> dict[str, Tensor]:
    """Raw sums over the loss tokens; drift is new - old, mismatch old - rollout. Fractions count before clipping."""
    weight = bounded_exp(mismatch)
    cap = algorithm.importance_cap
    floor, ceiling, bound = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high, algorithm.dual_clip
    sums = {
        "tokens": mask.sum().double(),
        "ratio_sum": _sum(mask, ratio),
        "clip_low_fraction_sum": _sum(mask, (ratio < floor) & (gain < 0)),
        "clip_high_fraction_sum": _sum(mask, (ratio > ceiling) & (gain > 0)),
        "kl_update_sum": _sum(mask, k3(drift)),
        "mismatch_abs_sum": _sum(mask, mismatch.abs()),
        "mismatch_abs_max": _max(mask, mismatch.abs()),
        "mismatch_kl_sum": _sum(mask, k3(mismatch)),
    }
    if bound is not None:
        sums["dual_clip_fraction_sum"] = _sum(mask, (ratio > bound) & (gain < 0))
    if cap is not None:
        sums["importance_weight_sum"] = _sum(mask, weight.clamp(max=cap))
        sums["importance_over_cap_fraction_sum"] = _sum(mask, mismatch > math.log(cap))
    return sums


def _inside(mask: Tensor, values: Tensor) -> Tensor:
    """`values` in at least fp32, 0 outside the mask, so that nothing computed from them can be NaN there."""
    values = values if values.dtype == torch.float64 else values.float()
    return torch.where(mask, values, 0.0)


def _sum(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values.detach().double(), 0.0).sum()


def _max(mask: Tensor, values: Tensor) -> Tensor:
    """Largest of non-negative values inside the mask, 0 when there is none."""
    inside = torch.where(mask, values.detach().double(), 0.0)
    return inside.max() if inside.numel() else inside.new_zeros(())


def _scaled(logits_TV: Tensor, temperature: float) -> Tensor:
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; logits are divided by it, so it must be above 0")
    logits_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return logits_TV / temperature
