"""K3's output format read back, whole and piece by piece."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from helpers.servers import tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_k3.rollout.server.text import LiteralMarks, Mark, Piece
from miles_k3.rollout.server.xtml import MAX_HEADER, Channel, ChannelReader, Part

# As the encoder published with Kimi K3 renders an assistant's message.
PUBLISHED = (
    '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>I should call the tools.<|close|>think<|sep|>'
    "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Zürich<|close|>argument<|sep|>'
    '<|open|>argument key="unit" type="string"<|sep|>c<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="search" index="2"<|sep|>'
    '<|open|>argument key="query" type="string"<|sep|>café "best"<|close|>argument<|sep|>'
    '<|open|>argument key="filters" type="object"<|sep|>{"tags": ["a", "b"], "max": 3}<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)


def read(chunks: Sequence[Piece], channel: Channel | None = None) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, reasoning, calls as (name, arguments)) of text that comes in these chunks."""
    marks, reader = LiteralMarks(), ChannelReader(channel)
    parts: list[Part] = []
    for chunk in chunks:
        parts += reader.feed(marks.feed([chunk]))
    parts += [*reader.feed(marks.finish()), *reader.finish()]
    calls: list[tuple[str, str]] = []
    for part in (p for p in parts if p.kind == "call"):
        if part.name is not None:
            calls.append((part.name, part.text))
        else:
            calls[part.call] = calls[part.call][0], calls[part.call][1] + part.text
    content = "".join(p.text for p in parts if p.kind == "content")
    return content, "".join(p.text for p in parts if p.kind == "reasoning"), calls


def call(inner: str, name: str = "f") -> str:
    opened = f'<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>'
    return f"{opened}{inner}<|close|>call<|sep|><|close|>tools<|sep|>"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_published_rendering(size: int) -> None:
    chunks = [PUBLISHED[i : i + size] for i in range(0, len(PUBLISHED), size)]
    content, reasoning, calls = read(chunks)
    assert (content, reasoning) == ("", "I should call the tools.")
    assert [name for name, _ in calls] == ["get_weather", "search"]
    assert json.loads(calls[0][1]) == {"city": "Zürich", "unit": "c"}
    assert json.loads(calls[1][1]) == {"query": 'café "best"', "filters": {"tags": ["a", "b"], "max": 3}}


def test_the_prompt_may_have_opened_the_channel() -> None:
    text = "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>"
    assert read([text], "think") == ("Yes.", "Hm.", [])
    assert read(["Yes.<|close|>response<|sep|>"], "response") == ("Yes.", "", [])


numbers = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.text('abz_-."&<>é', min_size=1, max_size=8)
arguments = st.dictionaries(st.text('ab"&|<é ', max_size=5), json_values, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    calls=st.lists(st.tuples(names, arguments), min_size=1, max_size=3),
    content=st.text("ab <|>é\n", max_size=12),
    data=st.data(),
)
def test_what_the_template_writes_is_read_back(calls: list, content: str, data: st.DataObject) -> None:
    """The chat template of the tiny K3 is the writer; any chunks give the same."""
    made = [
        {"id": str(i), "type": "function", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)
    ]
    messages = [{"role": "assistant", "content": content, "tool_calls": made}]
    text = tokenizer().apply_chat_template(messages, tokenize=False)
    text = text.removeprefix("<|bos|><|assistant|>").removesuffix("<|end_of_msg|>")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    said, reasoning, found = read(chunks)
    assert (said, reasoning) == (content, "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@settings(deadline=None, max_examples=100)
@given(pieces=st.lists(st.sampled_from(list(Mark)) | st.sampled_from([
    "think", "response", "tools", 'call tool="f"', 'argument key="k" type="string"', 'argument key="n" type="number"',
    "json", "message", "call", "argument", " ", "12", '"}', "text",
]), max_size=24), channel=st.sampled_from([None, "think", "response"]))  # fmt: skip
def test_nothing_is_lost_and_chunks_dont_matter(pieces: list[Piece], channel: Channel | None) -> None:
    reader = ChannelReader(channel)
    parts = [*reader.feed(pieces), *reader.finish()]
    one_by_one = ChannelReader(channel)
    others = [part for piece in pieces for part in one_by_one.feed([piece])] + one_by_one.finish()
    assert parts == others
    assert all(part.call < reader.num_calls for part in parts if part.kind == "call")


@pytest.mark.parametrize(
    "text",
    [
        "constants: <|open|>, <|close|>, and <|sep|>",
        "<|open|>unknown<|sep|>x<|close|>unknown<|sep|>",
        '<|open|>call tool="f"<|sep|>',  # not inside tools
        "a <|clo",
        "<|open|>tools",
        "<|close|>response<|sep|>",
        "<|open|>" + "x" * (MAX_HEADER + 10),
    ],
)
def test_what_is_no_tag_is_text(text: str) -> None:
    for chunks in ([text], list(text)):
        assert read(chunks) == (text, "", [])


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ("", "{}"),
        ('<|open|>json type="object"<|sep|>{"x": 1}<|close|>json<|sep|>', '{"x": 1}'),
        ('<|open|>argument key="n" type="number"<|sep|>1e2<|close|>argument<|sep|>', '{"n": 1e2}'),
        ('<|open|>argument key="n" type="number"<|sep|>NaN<|close|>argument<|sep|>', '{"n": "NaN"}'),
        ('<|open|>argument key="n" type="object"<|sep|>{oops<|close|>argument<|sep|>', '{"n": "{oops"}'),
        (
            '<|open|>argument key="a&quot;&amp;b"<|sep|>raw &amp; text<|close|>argument<|sep|>',
            '{"a\\"&b": "raw &amp; text"}',
        ),
    ],
)
def test_arguments(inner: str, arguments: str) -> None:
    assert read([call(inner)]) == ("", "", [("f", arguments)])


def test_a_call_that_was_cut_stays_cut() -> None:
    text = call('<|open|>argument key="a" type="string"<|sep|>half')
    assert read([text.partition("<|close|>")[0]]) == ("", "", [("f", '{"a": "half')])
