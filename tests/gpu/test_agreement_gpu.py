"""Trainer and engine, each on its kernels, say the same of one adapter; so do the trainer's kernels and plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import micro_batch, mini_batch, random_tokens
from helpers.tiny import tiny_adapter, tiny_config

from miles_k3.assemble import Model, adapter_config, make_engine, make_trainer
from miles_k3.k3.random_weights import random_base
from miles_k3.recipe import load_recipe
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.trainer.model import experts as trainer_experts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
# Every token goes to every expert: near ties of a router, which bf16 decides one way or the other, are another matter.
WIDTHS = {
    "vocab_size": 4096, "hidden_size": 1024, "kda_num_heads": 8, "kda_head_dim": 128, "num_attention_heads": 8,
    "intermediate_size": 2048, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 16, "num_experts_per_token": 16,
    "moe_intermediate_size": 256, "routed_expert_hidden_size": 512, "max_position_embeddings": 8192,
}  # fmt: skip


def test_one_adapter_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16, MXFP4 experts, rank 16 on every target. 0.03 nats: eight bits, through four layers, on logits near 1."""
    recipe = load_recipe(
        "tiny-cpu",
        ["model.device=cuda", "model.dtype=bfloat16", "model.base_dtype=mxfp4", "lora.rank=16", "lora.alpha=32.0"],
    ).recipe
    config = tiny_config(**WIDTHS)
    base = random_base(config, dtype=torch.bfloat16, device="cuda")
    model = Model(config=config, base=base, tokenizer=None)
    trainer, engine = make_trainer(recipe, model), make_engine(recipe, model)
    assert isinstance(trainer, MegatronTrainer)
    drawn = tiny_adapter(config, adapter_config(recipe), scale=0.02)
    trainer.load_adapter({name: t.to(base.device) for name, t in drawn.items()})
    engine.load_adapter(trainer.export_adapter())
    tokens = random_tokens((40, 25, 60))
    sequences, mini = [t.tolist() for t in tokens], mini_batch(micro_batch(tokens))
    ours, theirs = (torch.cat(list(side.score(sequences))).float().cpu() for side in (trainer, engine))
    gradients = trainer.gradients(mini, 1.0)[1]
    monkeypatch.setattr(trainer_experts, "takes_kernels", lambda _: False)
    unpacked = torch.cat(list(trainer.score(sequences))).float().cpu()
    plain = trainer.gradients(mini, 1.0)[1]
    assert (ours - unpacked).abs().mean() < 0.03
    assert (ours - theirs).abs().mean() < 0.03
    assert {n: e for n, t in plain.items() if (e := ((gradients[n] - t).norm() / t.norm()).item()) > 0.05} == {}
    engine.close()
