"""Reading a JSONL file of questions: slices, malformed lines with file and line, nothing guessed."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_k3.errors import ConfigError, DataError

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question; `line` counts from 1 as editors do."""

    line: int
    question: str
    answer: str


def split_source(source: str) -> tuple[Path, slice]:
    """`path@[a:b]` -> path and slice; bounds are Python's, negative ones count from the end. Raises ConfigError."""
    match = _SLICE.fullmatch(source)
    if match:
        start, stop = (None if match[key] is None else int(match[key]) for key in ("start", "stop"))
        return Path(match["path"]), slice(start, stop)
    if "@[" in source:
        raise ConfigError(
            f"task.name has the slice {source[source.rindex('@[') :]!r}, "
            "expected @[a:b] with whole numbers, e.g. @[-100:]"
        )
    return Path(source), slice(None)


def read_rows(
    source: str, *, prompt_column: str, answer_column: str, skip_bad: bool, skipped: Counter[str]
) -> list[Row]:
    """The rows that `source` (a path, optionally sliced) selects. Blank lines are no rows.

    A malformed line raises DataError, or with `skip_bad` is counted in `skipped["malformed"]`.
    """
    path, selection = split_source(source)
    try:
        raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; expected a JSONL file (task.name jsonl:<path>, relative to {Path.cwd()})"
        ) from error
    lines = [(number, line) for number, line in enumerate(raw.split(b"\n"), start=1) if line.strip()]
    rows: list[Row] = []
    first_problem = ""
    for number, line in lines[selection]:
        try:
            rows.append(_parse_row(line, number, prompt_column, answer_column))
        except ValueError as error:
            problem = f"{path}:{number}: {error}; correct the line or set task.on_bad_prompt: skip"
            if not skip_bad:
                raise DataError(problem) from error
            first_problem = first_problem or problem
            skipped["malformed"] += 1
    if not rows:
        raise DataError(
            f"{source} has no usable row ({len(lines)} lines that aren't blank, {len(lines[selection])} selected); "
            f"expected one JSON object a line with {prompt_column!r} and {answer_column!r}"
            + (f"; first problem: {first_problem}" if first_problem else "; check the path and its slice")
        )
    return rows


def _parse_row(line: bytes, number: int, prompt_column: str, answer_column: str) -> Row:
    """Raises ValueError saying what came and what was expected."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8, expected a JSON object in UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}), expected one JSON object") from error
    except RecursionError as error:
        raise ValueError("nested too deeply, expected one flat JSON object") from error
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, expected a JSON object")
    for column, role in ((prompt_column, "prompt_column"), (answer_column, "answer_column")):
        if column not in value:
            raise ValueError(
                f"no {column!r} among {', '.join(map(repr, value)) or 'no columns'}, "
                f"expected the column of task.params.{role}"
            )
    question, answer = value[prompt_column], _as_answer(value[answer_column], answer_column)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{prompt_column!r} is {_shown(question)}, expected text that isn't blank")
    return Row(line=number, question=question, answer=answer)


def _as_answer(value: Any, column: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{column!r} is {_shown(value)}, expected text that isn't blank or a number")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
