"""From prompts to graded groups: all requests at once, each answer graded as it lands.

Order never matters: a request's draws depend on (run seed, step, prompt index, sample index) only, and results are put
back in the order of the prompts. So several ranks can each collect a share of the prompts and together get what one
would have got; `refuse_failed` and `eval_result` judge the whole.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from miles_k3.errors import DataError, EngineError
from miles_k3.rollout.tasks.common import stable_hash
from miles_k3.types import Completion, FinishReason, Grade, Group, Prompt, Sample, SamplingParams

# Makes request ids unique in a process, whatever steps and evaluations run at the same time.
_HARVESTS = itertools.count()

Progress = Callable[[int, int], None]


class Generator(Protocol):
    """The part of `Engine` that collecting needs."""

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> Completion: ...
    def abort(self, request_id: str) -> None: ...


class AnswerGrader(Protocol):
    """RewardPool, or anything that grades like it."""

    async def grade(self, prompt: Prompt, text: str) -> Grade: ...


class Sampling(Protocol):
    """The fields of `config.SamplingSection` that shape a request."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def stop(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Held-out quality, one answer a prompt.

    `accuracy` is the share of answers with reward 1 or more; `mean_reward` includes partial credit; `mean_tokens` is
    the answers' length; `failures` counts answers that got no real grade, by the first word of their reason.
    """

    accuracy: float
    num_prompts: int
    mean_tokens: float
    mean_reward: float
    failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalAnswer:
    """What an evaluation keeps of one answer; `error` says why the engine failed it."""

    reward: float
    num_tokens: int
    failure: str | None
    error: str | None


async def collect(
    engine: Generator,
    prompts: Sequence[Prompt],
    *,
    first: int = 0,
    group_size: int,
    sampling: Sampling,
    stop_token_ids: Sequence[int],
    seed: int,
    step: int,
    grader: AnswerGrader,
    mask_truncated: bool,
    return_routed_experts: bool = False,
    protected: bool = False,
    progress: Progress | None = None,
) -> list[Group]:
    """`group_size` graded samples of each prompt; groups in prompt order, samples in index order.

    `first` is the harvest's index of the first prompt here, where these are a share of it. An answer with
    FinishReason.ERROR or ABORT stays in its group with reward 0 and no loss tokens. With `mask_truncated`, so does the
    loss mask of answers cut by length, which keep their reward. `protected` requests are never preempted.
    `progress(done, total)` follows each graded answer. An error of engine or grader, and cancellation, abort all
    requests and propagate.
    """
    base = _params(sampling, sampling.temperature, stop_token_ids, return_routed_experts, protected)
    requests = [
        _Request(prompt=prompt, key=("rollout", seed, step, i, j))
        for i, prompt in enumerate(prompts, first)
        for j in range(group_size)
    ]
    samples = await _run(engine, requests, base, grader, mask_truncated=mask_truncated, progress=progress)
    return [
        Group(prompt=prompt, samples=tuple(samples[i * group_size : (i + 1) * group_size]))
        for i, prompt in enumerate(prompts)
    ]


async def evaluate(
    engine: Generator,
    prompts: Sequence[Prompt],
    *,
    first: int = 0,
    sampling: Sampling,
    temperature: float,
    stop_token_ids: Sequence[int],
    seed: int,
    grader: AnswerGrader,
    progress: Progress | None = None,
) -> list[EvalAnswer]:
    """One answer a prompt at `temperature`, which replaces that of `sampling`. The same `seed` gives the same draws.

    `first` is the evaluation's index of the first prompt here. `eval_result` makes the numbers of all answers.
    """
    base = _params(sampling, temperature, stop_token_ids, False, False)
    requests = [_Request(prompt=prompt, key=("eval", seed, i)) for i, prompt in enumerate(prompts, first)]
    samples = await _run(engine, requests, base, grader, mask_truncated=False, progress=progress)
    return [
        EvalAnswer(
            reward=sample.grade.reward, num_tokens=len(sample.completion.token_ids), failure=sample.grade.failure,
            error=_error_of(sample.completion),
        )
        for sample in samples
    ]  # fmt: skip


def eval_result(answers: Sequence[EvalAnswer]) -> EvalResult:
    """The quality of all answers. Raises DataError without any, EngineError when the engine failed every one."""
    if not answers:
        raise DataError("evaluation got no prompts, expected at least one; set eval.prompts to 1 or more")
    _refuse_errors([answer.error for answer in answers])
    failures = Counter(answer.failure.split(":")[0] for answer in answers if answer.failure)
    return EvalResult(
        accuracy=sum(answer.reward >= 1.0 for answer in answers) / len(answers),
        num_prompts=len(answers),
        mean_tokens=sum(answer.num_tokens for answer in answers) / len(answers),
        mean_reward=sum(answer.reward for answer in answers) / len(answers),
        failures=dict(failures),
    )


def refuse_failed(groups: Sequence[Group]) -> None:
    """Raise EngineError when the engine failed every request of a harvest: what is wrong then concerns them all."""
    _refuse_errors([_error_of(sample.completion) for group in groups for sample in group.samples])


def request_seed(*key: int | str) -> int:
    """63-bit seed of one request, the same in every process, so that a resumed run draws the same answers."""
    return stable_hash(*key)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One answer to ask for; `key` names it within the run and seeds its draws."""

    prompt: Prompt
    key: tuple[int | str, ...]


