"""Bodies of ``POST /v1/responses`` as the chats that they are. Pure.

OpenAI's newer endpoint asks for a chat in other words. What it can say that a chat cannot (a conversation that the
server keeps, tools that the server runs, work in the background) is refused by name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.json_fields import (
    Fields,
    UnsupportedParameter,
    checked_array,
    checked_object,
    checked_string,
)
from mooncake_mesh.gateway.openai_errors import Problem
from mooncake_mesh.gateway.openai_requests import (
    MAX_CONTENT_PARTS,
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    MAX_TEXT_CHARS,
    ChatRequest,
    parse_chat,
)

Json = dict[str, Any]

_STORED: Final = ("store", "previous_response_id", "conversation", "background", "prompt")
_UNSUPPORTED: Final = {
    "include": "answers have nothing more to show",
    "max_tool_calls": "tools are run by the client",
    "reasoning": "models here answer without a separate reasoning",
    "top_logprobs": "use /v1/chat/completions for log-probabilities",
    "context_management": "a conversation is answered as it is",
}
_OPENAIS: Final = ("model", "temperature", "top_p", "stream", "service_tier", "parallel_tool_calls", "user")
_VLLMS: Final = ("seed", "stop", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_MORE: Final = ("min_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "priority", "cache_salt")
_SAME: Final = (*_OPENAIS, *_VLLMS, *_MORE)
"""Fields that mean the same for a chat."""
_TEXTS: Final = ("input_text", "output_text", "text")
_CHATS_NAMES: Final = {
    r"\bmax_completion_tokens\b": "max_output_tokens",
    r"\bmessages(\[\d+\])?": "input",
    r"\bresponse_format(\.json_schema)?": "text.format",
}
"""What errors of the chat's own parser are about, in this endpoint's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """``told`` are the fields of the request that every answer repeats."""

    chat: ChatRequest
    told: Json


def parse_responses(body: Json) -> ResponsesRequest:
    """Raises InvalidRequest; its words may still be those of a chat, see :func:`in_own_words`."""
    fields = Fields(body)
    fields.refuse(_STORED, why="nothing is stored here, so send the whole conversation as input")
    for name, why in _UNSUPPORTED.items():
        fields.refuse((name,), why=why)
    if fields.raw("truncation") not in (None, "disabled"):
        raise UnsupportedParameter("truncation is not supported: what is too long is refused", param="truncation")
    chat: Json = {name: body[name] for name in _SAME if fields.raw(name) is not None}
    instructions = fields.string("instructions", longest=MAX_TEXT_CHARS)
    chat["messages"] = [
        *([] if instructions is None else [{"role": "system", "content": instructions}]),
        *_messages(fields),
    ]
    chat["max_completion_tokens"] = fields.raw("max_output_tokens")
    chat["response_format"] = _format(fields.object("text"))
    chat["tools"] = _tools(fields)
    chat["tool_choice"] = _tool_choice(fields.raw("tool_choice"))
    return ResponsesRequest(chat=parse_chat(chat), told=_told(body, instructions))


def in_own_words(problem: Problem) -> Problem:
    """*problem* of the chat that a request was made into, for who sent the request."""
    message, param = problem.message, problem.param
    for chats, own in _CHATS_NAMES.items():
        message = re.sub(chats, own, message)
        param = None if param is None else re.sub(chats, own, param)
    return replace(problem, message=message, param=param)


def _told(body: Json, instructions: str | None) -> Json:
    return {
        "instructions": instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
        "truncation": "disabled",
    }


# --- the conversation -------------------------------------------------------------------------------------------------


def _messages(fields: Fields) -> list[Json]:
    given = fields.raw("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    entries = checked_array([] if given is None else given, "input", longest=MAX_MESSAGES)
    if not entries:
        raise InvalidRequest("input must be a text or hold at least one item", param="input")
    messages: list[Json] = []
    for index, entry in enumerate(entries):
        _add(messages, checked_object(entry, f"input[{index}]"))
    return messages


def _add(messages: list[Json], item: Fields) -> None:
    """One item of the conversation. Calls that follow one another, and the text before them, are one message."""
    match item.raw("type"):
        case None | "message":
            role = item.string("role", longest=MAX_LABEL_CHARS)
            messages.append({"role": role, "content": _text(item, "content")})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None, "tool_calls": []})
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        case "function_call_output":
            call_id = item.string("call_id", longest=MAX_LABEL_CHARS)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _text(item, "output")})
        case other:
            message = f"{item.param('type')}: {str(other)[:64]!r} is not supported: a conversation is text and calls"
            raise UnsupportedParameter(message, param=item.param("type"))


def _call(item: Fields) -> Json:
    function = {"name": item.raw("name"), "arguments": item.raw("arguments")}
    return {"id": item.raw("call_id"), "type": "function", "function": function}


def _text(item: Fields, name: str) -> str:
    """A text, or the texts of its parts in a row."""
    given, param = item.raw(name), item.param(name)
    if isinstance(given, str):
        return given
    if given is None:
        raise InvalidRequest(f"{param} is required", param=param)
    parts = checked_array(given, param, longest=MAX_CONTENT_PARTS)
    return "".join(_part(checked_object(part, f"{param}[{index}]")) for index, part in enumerate(parts))


def _part(part: Fields) -> str:
    if part.raw("type") not in _TEXTS:
        raise UnsupportedParameter(f"{part.param('type')}: only text is understood", param=part.param("type"))
    return checked_string(part.raw("text"), part.param("text"), longest=MAX_TEXT_CHARS)


# --- what may come back -----------------------------------------------------------------------------------------------


def _format(text: Fields | None) -> Json | None:
    """``text.format``, whose schema lies one level higher than a chat's."""
    given = None if text is None else text.object("format")
    if given is None:
        return None
    kind = given.raw("type")
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": _present(given, ("name", "schema", "strict", "description"))}


def _tools(fields: Fields) -> list[Json] | None:
    entries = fields.array("tools", longest=MAX_MESSAGES)
    return None if entries is None else [_tool(checked_object(one, f"tools[{i}]")) for i, one in enumerate(entries)]


def _tool(tool: Fields) -> Json:
    if tool.raw("type") != "function":
        message = f"{tool.param('type')} is not supported: only functions, which the client runs"
        raise UnsupportedParameter(message, param=tool.param("type"))
    return {"type": "function", "function": _present(tool, ("name", "description", "parameters", "strict"))}


def _tool_choice(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "function":
        return given
    return {"type": "function", "function": {"name": given.get("name")}}


def _present(fields: Fields, names: Sequence[str]) -> Json:
    return {name: value for name in names if (value := fields.raw(name)) is not None}
