"""A knob of the algorithm section that is accepted changes the loss, from the harvest on."""

import pytest
import torch

from miles_k3.batch import make_batch
from miles_k3.config import AlgorithmSection
from miles_k3.trainer.loss import policy_loss
from miles_k3.types import Completion, FinishReason, Grade, Group, Prompt, Sample

# What each knob is changed to. Where the default hides another knob's effect, the pair is the section before and after.
KNOBS = {
    "advantage": [{"advantage": kind} for kind in ("grpo", "rloo", "group_mean", "none")],
    "drop_equal_groups": [{"drop_equal_groups": True}, {"drop_equal_groups": False}],
    "mask_truncated": [{"mask_truncated": False}, {"mask_truncated": True}],
    "loss_normalization": [{"loss_normalization": "token"}, {"loss_normalization": "sequence"}],
    "clip_low": [{"clip_low": 0.2}, {"clip_low": 0.05}],
    "clip_high": [{"clip_high": 0.28}, {"clip_high": 0.05}],
    "dual_clip": [{"dual_clip": None}, {"dual_clip": 1.5}, {"dual_clip": 1.2}],
    "kl_coef": [{"kl_coef": 0.0}, {"kl_coef": 0.1}, {"kl_coef": 0.2}],
    "importance_cap": [{"importance_cap": None}, {"importance_cap": 2.0}, {"importance_cap": 1.1}],
    "entropy_coef": [{"entropy_coef": 0.0}, {"entropy_coef": 0.1}, {"entropy_coef": 0.2}],
}

ELSEWHERE = {"routing_replay"}  # changes the model's routes, not the loss of given log-probabilities: test_model


def harvest() -> list[Group]:
    """Groups with mixed and equal rewards, answers of different lengths, one of them cut off."""
    groups, token = [], 10
    for g, rewards in enumerate([(0.0, 1.0, 0.25, 0.5), (0.35,) * 4, (0.0, 0.0, 0.7, 1.3)]):
        prompt = Prompt(id=str(g), text="", token_ids=tuple(range(1, 4 + g)), answer="")
        samples = []
        for s, reward in enumerate(rewards):
            length = 3 + 2 * s + g
            completion = Completion(
                token_ids=tuple(range(token, token + length)),
                logprobs=tuple(-0.5 - 0.1 * (i % 7) for i in range(length)),
                text="",
                finish_reason=FinishReason.LENGTH if s == 3 else FinishReason.STOP,
                adapter_version=0,
            )
            token += length
            mask = (True,) * length
            samples.append(Sample(prompt=prompt, completion=completion, grade=Grade(reward=reward), loss_mask=mask))
        groups.append(Group(prompt=prompt, samples=tuple(samples)))
    return groups


def loss_from_groups(algorithm: AlgorithmSection) -> float:
    """Harvest to loss, with log-probabilities that are a fixed function of the token."""
    batch = make_batch(harvest(), algorithm, micro_batch_tokens=40, updates_per_rollout=1, temperature=1.0)
    (mini,) = batch.mini_batches
    total = 0.0
    for micro in mini.micro_batches:
        phase = micro.targets.double()
        old = micro.rollout_logprobs + 0.5 * torch.sin(2.7 * phase)
        out = policy_loss(
            old + 0.8 * torch.sin(5.1 * phase),
            old,
            micro.rollout_logprobs,
            micro.advantages,
            micro.loss_mask,
            micro.cu_seqlens,
            algorithm=algorithm,
            num_loss_tokens=mini.num_loss_tokens,
            num_sequences=mini.num_sequences,
            ref_logprobs=old + 0.3 * torch.cos(phase),
            entropy=1.0 + torch.sin(phase),
        )
        total += out.loss.item()
    return total


def test_every_knob_of_the_section_is_listed():
    assert KNOBS.keys() | ELSEWHERE == AlgorithmSection.model_fields.keys(), "a new knob needs its line in KNOBS"
    assert len(KNOBS["advantage"]) == 4


@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_changes_the_loss(knob):
    losses = [loss_from_groups(AlgorithmSection(**settings)) for settings in KNOBS[knob]]
    assert len({round(loss, 9) for loss in losses}) == len(losses), dict(
        zip(map(str, KNOBS[knob]), losses, strict=True)
    )
