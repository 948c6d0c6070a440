"""Text of a growing answer, token by token, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_UNFINISHED = "\ufffd"  # what a tokenizer prints for the first bytes of a character
_MAX_PIECES = 4  # tokens that one character can be spread over; more of them are broken text, not an unfinished one


class Detokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the engine uses."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


def decode(tokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
    """Text without special tokens."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True)


class StopText:
    """Finds the first stop string in an answer, also across token boundaries, decoding a few tokens at a time.

    Characters whose bytes are not complete yet are left out until they are.
    """

    def __init__(self, tokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._longest = max(map(len, stop))
        self._start = self._read = 0  # tokens before _start are context no more; those before _read are in `text`
        self.text = ""

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Take in the tokens after those of the last call; where the earliest stop string begins in `text`."""
        before = decode(self._tokenizer, token_ids[self._start : self._read])
        after = decode(self._tokenizer, token_ids[self._start :])
        unfinished = after.endswith(_UNFINISHED) and len(token_ids) - self._read < _MAX_PIECES
        if len(after) <= len(before) or unfinished:
            return None
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += after[len(before) :]
        self._start, self._read = self._read, len(token_ids)
        found = [at for at in (self.text.find(s, searched) for s in self._stop) if at >= 0]
        return min(found, default=None)
