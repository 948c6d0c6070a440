"""Files of questions and tasks on them, for the tests of this folder."""

import json

from unit.rollout.tasks.fakes import CharTokenizer

from miles_k3.config import TaskSection
from miles_k3.rollout.tasks.jsonl import JsonlTask
from miles_k3.rollout.tasks.registry import make_task


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(n, start=0):
    return [{"prompt": f"{i} + 1", "answer": i + 1} for i in range(start, start + n)]


def task(source, *, seed=0, params=None, **section) -> JsonlTask:
    section = TaskSection(name=f"jsonl:{source}", params=params or {}, **section)
    made = make_task(section, CharTokenizer(), seed=seed)
    assert isinstance(made, JsonlTask)
    return made


def texts(prompts):
    return [p.text for p in prompts]
