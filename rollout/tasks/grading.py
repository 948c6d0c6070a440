"""From whatever a scorer returns to exactly one Grade; the scorers of jsonl tasks."""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from numbers import Real
from typing import Any, Protocol

from miles_k3.rollout.tasks.common import extract_answer
from miles_k3.types import Grade, Prompt

FAILURE_CHARS = 300
SHORT_ANSWER_CHARS = 200


class Grader(Protocol):
    """The part of a task that travels to the grading processes: small, picklable, no tokenizer, no torch."""

    def prepare(self) -> None:
        """Import and build what scoring needs; called once, before grading processes are forked."""
        ...

    def score(self, prompt: Prompt, text: str) -> Any:
        """The reward of an answer. Anything but a finite number counts as a failed grading."""
        ...


def to_grade(value: Any) -> Grade:
    """A finite number (bool included) is a reward; None, text, NaN, inf, a dict... are failures with reward 0."""
    if not isinstance(value, Real):
        shown = "" if value is None else f" {value!r}"[:80]
        return Grade(
            reward=0.0,
            failure=f"not a number: the scorer returned {type(value).__name__}{shown}, expected a finite number",
        )
    reward = float(value)
    if not math.isfinite(reward):
        return Grade(reward=0.0, failure=f"not finite: the scorer returned {reward}, expected a finite number")
    return Grade(reward=reward)


def grade_with(grader: Grader, prompt: Prompt, text: str) -> Grade:
    """Score one answer. An exception of the scorer becomes a failure: one answer must not end a run."""
    try:
        return to_grade(grader.score(prompt, text))
    except Exception as error:  # noqa: BLE001 the edge where foreign scorers end; the loop counts every failure
        return Grade(reward=0.0, failure=f"exception: {type(error).__name__}: {error}"[:FAILURE_CHARS])


class ExactGrader:
    """1 where the answer is the expected text, letter for letter but for surrounding blanks."""

    def prepare(self) -> None:
        """Nothing to import."""

    def score(self, prompt: Prompt, text: str) -> float:
        return float(extract_answer(text) == prompt.answer.strip())


class MathGrader:
    """1 where math-verify finds the answer equal to the expected one (1/2, 0.5, \\boxed{\\frac{1}{2}}).

    math-verify's own timeouts are off: they use SIGALRM, which works in main threads only. RewardPool keeps the time.
    """

    def prepare(self) -> None:
        import math_verify  # noqa: F401

        # Both warn that their timeouts are off.
        for name in ("math_verify.grader", "math_verify.parser"):
            logging.getLogger(name).setLevel(logging.ERROR)

    def score(self, prompt: Prompt, text: str) -> float:
        from math_verify import verify

        self.prepare()
        answer, expected = extract_answer(text), prompt.answer.strip()
        if answer == expected:
            return 1.0
        gold = _parse_gold(expected)
        return float(any(verify(gold, target, timeout_seconds=None) for target in _targets(answer)))


class LengthGrader:
    """1 where the answer has as many characters as expected, less by the share that it has too many or too few.

    Something that a model of random weights, which says nothing sensible, can be rewarded for and learn.
    """

    def prepare(self) -> None:
        """Nothing to import."""

    def score(self, prompt: Prompt, text: str) -> float:
        expected = int(prompt.answer)
        return max(0.0, 1.0 - abs(len(extract_answer(text)) - expected) / expected)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType] None turns SIGALRM off


def _as_formula(text: str) -> str:
    """`text` in dollars unless it marks its formulas itself."""
    return text if "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text else f"${text}$"


@lru_cache(maxsize=1024)
def _parse_gold(expected: str) -> list[Any]:
    return _parse(_as_formula(expected))


def _targets(answer: str) -> list[list[Any]]:
    """Readings of an answer: formulas found in prose, then, if it is short, the whole as one formula."""
    readings = [answer]
    if len(answer) <= SHORT_ANSWER_CHARS and _as_formula(answer) != answer:
        readings.append(_as_formula(answer))
    return [_parse(reading) for reading in readings]
