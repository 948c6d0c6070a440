"""`reasoning_gym:<dataset>`: the package's procedural questions and its own scorers.

A question is held out or trained on by a hash of its text, so an evaluation question can't be a training question,
however small the space of questions, and the split is the same for every run and seed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from miles_k3.config import TaskSection
from miles_k3.errors import CheckpointError, ConfigError, DataError
from miles_k3.rollout.tasks.common import PromptEncoder, extract_answer, in_fraction, stable_hash, state_value
from miles_k3.rollout.tasks.grading import grade_with
from miles_k3.rollout.tasks.gym_dataset import CHUNK_QUESTIONS, HASH_DEPENDENT, EntryStream, make_dataset
from miles_k3.types import Grade, Prompt

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

logger = logging.getLogger(__name__)

HELD_OUT_FRACTION = 0.25
# So many draws in a row without a usable question mean that there is none.
MAX_DRAWS = 10_000
# So many held-out draws in a row without a new one mean that all have been seen.
MAX_REPEATS = 100


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the evaluation, never to training."""
    return in_fraction(question, HELD_OUT_FRACTION)


class ReasoningGymGrader:
    """Scores with the dataset's own `score_answer`; the dataset is rebuilt where the grading happens."""

    def __init__(self, name: str, params: Mapping[str, Any]) -> None:
        self._name = name
        self._params = dict(params)
        self._dataset: ProceduralDataset | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    def prepare(self) -> None:
        """Import the package and build the dataset."""
        if self._dataset is None:
            self._dataset = make_dataset(self._name, self._params, seed=0, size=CHUNK_QUESTIONS)

    def score(self, prompt: Prompt, text: str) -> Any:
        self.prepare()
        assert self._dataset is not None
        return self._dataset.score_answer(extract_answer(text), prompt.payload["entry"])


