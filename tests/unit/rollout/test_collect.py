"""collect and evaluate against an engine that answers in any order, fails, or never comes back."""

import asyncio
import random
from collections import Counter

import pytest

from miles_k3.config import SamplingSection
from miles_k3.errors import DataError, EngineError
from miles_k3.rollout.collect import collect, eval_result, evaluate, refuse_failed, request_seed
from miles_k3.types import Completion, FinishReason, Grade, Prompt, SamplingParams


class FakeEngine:
    """Answers are a function of (prompt, seed); `order` delays them at random; `script` overrides single requests."""

    def __init__(self, order=0, script=None):
        self._delays = random.Random(order)
        self._script = script or {}
        self.requests: dict[str, SamplingParams] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.aborted: list[str] = []
        self.waiting = 0
        self.most_waiting = 0

    async def generate(self, token_ids, params, *, request_id=None, adapter_version=None):
        assert request_id is not None
        assert request_id not in self.requests
        number = len(self.requests)
        self.requests[request_id] = params
        self.prompts.append(tuple(token_ids))
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await asyncio.sleep(self._delays.random() * 0.01)
            special = self._script.get(number)
            if isinstance(special, Exception):
                raise special
            if special == "hang":
                await asyncio.Event().wait()
            reason = special if isinstance(special, FinishReason) else FinishReason.STOP
            tokens = tuple(random.Random(f"{token_ids} {params.seed}").choices(range(100), k=1 + params.seed % 5))
            return Completion(
                token_ids=tokens,
                logprobs=(-1.0,) * (len(tokens) - (special == "short")),
                text=str(tokens),
                finish_reason=reason,
                adapter_version=3,
                error="logits are not finite" if reason is FinishReason.ERROR else None,
            )
        finally:
            self.waiting -= 1

    def abort(self, request_id):
        self.aborted.append(request_id)


class FakeGrader:
    def __init__(self, reward=lambda prompt, text: len(text) / 10, fail=None):
        self._reward, self._fail = reward, fail
        self.graded = Counter()

    async def grade(self, prompt, text):
        self.graded[prompt.id, text] += 1
        await asyncio.sleep(0)
        if self._fail:
            raise self._fail
        return Grade(reward=self._reward(prompt, text))


PROMPTS = [Prompt(id=f"p{i}", text=str(i), token_ids=(i, i + 1), answer=str(i)) for i in range(5)]
SAMPLING = SamplingSection(temperature=0.7, top_p=0.9, top_k=11, max_new_tokens=33, stop=("END",))


def collecting(engine, grader=None, *, prompts=PROMPTS, group_size=4, seed=0, step=2, mask_truncated=False, **options):
    return collect(
        engine,
        prompts,
        group_size=group_size,
        sampling=SAMPLING,
        stop_token_ids=[7, 8],
        seed=seed,
        step=step,
        grader=grader or FakeGrader(),
        mask_truncated=mask_truncated,
        **options,
    )


def run(engine, grader=None, **options):
    return asyncio.run(collecting(engine, grader, **options))


def eval_answers(engine, grader=None, *, prompts=PROMPTS, temperature=0.0, seed=0, first=0):
    return asyncio.run(
        evaluate(
            engine,
            prompts,
            first=first,
            sampling=SAMPLING,
            temperature=temperature,
            stop_token_ids=[7],
            seed=seed,
            grader=grader or FakeGrader(),
        )
    )


def run_eval(engine, grader=None, **options):
    return eval_result(eval_answers(engine, grader, **options))


def outcome(groups):
    return [
        (g.prompt.id, [(s.prompt.id, s.completion.token_ids, s.grade, s.loss_mask) for s in g.samples]) for g in groups
    ]


def test_all_requests_are_sent_at_once_and_each_answer_graded_once():
    engine, grader = FakeEngine(), FakeGrader()
    groups = run(engine, grader)
    assert engine.most_waiting == 20
    assert engine.prompts == [p.token_ids for p in PROMPTS for _ in range(4)]  # groups side by side: one prefill each
    assert [len(g.samples) for g in groups] == [4] * 5
    assert grader.graded == Counter((s.prompt.id, s.completion.text) for g in groups for s in g.samples)
    assert sum(grader.graded.values()) == 20
    for sample in (s for g in groups for s in g.samples):
        assert sample.grade.reward == len(sample.completion.text) / 10
        assert sample.loss_mask == (True,) * len(sample.completion.token_ids)


