"""One step's rollouts and the evaluations: each rank samples its share of the prompts, every rank gets the whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_k3.assemble import Parts
from miles_k3.config import Recipe
from miles_k3.errors import DataError
from miles_k3.metrics import StepTimer
from miles_k3.rollout.collect import (
    AnswerGrader,
    EvalAnswer,
    EvalResult,
    collect,
    eval_result,
    evaluate,
    refuse_failed,
)
from miles_k3.rollout.sglang.span import sampled_share
from miles_k3.types import Completion, Grade, Group, Prompt, Sample

EVAL_SEED = 0  # the same draws at every evaluation of every run, so that accuracies compare


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """What one rank sampled: its answers in the order of its prompts, without the prompts, which every rank has.

    `prompts` names all prompts of the step as this rank sees them; `seconds` is how long it took, `tail_s` the part of
    it after the last answer, when only grades were awaited.
    """

    prompts: tuple[str, ...]
    answers: tuple[tuple[Completion, Grade, tuple[bool, ...]], ...]
    seconds: float
    tail_s: float


def harvest(recipe: Recipe, parts: Parts, prompts: Sequence[Prompt], step: int, timer: StepTimer) -> list[Group]:
    """Graded groups of all `prompts`, the same on every rank, whatever the number of ranks. Collective.

    Time counts for `rollout` until the slowest rank has all answers, then for `reward`: grading overlaps generation.
    Raises EngineError when the engines failed every request.
    """
    with timer.phase("rollout"):
        shares = parts.world.everywhere(lambda: sample_share(recipe, parts, prompts, step))
    timer.move("rollout", "reward", max(shares, key=lambda share: share.seconds).tail_s)
    groups = join_shares(shares, prompts, recipe.rollout.group_size)
    refuse_failed(groups)
    return groups


def sample_share(recipe: Recipe, parts: Parts, prompts: Sequence[Prompt], step: int) -> Share:
    """This rank's answers to its engine's share of `prompts`; a group stays on one rank."""
    mine = sampled_share(recipe, parts.world, len(prompts))
    tail, started = _Tail(parts.rewards), time.perf_counter()
    groups = asyncio.run(collect(
        parts.engine, prompts[mine.start : mine.stop], first=mine.start, group_size=recipe.rollout.group_size,
        sampling=recipe.rollout.sampling, stop_token_ids=[parts.model.config.eos_token_id], seed=recipe.run.seed,
        step=step, grader=tail, mask_truncated=recipe.algorithm.mask_truncated,
        return_routed_experts=recipe.algorithm.routing_replay, protected=not recipe.rollout.preempt_groups,
    ))  # fmt: skip
    return Share(
        prompts=tuple(prompt.id for prompt in prompts),
        answers=tuple((s.completion, s.grade, s.loss_mask) for group in groups for s in group.samples),
        seconds=time.perf_counter() - started, tail_s=tail.seconds() if groups else 0.0,
    )  # fmt: skip


def join_shares(shares: Sequence[Share], prompts: Sequence[Prompt], group_size: int) -> list[Group]:
    """The ranks' answers as groups, in the order of the prompts. Raises DataError when the ranks read other data."""
    if strange := [rank for rank, share in enumerate(shares) if share.prompts != shares[0].prompts]:
        raise DataError(
            f"rank {strange[0]} drew other prompts than rank 0; every host needs the same data files and packages"
        )
    answers = iter([answer for share in shares for answer in share.answers])
    groups = []
    for prompt in prompts:
        parts = [next(answers) for _ in range(group_size)]
        groups.append(Group(prompt=prompt, samples=tuple(
            Sample(prompt=prompt, completion=completion, grade=grade, loss_mask=mask)
            for completion, grade, mask in parts
        )))  # fmt: skip
    return groups


def held_out_quality(recipe: Recipe, parts: Parts) -> EvalResult:
    """Evaluate the engines' present adapter on all held-out prompts, shared by the ranks. Collective."""

    def share() -> list[EvalAnswer]:
        prompts = parts.task.eval_prompts(recipe.eval.prompts)
        mine = sampled_share(recipe, parts.world, len(prompts))
        return asyncio.run(evaluate(
            parts.engine, prompts[mine.start : mine.stop], first=mine.start, sampling=recipe.rollout.sampling,
            temperature=recipe.eval.temperature, stop_token_ids=[parts.model.config.eos_token_id], seed=EVAL_SEED,
            grader=parts.rewards,
        ))  # fmt: skip

    return eval_result([answer for part in parts.world.everywhere(share) for answer in part])


def eval_metrics(result: EvalResult | None) -> Mapping[str, float]:
    if result is None:
        return {}
    return {
        "eval/accuracy": result.accuracy, "eval/reward": result.mean_reward, "eval/prompts": result.num_prompts,
        "eval/tokens": result.mean_tokens, "eval/failures": sum(result.failures.values()),
    }  # fmt: skip


class _Tail:
    """A grader that notes when the last answer came in, so that waiting for grades can be told from generating."""

    def __init__(self, grader: AnswerGrader) -> None:
        self._grader, self._last = grader, time.perf_counter()

    async def grade(self, prompt: Prompt, text: str) -> Grade:
        self._last = time.perf_counter()
        return await self._grader.grade(prompt, text)

    def seconds(self) -> float:
        return time.perf_counter() - self._last
