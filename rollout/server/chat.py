"""From chat messages to prompt tokens, through the model's own template, and which way its answers are to be read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from miles_k3.rollout.server.errors import ApiError
from miles_k3.rollout.server.schemas import AssistantMessage, ChatBody, Message, ToolMessage
from miles_k3.rollout.server.text import AnswerText, LiteralMarks, Piece, special_marks
from miles_k3.rollout.server.xtml import Channel, ChannelReader, Part

_PROBE = [{"role": "user", "content": "?"}]
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_OPENED: dict[str, Channel] = {"<|open|>think<|sep|>": "think", "<|open|>response<|sep|>": "response"}
_TAIL_TOKENS = 16  # hold the longest of _OPENED, also spelled in characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """`channel`: what the template opened for the answer. `tools`: calls may come."""

    token_ids: list[int]
    channel: Channel | None
    tools: bool


class Chat:
    """The tokenizer and its template. Tokenizing happens on a thread of its own: a long prompt takes a while."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.marks = special_marks(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.knows_tools = self._render(_PROBE, [_PROBE_TOOL]) != self._render(_PROBE, None)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def tokenize(self, text: str) -> list[int]:
        """Tokens of plain text, with what the tokenizer puts before every text."""
        return await self._in_thread(self.tokenizer.encode, text)

    async def prompt(self, body: ChatBody) -> ChatPrompt:
        """Raises ApiError 400 for messages or tools that the template doesn't take."""
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.tool_choice != "none" else []
        if tools and not self.knows_tools:
            raise ApiError(400, "this model's chat template doesn't show tools to the model", param="tools")
        messages = _for_template(body.messages)
        try:
            token_ids = await self._in_thread(self._render, messages, tools or None)
        except (TemplateError, TypeError, ValueError, KeyError) as e:
            raise ApiError(400, f"the chat template doesn't take these messages: {e}", param="messages") from e
        tail = self.tokenizer.decode(token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        channel: Channel | None = next((channel for end, channel in _OPENED.items() if tail.endswith(end)), None)
        return ChatPrompt(token_ids=token_ids, channel=channel, tools=bool(tools))

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
        )

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As templates expect them: plain text, arguments as objects, results of tools with their tool's name."""
    called: dict[str, str] = {}
    out = []
    for i, message in enumerate(messages):
        content = message.content
        fields: dict[str, Any] = {"role": message.role, "content": _plain(content)}
        if isinstance(message, AssistantMessage):
            if message.reasoning_content is not None:
                fields["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                fields["tool_calls"] = [
                    {"id": c.id, "type": "function",
                     "function": {"name": c.function.name, "arguments": _arguments(c.function.arguments)}}
                    for c in message.tool_calls
                ]  # fmt: skip
                called |= {c.id: c.function.name for c in message.tool_calls}
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in called:
                raise ApiError(
                    400,
                    f"messages.{i} answers tool call {message.tool_call_id!r}, which no message before it made",
                    param="messages",
                )
            fields |= {"tool_call_id": message.tool_call_id, "name": called[message.tool_call_id]}
        out.append(fields)
    return out


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _arguments(text: str) -> Any:
    """The object that the arguments spell; text that spells none stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class ChatReader:
    """One answer's tokens read as reasoning, content and tool calls."""

    def __init__(self, chat: Chat, prompt: ChatPrompt, *, stop: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        self._text = AnswerText(chat.tokenizer, stop=stop, stop_token_ids=stop_token_ids, marks=chat.marks)
        structured = bool(chat.marks) or prompt.channel is not None or prompt.tools
        self._channels = ChannelReader(prompt.channel) if structured else None
        self._literal = LiteralMarks() if structured and not chat.marks else None

    @property
    def num_calls(self) -> int:
        return self._channels.num_calls if self._channels else 0

    def feed(self, tokens: Sequence[int]) -> list[Part]:
        pieces = self._text.feed(tokens)
        return self._read(self._literal.feed(pieces) if self._literal else pieces)

    def finish(self) -> list[Part]:
        pieces = self._text.finish()
        if self._literal:
            pieces = [*self._literal.feed(pieces), *self._literal.finish()]
        return self._read(pieces) + (self._channels.finish() if self._channels else [])

    def _read(self, pieces: Sequence[Piece]) -> list[Part]:
        if self._channels:
            return self._channels.feed(pieces)
        return [Part(kind="content", text=piece) for piece in pieces if isinstance(piece, str)]
