"""Text of a growing answer: from tokens to text that is final, with structural marks kept apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer prints for the first bytes of a character
MAX_PIECES = 4  # tokens that one character can be spread over; more of them are broken text


class Mark(Enum):
    """The three structural tokens of K3's chat format."""

    OPEN = "<|open|>"
    CLOSE = "<|close|>"
    SEP = "<|sep|>"


Piece = str | Mark


def special_marks(tokenizer: Any) -> dict[int, Mark]:
    """Token id -> mark, where the tokenizer has them as tokens of their own; empty where they are ordinary text."""
    marks = {}
    for mark in Mark:
        ids = tokenizer.encode(mark.value, add_special_tokens=False)
        if len(ids) == 1:
            marks[ids[0]] = mark
    return marks if len(marks) == len(Mark) else {}


class AnswerText:
    """Takes tokens one after the other, gives text that no later token can change.

    Held back are characters whose bytes are not complete and ends that may become a stop string. Special tokens are
    left out, but for `marks`, which come as pieces of their own.
    """

    def __init__(
        self, tokenizer: Any, *, stop: Sequence[str] = (), stop_token_ids: Sequence[int] = (),
        marks: Mapping[int, Mark] | None = None,
    ) -> None:  # fmt: skip
        self._tokenizer, self._stop, self._marks = tokenizer, tuple(stop), marks or {}
        self._stop_token_ids = frozenset(stop_token_ids)
        self._ids: list[int] = []
        self._start = self._read = 0  # tokens before _start are context no more; those before _read are in the text
        self._held = ""
        self.stopped = False

    def feed(self, tokens: Sequence[int]) -> list[Piece]:
        """The pieces that became final with these tokens."""
        pieces: list[Piece] = []
        for token in tokens:
            if self.stopped or token in self._stop_token_ids:
                continue
            if token in self._marks:
                pieces += self.finish()
                pieces += [] if self.stopped else [self._marks[token]]
                continue
            self._ids.append(token)
            self._held += self._decoded(partial=True)
            pieces += self._released()
        return _joined(pieces)

    def finish(self) -> list[Piece]:
        """What was held back; the answer ends here."""
        if self.stopped:
            return []
        self._held += self._decoded(partial=False)
        pieces = self._released()
        if not self.stopped:
            pieces.append(self._held)
        self._held = ""
        self._ids.clear()
        self._start = self._read = 0
        return _joined(pieces)

    def _decoded(self, *, partial: bool) -> str:
        """Text of the tokens after `_read`, or "" while it may still change."""
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        unfinished = after.endswith(UNFINISHED) and len(self._ids) - self._read < MAX_PIECES
        if len(after) <= len(before) or (unfinished and partial):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _released(self) -> list[Piece]:
        """Take from the held text what is before a stop string, or can't be the beginning of one."""
        found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if found:
            text, self._held, self.stopped = self._held[: min(found)], "", True
            return [text]
        kept = max((_overlap(self._held, s) for s in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return [text]


def _overlap(text: str, wanted: str) -> int:
    """Length of the longest end of `text` that begins `wanted`, shorter than it."""
    return next((n for n in range(min(len(text), len(wanted) - 1), 0, -1) if text.endswith(wanted[:n])), 0)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        elif piece:
            out.append(piece)
    return out


class LiteralMarks:
    """Finds marks that are spelled out in ordinary text, for tokenizers that don't have them as tokens."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same with marks as marks; an end that may become one is held back."""
        out: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Mark):
                out += [*self.finish(), piece]
                continue
            self._held += piece
            out += self._taken()
        return _joined(out)

    def finish(self) -> list[Piece]:
        text, self._held = self._held, ""
        return [text] if text else []

    def _taken(self) -> list[Piece]:
        out: list[Piece] = []
        while True:
            places = [(at, mark) for mark in Mark if (at := self._held.find(mark.value)) >= 0]
            if not places:
                break
            at, mark = min(places, key=lambda place: place[0])
            out += [self._held[:at], mark]
            self._held = self._held[at + len(mark.value) :]
        kept = max(_overlap(self._held, mark.value) for mark in Mark)
        out.append(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return out
