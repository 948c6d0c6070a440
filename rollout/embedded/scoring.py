"""Log-probabilities of whole sequences, without caches. Shapes: T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_k3.adapters.store import AdapterStore
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.embedded.batch import uncached_batch
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.model import EngineModel

LOGIT_ELEMENTS = 1 << 25  # logits held at once


@torch.inference_mode()
def score_together(
    model: EngineModel, store: AdapterStore, sequences: Sequence[Sequence[int]], version: int, temperature: float
) -> list[Tensor]:
    """Of tokens 1.. of each sequence, in one forward; fp32 on the host."""
    device, counts = model.weights.embed.device, [len(s) - 1 for s in sequences]
    adapters = StepAdapters.of(store, [version] * len(counts), counts, device)
    residual, _ = model.hidden(uncached_batch([s[:-1] for s in sequences], device), adapters)
    targets_T = put([t for s in sequences for t in s[1:]], device)
    parts = []
    for rows in torch.arange(len(targets_T), device=device).split(max(1, LOGIT_ELEMENTS // model.config.vocab_size)):
        logits = model.logits(residual, rows).div_(temperature)
        parts.append(logits.log_softmax(-1).gather(1, targets_T[rows].unsqueeze(1)).squeeze(1))
    return list(torch.cat(parts).cpu().split(counts))
