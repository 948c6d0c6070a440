"""What a draft reads of its target: taps and last hidden states of whole sequences, by one forward without caches.

Shapes: T tokens of a sequence, W tap width, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles_k3.rollout.embedded.batch import uncached_batch
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.rollout.embedded.taps import Taps
from miles_k3.rollout.speculative.target_states import TargetStates


def target_states(
    engine: EmbeddedEngine, sequences: Sequence[Sequence[int]], layers: Sequence[int], *, chunk_tokens: int = 4096
) -> list[TargetStates]:
    """Of each sequence, under the engine's newest adapter; `layers` are 0-based, taps in their order (spec 6.2).

    Sequences are computed about `chunk_tokens` at a time. Uses no cache, so it works while the engine sleeps.
    """
    states: list[TargetStates] = []
    batch: list[Sequence[int]] = []
    for sequence in sequences:
        if batch and sum(map(len, batch)) + len(sequence) > chunk_tokens:
            states += _forward(engine, batch, layers)
            batch = []
        batch.append(sequence)
    return states + (_forward(engine, batch, layers) if batch else [])


@torch.no_grad()
def _forward(engine: EmbeddedEngine, sequences: Sequence[Sequence[int]], layers: Sequence[int]) -> list[TargetStates]:
    model, device = engine.runner.model, engine.runner.device
    counts = [len(s) for s in sequences]
    adapters = StepAdapters.of(engine.store, [engine.adapter_version] * len(counts), counts, device)
    taps = Taps.empty(layers, sum(counts), model.weights.embed)
    residual, _ = model.hidden(uncached_batch(sequences, device), adapters, taps=taps)
    final_TH = model.final(residual, taps=taps)
    return [
        TargetStates(taps_TW=t, final_TH=f)
        for t, f in zip(taps.rows_TW.split(counts), final_TH.split(counts), strict=True)
    ]
