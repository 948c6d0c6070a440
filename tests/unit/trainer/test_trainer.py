"""MegatronTrainer as the loop sees it: steps, versions, rates, clipping, KL, scoring, export and import."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.batches import micro_batch, mini_batch, random_tokens, train_batch
from helpers.trainers import ADAPTER, adapter_tensors, tiny_trainer

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.update import verify_update
from miles_k3.config import ParallelSection, TrainerSection
from miles_k3.errors import AdapterError, LaunchError, MilesError
from miles_k3.trainer.optim import learning_rate
from miles_k3.types import AdapterConfig

LENGTHS = (9, 2, 17, 33, 16)


def some_batch(seed: int = 0, **changes: Any):
    return train_batch(mini_batch(micro_batch(random_tokens(LENGTHS, seed=seed), seed=seed)), **changes)


def test_a_step_moves_the_adapter_and_nothing_else() -> None:
    trainer = tiny_trainer()
    base = trainer.base
    before = {name: t.clone() for name, t in base.tensors.items()}
    experts = {layer: tuple(t.clone() for t in bank.dense(torch.float32)) for layer, bank in base.experts.items()}
    start = trainer.export_adapter()
    stats = trainer.step(some_batch())
    end = trainer.export_adapter()
    assert (start.version, end.version, trainer.version) == (0, 1, 1)
    assert all(torch.equal(before[name], t) for name, t in base.tensors.items())
    for layer, bank in base.experts.items():
        assert all(torch.equal(a, b) for a, b in zip(experts[layer], bank.dense(torch.float32), strict=True))
    moved = {name for name, t in end.tensors.items() if not torch.equal(t, start.tensors[name])}
    assert moved == {name for name in end.tensors if ".lora_B." in name}  # at B = 0 no gradient reaches A
    trainer.step(some_batch(1))
    assert all(not torch.equal(t, end.tensors[name]) for name, t in trainer.export_adapter().tensors.items())
    assert math.isfinite(stats.loss)
    assert stats.metrics["tokens"] == sum(float(m.loss_mask.sum()) for m in some_batch().mini_batches[0].micro_batches)
    assert {"entropy", "mismatch_abs", "ratio"} <= stats.metrics.keys()


def test_an_empty_harvest_takes_no_update() -> None:
    trainer = tiny_trainer()
    start = trainer.export_adapter()
    stats = trainer.step(train_batch())
    assert (stats.loss, stats.grad_norm, trainer.version) == (0.0, 0.0, 1)
    assert all(torch.equal(t, start.tensors[name]) for name, t in trainer.export_adapter().tensors.items())


def test_a_micro_batch_without_loss_tokens_adds_nothing() -> None:
    trainer = tiny_trainer()
    whole = micro_batch(random_tokens(LENGTHS))
    masked = type(whole)(**{f: getattr(whole, f) for f in whole.__slots__} | {"loss_mask": whole.loss_mask * 0})
    trainer.step(train_batch(mini_batch(whole, masked)))
    other = tiny_trainer()
    other.step(train_batch(mini_batch(whole)))
    for name, t in trainer.export_adapter().tensors.items():
        assert torch.equal(t, other.export_adapter().tensors[name])


def test_old_logprobs_are_those_before_the_first_update() -> None:
    """With a large rate the second update's ratios leave 1; with the current ones as old they never would."""
    minis = [mini_batch(micro_batch(random_tokens(LENGTHS, seed=i), seed=i)) for i in range(2)]
    trainer = tiny_trainer(section={"lr": 3e-2})
    stats = trainer.step(train_batch(*minis))
    assert stats.metrics["kl_update"] > 1e-3
    assert tiny_trainer(section={"lr": 3e-2}).step(train_batch(minis[0])).metrics["kl_update"] == 0.0


def test_kl_is_measured_against_the_model_without_its_adapter() -> None:
    trainer = tiny_trainer(algorithm={"kl_coef": 0.1})
    assert trainer.step(some_batch()).metrics["kl_base"] == 0.0  # B = 0
    trainer.load_adapter(adapter_tensors())
    assert trainer.step(some_batch()).metrics["kl_base"] > 1e-3


