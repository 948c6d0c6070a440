"""Text that grows token by token: the same in any chunks, never taken back, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers.servers import tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_k3.rollout.embedded.text import StopText
from miles_k3.rollout.server.text import AnswerText, LiteralMarks, Mark, special_marks

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def said(answer: AnswerText, chunks: Sequence[Sequence[int]]) -> str:
    pieces = [piece for chunk in chunks for piece in answer.feed(chunk)] + answer.finish()
    return "".join(piece for piece in pieces if isinstance(piece, str))


@settings(deadline=None, max_examples=60)
@given(text=texts, size=st.integers(1, 9))
def test_any_chunks_give_the_text(text: str, size: int) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False)
    chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
    assert said(AnswerText(tokenizer()), chunks) == tokenizer().decode(ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=60)
@given(
    ids=st.lists(st.integers(0, 511), max_size=60), stop=st.lists(st.sampled_from(["1", "ab", "+ ", "é"]), max_size=2)
)
def test_any_tokens_stop_where_the_engine_stops(ids: list[int], stop: list[str]) -> None:
    """Random tokens are broken text; the engine's own search decides where a stop string begins."""
    engine = StopText(tokenizer(), stop) if stop else None
    end, cut = len(ids), None
    for i in range(1, len(ids) + 1 if engine else 0):
        assert engine is not None
        cut = engine.find(ids[:i])
        if cut is not None:
            end = i
            break
    whole = said(AnswerText(tokenizer(), stop=stop), [ids[:end]])
    assert whole == said(AnswerText(tokenizer(), stop=stop), [[t] for t in ids[:end]])
    if engine is not None and cut is not None:
        assert whole == engine.text[:cut]


def test_text_is_final_when_it_is_told() -> None:
    """The first half of a character, and the beginning of a stop string, wait."""
    answer = AnswerText(tokenizer(), stop=["12345"])
    ids = tokenizer().encode("é123x", add_special_tokens=False)
    told = [answer.feed([token]) for token in ids]
    assert told == [[], ["é"], [], [], [], ["123x"]]
    assert answer.finish() == []
    held = AnswerText(tokenizer(), stop=["12345"])
    assert held.feed(tokenizer().encode("123", add_special_tokens=False)) == []
    assert held.finish() == ["123"]


def test_stop_tokens_and_special_tokens_are_no_text() -> None:
    ids = [*tokenizer().encode("a", add_special_tokens=False), 4, 2]
    assert said(AnswerText(tokenizer(), stop_token_ids=[2]), [ids]) == "a"
    a, b = tokenizer().encode("a b", add_special_tokens=False)
    assert said(AnswerText(tokenizer(), stop_token_ids=[b]), [[a, b]]) == "a", "whatever else the token spells"


class MarkedTokenizer:
    """Characters as tokens, and the marks as tokens of their own."""

    def __init__(self) -> None:
        self.marks = {mark.value: 1000 + i for i, mark in enumerate(Mark)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.marks[text]] if text in self.marks else list(map(ord, text))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in ids if i < 1000)


def test_marks_that_are_tokens_differ_from_marks_that_are_spelled() -> None:
    marked = MarkedTokenizer()
    marks = special_marks(marked)
    assert marks == {1000: Mark.OPEN, 1001: Mark.CLOSE, 1002: Mark.SEP}
    answer = AnswerText(marked, marks=marks)
    spelled = "<|open|>"
    assert answer.feed([1000, *map(ord, spelled), 1002, ord("x")]) == [Mark.OPEN, spelled, Mark.SEP, "x"]


def test_a_tokenizer_without_marks() -> None:
    assert special_marks(tokenizer()) == {}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_spelled_marks_are_found_across_chunks(size: int) -> None:
    text = "a<|open|>b<|sep|><<|close|>|"
    marks = LiteralMarks()
    pieces = [p for i in range(0, len(text), size) for p in marks.feed([text[i : i + size]])] + marks.finish()
    joined: list = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    assert joined == ["a", Mark.OPEN, "b", Mark.SEP, "<", Mark.CLOSE, "|"]
