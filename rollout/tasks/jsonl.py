"""`jsonl:<path>`: a file of prompts and answers, shuffled anew each epoch, and the ways to grade them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from miles_k3.config import TaskSection
from miles_k3.errors import CheckpointError, ConfigError, DataError
from miles_k3.rollout.tasks.common import PromptEncoder, check_param_names, stable_hash, state_value
from miles_k3.rollout.tasks.grading import ExactGrader, Grader, LengthGrader, MathGrader, grade_with
from miles_k3.rollout.tasks.jsonl_rows import Row, read_rows, split_source
from miles_k3.types import Grade, Prompt


class JsonlParams(BaseModel):
    """`task.params` of a jsonl task."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt_column: str = "prompt"
    answer_column: str = "answer"
    eval_path: str | None = Field(default=None, description="Held-out rows; may carry a slice like task.name.")
    eval_fraction: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="Share of distinct questions held out."
    )
    shuffle: bool = True


def _params(section: TaskSection) -> JsonlParams:
    check_param_names("jsonl", section.params, JsonlParams.model_fields)
    try:
        params = JsonlParams(**section.params)
    except ValidationError as error:
        raise ConfigError(
            [f"task.params.{e['loc'][0]} is {e['input']!r}: {e['msg']}" for e in error.errors()]
        ) from error
    if params.eval_path is not None and params.eval_fraction is not None:
        raise ConfigError(
            "task.params has both eval_path and eval_fraction, expected one: a file or a share of this file"
        )
    return params


