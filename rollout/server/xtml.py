"""K3's output format, read back as it grows: channels of reasoning, answer and tool calls.

    <|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|>
    <|open|>tools<|sep|>
      <|open|>call tool="NAME" index="1"<|sep|>
        <|open|>argument key="KEY" type="string|number|boolean|null|object|array"<|sep|>VALUE<|close|>argument<|sep|>
      <|close|>call<|sep|>
    <|close|>tools<|sep|>

The prompt may have opened a channel already. Strings are raw; other values are JSON. Attributes escape & and ". A call
may hold <|open|>json type="object"<|sep|>{...}<|close|>json<|sep|> instead of arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from miles_k3.rollout.server.text import Mark, Piece

_HEADER = re.compile(r'([a-z]+)((?:\s+[a-z]+="[^"]*")*)\s*')
_ATTRIBUTE = re.compile(r'([a-z]+)="([^"]*)"')
_INSIDE = {
    "": {"think", "response", "tools", "message"},
    "message": {"think", "response", "tools"},
    "tools": {"call"},
    "call": {"argument", "json"},
}
_NEEDS = {"call": "tool", "argument": "key"}
MAX_HEADER = 2048  # characters; more of them are text that was never meant as a tag

Channel = Literal["think", "response"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of an answer. Of a call the first part has its `name`; later ones add to its JSON `text`."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: int = 0
    name: str | None = None


class ChannelReader:
    """Feed it pieces, get parts. What is no valid tag where it stands is text of the channel it stands in."""

    def __init__(self, channel: Channel | None = None) -> None:
        """`channel`: what the prompt has opened."""
        self._open: list[str] = [] if channel is None else ["message", channel]
        self._tag: tuple[Mark, str] | None = None  # the mark and what came after it, until <|sep|>
        self._value = _Value()
        self.num_calls = 0

    def feed(self, pieces: Sequence[Piece]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            parts += self._text(piece) if isinstance(piece, str) else self._mark(piece)
        return [part for part in parts if part.text or part.name is not None]

    def finish(self) -> list[Part]:
        """The answer ends, wherever it is; a call that was cut stays cut."""
        return [part for part in self._broken_tag() if part.text]

    @property
    def _inside(self) -> str:
        return self._open[-1] if self._open else ""

    def _text(self, text: str) -> list[Part]:
        if self._tag is None:
            return self._body(text)
        mark, header = self._tag
        self._tag = mark, header + text
        return self._broken_tag() if len(header) + len(text) > MAX_HEADER else []

    def _mark(self, mark: Mark) -> list[Part]:
        if mark is not Mark.SEP:
            parts = self._broken_tag()
            self._tag = mark, ""
            return parts
        if self._tag is None:
            return self._body(mark.value)
        kind, header = self._tag
        parts = self._opened(header) if kind is Mark.OPEN else self._closed(header.strip())
        if parts is None:
            return self._broken_tag(mark.value)
        self._tag = None
        return parts

    def _broken_tag(self, end: str = "") -> list[Part]:
        if self._tag is None:
            return []
        (mark, header), self._tag = self._tag, None
        return self._body(mark.value + header + end)

    def _opened(self, header: str) -> list[Part] | None:
        """None for what is no tag here."""
        match = _HEADER.fullmatch(header.strip())
        if match is None or match[1] not in _INSIDE.get(self._inside, ()):
            return None
        attributes = {key: _unescaped(value) for key, value in _ATTRIBUTE.findall(match[2])}
        if _NEEDS.get(match[1], "") not in ("", *attributes) or (match[1] == "json" and self._value.begun):
            return None
        self._open.append(match[1])
        if match[1] == "call":
            self.num_calls += 1
            self._value = _Value()
            return [Part(kind="call", call=self.num_calls - 1, name=attributes["tool"])]
        if match[1] == "argument":
            return self._call_parts(self._value.begin(attributes["key"], attributes.get("type", "string")))
        return []

    def _closed(self, name: str) -> list[Part] | None:
        if name not in self._open:
            return [] if name == "message" and not self._open else None
        parts: list[Part] = []
        while True:
            tag = self._open.pop()
            if tag in ("argument", "json"):
                parts += self._call_parts(self._value.end(whole=tag == "json"))
            elif tag == "call":
                parts += self._call_parts(self._value.close())
            if tag == name:
                return parts

    def _body(self, text: str) -> list[Part]:
        inside = self._inside
        if inside in ("argument", "json"):
            return self._call_parts(self._value.add(text))
        if inside == "think":
            return [Part(kind="reasoning", text=text)]
        structural = inside in ("tools", "call", "message")
        return [] if structural and not text.strip() else [Part(kind="content", text=text)]

    def _call_parts(self, text: str) -> list[Part]:
        return [Part(kind="call", call=self.num_calls - 1, text=text)]


class _Value:
    """The JSON object of one call, from its arguments."""

    def __init__(self) -> None:
        self.begun = self._whole = False
        self._string = True
        self._held = ""

    def begin(self, key: str, kind: str) -> str:
        start = ", " if self.begun else "{"
        self.begun, self._string, self._held = True, kind == "string", ""
        return f"{start}{_quoted(key)}: " + ('"' if self._string else "")

    def add(self, text: str) -> str:
        if self.begun and self._string:
            return _quoted(text)[1:-1]
        self._held += text
        return ""

    def end(self, *, whole: bool) -> str:
        """`whole`: it was a block with all arguments."""
        held, self._held = self._held, ""
        if whole:
            self._whole = True
            return held.strip()
        return '"' if self._string else _json_text(held)

    def close(self) -> str:
        if self._whole:
            return ""
        return "}" if self.begun else "{}"


def _json_text(text: str) -> str:
    """The text itself if it is JSON, else a JSON string of it."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _quoted(text)
    return text.strip()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
