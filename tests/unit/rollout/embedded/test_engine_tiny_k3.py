"""The trained tiny K3 that ships with the repository: what the engine is off by on a model that knows something."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.engines import ask
from helpers.oracle64 import Oracle64

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import text_params
from miles_k3.k3.safetensors_io import Checkpoint
from miles_k3.k3.weights import load_base
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.types import Completion, SamplingParams

FOLDER = Path(__file__).parents[4] / "assets" / "tiny-k3"


@pytest.fixture(scope="module")
def config() -> K3Config:
    return K3Config.from_folder(FOLDER)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    chats = [[{"role": "user", "content": f"{17 * i % 90 + 3} + {29 * i % 80 + 5} = ?"}] for i in range(48)]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def generated(
    config: K3Config, prompts: list[list[int]], dtype: torch.dtype
) -> tuple[EmbeddedEngine, list[Completion]]:
    engine = EmbeddedEngine(load_base(FOLDER, config, dtype=dtype), config, max_sequence_tokens=64, max_running=64)
    params = [SamplingParams(max_new_tokens=10, seed=i, stop_token_ids=(config.eos_token_id,)) for i in range(48)]
    return engine, ask(engine, prompts, params)


def test_fp32_equals_the_oracle(config: K3Config, prompts: list[list[int]]) -> None:
    _, answers = generated(config, prompts, torch.float32)
    with Checkpoint(FOLDER) as checkpoint:
        model = Oracle64(config, {p.name: checkpoint.read(p).clone() for p in text_params(config)})
    rows = [[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)]
    longest = max(map(len, rows))
    with torch.no_grad():
        expected = model.logprobs(torch.tensor([row + [0] * (longest - len(row)) for row in rows]))
    gaps = [
        (expected[i, len(p) - 1 : len(row) - 1] - torch.tensor(a.logprobs)).abs()
        for i, (p, row, a) in enumerate(zip(prompts, rows, answers, strict=True))
    ]
    assert torch.cat(gaps).mean() <= 1e-5
    assert torch.cat(gaps).max() <= 1e-3


def test_bf16_generates_what_it_scores(config: K3Config, prompts: list[list[int]]) -> None:
    """Caches, chunks, batches and single-token steps against one packed pass, both in BF16."""
    engine, answers = generated(config, prompts, torch.bfloat16)
    scored = engine.score([[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)])
    gaps = [
        (row[len(p) - 1 :] - torch.tensor(a.logprobs)).abs() for p, a, row in zip(prompts, answers, scored, strict=True)
    ]
    assert torch.cat(gaps).mean() <= 2e-2
