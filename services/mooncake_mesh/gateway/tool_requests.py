"""Tools in the body of a chat: ``tools``, ``tool_choice``, ``parallel_tool_calls``, and ``tool_calls`` of messages."""

import re
from typing import Any, Final

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.json_fields import (
    Fields,
    UnsupportedParameter,
    checked_object,
    checked_string,
    json_value,
)
from mooncake_mesh.gateway.structured_output import json_text
from mooncake_mesh.gateway.tools import Tool, ToolCall, ToolChoice, ToolUse
from mooncake_proto.grammar import MAX_GRAMMAR_CHARS

MAX_TOOLS: Final = 128
_MAX_DESCRIPTION_CHARS: Final = 1 << 16
_MAX_ARGUMENTS_CHARS: Final = 1 << 20
_MAX_ID_CHARS: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANY_TOOL: Final = {choice.value: choice for choice in (ToolChoice.NONE, ToolChoice.AUTO, ToolChoice.REQUIRED)}


def parse_tool_use(fields: Fields) -> ToolUse | None:
    """None where no tools are offered. Raises InvalidRequest."""
    entries = fields.array("tools", longest=MAX_TOOLS) or []
    is_parallel = fields.boolean("parallel_tool_calls") is not False
    choice = fields.raw("tool_choice")
    if not entries:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice asks for a call, but tools is empty", param="tool_choice")
        return None
    tools = tuple(_tool(checked_object(entry, f"tools[{index}]")) for index, entry in enumerate(entries))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools must not hold two functions of one name", param="tools")
    if choice is None:
        return ToolUse(tools=tools, is_parallel=is_parallel)
    if isinstance(choice, str):
        if choice not in _ANY_TOOL:
            message = f"tool_choice must be one of {', '.join(_ANY_TOOL)}, or name a function"
            raise InvalidRequest(message, param="tool_choice")
        return ToolUse(tools=tools, choice=_ANY_TOOL[choice], is_parallel=is_parallel)
    name = _function_of(checked_object(choice, "tool_choice"))[0]
    if name not in names:
        raise InvalidRequest(f"tool_choice names {name!r}, which is not in tools", param="tool_choice")
    return ToolUse(tools=tools, choice=ToolChoice.NAMED, name=name, is_parallel=False)


def parse_tool_calls(fields: Fields) -> tuple[ToolCall, ...]:
    """The calls that a message of the conversation made. Raises InvalidRequest."""
    param = fields.param("tool_calls")
    entries = fields.array("tool_calls", longest=MAX_TOOLS) or []
    return tuple(_call(checked_object(entry, f"{param}[{index}]")) for index, entry in enumerate(entries))


def _tool(fields: Fields) -> Tool:
    name, function = _function_of(fields)
    function.boolean("strict")
    parameters = function.raw("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        param = function.param("parameters")
        raise InvalidRequest(f"{param} must be a JSON schema, which is an object", param=param)
    if len(json_text(parameters, function.param("parameters"))) > MAX_GRAMMAR_CHARS:
        message = f"{function.param('parameters')} must not be longer than {MAX_GRAMMAR_CHARS} characters"
        raise InvalidRequest(message, param=function.param("parameters"))
    description = function.string("description", longest=_MAX_DESCRIPTION_CHARS) or ""
    return Tool(name=name, description=description, parameters=parameters)


def _call(fields: Fields) -> ToolCall:
    call_id = fields.string("id", longest=_MAX_ID_CHARS)
    if not call_id:
        raise InvalidRequest(f"{fields.param('id')} is required", param=fields.param("id"))
    name, function = _function_of(fields)
    param = function.param("arguments")
    text = checked_string(function.raw("arguments") or "{}", param, longest=_MAX_ARGUMENTS_CHARS)
    if not isinstance(_json(text), dict):
        raise InvalidRequest(f"{param} must be a JSON object as text", param=param)
    return ToolCall(id=call_id, name=name, arguments=text)


def _function_of(fields: Fields) -> tuple[str, Fields]:
    """Name and fields of the function in *fields*, whose type must be that."""
    if fields.raw("type") != "function":
        param = fields.param("type")
        raise UnsupportedParameter(f"{param}: only functions can be called", param=param)
    function = fields.object("function")
    if function is None:
        raise InvalidRequest(f"{fields.param('function')} is required", param=fields.param("function"))
    name = function.raw("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{function.param('name')} must be 1 to 64 letters, digits, - and _"
        raise InvalidRequest(message, param=function.param("name"))
    return name, function


def _json(text: str) -> Any:
    try:
        return json_value(text)
    except (ValueError, RecursionError):
        return None
