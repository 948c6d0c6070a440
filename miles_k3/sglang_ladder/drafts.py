"""Drafts of a ladder's model: one that knows what follows what in given answers, and one that is trained."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.k3.draft_params import MARKOV_W1, MARKOV_W2, draft_params
from miles_k3.k3.params import LM_HEAD, TEXT
from miles_k3.k3.supervised import TrainableK3, padded
from miles_k3.rollout.speculative.blocks import Example
from miles_k3.rollout.speculative.draft_io import write_draft
from miles_k3.rollout.speculative.draft_train import DraftTrainer, DraftTraining, initial_weights
from miles_k3.rollout.speculative.target_states import TargetStates

SURE = 256.0  # logits that a known follower gets; what the random rest of the draft says is far below


def draft_config(target: K3Config) -> DraftConfig:
    """Two layers that SGLang's kernels take, reading the target at four depths."""
    hidden, depth = target.hidden_size, target.num_hidden_layers
    return DraftConfig(
        hidden_size=hidden, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        intermediate_size=2 * hidden, vocab_size=target.vocab_size, rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=4096, block_size=7, markov_rank=256, mask_token_id=3, use_confidence_head=True,
        num_target_layers=depth, target_layer_ids=tuple(sorted({i * (depth - 1) // 3 for i in range(4)})),
    )  # fmt: skip


def write_telling_draft(folder: Path, target: K3Config, answers: Sequence[Sequence[int]]) -> Path:
    """A draft that proposes behind each token of `answers` the one that last followed it there; chance elsewhere."""
    config = draft_config(target)
    weights = {p.name: _drawn(p.name, p.shape) for p in draft_params(config)}
    following = {token: after for answer in answers for token, after in pairwise(answer)}
    weights[MARKOV_W1].zero_()
    weights[MARKOV_W2].zero_()
    for row, (token, after) in enumerate(list(following.items())[: config.markov_rank]):
        weights[MARKOV_W1][token, row] = 1.0
        weights[MARKOV_W2][after, row] = SURE
    shutil.rmtree(folder, ignore_errors=True)
    write_draft(folder, config, weights)
    return folder


def write_trained_draft(
    folder: Path,
    target: K3Config,
    weights: Mapping[str, Tensor],
    rows: Sequence[tuple[list[int], list[int]]],
    steps: int,
) -> float:
    """A draft trained on what the bare model, given by `plain_weights`, says of (prompt, answer) rows.

    Returns how many tokens of a block rejection sampling would accept, by its last step.
    """
    config = draft_config(target)
    examples = _examples(TrainableK3(target, weights), rows, config.target_layer_ids)
    embed_VH, head_VH = weights[TEXT + "embed_tokens.weight"], weights[LM_HEAD]
    trainer = DraftTrainer(config, initial_weights(config, 0), embed_VH, head_VH, DraftTraining(steps=steps))
    accepted = [trainer.step(examples)["draft/expected_accepted"] for _ in range(steps)]
    shutil.rmtree(folder, ignore_errors=True)
    write_draft(folder, config, {name: w.detach().cpu() for name, w in trainer.weights.items()})
    return accepted[-1]


@torch.no_grad()
def _examples(model: TrainableK3, rows: Sequence[tuple[list[int], list[int]]], layers: Sequence[int]) -> list[Example]:
    last, found = model.config.num_hidden_layers - 1, []
    for start in range(0, len(rows), 64):
        some = rows[start : start + 64]
        tokens, _ = padded(some, model.config.pad_token_id, model.weight(LM_HEAD).device)
        taps = model.taps(tokens, [*layers, last])
        finals = model.norm(taps[..., -model.config.hidden_size :], TEXT + "norm.weight", model.config.rms_norm_eps)
        for (prompt, answer), tap, final in zip(some, taps[..., : -model.config.hidden_size], finals, strict=True):
            whole = (*prompt, *answer)
            states = TargetStates(taps_TW=tap[: len(whole)], final_TH=final[: len(whole)])
            found.append(Example(token_ids=whole, num_prompt_tokens=len(prompt), states=states))
    return found


def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """A norm's ones; normal numbers of the scale of a product's inverse root otherwise."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5
