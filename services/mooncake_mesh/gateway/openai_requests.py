"""Bodies of OpenAI's chat and completion endpoints, validated: an object that exists is within every bound.

Both doors (HTTP, ZeroMQ SDK) parse here, so a request means the same on either. Fields that neither OpenAI nor this
server know are ignored. ``max_tokens`` 0 is refused: there is no answer to give.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import structlog

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.json_fields import (
    Fields,
    UnsupportedParameter,
    checked_array,
    checked_integer,
    checked_object,
    checked_string,
)
from mooncake_mesh.gateway.structured_output import GrammarText, parse_structured_output
from mooncake_mesh.gateway.text import TextRules
from mooncake_mesh.gateway.tool_form import call_grammar
from mooncake_mesh.gateway.tool_requests import parse_tool_calls, parse_tool_use
from mooncake_mesh.gateway.tools import ChatMessage, ToolUse
from mooncake_mesh.policy.request_class import BATCH_PRIORITY, MOST_URGENT
from mooncake_proto.serving import Sampling

log = structlog.get_logger()

_T = TypeVar("_T")

MAX_CHOICES: Final = 16
MAX_STOP_STRINGS: Final = 4
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_COMPLETION_LOGPROBS: Final = 5
MAX_CHAT_LOGPROBS: Final = 20
MAX_PROMPTS: Final = 16
MAX_MESSAGES: Final = 4096
MAX_CONTENT_PARTS: Final = 256
MAX_TEXT_CHARS: Final = 1 << 24
MAX_LABEL_CHARS: Final = 256
MAX_BIASED_TOKENS: Final = 1024
MAX_BIAS: Final = 100
MAX_TOKEN_ID: Final = (1 << 31) - 1
DEFAULT_COMPLETION_TOKENS: Final = 16
_TIERS: Final = ("auto", "default", "flex")
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """``include_usage`` adds a last chunk with the usage; ``continuous_usage_stats`` puts it into every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What both endpoints share. ``stream`` is None for one whole answer.

    ``priority`` and ``fairness_id`` are as in TokenRequest.

    ``sampling.seed`` and ``sampling.grammar`` are not set yet: ``seed`` None asks for a random one, and ``grammar``
    lacks what only the model's tokenizer knows. ``max_tokens`` None is the endpoint's default; ``max_tokens_param`` is
    the name the client used for it.
    """

    model: str
    n: int
    stream: StreamOptions | None
    sampling: Sampling
    grammar: GrammarText | None
    seed: int | None
    max_tokens: int | None
    max_tokens_param: str
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    text: TextRules
    cache_salt: str
    return_token_ids: bool
    add_special_tokens: bool
    priority: int
    fairness_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """``tool_use`` is None where no tools are offered."""

    options: GenerationOptions
    messages: tuple[ChatMessage, ...]
    tool_use: ToolUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """``prompts`` are texts or token ids, 1 to MAX_PROMPTS of them. ``echo`` puts the prompt before the completion."""

    options: GenerationOptions
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Raises InvalidRequest."""
    fields = Fields(body)
    messages = parse_messages(fields)
    fields.refuse(("functions", "function_call"), why="use tools and tool_choice")
    tool_use = parse_tool_use(fields)
    fields.refuse(("audio", "prediction", "web_search_options"), why="this server answers with plain text")
    if fields.raw("modalities") not in (None, ["text"]):
        raise UnsupportedParameter(
            "modalities is not supported: this server answers with plain text", param="modalities"
        )
    logprobs = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs", low=0, high=MAX_CHAT_LOGPROBS)
    if top and not logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    options = _options(fields, top_logprobs=(top or 0) if logprobs else None, add_special_tokens=False)
    called = None if tool_use is None else call_grammar(tool_use)
    if called is not None:
        if options.grammar is not None:
            message = f"{options.grammar.param} excludes a tool_choice that asks for a call"
            raise InvalidRequest(message, param=options.grammar.param)
        options = replace(options, grammar=called)
    _log_unknown(fields)
    return ChatRequest(options=options, messages=messages, tool_use=tool_use)


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Raises InvalidRequest."""
    fields = Fields(body)
    prompts = _prompts(fields)
    if fields.raw("suffix") not in (None, ""):
        raise UnsupportedParameter("suffix is not supported: the models here do not fill gaps", param="suffix")
    top_logprobs = fields.integer("logprobs", low=0, high=MAX_COMPLETION_LOGPROBS)
    echo = fields.boolean("echo") or False
    if echo and top_logprobs is not None:
        raise UnsupportedParameter("echo together with logprobs is not supported", param="echo")
    options = _options(fields, top_logprobs=top_logprobs, add_special_tokens=True)
    best_of = fields.integer("best_of", low=1, high=MAX_CHOICES)
    if best_of is not None and best_of != options.n:
        raise UnsupportedParameter("best_of other than n is not supported", param="best_of")
    _log_unknown(fields)
    return CompletionRequest(options=options, prompts=prompts, echo=echo)


def _options(fields: Fields, *, top_logprobs: int | None, add_special_tokens: bool) -> GenerationOptions:
    model = fields.string("model", longest=MAX_LABEL_CHARS)
    if model is None:
        raise InvalidRequest("model is required", param="model")
    if fields.raw("prompt_logprobs") is not None:
        message = "prompt_logprobs is not supported: prompts are computed without their logits"
        raise UnsupportedParameter(message, param="prompt_logprobs")
    max_tokens, max_tokens_param = _max_tokens(fields)
    min_tokens = fields.integer("min_tokens", low=0, high=MAX_TOKEN_ID) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is more than {max_tokens_param}", param="min_tokens")
    return GenerationOptions(
        model=model,
        n=_given(fields.integer("n", low=1, high=MAX_CHOICES), 1),
        stream=_stream(fields),
        sampling=_sampling(fields, top_logprobs),
        grammar=parse_structured_output(fields),
        seed=fields.integer("seed", low=-(1 << 63), high=(1 << 63) - 1),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        stop_token_ids=_stop_token_ids(fields),
        ignore_eos=fields.boolean("ignore_eos") or False,
        text=TextRules(
            stop=_stop(fields),
            include_stop=fields.boolean("include_stop_str_in_output") or False,
            skip_special=_given(fields.boolean("skip_special_tokens"), True),
            min_tokens=min_tokens,
        ),
        cache_salt=fields.string("cache_salt", longest=MAX_LABEL_CHARS) or "",
        return_token_ids=fields.boolean("return_token_ids") or False,
        add_special_tokens=_given(fields.boolean("add_special_tokens"), add_special_tokens),
        priority=_priority(fields),
        fairness_id=fields.string("user", longest=MAX_LABEL_CHARS) or "",
    )


def _priority(fields: Fields) -> int:
    """vLLM's ``priority``, lower first; and OpenAI's ``service_tier``, whose ``flex`` is work for idle hours."""
    priority = fields.integer("priority", low=MOST_URGENT, high=BATCH_PRIORITY)
    tier = fields.string("service_tier", longest=MAX_LABEL_CHARS)
    if tier not in (None, *_TIERS):
        raise InvalidRequest(f"service_tier must be one of {', '.join(_TIERS)}", param="service_tier")
    if priority is not None and tier == "flex":
        raise InvalidRequest("priority and service_tier flex exclude each other: give one", param="service_tier")
    return BATCH_PRIORITY if tier == "flex" else _given(priority, 0)


def _sampling(fields: Fields, top_logprobs: int | None) -> Sampling:
    top_p = _given(fields.number("top_p", low=0, high=1), 1.0)
    if top_p == 0:
        raise InvalidRequest("top_p must be more than 0", param="top_p")
    repetition_penalty = _given(fields.number("repetition_penalty", low=0, high=10), 1.0)
    if repetition_penalty == 0:
        raise InvalidRequest("repetition_penalty must be more than 0", param="repetition_penalty")
    return Sampling(
        temperature=_given(fields.number("temperature", low=0, high=2), 1.0),
        top_p=top_p,
        # -1 is how vLLM's clients switch the rule off
        top_k=max(0, _given(fields.integer("top_k", low=-1, high=MAX_TOKEN_ID), 0)),
        min_p=_given(fields.number("min_p", low=0, high=1), 0.0),
        repetition_penalty=repetition_penalty,
        presence_penalty=_given(fields.number("presence_penalty", low=-2, high=2), 0.0),
        frequency_penalty=_given(fields.number("frequency_penalty", low=-2, high=2), 0.0),
        top_logprobs=top_logprobs,
        logit_bias=_logit_bias(fields),
    )


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    given = fields.object("logit_bias")
    names = [] if given is None else given.unknown()
    if given is None or not names:
        return ()
    if len(names) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"logit_bias biases {len(names)} tokens, at most {MAX_BIASED_TOKENS}", param="logit_bias")
    biases: dict[int, float] = {}
    for name in names:
        if not (name.isascii() and name.isdecimal()) or int(name[:12]) > MAX_TOKEN_ID:
            raise InvalidRequest(f"logit_bias: {name[:32]!r} is no token id", param="logit_bias")
        bias = given.number(name, low=-MAX_BIAS, high=MAX_BIAS)
        if bias:
            biases[int(name)] = bias
    return tuple(sorted(biases.items()))


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    older = fields.integer("max_tokens", low=1, high=MAX_TOKEN_ID)
    newer = fields.integer("max_completion_tokens", low=1, high=MAX_TOKEN_ID)
    if older is not None and newer is not None and older != newer:
        raise InvalidRequest("max_tokens and max_completion_tokens differ: give one", param="max_completion_tokens")
    return (older, "max_tokens") if newer is None else (newer, "max_completion_tokens")


def _stream(fields: Fields) -> StreamOptions | None:
    streaming = fields.boolean("stream") or False
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions() if streaming else None
    if not streaming:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    return StreamOptions(
        include_usage=options.boolean("include_usage") or False,
        continuous_usage_stats=options.boolean("continuous_usage_stats") or False,
    )


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    entries = [value] if isinstance(value, str) else checked_array(value, "stop", longest=MAX_STOP_STRINGS)
    stop = tuple(checked_string(entry, "stop", longest=MAX_STOP_CHARS) for entry in entries)
    if "" in stop:
        raise InvalidRequest("stop must not hold an empty string", param="stop")
    return tuple(dict.fromkeys(stop))


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    entries = fields.array("stop_token_ids", longest=MAX_STOP_TOKEN_IDS) or []
    return tuple(checked_integer(entry, "stop_token_ids", low=0, high=MAX_TOKEN_ID) for entry in entries)


def parse_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """The conversation in ``messages``. Raises InvalidRequest, also for a result of a tool that nobody called."""
    entries = fields.array("messages", longest=MAX_MESSAGES)
    if not entries:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    messages: list[ChatMessage] = []
    called: dict[str, str] = {}
    for index, entry in enumerate(entries):
        message = _message(checked_object(entry, f"messages[{index}]"), called)
        called.update((call.id, call.name) for call in message.tool_calls)
        messages.append(message)
    return tuple(messages)


def _message(fields: Fields, called: Mapping[str, str]) -> ChatMessage:
    """A developer message reads as a system message: that is what the role's inventor made of it for older models.

    *called* are the names of the functions called so far, by the id of the call.
    """
    role = fields.string("role", longest=MAX_LABEL_CHARS)
    if role not in _ROLES:
        raise InvalidRequest(f"{fields.param('role')} must be one of {', '.join(_ROLES)}", param=fields.param("role"))
    fields.refuse(("function_call",), why="use tool_calls")
    fields.refuse(("audio",), why="only text is understood")
    calls = parse_tool_calls(fields)
    if calls and role != "assistant":
        raise InvalidRequest(f"{fields.param('tool_calls')} are the assistant's", param=fields.param("tool_calls"))
    if role != "tool":
        content = "" if calls and fields.raw("content") is None else _content(fields)
        return ChatMessage(role=_ROLES[role], content=content, tool_calls=calls)
    call_id, param = fields.string("tool_call_id", longest=MAX_LABEL_CHARS), fields.param("tool_call_id")
    if call_id is None or call_id not in called:
        raise InvalidRequest(f"{param} must be the id of a tool call in a message before", param=param)
    return ChatMessage(role="tool", content=_content(fields), tool_call_id=call_id, name=called[call_id])


def _content(fields: Fields) -> str:
    value = fields.raw("content")
    param = fields.param("content")
    if isinstance(value, str):
        return checked_string(value, param, longest=MAX_TEXT_CHARS)
    if value is None:
        raise InvalidRequest(f"{param} is required", param=param)
    parts = checked_array(value, param, longest=MAX_CONTENT_PARTS)
    if not parts:
        raise InvalidRequest(f"{param} must hold at least one part", param=param)
    return "\n".join(_part(checked_object(part, f"{param}[{index}]")) for index, part in enumerate(parts))


def _part(fields: Fields) -> str:
    kind = fields.string("type", longest=MAX_LABEL_CHARS)
    if kind != "text":
        raise UnsupportedParameter(
            f"{fields.param('type')}: only text parts are understood", param=fields.param("type")
        )
    text = fields.string("text", longest=MAX_TEXT_CHARS)
    if text is None:
        raise InvalidRequest(f"{fields.param('text')} is required", param=fields.param("text"))
    return text


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.raw("prompt")
    if value is None:
        raise InvalidRequest("prompt is required", param="prompt")
    if isinstance(value, str):
        prompts: tuple[str | tuple[int, ...], ...] = (checked_string(value, "prompt", longest=MAX_TEXT_CHARS),)
    elif isinstance(value, list) and value and isinstance(value[0], int):
        prompts = (parse_token_ids(value, "prompt"),)
    else:
        entries = checked_array(value, "prompt", longest=MAX_PROMPTS)
        prompts = tuple(_prompt(entry, f"prompt[{index}]") for index, entry in enumerate(entries))
    if not prompts or any(not prompt for prompt in prompts):
        raise InvalidRequest("prompt must not be empty", param="prompt")
    return prompts


def _prompt(value: object, param: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return checked_string(value, param, longest=MAX_TEXT_CHARS)
    return parse_token_ids(checked_array(value, param, longest=MAX_TEXT_CHARS), param)


def parse_token_ids(values: list[object], param: str) -> tuple[int, ...]:
    """Raises InvalidRequest for what cannot be a token id; whether the model knows it is checked later."""
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_TOKEN_ID:
            checked_integer(value, param, low=0, high=MAX_TOKEN_ID)
    return tuple(values)  # type: ignore[arg-type]


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _log_unknown(fields: Fields) -> None:
    names = fields.unknown()
    if names:
        log.debug("unknown_fields_ignored", names=[name[:MAX_LABEL_CHARS] for name in names[:32]])
