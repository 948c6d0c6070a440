"""A model folder's own tokenizer and chat template, read offline and tried on one question."""

from __future__ import annotations

from typing import Any

from miles_k3.errors import CheckpointError

PROBE = "2 + 2 = ?"


def load_tokenizer(folder: str) -> Any:
    """The tokenizer, with a template that works. Raises CheckpointError when one of them doesn't."""
    tokenizer = read_tokenizer(folder)
    text = render_probe(folder, tokenizer)
    if PROBE not in text:
        raise CheckpointError(
            f"{folder}: the chat template makes {text!r} of the question {PROBE!r}, which isn't in it; "
            "copy chat_template.jinja again"
        )
    return tokenizer


def read_tokenizer(folder: str) -> Any:
    """What transformers makes of the folder's files. Raises CheckpointError when it can't read them."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # what foreign readers raise on a torn file is anything at all
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise CheckpointError(
            f"{folder}: no tokenizer that transformers can read ({reason}); copy tokenizer.json and "
            "tokenizer_config.json again"
        ) from e


def render_probe(folder: str, tokenizer: Any) -> str:
    """The template's text for PROBE. Raises CheckpointError when there is no template or it can't be rendered."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise CheckpointError(f"{folder}: the tokenizer has no chat template; put chat_template.jinja beside it")
    messages = [{"role": "user", "content": PROBE}]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError) as e:
        raise CheckpointError(
            f"{folder}: the chat template can't be rendered ({e}); copy chat_template.jinja again"
        ) from e
