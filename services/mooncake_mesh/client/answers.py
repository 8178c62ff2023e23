"""Answers as values, named as in the openai package.

``raw`` is the JSON object that a value was made of, with whatever a newer gateway adds to it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mooncake_proto.errors import MalformedMessage

Json = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts. ``cached_tokens`` of the prompt had their KV in the pool already."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a function that the request offered; ``arguments`` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """``content`` is empty where there are only calls."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """``finish_reason`` is "stop", "length" or "tool_calls". ``logprobs`` is OpenAI's object, where asked for."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: Json | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletion:
    """A whole answer; ``text`` is that of its first choice."""

    id: str
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    raw: Json = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        return self.choices[0].message.content


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new of a message. New parts of tool calls are in the chunk's ``raw``, as OpenAI streams them."""

    content: str
    role: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChunkChoice:
    """``finish_reason`` is None but in the last chunk of its choice."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: Json | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionChunk:
    """A part of an answer. The last chunk of a stream has the usage and no choices.

    ``text`` is what it adds to the first choice, "" where it adds nothing.
    """

    id: str
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | None
    raw: Json = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        return "".join(choice.delta.content for choice in self.choices if choice.index == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChoice:
    """Of a whole answer, or of a chunk: then ``text`` is what is new, ``finish_reason`` None but in the last."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: Json | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole completion, or a chunk of one: only the last chunk has the usage, and no choices.

    ``text`` is that of the first choice.
    """

    id: str
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None
    raw: Json = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        return "".join(choice.text for choice in self.choices if choice.index == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """``created`` is when the gateway that answered was started, in Unix seconds."""

    id: str
    created: int
    owned_by: str
    max_model_len: int


def read_chat(data: bytes) -> ChatCompletion:
    """Raises MalformedMessage, as all of these."""

    def read(raw: Json) -> ChatCompletion:
        choices = tuple(
            ChatChoice(
                index=choice["index"],
                message=_message(choice["message"]),
                finish_reason=choice["finish_reason"],
                logprobs=choice.get("logprobs"),
            )
            for choice in raw["choices"]
        )
        return ChatCompletion(**_head(raw), choices=choices, usage=_usage(raw["usage"]), raw=raw)

    return read_json(data, read)


def read_chat_chunk(data: bytes) -> ChatCompletionChunk:
    def read(raw: Json) -> ChatCompletionChunk:
        choices = tuple(
            ChatChunkChoice(
                index=choice["index"],
                delta=Delta(role=choice["delta"].get("role"), content=choice["delta"].get("content") or ""),
                finish_reason=choice.get("finish_reason"),
                logprobs=choice.get("logprobs"),
            )
            for choice in raw["choices"]
        )
        return ChatCompletionChunk(**_head(raw), choices=choices, usage=_optional_usage(raw), raw=raw)

    return read_json(data, read)


def read_completion(data: bytes) -> Completion:
    """A whole completion or a chunk."""

    def read(raw: Json) -> Completion:
        choices = tuple(
            CompletionChoice(
                index=choice["index"],
                text=choice["text"],
                finish_reason=choice.get("finish_reason"),
                logprobs=choice.get("logprobs"),
            )
            for choice in raw["choices"]
        )
        return Completion(**_head(raw), choices=choices, usage=_optional_usage(raw), raw=raw)

    return read_json(data, read)


def read_models(data: bytes) -> tuple[Model, ...]:
    def read(raw: Json) -> tuple[Model, ...]:
        return tuple(
            Model(
                id=entry["id"],
                created=entry["created"],
                owned_by=entry["owned_by"],
                max_model_len=entry["max_model_len"],
            )
            for entry in raw["data"]
        )

    return read_json(data, read)


def _message(raw: Json) -> ChatMessage:
    calls = tuple(
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in raw.get("tool_calls") or ()
    )
    content = raw["content"]
    return ChatMessage(role=raw["role"], content="" if content is None and calls else content, tool_calls=calls)


def read_json(data: bytes, read: Callable[[Json], T]) -> T:
    """What *read* makes of the JSON object. Raises MalformedMessage where it finds another shape than it expects."""
    try:
        return read(json.loads(data))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise MalformedMessage(f"the gateway's answer is not as expected: {error!r}") from error


def _head(raw: Json) -> dict[str, Any]:
    return {"id": raw["id"], "created": raw["created"], "model": raw["model"]}


def _optional_usage(raw: Json) -> Usage | None:
    usage = raw.get("usage")
    return None if usage is None else _usage(usage)


def _usage(raw: Json) -> Usage:
    return Usage(
        prompt_tokens=raw["prompt_tokens"],
        completion_tokens=raw["completion_tokens"],
        total_tokens=raw["total_tokens"],
        cached_tokens=raw["prompt_tokens_details"]["cached_tokens"],
    )
