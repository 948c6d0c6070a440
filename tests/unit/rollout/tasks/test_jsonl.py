"""Files of questions as a task: epochs, held-out rows, scorers, cursors of the same data only."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.rollout.tasks.fakes import decode
from unit.rollout.tasks.jsonl_files import rows, task, texts, write

from miles_k3.errors import CheckpointError, ConfigError, DataError
from miles_k3.rollout.tasks.jsonl import epoch_order, split_held_out
from miles_k3.rollout.tasks.jsonl_rows import Row
from miles_k3.types import Grade


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "data.jsonl", rows(10))


def test_rows_become_prompts(file):
    source = task(file, params={"shuffle": False}, system_prompt="Add.")
    first = source.next(1)[0]
    assert (first.text, first.answer) == ("0 + 1", "1")
    assert decode(first) == "<s>Add.</s><u>0 + 1</u><a>"
    assert first.id == f"{file}:1/epoch0"


def test_columns(tmp_path):
    file = write(tmp_path / "d.jsonl", [{"question": "a", "solution": "b", "answer": "no"}])
    prompt = task(file, params={"prompt_column": "question", "answer_column": "solution"}).next(1)[0]
    assert (prompt.text, prompt.answer) == ("a", "b")


@given(n=st.integers(1, 30), seed=st.integers(0, 2**40), epoch=st.integers(0, 50), shuffle=st.booleans())
def test_an_epoch_is_a_permutation(n, seed, epoch, shuffle):
    order = epoch_order(n, seed=seed, epoch=epoch, shuffle=shuffle)
    assert sorted(order) == list(range(n))
    assert order == epoch_order(n, seed=seed, epoch=epoch, shuffle=shuffle)
    if not shuffle:
        assert order == list(range(n))


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(20, seed=s, epoch=e, shuffle=True)) for s in range(5) for e in range(5)}
    assert len(orders) == 25


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 12), steps=st.lists(st.integers(0, 9), max_size=8), seed=st.integers(0, 3), data=st.data())
def test_every_row_once_an_epoch_in_any_steps_with_a_resume_anywhere(tmp_path_factory, n, steps, seed, data):
    file = write(tmp_path_factory.mktemp("epochs") / "d.jsonl", rows(n))
    source = task(file, seed=seed)
    resume_at = data.draw(st.integers(0, len(steps)))
    seen = []
    for i, step in enumerate(steps):
        if i == resume_at:
            state = json.loads(json.dumps(source.state_dict()))
            source = task(file, seed=seed)
            source.load_state_dict(state)
        seen += source.next(step)
    assert len(seen) == sum(steps)
    assert texts(seen) == texts(task(file, seed=seed).next(sum(steps)))
    for start in range(0, len(seen), n):
        epoch = Counter(texts(seen[start : start + n]))
        assert max(epoch.values()) == 1
        if start + n <= len(seen):
            assert len(epoch) == n
    assert len({p.id for p in seen}) == len(seen)


def test_long_prompts_fail_at_the_start_or_are_counted(tmp_path):
    file = write(tmp_path / "d.jsonl", [*rows(3), {"prompt": "x" * 50, "answer": 1}])
    with pytest.raises(DataError, match=r"d.jsonl:4: the prompt has 60 tokens, the limit is 20; set task.max_prompt"):
        task(file, max_prompt_tokens=20)
    source = task(file, max_prompt_tokens=20, on_bad_prompt="skip")
    assert source.skipped == {"too_long": 1}
    assert sorted(texts(source.next(3))) == [row["prompt"] for row in rows(3)]
    with pytest.raises(DataError, match=r"none of 0 rows is left to train on .*'too_long': 4"):
        task(file, max_prompt_tokens=2, on_bad_prompt="skip")


@given(
    questions=st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=40),
    fraction=st.floats(0.01, 0.99),
)
def test_held_out_split(questions, fraction):
    table = [Row(line=i, question=q, answer="") for i, q in enumerate(questions)]
    train, held_out = split_held_out(table, fraction)
    assert sorted(r.line for r in train + held_out) == list(range(len(table)))
    assert not {r.question for r in train} & {r.question for r in held_out}
    distinct = len(set(questions))
    assert len({r.question for r in held_out}) == max(1, int(distinct * fraction))


def test_eval_fraction(tmp_path):
    file = write(tmp_path / "d.jsonl", rows(50))
    source = task(file, params={"eval_fraction": 0.2})
    held_out = texts(source.eval_prompts(10))
    assert held_out == texts(task(file, seed=9, params={"eval_fraction": 0.2}).eval_prompts(10))
    assert not set(held_out) & set(texts(source.next(120)))
    assert source.skipped == {"held_out": 10}
    with pytest.raises(DataError, match=r"eval.prompts is 11 but jsonl:.* holds out 10 rows"):
        source.eval_prompts(11)


def test_eval_path_takes_its_questions_out_of_training(tmp_path):
    file = write(tmp_path / "d.jsonl", rows(20))
    other = write(tmp_path / "e.jsonl", rows(20, start=15))
    source = task(file, params={"eval_path": f"{other}@[:10]"})
    assert texts(source.eval_prompts(10)) == [row["prompt"] for row in rows(10, start=15)]
    assert sorted(texts(source.next(15))) == sorted(row["prompt"] for row in rows(15))
    assert source.skipped == {"held_out": 5}
    assert source.eval_prompts(1)[0].id == f"{other}:1/eval"
    with pytest.raises(DataError, match="none of 20 rows is left to train on"):
        task(file, params={"eval_path": str(file)})


def test_bad_lines_of_the_eval_file_are_counted_apart(tmp_path, file):
    other = tmp_path / "e.jsonl"
    other.write_text('{"prompt": "z", "answer": 1}\noops\n')
    with pytest.raises(DataError, match=r"e.jsonl:2: not JSON"):
        task(file, params={"eval_path": str(other)})
    assert task(file, params={"eval_path": str(other)}, on_bad_prompt="skip").skipped == {"eval_malformed": 1}


def test_evaluation_without_held_out_rows_says_what_to_set(file):
    with pytest.raises(DataError, match=r"holds out 0 rows; set eval.prompts .*task.params.eval_path"):
        task(file).eval_prompts(1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"promt_column": "q"}, "task.params.promt_column is unknown to jsonl; did you mean 'prompt_column'"),
        ({"eval_fraction": 0.0}, "task.params.eval_fraction is 0.0"),
        ({"eval_fraction": "0.1"}, "task.params.eval_fraction is '0.1'"),
        ({"shuffle": "no"}, "task.params.shuffle is 'no'"),
        ({"eval_fraction": 0.1, "eval_path": "x"}, "both eval_path and eval_fraction"),
    ],
)
def test_wrong_parameters(file, params, message):
    with pytest.raises(ConfigError, match=message):
        task(file, params=params)


def test_scorers(file):
    math, auto, exact = (task(file, scorer=scorer) for scorer in ("math", "auto", "exact"))
    prompt = math.next(1)[0]
    for source, reward in ((math, 1.0), (auto, 1.0), (exact, 0.0)):
        assert source.grade(prompt, f"\\boxed{{{prompt.answer}}}") == Grade(reward=reward)
        assert source.grade(prompt, f" {prompt.answer}") == Grade(reward=1.0)


def test_length_is_rewarded_by_how_near_it_is(tmp_path):
    rows = tmp_path / "lengths.jsonl"
    rows.write_text('{"prompt": "ten", "answer": 10}\n')
    source = task(rows, scorer="length")
    (prompt,) = source.next(1)
    for answer, reward in (("x" * 10, 1.0), ("x" * 8, 0.8), ("x" * 13, 0.7), ("", 0.0), ("x" * 40, 0.0)):
        assert source.grade(prompt, answer).reward == pytest.approx(reward)
    rows.write_text('{"prompt": "ten", "answer": 10}\n{"prompt": "none", "answer": "0"}\n')
    with pytest.raises(DataError, match=r"lengths.jsonl:2: the answer is '0', but task.scorer: length wants"):
        task(rows, scorer="length")


def test_a_moved_file_resumes(tmp_path, file):
    source = task(file)
    source.next(7)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(file.read_bytes())
    other = task(moved)
    other.load_state_dict(source.state_dict())
    assert texts(other.next(20)) == texts(source.next(20))


def test_states_of_other_data_are_refused(tmp_path, file):
    state = task(file).state_dict()
    changed = write(tmp_path / "changed.jsonl", [*rows(9), {"prompt": "9 + 1", "answer": 11}])
    for source, message in (
        (task(changed), "sha256="),
        (task(f"{file}@[:9]"), "rows=10"),
        (task(file, seed=1), "seed=0"),
        (task(file, params={"shuffle": False}), "shuffle=True"),
    ):
        with pytest.raises(CheckpointError, match=message):
            source.load_state_dict(state)
    with pytest.raises(CheckpointError, match="saved by 'reasoning_gym:gcd'"):
        task(file).load_state_dict({"task": "reasoning_gym:gcd", "seed": 0, "cursor": 3})


@pytest.mark.parametrize("key", ["scheme", "seed", "shuffle", "rows", "sha256", "cursor"])
def test_a_missing_field_fails_instead_of_restarting(file, key):
    state = task(file).state_dict()
    del state[key]
    with pytest.raises(CheckpointError, match=key):
        task(file).load_state_dict(state)


@pytest.mark.parametrize("cursor", [-1, "3", 2.0, True, None])
def test_damaged_cursors(file, cursor):
    with pytest.raises(CheckpointError, match="cursor"):
        task(file).load_state_dict({**task(file).state_dict(), "cursor": cursor})
