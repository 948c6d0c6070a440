"""The golden checkpoint: what SGLang said about it on a GPU, what NaiveK3 says, and what the engine says."""

from __future__ import annotations

import pytest
import torch
from helpers.engines import ask, assert_idle
from helpers.golden import SCALING, Golden, assert_agrees

from miles_k3.adapters.update import make_update
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.params import text_params
from miles_k3.k3.weights import build_base
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.types import AdapterConfig, SamplingParams

NUM_NEW = 16
PROMPT = 200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return Golden.make(tmp_path_factory.mktemp("golden") / "checkpoint")


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "lora"])
def test_scores_and_cached_answers(golden: Golden, adapted: bool) -> None:
    """Scores against SGLang and NaiveK3; greedy answers through caches, chunks and batches against NaiveK3."""
    config, scores = golden.config, golden.lora if adapted else golden.base
    base = build_base(config, text_params(config), lambda p: golden.weights[p.name], dtype=torch.float32)
    engine = EmbeddedEngine(
        base, config, max_lora_rank=16, max_running=4, prefill_chunk_tokens=130, max_sequence_tokens=256
    )
    if adapted:
        tensors = {name: t.contiguous() for name, t in golden.adapter.items()}
        engine.load_adapter(make_update(0, AdapterConfig(rank=16, alpha=32.0, share_gate_up_a=False), tensors))
    scored = torch.stack(engine.score(scores.tokens_BT.tolist()))
    assert_agrees(scores.compare(scored))

    prompts = scores.tokens_BT[:, :PROMPT].tolist()
    answers = ask(engine, prompts, SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW))
    assert_idle(engine)
    sequences = torch.tensor([[*p, *a.token_ids][:-1] for p, a in zip(prompts, answers, strict=True)])
    with torch.no_grad():
        logits = NaiveK3(config, golden.weights, golden.adapter if adapted else None, SCALING)(sequences)
    by_naive = logits[:, : PROMPT - 1].log_softmax(-1).gather(-1, scores.tokens_BT[:, 1:PROMPT, None]).squeeze(-1)
    assert (scored[:, : PROMPT - 1] - by_naive).abs().max() <= 1e-3
    for row, answer in zip(logits[:, PROMPT - 1 :], answers, strict=True):
        tokens = torch.tensor(answer.token_ids)
        assert tokens.tolist() == row.argmax(-1).tolist()
        expected = row.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        assert (expected - torch.tensor(answer.logprobs)).abs().max() <= 1e-3