class ReasoningGymTask:
    """Endless training prompts from `seed`; held-out prompts that are the same for every seed."""

    def __init__(self, section: TaskSection, tokenizer: Any, *, seed: int, source: str) -> None:
        if section.scorer != "auto":
            raise ConfigError(
                f"task.scorer is {section.scorer!r}, but {section.name} has a scorer of its own; set task.scorer: "
                "auto, or write the questions to a file for jsonl:<path>"
            )
        self.name = section.name
        self._dataset_name = source
        self._params = dict(section.params)
        self._seed = seed
        self._cursor = 0
        self._last = ""  # hash of the question before the cursor
        self._encoder = PromptEncoder(section, tokenizer)
        self._train = EntryStream(source, self._params, seed=seed, label="train")
        self._eval: list[Prompt] = []
        self._eval_iterator = self._held_out_prompts()
        self.grader = ReasoningGymGrader(source, self._params)
        self.grader.prepare()
        if source in HASH_DEPENDENT and sys.flags.hash_randomization:
            logger.warning(
                "reasoning_gym:%s asks other questions in each process; set PYTHONHASHSEED=0 to make runs repeatable",
                source,
            )

    @property
    def skipped(self) -> dict[str, int]:
        """Draws that became no prompt, by reason: held_out (by design), too_long, eval_too_long."""
        return dict(self._encoder.skipped)

    def next(self, n: int) -> list[Prompt]:
        """The next `n` training prompts; advances the cursor. Raises DataError when there are none."""
        prompts: list[Prompt] = []
        barren = 0
        while len(prompts) < n:
            prompt = self._draw()
            barren = 0 if prompt else barren + 1
            if prompt:
                prompts.append(prompt)
            elif barren >= MAX_DRAWS:
                raise DataError(
                    f"{self.name}: {MAX_DRAWS} draws in a row gave no training prompt (skipped: {self.skipped}); "
                    "expected a larger space of questions or a higher task.max_prompt_tokens: change task.params"
                )
        return prompts

    def _draw(self) -> Prompt | None:
        """The prompt at the cursor, or None where it is held out or too long; advances the cursor."""
        index = self._cursor
        entry = self._train[index]
        question = entry["question"]
        token_ids = None
        if is_held_out(question):
            self._encoder.skipped["held_out"] += 1
        else:
            token_ids = self._encoder.encode_or_skip(question, f"{self.name}, question {index}")
        self._cursor += 1
        self._last = _fingerprint(question)
        return None if token_ids is None else _prompt(f"{self.name}/train/{index}", entry, token_ids)

    def eval_prompts(self, n: int) -> list[Prompt]:
        """The first `n` held-out prompts: distinct while the space of questions has new ones, then repeated."""
        try:
            while len(self._eval) < n:
                self._eval.append(next(self._eval_iterator))
        except DataError:
            self._eval, self._eval_iterator = [], self._held_out_prompts()  # a generator is spent once it has raised
            raise
        return self._eval[:n]

    def _held_out_prompts(self) -> Iterator[Prompt]:
        stream = EntryStream(self._dataset_name, self._params, seed=0, label="held-out")
        seen: set[str] = set()
        index, given, barren, repeats, exhausted = 0, 0, 0, 0, False
        while barren < MAX_DRAWS:
            entry, barren, index = stream[index], barren + 1, index + 1
            question = entry["question"]
            if not is_held_out(question):
                continue
            repeats = repeats + 1 if question in seen else 0
            if repeats and not exhausted:
                if repeats < MAX_REPEATS:
                    continue
                exhausted = True
                logger.warning("%s has %d distinct held-out questions; further ones are repeats", self.name, given)
            token_ids = self._encoder.encode_or_skip(
                question, f"{self.name}, held-out question {index}", "eval_too_long"
            )
            if token_ids is None:
                continue
            seen.add(question)
            yield _prompt(f"{self.name}/eval/{given}", entry, token_ids)
            given, barren = given + 1, 0
        raise DataError(
            f"{self.name}: {MAX_DRAWS} draws in a row gave no held-out prompt (skipped so far: {self.skipped}); "
            "expected a larger space of questions or a higher task.max_prompt_tokens: change task.params"
        )

    def grade(self, prompt: Prompt, text: str) -> Grade:
        """Score one answer with the dataset's own scorer."""
        return grade_with(self.grader, prompt, text)

    def state_dict(self) -> dict[str, Any]:
        """Where the training stream stands, and what identifies the stream."""
        skipped = {reason: n for reason, n in self.skipped.items() if not reason.startswith("eval_")}
        return {
            "task": self.name,
            "params": self._params,
            "seed": self._seed,
            "cursor": self._cursor,
            "last": self._last,
            "skipped": skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises CheckpointError when it belongs to another stream."""
        mine = {"task": self.name, "params": self._params, "seed": self._seed}
        for key, expected in mine.items():
            if key not in state or not _equal(state[key], expected):
                raise CheckpointError(
                    f"the data cursor was saved with {key}={state.get(key)!r}, this run has {expected!r}; "
                    "resume with the recipe of that run, or start a new run"
                )
        cursor = state_value(state, "cursor", int, self.name)
        last = state_value(state, "last", str, self.name)
        skipped = state_value(state, "skipped", dict, self.name)
        if cursor < 0:
            raise CheckpointError(
                f"the data cursor of {self.name} is {cursor}, expected 0 or more; resume from another checkpoint"
            )
        if cursor and _fingerprint(self._train[cursor - 1]["question"]) != last:
            self._report_other_questions(cursor)
        self._cursor, self._last = cursor, last
        for reason in [reason for reason in self._encoder.skipped if not reason.startswith("eval_")]:
            del self._encoder.skipped[reason]
        self._encoder.skipped.update(skipped)

    def _report_other_questions(self, cursor: int) -> None:
        if self._dataset_name in HASH_DEPENDENT:
            logger.warning("%s goes on at question %d of another sequence of questions", self.name, cursor)
            return
        raise CheckpointError(
            f"{self.name} now gives another question {cursor - 1} than in the saved run: reasoning-gym's version or "
            "data changed; install the version of that run, or start a new run"
        )


def _equal(a: Any, b: Any) -> bool:
    """Equality after a round trip through JSON, which makes lists of tuples."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and a == b


def _fingerprint(question: str) -> str:
    return f"{stable_hash('question', question):016x}"


def _prompt(prompt_id: str, entry: dict[str, Any], token_ids: tuple[int, ...]) -> Prompt:
    answer = entry["answer"]  # None where any of several answers is right
    return Prompt(
        id=prompt_id,
        text=entry["question"],
        token_ids=token_ids,
        answer="" if answer is None else str(answer),
        payload={"entry": entry},
    )
