"""The stream of questions: strict parameters, disjoint evaluation, exact resumption, the package's own scores."""

import json
import logging
import os
import subprocess
import sys

import pytest
from unit.rollout.tasks.fakes import CharTokenizer, decode

from miles_k3.config import TaskSection
from miles_k3.errors import CheckpointError, ConfigError, DataError
from miles_k3.rollout.tasks.reasoning_gym import is_held_out
from miles_k3.rollout.tasks.registry import make_task
from miles_k3.types import Grade

TINY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 questions in all


def task(name="chain_sum", *, seed=0, params=TINY, **section):
    section = TaskSection(name=f"reasoning_gym:{name}", params=params, **section)
    return make_task(section, CharTokenizer(), seed=seed)


def test_prompts_go_through_the_chat_template():
    prompt = task(system_prompt="Be brief.").next(1)[0]
    assert decode(prompt) == f"<s>Be brief.</s><u>{prompt.text}</u><a>"
    assert decode(task().next(1)[0]).startswith("<u>State the final answer")


def test_questions_come_from_the_package_with_the_given_parameters():
    for prompt in task().next(20):
        entry = prompt.payload["entry"]
        assert entry["metadata"]["source_dataset"] == "chain_sum"
        assert entry["metadata"]["num_terms"] == 2
        assert (prompt.text, prompt.answer) == (entry["question"], entry["answer"])


def test_the_stream_depends_on_the_seed_and_never_ends():
    texts = [p.text for p in task(params={}).next(1100)]  # beyond two chunks
    assert texts == [p.text for p in task(params={}).next(1100)]
    assert len(set(texts)) > 1050
    other = {p.text for p in task(params={}, seed=1).next(1100)}
    assert len(other & set(texts)) < 50  # seeds 0 and 1 of the package itself share nearly all


def test_next_in_pieces_equals_next_at_once():
    whole, pieces = task(), task()
    assert [p.id for p in whole.next(50)] == [p.id for n in (1, 0, 7, 42) for p in pieces.next(n)]
    assert whole.state_dict() == pieces.state_dict()


def test_ids_are_unique():
    source = task()
    ids = [p.id for p in [*source.next(300), *source.eval_prompts(300)]]
    assert len(set(ids)) == 600


@pytest.mark.parametrize("eval_first", [True, False])
def test_training_never_sees_a_held_out_question_even_in_a_tiny_space(eval_first):
    source = task(seed=3)
    if eval_first:
        source.eval_prompts(300)
    trained = {p.text for p in source.next(3000)}
    held_out = {p.text for p in source.eval_prompts(300)}
    assert not held_out & trained
    assert len(held_out | trained) == 200  # every question is on one of the sides
    assert source.skipped["held_out"] > 0
    assert all(map(is_held_out, held_out))


def test_eval_prompts_are_the_same_at_every_call_and_for_every_seed():
    source = task(seed=3)
    first = source.eval_prompts(20)
    source.next(100)
    assert [p.id for p in source.eval_prompts(10)] == [p.id for p in first[:10]]
    assert [p.text for p in source.eval_prompts(100)][:20] == [p.text for p in first]
    assert [p.text for p in task(seed=4).eval_prompts(100)] == [p.text for p in source.eval_prompts(100)]


def test_eval_prompts_are_distinct_while_there_are_new_ones(caplog):
    texts = [p.text for p in task().eval_prompts(256)]
    distinct = len(set(texts))
    assert len(texts) == 256
    assert 20 < distinct < 80
    assert len(set(texts[:distinct])) == distinct
    assert f"has {distinct} distinct held-out questions" in caplog.text
    assert len({p.text for p in task(params={}).eval_prompts(256)}) == 256


def test_scores_are_the_packages_own():
    source = task()
    prompt = source.next(1)[0]
    assert source.grade(prompt, f" {prompt.answer}\n") == Grade(reward=1.0)
    assert source.grade(prompt, f"Well, <answer>{prompt.answer}.0</answer>") == Grade(reward=1.0)
    assert source.grade(prompt, "no idea").reward == 0.0
    text = f"is {prompt.answer}"
    assert source.grade(prompt, text).reward == pytest.approx(len(prompt.answer) / len(text))


def test_scorers_that_accept_several_answers():
    source = task("countdown", params={"min_numbers": 3, "max_numbers": 3})
    prompt = source.next(1)[0]
    expression = prompt.payload["entry"]["metadata"]["expression"]
    assert source.grade(prompt, f"({expression})") == Grade(reward=1.0)


@pytest.mark.parametrize("seen", [0, 1, 375, 777])
def test_resume_goes_on_exactly(seen):
    one = task(params={})
    one.next(seen)
    state = json.loads(json.dumps(one.state_dict()))
    two = task(params={})
    two.next(5)
    two.load_state_dict(state)
    assert two.skipped == one.skipped
    assert [(p.id, p.token_ids) for p in two.next(20)] == [(p.id, p.token_ids) for p in one.next(20)]
    assert two.state_dict() == one.state_dict()


