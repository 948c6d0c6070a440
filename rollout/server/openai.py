"""Answers in OpenAI's words: whole ones and chunks, for completions and for chat."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from miles_k3.rollout.server.backend import News
from miles_k3.rollout.server.chat import ChatReader
from miles_k3.rollout.server.errors import ApiError
from miles_k3.rollout.server.flight import Flight
from miles_k3.rollout.server.state import new_id
from miles_k3.rollout.server.text import AnswerText
from miles_k3.rollout.server.xtml import Part
from miles_k3.types import FinishReason

DONE = "[DONE]"
Fields = dict[str, Any]
TokenText = Callable[[int], tuple[str, list[int] | None]]


class Choice(Protocol):
    """One answer on its way. Deltas are the choice's fields of a chunk, without index and finish_reason."""

    def take(self, news: News) -> list[Fields]: ...
    def finish_reason(self, reason: FinishReason) -> str: ...
    def whole(self) -> Fields: ...


class Answer:
    """All choices of one request. `prompt_tokens` counts each prompt once."""

    def __init__(
        self, flight: Flight, choices: Sequence[Choice], *, kind: str, prefix: str, model: str, prompt_tokens: int
    ) -> None:
        self._flight, self._choices, self._kind, self._prompt_tokens = flight, choices, kind, prompt_tokens
        self._completion_tokens = 0
        self._head: Fields = {
            "id": new_id(prefix),
            "created": int(time.time()),
            "model": model,
            "adapter_version": flight.generations[0].version,
        }

    async def whole(self) -> Fields:
        reasons: dict[int, str] = {}
        async for index, news in self._flight.news():
            self._completion_tokens += len(news.tokens)
            self._choices[index].take(news)
            if news.completion is not None:
                reasons[index] = self._reason(index, news.completion.finish_reason)
        choices = [
            {"index": i, **choice.whole(), "finish_reason": reasons[i]} for i, choice in enumerate(self._choices)
        ]
        return {**self._head, "object": self._kind, "choices": choices, "usage": self._usage()}

    async def chunks(self, *, usage: bool, first: Fields | None) -> AsyncIterator[Fields | str]:
        """`first`: the delta that opens each choice."""
        kind = self._kind if self._kind == "text_completion" else f"{self._kind}.chunk"
        head = {**self._head, "object": kind, **({"usage": None} if usage else {})}

        def chunk(index: int, fields: Fields, reason: str | None = None) -> Fields:
            return {**head, "choices": [{"index": index, **fields, "finish_reason": reason}]}

        for index in range(len(self._choices) if first is not None else 0):
            yield chunk(index, dict(first or {}))
        async for index, news in self._flight.news():
            self._completion_tokens += len(news.tokens)
            deltas = self._choices[index].take(news)
            reason = None if news.completion is None else self._reason(index, news.completion.finish_reason)
            for fields in deltas:
                yield chunk(index, fields)
            if reason is not None:
                yield chunk(index, {"delta": {}} if first is not None else {"text": "", "logprobs": None}, reason)
        if usage:
            yield {**head, "choices": [], "usage": self._usage()}
        yield DONE

    def _reason(self, index: int, reason: FinishReason) -> str:
        if reason is FinishReason.ABORT:
            raise ApiError(503, "the server is shutting down and ended this answer", code="aborted", retry_after_s=30)
        return self._choices[index].finish_reason(reason)

    def _usage(self) -> Mapping[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }


class TextChoice:
    """An answer of /v1/completions."""

    def __init__(self, text: AnswerText, token_text: TokenText | None) -> None:
        """`token_text` where log-probabilities are wanted."""
        self._text, self._token_text = text, token_text
        self._length = 0
        self._parts: list[str] = []
        self._logprobs: Fields = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": None}

    def take(self, news: News) -> list[Fields]:
        text, logprobs = "", self._empty()
        for token, logprob in zip(news.tokens, news.logprobs, strict=True):
            if logprobs is not None and self._token_text is not None:
                logprobs["tokens"].append(self._token_text(token)[0])
                logprobs["token_logprobs"].append(logprob)
                logprobs["text_offset"].append(self._length + len(text))
            text += _plain(self._text.feed([token]))
        if news.ended:
            text += _plain(self._text.finish())
        self._length += len(text)
        self._parts.append(text)
        if logprobs is not None:
            for key in ("tokens", "token_logprobs", "text_offset"):
                self._logprobs[key] += logprobs[key]
        return [{"text": text, "logprobs": logprobs}] if text or (logprobs and logprobs["tokens"]) else []

    def _empty(self) -> Fields | None:
        if self._token_text is None:
            return None
        return {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": None}

    def finish_reason(self, reason: FinishReason) -> str:
        return str(reason)

    def whole(self) -> Fields:
        return {"text": "".join(self._parts), "logprobs": self._logprobs if self._token_text else None}


class ChatChoice:
    """An answer of /v1/chat/completions."""

    def __init__(self, reader: ChatReader, token_text: TokenText | None) -> None:
        self._reader, self._token_text = reader, token_text
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Fields] = []
        self._logprobs: list[Fields] = []

    def take(self, news: News) -> list[Fields]:
        parts = self._reader.feed(news.tokens)
        if news.ended:
            parts += self._reader.finish()
        deltas = [{"delta": self._delta(part)} for part in parts]
        if self._token_text is not None and news.tokens:
            told = [self._logprob(t, p) for t, p in zip(news.tokens, news.logprobs, strict=True)]
            self._logprobs += told
            deltas = deltas or [{"delta": {}}]
            deltas[0]["logprobs"] = {"content": told, "refusal": None}
        return deltas

    def _delta(self, part: Part) -> Fields:
        if part.kind == "content":
            self._content.append(part.text)
            return {"content": part.text}
        if part.kind == "reasoning":
            self._reasoning.append(part.text)
            return {"reasoning_content": part.text}
        if part.name is not None:
            call = {"id": new_id("call"), "type": "function", "function": {"name": part.name, "arguments": ""}}
            self._calls.append(call)
            return {"tool_calls": [{"index": part.call, **call, "function": dict(call["function"])}]}
        self._calls[part.call]["function"]["arguments"] += part.text
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}

    def _logprob(self, token: int, logprob: float) -> Fields:
        assert self._token_text is not None
        text, spelled = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": spelled, "top_logprobs": []}

    def finish_reason(self, reason: FinishReason) -> str:
        return "tool_calls" if reason is FinishReason.STOP and self._calls else str(reason)

    def whole(self) -> Fields:
        content = "".join(self._content)
        message: Fields = {"role": "assistant", "content": content if content or not self._calls else None}
        message["refusal"] = None
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = {"content": self._logprobs, "refusal": None} if self._token_text is not None else None
        return {"message": message, "logprobs": logprobs}


def _plain(pieces: Sequence[Any]) -> str:
    return "".join(pieces)