def test_temperature_divides_the_logits() -> None:
    trainer = tiny_trainer()
    sequence = random_tokens((12,))[0].tolist()
    cold, hot = (trainer.score([sequence], temperature=t)[0] for t in (0.5, 50.0))
    assert hot.mean() == pytest.approx(-math.log(256), abs=0.02)
    assert cold.mean() < hot.mean()
    with pytest.raises(MilesError, match="temperature is 0"):
        trainer.score([sequence], temperature=0.0)


def test_score_does_not_depend_on_the_packing() -> None:
    sequences = [s.tolist() for s in random_tokens((9, 1, 17, 33, 2))]
    trainer = tiny_trainer(calm=True, section={"micro_batch_tokens": 40})
    together = trainer.score(sequences)
    assert [len(t) for t in together] == [8, 0, 16, 32, 1]
    assert all(t.dtype == torch.float32 for t in together)
    for sequence, logprobs in zip(sequences, together, strict=True):
        torch.testing.assert_close(trainer.score([sequence])[0], logprobs, rtol=0, atol=1e-4)
    assert trainer.score([]) == []


def test_clipping_bounds_the_gradient_that_adam_sees() -> None:
    """Adam is blind to scale but for its eps: a huge eps makes the step proportional to the clipped gradient."""
    moves = {}
    for clip in (0.0, 1e-3):
        trainer = tiny_trainer(section={"lr": 1.0, "adam_eps": 1e3, "grad_clip": clip})
        stats = trainer.step(some_batch())
        moves[clip] = sum(float(t.norm() ** 2) for n, t in trainer.export_adapter().tensors.items() if ".lora_B." in n)
        moves[clip, "norm"] = stats.grad_norm
    assert moves[0.0, "norm"] == pytest.approx(moves[1e-3, "norm"])  # reported before clipping
    ratio = math.sqrt(moves[1e-3] / moves[0.0])
    assert ratio == pytest.approx(1e-3 / moves[0.0, "norm"], rel=1e-2)


def test_a_gradient_that_is_not_finite_stops_before_the_update() -> None:
    trainer = tiny_trainer()
    batch = some_batch()
    batch.mini_batches[0].micro_batches[0].advantages.fill_(float("inf"))
    start = trainer.export_adapter()
    with pytest.raises(MilesError, match=r"gradient norm is .* in update 1 of step 1;"):
        trainer.step(batch)
    assert all(torch.equal(t, start.tensors[name]) for name, t in trainer.export_adapter().tensors.items())


@pytest.mark.parametrize("share", [True, False])
def test_exports_are_whole_owned_and_load_back(share: bool) -> None:
    adapter = AdapterConfig(rank=6, alpha=12.0, share_gate_up_a=share)
    trainer = tiny_trainer(adapter=adapter)
    trainer.load_adapter(adapter_tensors(adapter))
    update = trainer.export_adapter()
    verify_update(update, adapter_layout(trainer.config, adapter), max_rank=6, expected_version=None)
    assert all(torch.equal(update.tensors[name], t) for name, t in adapter_tensors(adapter).items())
    trainer.step(some_batch())
    assert all(torch.equal(update.tensors[name], t) for name, t in adapter_tensors(adapter).items())


def test_bf16_masters_follow_a_loaded_adapter() -> None:
    """A master left at its start would throw the loaded adapter away at the first step."""
    trainer = tiny_trainer(dtype=torch.bfloat16, section={"lr": 0.0})
    trainer.load_adapter(adapter_tensors())
    trainer.step(some_batch())
    update = trainer.export_adapter()
    assert all(torch.equal(t, adapter_tensors()[name].bfloat16()) for name, t in update.tensors.items())


def test_bad_adapters_are_refused_and_change_nothing() -> None:
    trainer = tiny_trainer()
    start, good = trainer.export_adapter(), adapter_tensors()
    first = next(iter(good))
    gate = next(name for name in good if ".gate_proj.lora_A." in name)
    for bad, words in (
        ({n: t for n, t in good.items() if n != first}, "lacks 1 of"),
        ({**good, "other.lora_A.weight": good[first]}, "match nothing"),
        ({**good, first: good[first][:-1]}, "has shape"),
        ({**good, first: good[first] * float("nan")}, "NaN"),
        ({**good, gate: good[gate] + 1}, "set lora.share_gate_up_a: false"),
    ):
        with pytest.raises(AdapterError, match=words):
            trainer.load_adapter(bad)
    assert all(torch.equal(t, start.tensors[name]) for name, t in trainer.export_adapter().tensors.items())


