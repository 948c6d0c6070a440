"""The draft's side of a recorded step: its context of new tokens, and its blocks.

Where versions have drafts of their own each draft computes all rows and a row takes its own: no shape depends on whose
they are. Shapes: T rows, W tap width, R requests, G tokens of a block, P pages, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.embedded.fused.graphs.members import sampling_of
from miles_k3.rollout.embedded.sampler import SamplingBatch, sample
from miles_k3.rollout.embedded.speculation import Speculator
from miles_k3.rollout.speculative.acceptance import AcceptMode, draft_seeds, policy_probs
from miles_k3.rollout.speculative.serving_draft import ServingDraft


def write_context_(
    pool: BlockPool, drafts: Sequence[ServingDraft], draft_T: Tensor, taps_TW: Tensor, positions_T: Tensor,
    write_T: Tensor, padding_row: int,
) -> None:  # fmt: skip
    """Keys and values of new tokens. Padding, whose `write_T` is negative, and requests that no draft follows, whose
    `draft_T` is, leave the zeros of the padding page as they are."""
    numbers_TC = _own([d.context_rows(taps_TW, positions_T) for d in drafts], draft_T)
    real_T = (write_T >= 0) & (draft_T >= 0)
    rows_RC = pool.draft[0].flatten(0, 1)
    at_T = torch.where(real_T, write_T, padding_row)
    rows_RC.index_copy_(0, at_T, torch.where(real_T.unsqueeze(1), numbers_TC.to(rows_RC.dtype), 0.0))


def draft_blocks(
    pool: BlockPool, drafts: Sequence[ServingDraft], at: Mapping[str, Tensor], num_pages: int,
    probs: DraftProbs | None = None, *, on_kernels: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(tokens int64 [R, G], confidences fp32 [R, G]) of one block behind each anchor. `probs` (rejection) gets what
    each was drawn from; without, they are drawn with the policy's own uniforms."""
    sampling, tokens, confidences = sampling_of(at, on_kernels=on_kernels), [], []
    mode = AcceptMode.COUPLED if probs is None else AcceptMode.REJECTION
    drawing = replace(sampling, seeds_B=draft_seeds(mode, sampling.seeds_B))
    for i, draft in enumerate(drafts):
        block = draft.draft(
            at["anchors"], at["contexts"],
            draft.context_in(pool.draft[0], at["table"][:, :num_pages], on_kernels=on_kernels),
            choose=lambda logits_RV, k: sample(logits_RV, drawing, at["positions"] + k)[0],
        )  # fmt: skip
        if probs is not None:
            probs.put(block.logits_SGV, drawing, at["drafts"] == i)
        sure_RG = block.confidence_SG
        tokens.append(block.tokens_SG)
        confidences.append(torch.ones(block.tokens_SG.shape, device=pool.device) if sure_RG is None else sure_RG)
    return _own(tokens, at["drafts"]), _own(confidences, at["drafts"]).nan_to_num(0.0).clamp(0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftProbs:
    """What drafted tokens were drawn from, in the one buffer [N, G, V] of an engine, whose last row is nobody's;
    `rows_R`: whose is whose."""

    buffer_NGV: Tensor
    rows_R: Tensor

    @classmethod
    def of(cls, speculator: Speculator, rows_R: Tensor) -> DraftProbs | None:
        """None where drafts are judged by their tokens alone."""
        return None if speculator.probs_NGV is None else cls(buffer_NGV=speculator.probs_NGV, rows_R=rows_R)

    def put(self, logits_RGV: Tensor, drawing: SamplingBatch, own_R: Tensor) -> None:
        """Those of the requests that this draft drafts for."""
        nobody, size = self.buffer_NGV.shape[0] - 1, self.buffer_NGV.shape[1]
        rows_R = torch.where(own_R, self.rows_R, nobody) * size
        for k in range(size):
            logits_RV = logits_RGV[:, k]
            finite_R = torch.isfinite(logits_RV.sum(-1))
            self.buffer_NGV.flatten(0, 1).index_copy_(0, rows_R + k, policy_probs(logits_RV, drawing, finite_R))


def _own(results: Sequence[Tensor], owner_N: Tensor) -> Tensor:
    """Of each row what its own draft says."""
    found = results[0]
    for i, other in enumerate(results[1:], start=1):
        found = torch.where((owner_N == i).unsqueeze(1), other, found)
    return found
