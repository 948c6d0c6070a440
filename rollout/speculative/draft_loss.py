"""The loss of a DSpark draft (spec 6.4): cross entropy with the data, distance to the target, confidence.

Shapes: S sequences, A blocks, G tokens of a block, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_k3.rollout.speculative.blocks import BlockBatch
from miles_k3.rollout.speculative.draft import DraftModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """How much each term counts; row k of a block counts e^(-k / gamma_decay)."""

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    gamma_decay: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftLoss:
    """`total` is differentiable; the terms are means over supervised rows, weighted by position.

    `expected_accepted`: tokens of a block that rejection sampling would accept, from the distances, mean over blocks.
    """

    total: Tensor
    cross_entropy: Tensor
    distance: Tensor
    confidence: Tensor
    expected_accepted: Tensor


def draft_loss(model: DraftModel, batch: BlockBatch, weights: LossWeights) -> DraftLoss:
    """Teacher-forced: the Markov head sees the data's tokens. The distance is sum_v |p - q|, without the half."""
    context = model.context(batch.taps_STW)
    hidden = model.hidden(batch.previous_SAG[..., 0], batch.anchors_SA, context)
    on = batch.supervised_SAG
    previous, hidden, labels = batch.previous_SAG[on], hidden[on], batch.labels_SAG[on]
    log_q = model.logits(hidden, previous).log_softmax(-1)
    with torch.no_grad():
        p = (batch.target_SAGH[on] @ model.head_VH.float().t()).softmax(-1)
    distance = (log_q.exp() - p).abs().sum(-1)
    accepted = (1.0 - 0.5 * distance).detach()
    rows = torch.arange(on.shape[-1], device=on.device, dtype=torch.float32)
    share = (-rows / weights.gamma_decay).exp().expand(on.shape)[on]
    share = share / share.sum()
    cross_entropy = (share * F.nll_loss(log_q, labels, reduction="none")).sum()
    mean_distance = (share * distance).sum()
    confidence = torch.zeros((), device=on.device)
    if model.config.use_confidence_head:
        odds = model.confidence_logits(hidden, previous)
        confidence = (share * F.binary_cross_entropy_with_logits(odds, accepted, reduction="none")).sum()
    total = weights.cross_entropy * cross_entropy + weights.distance * mean_distance + weights.confidence * confidence
    rate = torch.zeros(on.shape, device=on.device).masked_scatter(on, accepted)
    blocks = on.any(-1).sum()
    return DraftLoss(
        total=total, cross_entropy=cross_entropy.detach(), distance=mean_distance.detach(),
        confidence=confidence.detach(), expected_accepted=rate.cumprod(-1).sum() / blocks,
    )  # fmt: skip