def test_the_start_depends_on_seed_and_name_only() -> None:
    one, same, other = (tiny_trainer(seed=seed).export_adapter().tensors for seed in (3, 3, 4))
    shorter = AdapterConfig(rank=6, alpha=99.0, share_gate_up_a=False)
    separate = tiny_trainer(seed=3, adapter=shorter).export_adapter().tensors
    for name, t in one.items():
        assert torch.equal(t, same[name])
        if ".lora_B." in name:
            assert not t.any()
            continue
        assert not torch.equal(t, other[name])
        assert torch.equal(t, separate[name]) == (".up_proj." not in name)
        bound = math.sqrt(6 / sum(t.shape[-2:]))
        assert 0.8 * bound < t.abs().max() <= bound


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rates(decay: str, rates: list[float]) -> None:
    section = TrainerSection(lr=2.0, lr_warmup_steps=2, lr_decay=decay)  # type: ignore[arg-type]
    found = [learning_rate(section, step, total_steps=6) for step in range(6)]
    assert found == pytest.approx([2.0 * rate for rate in rates], abs=1e-5)
    trainer = tiny_trainer(section={"lr": 2.0, "lr_warmup_steps": 2, "lr_decay": decay}, total_steps=6)
    assert [trainer.step(train_batch()).lr for _ in range(3)] == pytest.approx(found[:3])


def test_a_layout_that_cannot_run_is_refused_with_all_reasons() -> None:
    with pytest.raises(LaunchError) as found:
        tiny_trainer(section={"parallel": ParallelSection(tp=3, ep=4, vpp=2)})
    reasons = str(found.value).splitlines()
    assert len(reasons) == 9
    for part in ("a multiple of tp 3", "KDA heads 4", "vpp is 2 but pp is 1", "ep 4 doesn't divide the 1 ranks"):
        assert any(part in reason for reason in reasons)


def test_the_adapter_config_is_exported_as_given() -> None:
    assert tiny_trainer().export_adapter().config == ADAPTER


def test_every_factor_carries_its_rule() -> None:
    model = tiny_trainer().model
    factors = {name: vars(p) for name, p in model.named_parameters() if p.requires_grad}
    assert all("factor_rule" in marks for marks in factors.values())
    found = {
        name: (marks["factor_rule"].reduction.value, marks["partition_dim"], marks["allreduce"])
        for name, marks in factors.items()
        if name.startswith("layers.7.")
    }
    layer = "layers.7."
    assert found == {
        layer + "attention.q_a_lora.a": ("mean_tp", -1, True),
        layer + "attention.q_a_lora.b": ("mean_tp", -1, True),
        layer + "attention.kv_a_lora.a": ("mean_tp", -1, True),
        layer + "attention.kv_a_lora.b": ("mean_tp", -1, True),
        layer + "attention.o_lora.a": ("none", 1, True),
        layer + "attention.o_lora.b": ("sum_tp", -1, True),
        layer + "moe.experts_lora.a1": ("sum_tp", -1, True),
        layer + "moe.experts_lora.a3": ("sum_tp", -1, True),
        layer + "moe.experts_lora.b1": ("expert_dp", -1, False),
        layer + "moe.experts_lora.b3": ("expert_dp", -1, False),
        layer + "moe.experts_lora.a2": ("expert_dp", -1, False),
        layer + "moe.experts_lora.b2": ("sum_tp", -1, True),
        layer + "moe.shared_experts.fc1_lora.a": ("sum_tp", -1, True),
        layer + "moe.shared_experts.fc1_lora.b": ("none", 0, True),
        layer + "moe.shared_experts.fc2_lora.a": ("none", 1, True),
        layer + "moe.shared_experts.fc2_lora.b": ("sum_tp", -1, True),
    }
