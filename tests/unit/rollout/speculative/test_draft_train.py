"""Training of a draft: it gets better, goes on bit for bit, and refuses what it can't use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.drafts import random_examples, small_config
from helpers.engines import ask, make_engine, random_prompts
from helpers.engines import weights as target_weights

from miles_k3.errors import CheckpointError, DataError
from miles_k3.k3.params import LM_HEAD, TEXT
from miles_k3.rollout.speculative.blocks import Example
from miles_k3.rollout.speculative.draft_train import DraftTrainer, DraftTraining, initial_weights
from miles_k3.rollout.speculative.taps import target_states
from miles_k3.types import SamplingParams


def make_trainer(steps: int = 12, *, seed: int = 0, **changes: int) -> DraftTrainer:
    config = small_config(**changes)
    embed, head = target_weights()[TEXT + "embed_tokens.weight"].float(), target_weights()[LM_HEAD].float()
    head *= 2  # the mild weights' answers are nearly drawn blindly, and no draft could guess them
    at = DraftTraining(steps=steps, seed=seed, sequences_per_step=8, max_blocks=4, warmup_steps=2)
    return DraftTrainer(config, initial_weights(config, 0), embed, head, at)


def examples() -> list[Example]:
    engine = make_engine()
    prompts = random_prompts(8, low=4, high=12)
    answers = ask(engine, prompts, SamplingParams(temperature=0.0, max_new_tokens=10))
    sequences = [(*p, *a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    states = target_states(engine, sequences, small_config().target_layer_ids)
    return [
        Example(token_ids=s, num_prompt_tokens=len(p), states=state)
        for s, p, state in zip(sequences, prompts, states, strict=True)
    ]


def test_training_improves_every_term() -> None:
    trainer, data = make_trainer(steps=60), examples()
    lines = [trainer.step(data) for _ in range(60)]
    first, last = lines[0], lines[-1]
    assert last["draft/cross_entropy"] < 0.5 * first["draft/cross_entropy"]
    assert last["draft/distance"] < 0.8 * first["draft/distance"]
    assert last["draft/confidence"] < first["draft/confidence"]
    assert last["draft/expected_accepted"] > 1.5 * first["draft/expected_accepted"]


def test_the_target_is_left_alone() -> None:
    trainer = make_trainer()
    before = trainer.model.head_VH.clone(), trainer.model.embed_VH.clone()
    for _ in range(3):
        trainer.step(random_examples([(3, 5), (4, 6)], trainer.model.config))
    assert torch.equal(before[0], trainer.model.head_VH)
    assert torch.equal(before[1], trainer.model.embed_VH)


@pytest.mark.parametrize("after", [0, 5])
def test_a_resumed_training_is_bit_equal(tmp_path: Path, after: int) -> None:
    data = random_examples([(3, 9), (4, 6), (5, 12), (2, 7)] * 4, small_config())
    whole, first, second = make_trainer(), make_trainer(), make_trainer()
    lines = [whole.step(data) for _ in range(12)]
    for _ in range(after):
        first.step(data)
    first.save(tmp_path)
    second.load(tmp_path)
    assert [second.step(data) for _ in range(12 - after)] == lines[after:]
    assert all(torch.equal(whole.weights[n], second.weights[n]) for n in whole.weights)


def test_the_state_of_another_draft_is_refused(tmp_path: Path) -> None:
    make_trainer().save(tmp_path)
    with pytest.raises(CheckpointError, match="state of another draft"):
        make_trainer(markov_rank=9).load(tmp_path)


def test_answers_without_anything_to_draft_are_refused() -> None:
    trainer = make_trainer()
    with pytest.raises(DataError, match="none of 2 answers has two tokens"):
        trainer.step(random_examples([(3, 1), (4, 0)], trainer.model.config))


def test_the_highest_seed_trains() -> None:
    assert make_trainer(seed=2**63 - 1).step(examples())["train/loss"] > 0


def test_the_rate_rises_and_falls() -> None:
    at = DraftTraining(steps=100, lr=1.0, warmup_steps=10)
    rates = [at.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11)
    assert max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 1e-3