def test_results_do_not_depend_on_the_order_of_arrival():
    outcomes = [outcome(run(FakeEngine(order))) for order in range(5)]
    assert all(o == outcomes[0] for o in outcomes)
    assert [prompt_id for prompt_id, _ in outcomes[0]] == [p.id for p in PROMPTS]


def test_sampling_parameters_reach_the_engine():
    engine = FakeEngine()
    run(engine, return_routed_experts=True)
    params = next(iter(engine.requests.values()))
    assert params == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=11,
        max_new_tokens=33,
        stop_token_ids=(7, 8),
        stop=("END",),
        seed=params.seed,
        return_routed_experts=True,
    )


def test_seeds_are_distinct_repeatable_and_63_bits():
    def seeds(**options):
        engine = FakeEngine()
        run(engine, **options)
        return [p.seed for p in engine.requests.values()]

    first = seeds()
    assert first == seeds()
    assert len({*first, *seeds(step=3), *seeds(seed=1)}) == 60
    assert all(0 <= s < 2**63 for s in first)
    assert max(first) > 2**60
    assert first[0] == request_seed("rollout", 0, 2, 0, 0) == PINNED_SEED
    # A larger group keeps the draws of the smaller one.
    assert seeds(group_size=2) == [first[4 * i + j] for i in range(5) for j in range(2)]


PINNED_SEED = 7203198263559892435


def test_request_ids_are_unique_over_steps_and_evaluations():
    engine = FakeEngine()  # refuses an id that it has seen
    run(engine)
    run(engine)
    run_eval(engine)
    run_eval(engine)
    assert len(engine.requests) == 50


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_failed_answers_stay_in_their_group_untrained(reason):
    grader = FakeGrader()
    groups = run(FakeEngine(script={5: reason}), grader)
    sample = groups[1].samples[1]
    assert sample.completion.finish_reason is reason
    assert sample.grade.reward == 0.0
    assert (sample.grade.failure or "").startswith(f"{reason}: ")
    assert sample.loss_mask == (False,) * len(sample.completion.token_ids)
    assert sum(grader.graded.values()) == 19
    others = [s for g in groups for s in g.samples if s is not sample]
    assert all(all(s.loss_mask) and s.grade.failure is None for s in others)


@pytest.mark.parametrize("mask_truncated", [True, False])
def test_truncated_answers_keep_their_reward(mask_truncated):
    groups = run(FakeEngine(script={5: FinishReason.LENGTH}), mask_truncated=mask_truncated)
    sample = groups[1].samples[1]
    assert sample.grade == Grade(reward=len(sample.completion.text) / 10)
    assert sample.loss_mask == (not mask_truncated,) * len(sample.completion.token_ids)
    assert all(all(s.loss_mask) for g in groups for s in g.samples if s is not sample)


def test_an_engine_error_aborts_the_rest_and_propagates():
    engine = FakeEngine(script={5: EngineError("the engine sleeps"), **dict.fromkeys(range(10, 20), "hang")})
    with pytest.raises(EngineError, match="the engine sleeps"):
        run(engine)
    assert engine.waiting == 0
    assert set(engine.aborted) >= set(list(engine.requests)[10:20])
    assert len(set(engine.aborted)) == len(engine.aborted)


def test_a_grader_error_aborts_the_rest_and_propagates():
    engine = FakeEngine(script={3: "hang"})
    with pytest.raises(RuntimeError, match="no grader"):
        run(engine, FakeGrader(fail=RuntimeError("no grader")))
    assert list(engine.requests)[3] in engine.aborted
    assert engine.waiting == 0


def test_cancellation_aborts_everything_and_leaves_no_task():
    engine = FakeEngine(script=dict.fromkeys(range(20), "hang"))

    async def main():
        task = asyncio.ensure_future(collecting(engine))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(main()) == set()
    assert Counter(engine.aborted) == Counter(list(engine.requests))
    assert engine.waiting == 0