def split_held_out(rows: Sequence[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """(training, held-out) rows: `fraction` of the distinct questions, at least one, chosen by a hash of their text.

    Rows with the same question stay on one side.
    """
    ranked = sorted({row.question for row in rows}, key=lambda question: stable_hash("split", question))
    held_out = set(ranked[: max(1, math.floor(len(ranked) * fraction))])
    return [row for row in rows if row.question not in held_out], [row for row in rows if row.question in held_out]


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of rows in an epoch: a permutation that depends on (seed, epoch) only."""
    order = list(range(num_rows))
    if shuffle:
        Random(stable_hash("epoch", seed, epoch)).shuffle(order)
    return order


class JsonlTask:
    """Every training row exactly once an epoch, forever; the cursor counts rows over all epochs."""

    def __init__(self, section: TaskSection, tokenizer: Any, *, seed: int, source: str) -> None:
        self.name = section.name
        self._seed = seed
        self._encoder = PromptEncoder(section, tokenizer)
        self._file = split_source(source)[0]
        params = _params(section)
        self._shuffle = params.shuffle
        self._rows, self._eval_rows, self._eval_file = self._load(source, params)
        self._sha256 = _hash_rows(self._rows)
        self._cursor = 0
        self._order: tuple[int, list[int]] = (-1, [])
        if section.scorer == "length":
            _refuse_no_lengths(self._rows, self._file)
            _refuse_no_lengths(self._eval_rows, self._eval_file)
        self.grader: Grader = _grader(section.scorer)

    @property
    def skipped(self) -> dict[str, int]:
        """Rows that became no training prompt, by reason: malformed, too_long, held_out; eval_* for held-out rows."""
        return dict(+self._encoder.skipped)

    def _load(self, source: str, params: JsonlParams) -> tuple[list[Row], list[Row], Path]:
        """(training rows, held-out rows, file of the latter), overlong prompts and held-out questions taken out."""
        columns = {"prompt_column": params.prompt_column, "answer_column": params.answer_column}
        skipped, skip_bad = self._encoder.skipped, self._encoder.skip_bad
        rows = read_rows(source, **columns, skip_bad=skip_bad, skipped=skipped)
        rows = self._short_enough(rows, self._file, "too_long")
        held_out: list[Row] = []
        eval_file = self._file
        train = rows
        if params.eval_fraction is not None:
            train, held_out = split_held_out(rows, params.eval_fraction)
        elif params.eval_path is not None:
            eval_file = split_source(params.eval_path)[0]
            before = skipped.pop("malformed", 0)
            held_out = read_rows(params.eval_path, **columns, skip_bad=skip_bad, skipped=skipped)
            skipped.update({"eval_malformed": skipped.pop("malformed", 0), "malformed": before})
            held_out = self._short_enough(held_out, eval_file, "eval_too_long")
            questions = {row.question for row in held_out}
            train = [row for row in rows if row.question not in questions]
        skipped["held_out"] += len(rows) - len(train)
        if not train:
            raise DataError(
                f"{source}: none of {len(rows)} rows is left to train on (skipped: {dict(+skipped)}); expected "
                "questions that are neither held out nor too long: change eval_path, eval_fraction or max_prompt_tokens"
            )
        return train, held_out, eval_file

    def _short_enough(self, rows: Sequence[Row], file: Path, reason: str) -> list[Row]:
        """Rows within the token limit, so that a run fails at its start rather than in the middle."""
        return [
            row for row in rows if self._encoder.encode_or_skip(row.question, f"{file}:{row.line}", reason) is not None
        ]

    def next(self, n: int) -> list[Prompt]:
        """The next `n` training prompts; advances the cursor, over the end of an epoch if need be."""
        prompts = []
        for position in range(self._cursor, self._cursor + n):
            epoch, index = divmod(position, len(self._rows))
            if self._order[0] != epoch:
                order = epoch_order(len(self._rows), seed=self._seed, epoch=epoch, shuffle=self._shuffle)
                self._order = (epoch, order)
            row = self._rows[self._order[1][index]]
            prompts.append(self._prompt(row, f"{self._file}:{row.line}/epoch{epoch}"))
        self._cursor += n
        return prompts

    def eval_prompts(self, n: int) -> list[Prompt]:
        """The first `n` held-out prompts in file order. Raises DataError when there are fewer."""
        if n > len(self._eval_rows):
            raise DataError(
                f"eval.prompts is {n} but {self.name} holds out {len(self._eval_rows)} rows; set eval.prompts to "
                "at most that, or task.params.eval_path or task.params.eval_fraction to hold out more"
            )
        return [self._prompt(row, f"{self._eval_file}:{row.line}/eval") for row in self._eval_rows[:n]]

    def _prompt(self, row: Row, prompt_id: str) -> Prompt:
        token_ids = self._encoder.encode(row.question)
        return Prompt(id=prompt_id, text=row.question, token_ids=token_ids, answer=row.answer)

    def grade(self, prompt: Prompt, text: str) -> Grade:
        """Score one answer as `task.scorer` says."""
        return grade_with(self.grader, prompt, text)

    def state_dict(self) -> dict[str, Any]:
        """Rows used so far, and what identifies their order. The file may move, its rows may not change."""
        return {
            "task": self.name,
            "scheme": "jsonl",
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._rows),
            "sha256": self._sha256,
            "cursor": self._cursor,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises CheckpointError when it belongs to other rows or another order."""
        mine = self.state_dict()
        for key in ("scheme", "seed", "shuffle", "rows", "sha256"):
            if state.get(key) != mine[key]:
                raise CheckpointError(
                    f"the data cursor was saved by {state.get('task')!r} with {key}={state.get(key)!r}, "
                    f"{self.name} has {mine[key]!r}; resume with the data and recipe of that run, or start a new run"
                )
        cursor = state_value(state, "cursor", int, self.name)
        if cursor < 0:
            raise CheckpointError(
                f"the data cursor of {self.name} is {cursor}, expected 0 or more; resume from another checkpoint"
            )
        self._cursor = cursor


def _grader(scorer: Literal["auto", "math", "exact", "length"]) -> Grader:
    if scorer == "length":
        return LengthGrader()
    return ExactGrader() if scorer == "exact" else MathGrader()


def _refuse_no_lengths(rows: Iterable[Row], file: Path) -> None:
    for row in rows:
        if not row.answer.strip().isdecimal() or not int(row.answer):
            raise DataError(
                f"{file}:{row.line}: the answer is {row.answer!r}, but task.scorer: length wants the number of "
                "characters that is asked for, 1 or more"
            )


def _hash_rows(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.question, row.answer]).encode() + b"\n")
    return digest.hexdigest()
