"""Small drafts of the tiny model, and blocks for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from helpers.engines import weights as target_weights
from helpers.tiny import draw_seed, tiny_config
from torch import Tensor

from miles_k3.k3.draft_config import DraftConfig
from miles_k3.k3.draft_params import MARKOV_W1, MARKOV_W2, draft_params
from miles_k3.k3.params import LM_HEAD, TEXT
from miles_k3.rollout.speculative.blocks import Example
from miles_k3.rollout.speculative.draft import DraftModel
from miles_k3.rollout.speculative.target_states import TargetStates

RADIXARK: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 7,
    "confidence_head_with_markov": True, "dtype": "bfloat16", "enable_confidence_head": True, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 14336, "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla", "markov_rank": 256, "max_position_embeddings": 1048576, "model_type": "qwen3",
    "num_attention_heads": 64, "num_hidden_layers": 5, "num_key_value_heads": 16, "num_target_layers": 93,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "vocab_size": 163840,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 16.0,
                        "original_max_position_embeddings": 65536},
    "dflash_config": {"mask_token_id": 163824, "target_layer_ids": [7, 23, 51, 67, 83]},
}  # fmt: skip


def small_config(**changes: Any) -> DraftConfig:
    """A draft of tiny-A, every width another one."""
    dims = {
        "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
        "intermediate_size": 72, "vocab_size": 256, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        "block_size": 5, "markov_rank": 12, "mask_token_id": 3, "use_confidence_head": True,
        "target_layer_ids": (1, 4, 7),
    }  # fmt: skip
    return DraftConfig(**{**dims, **changes})


def small_weights(config: DraftConfig, seed: int = 0) -> dict[str, Tensor]:
    """Values that BF16 holds exactly; norms and heads far from what a new draft has."""
    out = {}
    for p in draft_params(config):
        normal = torch.randn(p.shape, generator=torch.Generator().manual_seed(draw_seed(seed, p.name)))
        scaled = 1.0 + 0.3 * normal if p.name.endswith("norm.weight") else normal * p.shape[-1] ** -0.5
        out[p.name] = scaled.bfloat16().float()
    return out


def telling_weights(config: DraftConfig, answers: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """A draft that knows, by its Markov head alone, which token last followed each one in `answers`."""
    weights, size = small_weights(config), config.vocab_size
    assert config.markov_rank == size
    weights[MARKOV_W1], weights[MARKOV_W2] = torch.eye(size), torch.zeros(size, size)
    for answer in answers:
        for token, following in pairwise(answer):
            weights[MARKOV_W2][:, token] = 0.0
            weights[MARKOV_W2][following, token] = 60.0
    return weights


def small_draft(dtype: torch.dtype = torch.float32, **changes: Any) -> DraftModel:
    config = small_config(**changes)
    embed, head = (target_weights()[name].to(dtype) for name in (TEXT + "embed_tokens.weight", LM_HEAD))
    return DraftModel(config, {n: w.to(dtype) for n, w in small_weights(config).items()}, embed, head)


def random_examples(lengths: list[tuple[int, int]], config: DraftConfig, seed: int = 0) -> list[Example]:
    """Examples of (prompt, answer) lengths with random tokens and states."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for prompt, answer in lengths:
        count = prompt + answer
        states = TargetStates(
            taps_TW=torch.randn(count, config.tap_width, generator=generator),
            final_TH=torch.randn(count, config.hidden_size, generator=generator),
        )
        tokens = torch.randint(0, tiny_config().vocab_size, (count,), generator=generator).tolist()
        examples.append(Example(token_ids=tuple(tokens), num_prompt_tokens=prompt, states=states))
    return examples
