"""The policy loss against TRL's GRPO trainer: loss, gradient and clip fractions."""

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from loss_cases import loss_of, make_case

from miles_k3.config import AlgorithmSection
from miles_k3.trainer.loss import finalize_metrics


@pytest.fixture(scope="module")
def grpo_trainer():
    """TRL's own trainer class; its loss is called unbound, on a stand-in that holds the options."""
    return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


def trl_loss(grpo_trainer, case, algorithm: AlgorithmSection, logprobs):
    """TRL's `_compute_loss` on the case, padded to [B, T]; returns its scalar."""
    starts = case["cu_seqlens"].tolist()
    spans = [
        (a, b) for a, b in pairwise(starts) if case["loss_mask"][a:b].any()
    ]  # TRL's "grpo" averages over all rows, and an empty one would count

    def padded(values):
        return torch.nn.utils.rnn.pad_sequence([values[a:b] for a, b in spans], batch_first=True)

    mask = padded(case["loss_mask"].double())
    correct = algorithm.importance_cap is not None
    weight = (
        (case["old_logprobs"] - case["rollout_logprobs"]).exp().clamp(max=algorithm.importance_cap) if correct else None
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded(logprobs), padded(case["entropy"]), None),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=False, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(delta=algorithm.dual_clip, use_bias_correction_kl=True, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        loss_type={"token": "dapo", "sequence": "grpo"}[algorithm.loss_normalization],
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=algorithm.kl_coef,
        epsilon_low=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        use_vllm=correct,
        vllm_importance_sampling_correction=correct,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=algorithm.entropy_coef > 0,
        use_adaptive_entropy=False,
        entropy_coef=algorithm.entropy_coef,
    )
    inputs = {
        "prompt_ids": torch.zeros(len(spans), 1),
        "prompt_mask": torch.ones(len(spans), 1),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": torch.stack([case["advantages"][a] for a, _ in spans]),
        "old_per_token_logps": padded(case["old_logprobs"]),
        "ref_per_token_logps": padded(case["ref_logprobs"]),
        "importance_sampling_ratio": padded(weight) if correct else None,
        "num_items_in_batch": mask.sum(),
    }
    return grpo_trainer._compute_loss(trainer, None, inputs), trainer._metrics["train"]


@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.parametrize(
    "knobs",
    [
        {"importance_cap": None},
        {"clip_low": 0.1, "clip_high": 0.5, "importance_cap": None},
        {"importance_cap": 1.3},
        {"kl_coef": 0.4},
        {"dual_clip": 1.6},  # TRL's delta is the same bound while it is above 1 + clip_high
    ],
    ids=lambda knobs: ",".join(knobs),
)
def test_loss_gradient_and_metrics_equal_trl(grpo_trainer, normalization, knobs):
    case = make_case(7)
    if "dual_clip" in knobs:  # delta also caps positive advantages, where the clip is already tighter: no difference
        case["old_logprobs"] = case["old_logprobs"] - 0.5
    algorithm = AlgorithmSection(loss_normalization=normalization, **knobs)
    ours, theirs = (case["logprobs"].clone().requires_grad_() for _ in range(2))
    out = loss_of(case, algorithm, logprobs=ours)
    expected, logged = trl_loss(grpo_trainer, case, algorithm, theirs)
    out.loss.backward()
    expected.backward()
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)
    metrics = finalize_metrics([out.sums])
    assert metrics["clip_low_fraction"] == pytest.approx(logged["clip_ratio/low_mean"][0])
    assert metrics["clip_high_fraction"] == pytest.approx(logged["clip_ratio/high_mean"][0])
    assert metrics["clip_low_fraction"] + metrics["clip_high_fraction"] > 0
    assert metrics["entropy"] == pytest.approx(logged["entropy"][0])


def test_entropy_bonus_equals_trl(grpo_trainer):
    case = make_case(8)  # TRL always takes a token mean of the entropy, so only token normalisation compares
    algorithm = AlgorithmSection(entropy_coef=0.25)
    expected, _ = trl_loss(grpo_trainer, case, algorithm, case["logprobs"])
    torch.testing.assert_close(loss_of(case, algorithm).loss, expected, rtol=1e-12, atol=0)
