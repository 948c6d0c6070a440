"""Incremental text and stop strings, on a tokenizer whose tokens are bytes and one whose tokens are words."""

from __future__ import annotations

import pytest

from miles_k3.rollout.embedded.text import StopText, decode


class Bytes:
    """One token a byte, so that characters are split and a stop string takes several tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class Words:
    """Some tokens hold several characters; 0 is special."""

    pieces = ("<end>", "the", " answer", " is", " 42", "\n\nQ", "uestion", ":")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[t] for t in token_ids if t or not skip_special_tokens)


def feed(stop: StopText, tokens: list[int]) -> tuple[int | None, int]:
    """(where the stop string begins, tokens read)."""
    for count in range(1, len(tokens) + 1):
        at = stop.find(tokens[:count])
        if at is not None:
            return at, count
    return None, len(tokens)


def test_a_stop_string_over_several_tokens() -> None:
    text = "value=7;END more"
    stop = StopText(Bytes(), ["END"])
    at, read = feed(stop, list(text.encode()))
    assert stop.text[:at] == "value=7;"
    assert read == text.index("END") + 3


def test_a_stop_string_inside_tokens() -> None:
    stop = StopText(Words(), ["\n\nQuestion"])
    at, read = feed(stop, [1, 2, 3, 4, 5, 6, 7])
    assert stop.text[:at] == "the answer is 42"
    assert read == 6


def test_the_earliest_of_several_wins() -> None:
    stop = StopText(Words(), ["42", " is 4", "zzz"])
    at, _ = feed(stop, [1, 2, 3, 4])
    assert stop.text[:at] == "the answer"


def test_characters_of_several_bytes() -> None:
    text = "größe ✓ 数 STOP"
    stop = StopText(Bytes(), [" STOP"])
    at, _ = feed(stop, list(text.encode()))
    assert stop.text[:at] == "größe ✓ 数"
    stop = StopText(Bytes(), ["✓"])
    at, read = feed(stop, list(text.encode()))
    assert stop.text[:at] == "größe "
    assert read == len("größe ✓".encode())


def test_no_stop_string_is_found_where_there_is_none() -> None:
    stop = StopText(Bytes(), ["EN D", "x" * 50])
    assert feed(stop, list(b"END and the EN"))[0] is None
    assert stop.text == "END and the EN"


@pytest.mark.parametrize("text", ["", "a", "ää", "abcabcab"])
def test_incremental_text_is_the_whole_text(text: str) -> None:
    stop = StopText(Bytes(), ["\0"])
    feed(stop, list(text.encode()))
    assert stop.text == text


def test_broken_bytes_do_not_hide_a_stop_string() -> None:
    """An answer of bytes that are no text at all, followed by the stop string."""
    stop = StopText(Bytes(), ["END"])
    at, read = feed(stop, [0xFF] * 20 + list(b"END"))
    assert at is not None
    assert read == 23


def test_special_tokens_are_left_out() -> None:
    assert decode(Words(), [1, 2, 0]) == "the answer"
