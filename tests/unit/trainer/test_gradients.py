"""Gradients and optimizer steps of the adapter against autograd and Adam on the naive model.

Tolerance of gradients: 1e-4 of each tensor's norm on `calm` weights. fp32 rounding through eight layers, each with two
softmax mixes and saturating activations, comes to a few 1e-6 there; a wrong formula or a missing term to 1e-2 and more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches import micro_batch, mini_batch, random_tokens, train_batch
from helpers.mutants import mutate
from helpers.trainers import (
    ADAPTER,
    adapter_tensors,
    gradients,
    leaves,
    naive_loss,
    relative_difference,
    tiny_trainer,
)
from torch import Tensor

from miles_k3.config import AlgorithmSection
from miles_k3.trainer import lora
from miles_k3.types import AdapterConfig, MiniBatch

LENGTHS = (9, 2, 17, 33, 16)
SEPARATE = AdapterConfig(rank=6, alpha=12.0, share_gate_up_a=False)


def naive_gradients(mini: MiniBatch, algorithm: dict[str, Any], adapter: AdapterConfig = ADAPTER) -> dict[str, Tensor]:
    made = leaves(adapter_tensors(adapter), torch.float64, adapter.share_gate_up_a)
    loss = naive_loss(made, mini, AlgorithmSection(**algorithm), scaling=adapter.scaling, temperature=0.7, calm=True)
    loss.backward()
    return {name: t.grad for name, t in made.items() if t.grad is not None}


@pytest.mark.parametrize("adapter", [ADAPTER, SEPARATE], ids=["shared_a", "separate_a"])
@pytest.mark.parametrize(
    "algorithm",
    [{}, {"kl_coef": 0.3, "entropy_coef": 0.2, "importance_cap": None, "loss_normalization": "sequence"}],
    ids=["default", "all_terms"],
)
def test_every_gradient_equals_the_naive_one(algorithm: dict[str, Any], adapter: AdapterConfig) -> None:
    mini = mini_batch(micro_batch(random_tokens(LENGTHS)))
    trainer = tiny_trainer(calm=True, algorithm=algorithm, adapter=adapter)
    trainer.load_adapter(adapter_tensors(adapter))
    wanted = naive_gradients(mini, algorithm, adapter)
    found = gradients(trainer, mini, temperature=0.7)
    assert found.keys() == wanted.keys()
    assert all(float(g.norm()) > 0 for g in wanted.values())
    differences = relative_difference(found, wanted)
    assert max(differences.values()) <= 1e-4, max(differences.items(), key=lambda item: item[1])


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (lora.DenseLora, "* self.scaling", "* self.scaling * 1.01"),
        (lora.GateUpLora, "x_TI @ self.a.t()", "x_TI.detach() @ self.a.t()"),
    ],
)
def test_a_planted_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, module: type, old: str, new: str) -> None:
    mini = mini_batch(micro_batch(random_tokens(LENGTHS)))
    monkeypatch.setattr(module, "forward", mutate(module, (old, new)).forward)
    trainer = tiny_trainer(calm=True)
    trainer.load_adapter(adapter_tensors())
    assert max(relative_difference(gradients(trainer, mini, 0.7), naive_gradients(mini, {})).values()) > 1e-3


def test_the_number_of_micro_batches_does_not_matter() -> None:
    """Not even their order of magnitude: megatron would divide by their number."""
    sequences = random_tokens((9, 12, 17, 8, 16, 11, 5, 14))
    one = micro_batch(sequences)
    ends = one.cu_seqlens.tolist()
    four = []
    for first in range(0, 8, 2):
        piece = micro_batch(sequences[first : first + 2], first_id=first)
        part = slice(ends[first], ends[first + 2])
        four.append(
            type(one)(
                tokens=one.tokens[part], cu_seqlens=piece.cu_seqlens, targets=one.targets[part],
                loss_mask=one.loss_mask[part], advantages=one.advantages[part],
                rollout_logprobs=one.rollout_logprobs[part], sequence_ids=piece.sequence_ids,
            )
        )  # fmt: skip
    trainer = tiny_trainer(calm=True)
    trainer.load_adapter(adapter_tensors())
    wanted, found = gradients(trainer, mini_batch(one)), gradients(trainer, mini_batch(*four))
    assert max(relative_difference(found, wanted).values()) <= 2e-5


def test_three_steps_equal_adam_on_the_naive_model() -> None:
    """Adam divides by the root of tiny squares: an eps of 1e-6 keeps rounding of the smallest gradients out of it."""
    section = {"lr": 1e-3, "lr_warmup_steps": 1, "weight_decay": 0.01, "grad_clip": 0.5, "adam_eps": 1e-6}
    batches = [mini_batch(micro_batch(random_tokens(LENGTHS, seed=i), seed=i)) for i in range(3)]
    trainer = tiny_trainer(calm=True, section=section)
    trainer.load_adapter(adapter_tensors())
    made = leaves(adapter_tensors(), torch.float64, share=True)
    unique = list({id(t): t for t in made.values()}.values())
    adam = torch.optim.AdamW(unique, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)
    for i, mini in enumerate(batches):
        adam.zero_grad()
        loss = naive_loss(made, mini, AlgorithmSection(), scaling=ADAPTER.scaling, calm=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(unique, 0.5)
        adam.param_groups[0]["lr"] = 1e-3 * (0.5 if i == 0 else 1.0)
        adam.step()
        stats = trainer.step(train_batch(mini))
        assert stats.loss == pytest.approx(loss.item(), abs=1e-5)
        assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        assert norm > 0.5  # clipping took part
    start, found = adapter_tensors(), trainer.export_adapter().tensors
    moved = {name: t.detach() - start[name] for name, t in made.items()}
    ours = {name: found[name].double() - start[name] for name in made}
    assert max(relative_difference(ours, moved).values()) <= 1e-3


def test_layer_zero_attention_mix_has_no_part() -> None:
    """Trap 7: the first layer has no bank to mix, its AttnRes weights are never used."""
    trainer = tiny_trainer()
    score = trainer.score([list(range(20))])
    with torch.no_grad():
        dict(trainer.model.named_parameters())["layers.0.attention_res.proj"].zero_()
    assert torch.equal(trainer.score([list(range(20))])[0], score[0])
