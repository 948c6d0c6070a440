"""The trainer on the golden checkpoint: as close to SGLang as the oracle is, and to the oracle by rounding only."""

from __future__ import annotations

import pytest
import torch
from helpers.golden import SCALING, Golden, assert_agrees

from miles_k3.config import AlgorithmSection, TrainerSection
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.params import text_params
from miles_k3.k3.weights import build_base
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.types import AdapterConfig

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("base_dtype", ["bf16", "mxfp4"])
def test_scores(golden: Golden, adapted: bool, base_dtype: str) -> None:
    config, scores = golden.config, golden.lora if adapted else golden.base
    base = build_base(
        config, text_params(config), lambda p: golden.weights[p.name], dtype=torch.float32, base_dtype=base_dtype
    )
    trainer = MegatronTrainer(
        base, config, adapter=AdapterConfig(rank=16, alpha=16 * SCALING, share_gate_up_a=False),
        section=TrainerSection(), algorithm=AlgorithmSection(), total_steps=1, seed=0,
    )  # fmt: skip
    if adapted:
        trainer.load_adapter({name: t.contiguous() for name, t in golden.adapter.items()})
    found = torch.stack(trainer.score(scores.tokens_BT.tolist()))
    assert_agrees(scores.compare(found))
    with torch.no_grad():
        oracle = NaiveK3(config, golden.weights, golden.adapter if adapted else None, SCALING)
        expected = oracle.logprobs(scores.tokens_BT)
    assert (found - expected).abs().mean() <= 1e-5  # fp32 on both sides, other orders of the same sums
