"""What may be asked of an answer: the fields of OpenAI's endpoints that the gateway takes, and its own."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

Message = Mapping[str, Any]
"""``{"role": "user", "content": "Hello"}``; role is system, user, assistant or tool."""


class Options(TypedDict, total=False):
    """Every option may be left out. ``temperature`` 0 takes the likeliest token; ``seed`` makes answers repeatable.

    ``response_format`` and ``structured_outputs`` say what the answer has to be (docs/api.md).
    """

    n: int
    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    ignore_eos: bool
    logit_bias: Mapping[str, float]
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]
    cache_salt: str
    return_token_ids: bool
    add_special_tokens: bool
    user: str
    priority: int
    service_tier: str | None


class ChatOptions(Options, total=False):
    max_completion_tokens: int | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    logprobs: bool
    top_logprobs: int | None


class CompletionOptions(Options, total=False):
    """``logprobs`` is how many of the likeliest tokens to report; ``echo`` puts the prompt before the completion."""

    logprobs: int | None
    echo: bool


class CacheOptions(TypedDict, total=False):
    """What is said of a context cache when it is made. ``ttl`` (seconds from now) and ``expired_at`` (a Unix second)
    exclude each other."""

    tools: Sequence[Mapping[str, Any]]
    name: str
    description: str
    metadata: Mapping[str, str]
    tags: Sequence[str]
    ttl: int | None
    expired_at: int | None


class ListOptions(TypedDict, total=False):
    """Which part of a list: ``order`` is "desc" or "asc", ``after`` and ``before`` exclude each other. Tags have no
    ``metadata``."""

    limit: int
    order: str
    after: str | None
    before: str | None
    metadata: Mapping[str, str]
