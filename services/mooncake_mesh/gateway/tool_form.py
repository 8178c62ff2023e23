"""How calls of tools stand in a text: the form of Hermes, which Qwen and SmolLM write as well.

::

    <tool_call>
    {"name": "…", "arguments": {…}}
    </tool_call>

A model whose chat template speaks of tools in this form is told of them by it. For any other the tools are described in
the system message, calls and their results are written into the messages around them, and the form is the same.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.structured_output import GrammarText, lark_string
from mooncake_mesh.gateway.tools import ChatMessage, Tool, ToolCall, ToolChoice, ToolUse
from mooncake_proto.grammar import MAX_GRAMMAR_CHARS, GrammarKind

CALL_BEGINS: Final = "<tool_call>"
CALL_ENDS: Final = "</tool_call>"
_RESULT_BEGINS: Final = "<tool_response>"
_RESULT_ENDS: Final = "</tool_response>"
_MOST_CALLS: Final = 16
_LAYOUT: Final = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}}
_INTRODUCTION: Final = (
    "You can call these functions. Each line between the <tools> marks describes one, with the JSON schema of its"
    " parameters:\n<tools>\n{tools}\n</tools>\nTo call a function, answer with its name and arguments as a JSON object"
    " between marks, like this:\n"
    '<tool_call>\n{{"name": "the function", "arguments": {{"a parameter": 1}}}}\n</tool_call>'
)


def call_grammar(use: ToolUse) -> GrammarText | None:
    """What an answer must be that has to call tools; None where it need not. Raises InvalidRequest for very many."""
    if use.choice not in (ToolChoice.REQUIRED, ToolChoice.NAMED):
        return None
    tools = use.callable
    lines = [
        "start: call" + (f' ("\\n" call){{0,{_MOST_CALLS - 1}}}' if use.is_parallel else ""),
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
    ]
    for index, tool in enumerate(tools):
        head = lark_string(f'{CALL_BEGINS}\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        lines.append(f"call_{index}: {head} args_{index} {lark_string('}' + chr(10) + CALL_ENDS)}")
        schema = {"type": "object", **tool.parameters, **_LAYOUT}
        lines.append(f"args_{index}: %json {json.dumps(schema, ensure_ascii=False)}")
    text = "\n".join(lines)
    if len(text) > MAX_GRAMMAR_CHARS:
        message = f"tools of which one must be called must not have more than {MAX_GRAMMAR_CHARS} characters of schemas"
        raise InvalidRequest(message, param="tools")
    return GrammarText(kind=GrammarKind.LARK, text=text, param="tools")


def plain_chat(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[ChatMessage]:
    """*messages* for a template that knows nothing of tools: only roles and contents, with the same meaning."""
    plain: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            result = f"{_RESULT_BEGINS}\n{message.content}\n{_RESULT_ENDS}"
            if plain and plain[-1].role == "user" and plain[-1].content.endswith(_RESULT_ENDS):
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{result}")
            else:
                plain.append(ChatMessage(role="user", content=result))
        elif message.tool_calls:
            before = (
                message.content and message.content.removesuffix("\n") + "\n"
            )  # as the model wrote it: its KV is kept
            calls = "\n".join(_call_text(call) for call in message.tool_calls)
            plain.append(ChatMessage(role=message.role, content=before + calls))
        else:
            plain.append(message)
    if tools:
        described = "\n".join(json.dumps(tool.json()["function"], ensure_ascii=False) for tool in tools)
        introduction = _INTRODUCTION.format(tools=described)
        if plain and plain[0].role == "system":
            plain[0] = replace(plain[0], content=f"{plain[0].content}\n\n{introduction}")
        else:
            plain.insert(0, ChatMessage(role="system", content=introduction))
    return plain


def template_turn(message: ChatMessage) -> dict[str, Any]:
    """A message as templates that know tools expect it: arguments as an object."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return turn


def _call_text(call: ToolCall) -> str:
    return f'{CALL_BEGINS}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n{CALL_ENDS}'
