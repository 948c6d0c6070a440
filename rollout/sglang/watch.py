"""Listens to an answer while SGLang makes it: stop strings, which it can't see without a tokenizer, and `on_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_k3.protocols import OnTokens
from miles_k3.rollout.embedded.text import Detokenizer, StopText, decode
from miles_k3.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a stop string ended an answer: after so many tokens; the text ends before it."""

    num_tokens: int
    text: str


class Watch:
    """One request's listener; `hear` is called on SGLang's thread."""

    def __init__(self, stop_text: StopText | None, on_tokens: OnTokens | None, stop: Callable[[], None]) -> None:
        self._stop_text, self._on_tokens, self._stop = stop_text, on_tokens, stop
        self._heard = 0
        self.cut: Cut | None = None

    @classmethod
    def over(
        cls, params: SamplingParams, tokenizer: Detokenizer | None, on_tokens: OnTokens | None, stop: Callable[[], None]
    ) -> Watch | None:
        """A listener, where anybody listens."""
        stop_text = StopText(tokenizer, params.stop) if params.stop and tokenizer else None
        return None if stop_text is None and on_tokens is None else cls(stop_text, on_tokens, stop)

    def hear(self, tokens: Sequence[int], rows: Sequence[Sequence[Any]]) -> None:
        """All tokens so far with their log-probabilities; what follows a stop string is not heard."""
        if self.cut is not None:
            return
        first = self._heard
        while self._heard < len(tokens) and self.cut is None:
            self._heard += 1
            place = None if self._stop_text is None else self._stop_text.find(list(tokens[: self._heard]))
            if place is not None and self._stop_text is not None:
                self.cut = Cut(num_tokens=self._heard, text=self._stop_text.text[:place])
                self._stop()
        if self._on_tokens is not None and self._heard > first:
            self._on_tokens(list(tokens[first : self._heard]), [float(row[0]) for row in rows[first : self._heard]])


def answer_text(tokenizer: Detokenizer | None, tokens: Sequence[int], params: SamplingParams, cut: Cut | None) -> str:
    """The answer's text: it ends before the stop string or stop token. Empty without a tokenizer."""
    if tokenizer is None:
        return ""
    if cut is not None:
        return cut.text
    ends = bool(tokens) and tokens[-1] in params.stop_token_ids
    return decode(tokenizer, list(tokens[:-1] if ends else tokens))
