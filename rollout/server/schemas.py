"""What clients may send. Anything else is refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from miles_k3.types import COLDEST

# OpenAI's parameters that this server doesn't have, with the values at which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}


def _not_next_to_0(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(f"it is {temperature}; expected 0, which is greedy, or {COLDEST:g} or more")
    return temperature


Token = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Text = Annotated[str, Field(max_length=4_000_000)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False), AfterValidator(_not_next_to_0)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Body(BaseModel):
    """Strict: a number in quotes is no number. null stands for a parameter that was left out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            key: value
            for key, value in given.items()
            if key in cls.model_fields or not (value is None or _is_neutral(key, value))
        }


def _is_neutral(key: str, value: Any) -> bool:
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
               for neutral in NEUTRAL.get(key, ()))  # fmt: skip


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingBody(Body):
    """What completions and chat share. `top_k` and `ignore_eos` are additions to OpenAI's."""

    model: Text
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams only; set stream: true or leave it out")
        return self


class CompletionBody(SamplingBody):
    """`logprobs`: 0 gives those of the sampled tokens; alternatives are not computed."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=128)]
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=128)]
    )
    max_tokens: Count | None = None
    logprobs: Literal[0] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text


class ToolCall(Body):
    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


Content = Text | Annotated[list[TextPart], Field(max_length=4096)]


class SystemMessage(Body):
    role: Literal["system"]
    content: Content


class UserMessage(Body):
    role: Literal["user"]
    content: Content


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("an assistant's message needs content or tool_calls")
        return self


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChatBody(SamplingBody):
    """`logprobs: true` gives those of the sampled tokens; `top_logprobs` must be 0: alternatives are not computed.

    `tool_choice` is auto or none: nothing forces a call.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none"] | None = None


class GenerateSampling(Body):
    """The fields of the engine's own `SamplingParams`; the stop token is the model's unless others are given."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    max_new_tokens: Count = 64
    stop: Annotated[list[StopText], Field(max_length=16)] = []
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    seed: Seed | None = None


class GenerateBody(Body):
    """Tokens in. `model` as in /v1/models; without it, or `adapter_version`, the newest adapter."""

    input_ids: Annotated[list[Token], Field(min_length=1)]
    sampling_params: GenerateSampling = GenerateSampling()
    model: Text | None = None
    adapter_version: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    stream: bool = False

    @model_validator(mode="after")
    def _one_name(self) -> GenerateBody:
        if self.model is not None and self.adapter_version is not None:
            raise ValueError("give model or adapter_version, not both")
        return self


class LoadBody(Body):
    """`path`: a PEFT folder below the server's --adapter-root. `version`: refuse unless it is the next one."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    version: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    pin: bool = False
