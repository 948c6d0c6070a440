"""The official client talks to the server, and hears what the engine itself would say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import openai
import pytest
from helpers.servers import MODEL, Running, running_server, tiny_engine, tokenizer

from miles_k3.types import Completion, SamplingParams

QUESTION: Any = [{"role": "user", "content": "What is 3 + 4?"}]
PROMPT = "State the final answer to the following arithmetic problem: 12 + 34 ="
EOS = 2


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running_server(tiny_engine(), default_max_tokens=40) as running:
        yield running


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def by_engine(token_ids: list[int], **params: Any) -> Completion:
    """What an engine of its own answers."""
    engine = tiny_engine()
    return asyncio.run(engine.generate(token_ids, SamplingParams(stop_token_ids=(EOS,), **params)))


def chat_tokens(messages: Any) -> list[int]:
    return tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, f"{MODEL}@base"]
    assert client.models.retrieve(f"{MODEL}@base").id == f"{MODEL}@base"
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist; there are tiny-k3"):
        client.models.retrieve("other")


def test_chat_says_what_the_engine_says(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, seed=5, temperature=0.7, top_p=0.9, max_completion_tokens=9, logprobs=True
    )
    own = by_engine(chat_tokens(QUESTION), seed=5, temperature=0.7, top_p=0.9, max_new_tokens=9)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == own.text
    assert choice.finish_reason == own.finish_reason
    assert choice.logprobs
    assert choice.logprobs.content
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(own.logprobs, abs=1e-5)
    assert [entry.token for entry in choice.logprobs.content] == [tokenizer().decode([t]) for t in own.token_ids]
    assert answer.usage
    assert answer.usage.completion_tokens == len(own.token_ids)
    assert answer.usage.prompt_tokens == len(chat_tokens(QUESTION))


def test_completion_says_what_the_engine_says(client: openai.OpenAI) -> None:
    own = by_engine(tokenizer().encode(PROMPT), seed=5, temperature=3.0, max_new_tokens=24)
    asked: Any = {"model": MODEL, "seed": 5, "temperature": 3.0, "max_tokens": 24}
    answer = client.completions.create(**asked, prompt=PROMPT, logprobs=0)
    assert answer.choices[0].text == own.text
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.token_logprobs == pytest.approx(own.logprobs, abs=1e-5)
    assert logprobs.tokens
    lengths = [len(token) for token, id_ in zip(logprobs.tokens, own.token_ids, strict=True) if id_ != EOS]
    assert logprobs.text_offset
    assert logprobs.text_offset[: len(lengths)] == list(accumulate(lengths, initial=0))[: len(lengths)]
    assert sum(lengths) == len(own.text) > 0
    tokens = client.completions.create(**asked, prompt=tokenizer().encode(PROMPT))
    assert tokens.choices[0].text == own.text


@pytest.mark.parametrize(
    "greedy", [{"temperature": 0.0}, {"temperature": 50.0, "extra_body": {"top_k": 1, "ignore_eos": True}}]
)
def test_greedy_answers_need_no_seed(client: openai.OpenAI, greedy: dict[str, Any]) -> None:
    common: Any = {"model": MODEL, "prompt": "1 2 3", "max_tokens": 12, "extra_body": {"ignore_eos": True}, **greedy}
    texts = {client.completions.create(**common, seed=seed).choices[0].text for seed in range(3)}
    engine = tiny_engine()
    own = engine.generate(tokenizer().encode("1 2 3"), SamplingParams(temperature=0.0, max_new_tokens=12))
    assert texts == {asyncio.run(own).text}


def test_a_chat_that_names_no_limit_ends_at_the_servers(served: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"ignore_eos": True})
    assert answer.usage
    assert answer.usage.completion_tokens == served.server.options.default_max_tokens == 40


def test_streams_add_up_to_the_whole(client: openai.OpenAI) -> None:
    common: Any = {"model": MODEL, "messages": QUESTION, "seed": 7, "n": 3, "max_tokens": 12, "temperature": 2.0}
    common |= {"logprobs": True, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**common)
    chunks = list(client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    for choice in whole.choices:
        deltas = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(d.delta.content or "" for d in deltas) == choice.message.content
        assert [d.finish_reason for d in deltas if d.finish_reason] == [choice.finish_reason]
        told = [e for d in deltas if d.logprobs for e in d.logprobs.content or ()]
        assert choice.logprobs
        assert choice.logprobs.content
        assert [(e.token, e.bytes) for e in told] == [(e.token, e.bytes) for e in choice.logprobs.content]
        assert [e.logprob for e in told] == pytest.approx([e.logprob for e in choice.logprobs.content], abs=1e-4)
        assert deltas[0].delta.role == "assistant"
    assert len({choice.message.content for choice in whole.choices}) > 1


def test_several_prompts_and_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One", "Two"], n=2, seed=3, max_tokens=5, extra_body={"ignore_eos": True}
    )
    alone = client.completions.create(
        model=MODEL, prompt="Two", n=2, seed=3, max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]
    assert answer.usage
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == len(tokenizer().encode("One")) + len(tokenizer().encode("Two"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20


def test_stop_strings_cut_streams_too(client: openai.OpenAI) -> None:
    common: Any = {"model": MODEL, "prompt": PROMPT, "seed": 1, "max_tokens": 40, "temperature": 5.0}
    common |= {"extra_body": {"ignore_eos": True}}
    free = client.completions.create(**common).choices[0].text
    stop = free[9:12]
    cut = client.completions.create(**common, stop=[stop, "never there"]).choices[0]
    assert cut.text == free[: free.index(stop)]
    assert cut.finish_reason == "stop"
    stream = client.completions.create(**common, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == cut.text


def test_the_asynchronous_client(served: Running) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=QUESTION, seed=2, max_tokens=8)
            stream = await client.chat.completions.create(
                model=MODEL, messages=QUESTION, seed=2, max_tokens=8, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return [(await whole).choices[0].message.content or "", text]

    first, second = asyncio.run(ask())
    assert first == second


def test_a_negative_seed_is_a_seed(client: openai.OpenAI) -> None:
    own = by_engine(tokenizer().encode(PROMPT), seed=-1, temperature=3.0, max_new_tokens=24)
    asked: Any = {"model": MODEL, "prompt": PROMPT, "temperature": 3.0, "max_tokens": 24}
    assert client.completions.create(**asked, seed=-1).choices[0].text == own.text


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    common: Any = {"model": MODEL, "prompt": "x", "max_tokens": 20, "temperature": 2.0}
    texts = {client.completions.create(**common, extra_body={"ignore_eos": True}).choices[0].text for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias is not a supported parameter; supported are model, temperature"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not a supported parameter"),
        ({"echo": True}, "echo is not a supported parameter"),
        ({"extra_body": {"invented": 1}}, "invented is not a supported parameter"),
        ({"logprobs": 3}, "logprobs is 3: input should be 0"),
        ({"temperature": -1}, "temperature is -1: input should be greater than or equal to 0"),
        ({"temperature": 1e-45, "logprobs": 0}, "temperature is refused: it is 1e-45; expected 0, which is greedy"),
        ({"temperature": "1"}, "temperature is '1': input should be a valid number"),
        ({"top_p": 0}, "top_p is 0: input should be greater than 0"),
        ({"n": 0}, "n is 0"),
        ({"seed": 2**63}, "seed is 9223372036854775808: input should be less than 9223372036854775808"),
        ({"seed": -(2**63) - 1}, "seed is -9223372036854775809: input should be greater than or equal to -9223372036"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt is 7: input should be a valid string or is 7: input should be a valid list"),
        ({"prompt": [1, 700]}, "prompt has token 700; the model's vocabulary is 0..511"),
        ({"prompt": "word " * 600}, "sequences are limited to 512 tokens, this request has"),
        ({"max_tokens": 512}, "sequences are limited to 512 tokens, this request has"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams only"),
    ],
)
def test_refused_parameters(client: openai.OpenAI, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(**{"model": MODEL, "prompt": "x", **changes})
    assert message in refusal.value.message
    assert refusal.value.type == "invalid_request_error"


def test_parameters_that_change_nothing_are_taken(client: openai.OpenAI) -> None:
    client.completions.create(
        model=MODEL, prompt="x", max_tokens=1, logit_bias={}, presence_penalty=0, frequency_penalty=0.0, best_of=1,
        echo=False, suffix=None, extra_body={"user": None},
    )  # fmt: skip


def test_unknown_models_and_versions(client: openai.OpenAI) -> None:
    for model in ("other", f"{MODEL}@7", f"{MODEL}@", ""):
        with pytest.raises(openai.NotFoundError, match="does not exist; there are tiny-k3, tiny-k3@base"):
            client.completions.create(model=model, prompt="x")
