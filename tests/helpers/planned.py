"""Recipes, batches and ranks for comparing a plan with what is measured."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from helpers.batches import micro_batch, mini_batch, random_tokens, train_batch

from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.parallel import token_multiple
from miles_k3.plan.phases import full_micro_batch
from miles_k3.types import TrainBatch


def fullest_batch(recipe: Recipe, config: K3Config, *, micro_batches: int = 1, seed: int = 0) -> TrainBatch:
    """Micro-batches as a plan has them: full of the longest sequences, whose answers are trained on."""
    new = recipe.rollout.sampling.max_new_tokens
    longest = recipe.task.max_prompt_tokens + new
    unit = token_multiple(recipe.trainer.parallel)
    lengths = full_micro_batch(longest, recipe.trainer.micro_batch_tokens, unit)
    made = []
    for number in range(micro_batches):
        micro = micro_batch(random_tokens(lengths, vocab=config.vocab_size, seed=seed + number), seed=seed)
        mask = micro.loss_mask.zero_()
        for start, end in pairwise(micro.cu_seqlens.tolist()):
            mask[max(start, end - 1 - new) : end - 1] = 1.0
        made.append(dataclasses.replace(micro, loss_mask=mask))
    return train_batch(mini_batch(*made))
