"""Tools by way of the official client: declared to the model, called by it, answered to it."""

# The client types a tool call as a union, and messages as one too.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from helpers.servers import MODEL, ScriptedEngine, running_server, tokenizer

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "number"}}},
        },
    }
]
QUESTION: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
CALLS = (
    'Looking.<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>"Rome" <ά><|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="get_weather" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)


@contextmanager
def talking(script: str) -> Iterator[tuple[Any, ScriptedEngine]]:
    """The official client, of no type: its tools are unions that only a look at `type` takes apart."""
    engine = ScriptedEngine(script)
    with (
        running_server(engine, default_max_tokens=1000) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, engine


def test_calls_come_whole() -> None:
    with talking(CALLS) as (client, engine):
        [choice] = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Looking."
        first, second = choice.message.tool_calls
        assert first.type == second.type == "function"
        assert (first.function.name, json.loads(first.function.arguments)) == (
            "get_weather",
            {"city": '"Rome" <ά>', "days": 2},
        )
        assert (second.function.name, second.function.arguments) == ("get_weather", "{}")
        assert first.id != second.id
        prompt = tokenizer().decode(list(engine.asked[0][0]))
        assert '"name": "get_weather"' in prompt


def test_calls_come_in_pieces() -> None:
    """Names come first and whole, arguments bit by bit; no markup in the content."""
    with talking(CALLS) as (client, _):
        chunks = list(client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Looking."
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert [(p.index, p.function.name) for p in pieces if p.function and p.function.name] == [
        (0, "get_weather"),
        (1, "get_weather"),
    ]
    arguments = ["".join(p.function.arguments or "" for p in pieces if p.function and p.index == i) for i in (0, 1)]
    assert [json.loads(a) for a in arguments] == [{"city": '"Rome" <ά>', "days": 2}, {}]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert all(p.id for p in pieces if p.function and p.function.name)


def test_a_conversation_goes_on_with_results() -> None:
    with talking(CALLS) as (client, _):
        message = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": c.id, "content": "rain"} for c in message.tool_calls or ()]
    said = message.model_dump()
    with talking("It rains.") as (client, engine):
        answer = client.chat.completions.create(model=MODEL, messages=[*QUESTION, said, *results], tools=TOOLS)
        assert answer.choices[0].message.content == "It rains."
        assert answer.choices[0].finish_reason == "stop"
        prompt = tokenizer().decode(list(engine.asked[0][0]))
        assert CALLS in prompt
        assert prompt.endswith("<|tool|>get_weather\nrain<|end_of_msg|><|assistant|>")
        results[0]["tool_call_id"] = "call-unknown"
        with pytest.raises(openai.BadRequestError, match=r"messages\.2 answers tool call 'call-unknown'"):
            client.chat.completions.create(model=MODEL, messages=[*QUESTION, said, *results], tools=TOOLS)


def test_without_tools_markup_is_text() -> None:
    """This tokenizer has no marks of its own, so they may be an answer's words."""
    with talking(CALLS) as (client, engine):
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            [choice] = client.chat.completions.create(model=MODEL, messages=QUESTION, **options).choices
            assert (choice.message.content, choice.message.tool_calls) == (CALLS, None)
        assert "get_weather" not in tokenizer().decode(list(engine.asked[-1][0]))


def test_a_call_that_was_cut_says_so() -> None:
    with talking(CALLS) as (client, _):
        [choice] = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, max_tokens=120).choices
    assert choice.finish_reason == "length"
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert '{"city": "\\"Rome\\" <ά>"'.startswith(call.function.arguments[:10])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice is 'required': input should be 'auto' or 'none'"),
        ({"tools": [{"type": "function", "function": {"name": "has space"}}]}, "tools.0.function.name"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls is not a supported parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format is not a supported parameter"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs is 2: input should be 0"),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant"}]}, "an assistant's message needs content or tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}]},
            "this model has no channel for reasoning_content",
        ),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "give max_tokens or max_completion_tokens, not both"),
    ],
)
def test_refusals_of_chat(changes: dict[str, Any], message: str) -> None:
    with talking("x") as (client, engine):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **changes})
        assert message in refusal.value.message
        assert not engine.asked


def test_content_may_come_in_parts() -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    with talking("x") as (client, engine):
        client.chat.completions.create(model=MODEL, messages=parts)
        assert tokenizer().decode(list(engine.asked[0][0])) == "<|bos|><|user|>ab<|end_of_msg|><|assistant|>"
