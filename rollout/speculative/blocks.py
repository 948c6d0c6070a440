"""Blocks to train a draft on: anchors inside the policy's answers, and what the target says of the tokens after them.

Shapes: S sequences, A blocks of each, G tokens of a block, T tokens, W tap width, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.rollout.speculative.target_states import TargetStates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """One answer of the policy behind its prompt; only answer tokens are drafted."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    states: TargetStates

    @property
    def num_anchors(self) -> int:
        """Answer tokens with one behind them. A prompt's last token is none: the target has just said what follows."""
        return max(0, len(self.token_ids) - 1 - self.num_prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockBatch:
    """Right-padded sequences and their blocks.

    Row k of a block follows `previous_SAG`, should give `labels_SAG`, and counts where `supervised_SAG`: while the
    label is still of the answer. `target_SAGH` is what the target's head reads where it predicts that label.
    """

    taps_STW: Tensor
    anchors_SA: Tensor
    previous_SAG: Tensor
    labels_SAG: Tensor
    supervised_SAG: Tensor
    target_SAGH: Tensor


def make_blocks(
    examples: Sequence[Example], block_size: int, *, max_blocks: int, generator: torch.Generator
) -> BlockBatch:
    """At most `max_blocks` blocks of each example, at different anchors, drawn where there are more."""
    chosen = [_anchors(e, max_blocks, generator) for e in examples]
    num_blocks = max(1, *(len(a) for a in chosen)) if chosen else 1
    longest = max(len(e.token_ids) for e in examples)
    rows = torch.arange(block_size)
    device = examples[0].states.taps_TW.device
    columns: dict[str, list[Tensor]] = {"taps": [], "anchors": [], "previous": [], "labels": [], "on": [], "target": []}
    for example, anchors in zip(examples, chosen, strict=True):
        anchors_A = torch.tensor([*anchors, *[example.num_prompt_tokens] * (num_blocks - len(anchors))])
        is_block_A1 = (torch.arange(num_blocks) < len(anchors)).unsqueeze(1)
        end = len(example.token_ids) - 1
        at_AG = anchors_A.unsqueeze(1) + rows
        tokens = torch.tensor(example.token_ids)
        columns["anchors"].append(anchors_A)
        columns["previous"].append(tokens[at_AG.clamp(max=end)])
        columns["labels"].append(tokens[(at_AG + 1).clamp(max=end)])
        columns["on"].append((at_AG < end) & is_block_A1)
        columns["target"].append(example.states.final_TH.float()[at_AG.clamp(max=end).to(device)])
        padding = (0, 0, 0, longest - len(example.token_ids))
        columns["taps"].append(torch.nn.functional.pad(example.states.taps_TW.float(), padding))
    taps, anchors_SA, previous, labels, on, target = (torch.stack(c).to(device) for c in columns.values())
    return BlockBatch(
        taps_STW=taps, anchors_SA=anchors_SA, previous_SAG=previous, labels_SAG=labels, supervised_SAG=on,
        target_SAGH=target,
    )  # fmt: skip


def _anchors(example: Example, most: int, generator: torch.Generator) -> list[int]:
    count = example.num_anchors
    picked = torch.randperm(count, generator=generator)[:most].sort().values
    return (picked + example.num_prompt_tokens).tolist()
