"""The one place that knows which tasks there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from miles_k3.config import TaskSection
from miles_k3.errors import ConfigError
from miles_k3.protocols import Task
from miles_k3.rollout.tasks.common import did_you_mean
from miles_k3.rollout.tasks.grading import Grader
from miles_k3.rollout.tasks.jsonl import JsonlTask
from miles_k3.rollout.tasks.reasoning_gym import ReasoningGymTask


class GradedTask(Task, Protocol):
    """A task whose scorer can be sent to other processes."""

    @property
    def grader(self) -> Grader: ...
    @property
    def skipped(self) -> dict[str, int]: ...


SCHEMES: dict[str, tuple[str, Callable[..., GradedTask]]] = {
    "reasoning_gym": ("reasoning_gym:<dataset>", ReasoningGymTask),
    "jsonl": ("jsonl:<path>", JsonlTask),
}


def make_task(section: TaskSection, tokenizer: Any, *, seed: int) -> GradedTask:
    """The task that `section.name` names. `tokenizer` is a transformers tokenizer with a chat template.

    Raises ConfigError for an unknown scheme, dataset or parameter; DataError for a file that can't be used.
    """
    scheme, colon, rest = section.name.partition(":")
    if not colon or not rest or scheme not in SCHEMES:
        forms = ", ".join(form for form, _ in SCHEMES.values())
        hint = did_you_mean(scheme, SCHEMES) if scheme not in SCHEMES else ""
        raise ConfigError(f"task.name is {section.name!r}, expected one of {forms}{hint}")
    return SCHEMES[scheme][1](section, tokenizer, seed=seed, source=rest)
