"""What every task needs: stable hashes, the chat template with its length limit, the answer inside a completion."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from miles_k3.config import TaskSection
from miles_k3.errors import CheckpointError, ConfigError, DataError


def stable_hash(*parts: int | str) -> int:
    """63-bit hash of `parts`, the same in every process and on every machine (Python's own `hash` is salted)."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def in_fraction(text: str, fraction: float) -> bool:
    """Whether `text` falls into a fixed pseudo-random `fraction` of all texts."""
    return stable_hash("split", text) < fraction * 2**63


def extract_answer(text: str) -> str:
    """The stripped text inside the last `<answer>..</answer>`, or the whole stripped text where there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return (text if start < 0 else text[start + len("<answer>") : end]).strip()


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_param_names(task: str, params: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises ConfigError naming every key of `params` that the task doesn't have, with the ones that it has."""
    known = sorted(known)
    problems = [
        f"task.params.{key} is unknown to {task}{did_you_mean(key, known)} (valid: {', '.join(known)})"
        for key in params
        if key not in known
    ]
    if problems:
        raise ConfigError(problems)


def state_value(state: Mapping[str, Any], key: str, kind: type, task: str) -> Any:
    """`state[key]`; raises CheckpointError unless it is there and a `kind` (never a restart from zero)."""
    value = state.get(key)
    if type(value) is not kind:
        raise CheckpointError(
            f"the data cursor of {task} holds {key}={value!r}, expected {kind.__name__}; resume from another checkpoint"
        )
    return value


class PromptEncoder:
    """Question -> token ids through the tokenizer's chat template.

    `tokenizer` is a transformers tokenizer. `skipped` counts what `on_bad_prompt: skip` left out, by reason.
    """

    def __init__(self, section: TaskSection, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"tokenizer {getattr(tokenizer, 'name_or_path', tokenizer)!r} has no chat template, "
                "which prompts are built with; put a chat_template.jinja into the model's folder"
            )
        self._tokenizer = tokenizer
        self._system = [{"role": "system", "content": section.system_prompt}] if section.system_prompt else []
        self.max_tokens = section.max_prompt_tokens
        self.skip_bad = section.on_bad_prompt == "skip"
        self.skipped: Counter[str] = Counter()

    def encode(self, question: str) -> tuple[int, ...]:
        """Token ids of system prompt and question up to where the answer begins."""
        messages = [*self._system, {"role": "user", "content": question}]
        ids = self._tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return tuple(ids)

    def encode_or_skip(self, question: str, where: str, reason: str = "too_long") -> tuple[int, ...] | None:
        """Token ids, or None (counted under `reason`) for a prompt over the limit; raises DataError unless skipping."""
        ids = self.encode(question)
        if len(ids) <= self.max_tokens:
            return ids
        if not self.skip_bad:
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens, the limit is {self.max_tokens}; "
                f"set task.max_prompt_tokens: {len(ids)} or task.on_bad_prompt: skip"
            )
        self.skipped[reason] += 1
        return None