def test_a_missing_logprob_is_refused():
    with pytest.raises(EngineError, match=r"prompt 'p1': the engine gave \d tokens but \d log-probabilities"):
        run(FakeEngine(script={4: "short"}))


def test_progress_counts_every_answer():
    seen = []
    run(FakeEngine(script={5: FinishReason.ERROR}), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 20) for i in range(1, 21)]


def test_no_prompts_are_no_groups():
    assert run(FakeEngine(), prompts=[]) == []


def test_evaluation_uses_its_own_temperature_and_one_sample_each():
    engine = FakeEngine()
    run_eval(engine, temperature=0.0)
    assert len(engine.requests) == len(PROMPTS)
    for params in engine.requests.values():
        assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (0.0, 0.9, 11, 33)
        assert (params.stop, params.stop_token_ids) == (("END",), (7,))


def test_evaluation_draws_the_same_for_a_seed_and_other_than_training():
    def seeds(seed):
        engine = FakeEngine()
        run_eval(engine, seed=seed)
        return [p.seed for p in engine.requests.values()]

    assert seeds(0) == seeds(0)
    assert not set(seeds(0)) & set(seeds(1))
    assert request_seed("rollout", 0, 0) not in seeds(0)


def test_evaluation_result():
    rewards = {"p0": 1.0, "p1": 0.5, "p2": 0.0, "p3": 1.0, "p4": 1.0}
    engine = FakeEngine(script={4: FinishReason.ERROR, 3: FinishReason.LENGTH})
    result = run_eval(engine, FakeGrader(lambda prompt, text: rewards[prompt.id]))
    assert result.accuracy == 2 / 5
    assert result.mean_reward == 2.5 / 5
    assert result.num_prompts == 5
    assert result.failures == {"error": 1}
    assert result.mean_tokens == sum(1 + p.seed % 5 for p in engine.requests.values()) / 5


def test_an_engine_that_fails_every_request_ends_the_run():
    """One failed answer is counted; nothing but failed ones is a broken model, which would train on nothing."""
    script = dict.fromkeys(range(4), FinishReason.ERROR)
    with pytest.raises(EngineError, match=r"failed all 4 requests, the first with: logits are not finite; check"):
        run_eval(FakeEngine(script=script), prompts=PROMPTS[:4])
    assert run_eval(FakeEngine(script=script), prompts=PROMPTS[:5]).failures == {"error": 4}


def test_a_harvest_of_failures_only_is_refused_as_a_whole():
    """A share of it may fail: the others' answers decide."""
    failed = run(FakeEngine(script=dict.fromkeys(range(8), FinishReason.ERROR)), prompts=PROMPTS[:2])
    refuse_failed([*failed, *run(FakeEngine(), prompts=PROMPTS[2:], first=2)])
    with pytest.raises(EngineError, match="failed all 8 requests"):
        refuse_failed(failed)


def test_shares_of_the_prompts_add_up_to_the_whole():
    whole = outcome(run(FakeEngine()))
    parts = [
        run(FakeEngine(order=i), prompts=PROMPTS[a:b], first=a) for i, (a, b) in enumerate([(0, 2), (2, 2), (2, 5)])
    ]
    assert [g for part in parts for g in outcome(part)] == whole
    answers = eval_answers(FakeEngine(), prompts=PROMPTS[:3]) + eval_answers(FakeEngine(), prompts=PROMPTS[3:], first=3)
    assert eval_result(answers) == run_eval(FakeEngine())


def test_evaluation_counts_failed_gradings():
    class Failing:
        async def grade(self, prompt, text):
            return Grade(reward=0.0, failure="timeout: no reward within 5 s" if prompt.id < "p3" else "exception: X: y")

    result = run_eval(FakeEngine(), Failing())
    assert result.failures == {"timeout": 3, "exception": 2}
    assert result.accuracy == 0.0


def test_evaluation_without_prompts_is_refused():
    with pytest.raises(DataError, match=r"no prompts, expected at least one; set eval.prompts"):
        run_eval(FakeEngine(), prompts=[])
