"""Small harvests for the tests of make_batch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from miles_k3.batch import make_batch
from miles_k3.config import AlgorithmSection
from miles_k3.types import Completion, FinishReason, Grade, Group, Prompt, Sample, TrainBatch


def make_sample(
    prompt: Prompt,
    reward: float,
    *,
    answer: Sequence[int] = (7, 8, 9),
    mask: Iterable[bool] | None = None,
    failure: str | None = None,
    **completion: Any,
) -> Sample:
    fields: dict[str, Any] = {
        "token_ids": tuple(answer),
        "logprobs": tuple(-0.5 - i for i in range(len(answer))),
        "text": "",
        "finish_reason": FinishReason.STOP,
        "adapter_version": 3,
    }
    return Sample(
        prompt=prompt,
        completion=Completion(**{**fields, **completion}),
        grade=Grade(reward=reward, failure=failure),
        loss_mask=(True,) * len(answer) if mask is None else tuple(mask),
    )


def make_group(rewards: Iterable[float], name: str = "p", prompt: tuple[int, ...] = (1, 2, 3), **sample: Any) -> Group:
    asked = Prompt(id=name, text="", token_ids=prompt, answer="")
    return Group(prompt=asked, samples=tuple(make_sample(asked, reward, **sample) for reward in rewards))


def swap(group: Group, index: int, sample: Sample) -> Group:
    return replace(group, samples=(*group.samples[:index], sample, *group.samples[index + 1 :]))


def batch_of(
    *groups: Group, micro_batch_tokens: int = 64, updates_per_rollout: int = 1, temperature: float = 1.0, **knobs: Any
) -> TrainBatch:
    return make_batch(
        groups,
        AlgorithmSection(**knobs),
        micro_batch_tokens=micro_batch_tokens,
        updates_per_rollout=updates_per_rollout,
        temperature=temperature,
    )