def test_resume_at_every_draw_around_a_chunk():
    one = task(params={})
    while one.state_dict()["cursor"] < 495:
        one.next(1)
    for _ in range(10):
        two = task(params={})
        two.load_state_dict(one.state_dict())
        assert two.next(3)[0].text == one.next(1)[0].text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "reasoning_gym:gcd"}, "task='reasoning_gym:gcd'"),
        ({"seed": 8}, "seed=8, this run has 0"),
        ({"params": {}}, "params={}"),
        ({"params": {**TINY, "max_terms": 2.0}}, "params="),
        ({"cursor": None}, "cursor=None, expected int"),
        ({"cursor": "5"}, "cursor='5', expected int"),
        ({"cursor": True}, "cursor=True"),
        ({"cursor": -1}, "is -1"),
        ({"last": "0" * 16}, "gives another question"),
        ({"skipped": None}, "skipped=None"),
    ],
)
def test_foreign_and_damaged_states_are_refused(change, message):
    source = task()
    source.next(10)
    fresh = task()
    before = fresh.state_dict()
    with pytest.raises(CheckpointError, match=message):
        fresh.load_state_dict({**source.state_dict(), **change})
    assert fresh.state_dict() == before


@pytest.mark.parametrize("key", ["task", "params", "seed", "cursor", "last", "skipped"])
def test_a_missing_field_fails_instead_of_restarting(key):
    source = task()
    source.next(3)
    state = source.state_dict()
    del state[key]
    with pytest.raises(CheckpointError, match=key):
        task().load_state_dict(state)


def test_long_prompts_are_an_error_or_counted():
    params = {"min_terms": 2, "max_terms": 6}
    with pytest.raises(DataError, match=r"the prompt has \d+ tokens, the limit is 90; set task.max_prompt_tokens: \d+"):
        task(params=params, max_prompt_tokens=90).next(50)
    source = task(params=params, max_prompt_tokens=90, on_bad_prompt="skip")
    prompts = [*source.next(50), *source.eval_prompts(20)]
    assert max(len(p.token_ids) for p in prompts) <= 90
    assert source.skipped["too_long"] > 0
    assert source.skipped["eval_too_long"] > 0
    assert source.state_dict()["cursor"] == 50 + source.skipped["too_long"] + source.skipped["held_out"]


def test_no_usable_question_is_an_error_not_a_hang():
    source = task(max_prompt_tokens=5, on_bad_prompt="skip")
    with pytest.raises(DataError, match="10000 draws in a row gave no training prompt"):
        source.next(1)
    for _ in range(2):
        with pytest.raises(DataError, match="gave no held-out prompt"):
            source.eval_prompts(1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_term": 3}, "task.params.max_term is unknown to reasoning_gym:chain_sum; did you mean 'max_terms'"),
        ({"max_term": 3}, "valid: allow_negation, max_digits, max_terms, min_digits, min_terms"),
        ({"seed": 1}, "task.params.seed is unknown"),
        ({"size": 1}, "task.params.size is unknown"),
        ({"max_terms": "3"}, r"task.params.max_terms is '3' \(str\), expected int"),
        ({"max_terms": 3.5}, r"is 3.5 \(float\), expected int"),
        ({"allow_negation": 1}, "expected bool"),
        ({"min_terms": 5, "max_terms": 4}, "refuses task.params .*max_terms must be"),
    ],
)
def test_wrong_parameters(params, message):
    with pytest.raises(ConfigError, match=message):
        task(params=params)


def test_all_unknown_parameters_are_named_at_once():
    with pytest.raises(ConfigError) as info:
        task(params={"a": 1, "b": 2})
    assert len(info.value.problems) == 2


def test_unknown_dataset():
    with pytest.raises(ConfigError, match=r"doesn't have; did you mean 'chain_sum'.* known: .*gcd"):
        task("chain_sums")
    with pytest.raises(ConfigError, match="doesn't have"):
        task("composite")


def test_datasets_that_follow_the_hash_seed_say_so(caplog):
    with caplog.at_level(logging.WARNING):
        task("ransom_note", params={})
    assert ("set PYTHONHASHSEED=0" in caplog.text) == bool(sys.flags.hash_randomization)


def test_the_stream_is_the_same_in_every_process():
    code = (
        "from unit.rollout.tasks.test_reasoning_gym import task\n"
        "t = task(params={}, seed=5)\n"
        "print([p.text for p in t.next(3) + t.eval_prompts(3)])"
    )
    env = {**os.environ, "PYTHONPATH": "tests", "PYTHONHASHSEED": "12345"}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    here = task(params={}, seed=5)
    assert output == f"{[p.text for p in here.next(3) + here.eval_prompts(3)]}\n"