def _params(
    sampling: Sampling, temperature: float, stop_token_ids: Sequence[int], return_routed_experts: bool, protected: bool
) -> Callable[[int], SamplingParams]:
    """seed -> the parameters of one request."""

    def with_seed(seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=tuple(stop_token_ids),
            stop=tuple(sampling.stop),
            seed=seed,
            return_routed_experts=return_routed_experts,
            protected=protected,
        )

    return with_seed


async def _run(
    engine: Generator,
    requests: Sequence[_Request],
    params_of: Callable[[int], SamplingParams],
    grader: AnswerGrader,
    *,
    mask_truncated: bool,
    progress: Progress | None,
) -> list[Sample]:
    """A sample for each request, in their order."""
    harvest = next(_HARVESTS)
    ids = ["-".join(map(str, (*request.key, harvest))) for request in requests]
    done = 0

    async def answer(request: _Request, request_id: str) -> Sample:
        nonlocal done
        params = params_of(request_seed(*request.key))
        try:
            completion = await engine.generate(request.prompt.token_ids, params, request_id=request_id)
        except asyncio.CancelledError:
            engine.abort(request_id)
            raise
        sample = await _graded(request.prompt, completion, grader, mask_truncated)
        done += 1
        if progress:
            progress(done, len(requests))
        return sample

    tasks = [asyncio.ensure_future(answer(*pair)) for pair in zip(requests, ids, strict=True)]
    try:
        samples = await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # only an error or a cancellation leaves any running; gather itself lets them run on
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return samples


def _error_of(completion: Completion) -> str | None:
    if completion.finish_reason is FinishReason.ERROR:
        return completion.error or "no reason given"
    finite = all(map(math.isfinite, completion.logprobs))
    return None if finite else "its log-probabilities are not finite"


def _refuse_errors(errors: Sequence[str | None]) -> None:
    told = [error for error in errors if error]
    if told and len(told) == len(errors):
        raise EngineError(
            f"the engine failed all {len(told)} requests, the first with: {told[0]}; check the model's files with "
            "their source, and that the temperature isn't next to 0"
        )


async def _graded(prompt: Prompt, completion: Completion, grader: AnswerGrader, mask_truncated: bool) -> Sample:
    num_tokens = len(completion.token_ids)
    if len(completion.logprobs) != num_tokens:
        raise EngineError(
            f"prompt {prompt.id!r}: the engine gave {num_tokens} tokens but {len(completion.logprobs)} "
            "log-probabilities, expected one for each token; report this as a bug of the engine"
        )
    reason = completion.finish_reason
    if reason in (FinishReason.ERROR, FinishReason.ABORT):
        grade = Grade(reward=0.0, failure=f"{reason}: {completion.error or 'the engine ended the answer early'}")
        trained = False
    else:
        grade = await grader.grade(prompt, completion.text)
        trained = not (mask_truncated and reason is FinishReason.LENGTH)
    return Sample(prompt=prompt, completion=completion, grade=grade, loss_mask=(trained,) * num_tokens)
