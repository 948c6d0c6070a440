"""Scores and what becomes of bad ones."""

import logging
import threading

import pytest
from unit.rollout.tasks.fakes import VALUES, ScriptedGrader, prompt

from miles_k3.rollout.tasks.common import extract_answer, stable_hash
from miles_k3.rollout.tasks.grading import ExactGrader, MathGrader, grade_with, to_grade
from miles_k3.types import Grade

GOOD = {"zero": 0.0, "half": 0.5, "int": 1.0, "negative": -2.0, "bool": 1.0, "numpy": 0.25}


@pytest.mark.parametrize("key", VALUES)
def test_only_finite_numbers_are_rewards(key):
    grade = grade_with(ScriptedGrader(), prompt(), f"value:{key}")
    if key in GOOD:
        assert grade == Grade(reward=GOOD[key])
        assert type(grade.reward) is float
    else:
        assert grade.reward == 0.0
        assert grade.failure


def test_failures_name_what_came():
    assert to_grade("0.5").failure == "not a number: the scorer returned str '0.5', expected a finite number"
    assert to_grade(None).failure == "not a number: the scorer returned NoneType, expected a finite number"
    assert to_grade(float("nan")).failure == "not finite: the scorer returned nan, expected a finite number"
    assert grade_with(ScriptedGrader(), prompt(), "raise").failure == "exception: RuntimeError: no such unit"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("  42 \n", "42"),
        ("so <answer> 42\n</answer>", "42"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("<answer>42", "<answer>42"),
        ("42</answer>", "42</answer>"),
        ("<answer></answer>", ""),
        ("", ""),
    ],
)
def test_answer_in_a_completion(text, answer):
    assert extract_answer(text) == answer


def test_extraction_takes_linear_time():
    assert extract_answer("<answer>" * 200_000).startswith("<answer>")


def test_exact():
    grader = ExactGrader()
    assert grader.score(prompt("Paris"), " Paris\n") == 1.0
    assert grader.score(prompt("Paris"), "<answer>Paris</answer>") == 1.0
    assert grader.score(prompt("Paris"), "paris") == 0.0
    assert grader.score(prompt("Paris"), "Paris!") == 0.0


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("1/2", "0.5", 1.0),
        ("1/2", "\\frac{1}{2}", 1.0),
        ("\\frac{1}{2}", "It is \\boxed{0.5}.", 1.0),
        ("$\\frac{1}{2}$", "<answer>1/2</answer>", 1.0),
        ("42", "the answer is 42", 1.0),
        ("1,000", "1000", 1.0),
        ("x+1", "1+x", 1.0),
        ("42", "43", 0.0),
        ("42", "", 0.0),
        ("42", "I don't know", 0.0),
        ("-3", "3", 0.0),
        ("yes", "yes", 1.0),
    ],
)
def test_math(answer, text, reward):
    assert grade_with(MathGrader(), prompt(answer), text) == Grade(reward=reward)


def test_math_works_quietly_outside_the_main_thread(caplog, monkeypatch):
    for name in ("math_verify.grader", "math_verify.parser"):
        monkeypatch.setattr(f"{name}.TIMEOUT_WARNING_SHOWN", False)
        logging.getLogger(name).setLevel(logging.NOTSET)
    grades = []
    thread = threading.Thread(target=lambda: grades.append(grade_with(MathGrader(), prompt("7/4"), "1.75")))
    thread.start()
    thread.join()
    assert grades == [Grade(reward=1.0)]
    assert not caplog.records


def test_hash_is_pinned():
    # A changed hash would change every resumed run and every held-out set.
    assert stable_hash("rollout", 0, 1, 2, 3) == stable_hash("rollout", 0, 1, 2, 3)
    assert stable_hash("a", 1) != stable_hash("a", "1")
    assert stable_hash(0) == PINNED
    assert all(0 <= stable_hash(i) < 2**63 for i in range(1000))


PINNED = 6197007067532723406
