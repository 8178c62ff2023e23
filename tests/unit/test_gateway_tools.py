"""Tools: how they are asked for, how calls are read out of a text that comes in pieces, and how a prompt shows them."""

import json
from typing import Any

import pytest

from mooncake_mesh.engine.api import TokenList
from mooncake_mesh.engine.fake_recipe import SPECIAL, TOKEN_BYTES
from mooncake_mesh.engine.grammar import GrammarCompiler, check_grammar
from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.chat_template import ChatTemplate
from mooncake_mesh.gateway.openai_requests import ChatRequest, parse_chat
from mooncake_mesh.gateway.tool_form import call_grammar, plain_chat
from mooncake_mesh.gateway.tool_reader import CallArguments, CallBegins, Content, Part, ToolCallReader
from mooncake_mesh.gateway.tools import ChatMessage, Tool, ToolCall, ToolChoice, ToolUse
from mooncake_proto.grammar import Grammar
from tests.unit.test_engine_grammar import next_tokens

WEATHER = Tool(
    name="weather",
    description="Tells the weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CLOCK = Tool(name="clock", parameters={"type": "object", "properties": {}})
ULM = '{"city": "Ulm"}'
ASK = {"role": "user", "content": "Will it rain in Ulm?"}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# --- reading ----------------------------------------------------------------------------------------------------------


def read(text: str, step: int) -> list[Part]:
    reader = ToolCallReader()
    parts = [part for start in range(0, len(text), step) for part in reader.feed(text[start : start + step])]
    return parts + reader.finish()


def merged(parts: list[Part]) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)])."""
    content, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case Content(text=text):
                content += text
            case CallBegins(index=index, name=name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index=index, text=text):
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


READINGS = [
    ("no call at all", "no call at all", []),
    (call("clock", "{}"), "", [("clock", "{}")]),
    (
        f"Let me see.\n{call('weather', ULM)}\n{call('clock', '{}')}\n",
        "Let me see.\n",
        [("weather", '{"city": "Ulm"}'), ("clock", "{}")],
    ),
    (call("clock", '{"a": "} </tool_call> \\" {"}'), "", [("clock", '{"a": "} </tool_call> \\" {"}')]),
    (
        '<tool_call>{"arguments": {"x": [1, {"y": 2}]}, "name": "f"}</tool_call> done',
        "done",
        [("f", '{"x": [1, {"y": 2}]}')],
    ),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "parameters": {"x": 1}, "id": 3}</tool_call>', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("a <tool_call> is a mark, and so is </tool_call>", "a <tool_call> is a mark, and so is </tool_call>", []),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("1 <tool, 2 <tool_c", "1 <tool, 2 <tool_c", []),
    ('<tool_call>{"na', '<tool_call>{"na', []),
    ('<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    ("\n\nhello\n", "\n\nhello\n", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), READINGS, ids=[row[0][:30] for row in READINGS])
def test_calls_are_found_wherever_the_pieces_end(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for step in (1, 2, 3, 7, len(text)):
        assert merged(read(text, step)) == (content, calls), step


def test_arguments_go_out_as_they_come() -> None:
    reader = ToolCallReader()
    assert reader.feed('<tool_call>\n{"name": "f", "arguments": ') == []
    begins, first = reader.feed('{"city": "U')
    assert isinstance(begins, CallBegins)
    assert begins.id.startswith("call_")
    assert first == CallArguments(index=0, text='{"city": "U')
    assert reader.feed('lm"}') == [CallArguments(index=0, text='lm"}')]
    assert reader.feed("}\n</tool_") == []
    assert reader.feed("call>") == []
    assert reader.finish() == []


# --- asking -----------------------------------------------------------------------------------------------------------


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"model": "m", "messages": [ASK], **fields})


def offered(*tools: Tool) -> list[dict[str, Any]]:
    return [tool.json() for tool in tools]


def test_tools_and_choices_are_read() -> None:
    assert chat().tool_use is None
    assert chat(tools=[], tool_choice="none").tool_use is None
    use = chat(tools=offered(WEATHER, CLOCK)).tool_use
    assert use == ToolUse(tools=(WEATHER, CLOCK), choice=ToolChoice.AUTO)
    named = chat(
        tools=offered(WEATHER, CLOCK), tool_choice={"type": "function", "function": {"name": "clock"}}
    ).tool_use
    assert named is not None
    assert (named.choice, named.callable) == (ToolChoice.NAMED, (CLOCK,))
    bare = chat(tools=[{"type": "function", "function": {"name": "f"}}]).tool_use
    assert bare is not None
    assert bare.tools[0].parameters == {"type": "object", "properties": {}, "additionalProperties": False}


CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def test_calls_and_results_in_the_conversation_are_read() -> None:
    messages = chat(messages=[ASK, CALLED, RESULT], tools=offered(WEATHER)).messages
    weather = ToolCall(id="c1", name="weather", arguments='{"city": "Ulm"}')
    assert messages[1:] == (
        ChatMessage(role="assistant", content="", tool_calls=(weather,)),
        ChatMessage(role="tool", content="rain", tool_call_id="c1", name="weather"),
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": offered(CLOCK), "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": offered(CLOCK), "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": offered(CLOCK, CLOCK)}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [ASK, RESULT]}, "messages[1].tool_call_id"),
        ({"messages": [{**CALLED, "role": "user"}]}, "messages[0].tool_calls"),
        (
            {
                "tools": offered(CLOCK),
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
    ],
)
def test_bad_tools_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


# --- the grammar of a call that has to come ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "text", "is_whole"),
    [
        (
            ToolUse(tools=(WEATHER, CLOCK), choice=ToolChoice.REQUIRED),
            call("weather", '{"city": "Ulm","days": 3}'),
            True,
        ),
        (
            ToolUse(tools=(WEATHER, CLOCK), choice=ToolChoice.REQUIRED),
            call("clock", "{}") + "\n" + call("clock", "{}"),
            True,
        ),
        (ToolUse(tools=(CLOCK,), choice=ToolChoice.REQUIRED, is_parallel=False), call("clock", "{}") + "\n", False),
        (ToolUse(tools=(WEATHER, CLOCK), choice=ToolChoice.NAMED, name="clock"), '<tool_call>\n{"name": "w', False),
        (ToolUse(tools=(WEATHER,), choice=ToolChoice.REQUIRED), call("weather", "{}"), False),
        (ToolUse(tools=(WEATHER,), choice=ToolChoice.REQUIRED), "It will", False),
    ],
)
def test_a_required_call_is_one_of_the_tools_with_arguments_of_its_schema(
    use: ToolUse, text: str, is_whole: bool
) -> None:
    asked = call_grammar(use)
    assert asked is not None
    check_grammar(asked.kind, asked.text)
    compiler = GrammarCompiler(TokenList(tokens=TOKEN_BYTES, special=SPECIAL))
    rule = compiler.compile(Grammar(kind=asked.kind, text=asked.text, end_tokens=(257,))).filter()
    allowed = [char in next_tokens(rule, text[:end]) for end, char in enumerate(text.encode())]
    if is_whole:
        assert all(allowed)
        assert 257 in next_tokens(rule, text)
    else:
        assert not all(allowed)


def test_who_may_choose_is_not_constrained() -> None:
    assert call_grammar(ToolUse(tools=(CLOCK,))) is None
    assert call_grammar(ToolUse(tools=(CLOCK,), choice=ToolChoice.NONE)) is None


# --- prompts ----------------------------------------------------------------------------------------------------------

CHATML = "{% for m in messages %}[{{ m['role'] }}|{{ m['content'] }}]{% endfor %}"
NATIVE = (
    "{% if tools %}{{ tools[0].function.name }} <tool_call>{% endif %}{% for m in messages %}"
    "[{{ m.role }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
)
TALK = (
    ChatMessage(role="user", content="rain?"),
    ChatMessage(
        role="assistant", content="", tool_calls=(ToolCall(id="c1", name="weather", arguments='{"city": "Ulm"}'),)
    ),
    ChatMessage(role="tool", content="rain", tool_call_id="c1", name="weather"),
    ChatMessage(role="tool", content="12:00", tool_call_id="c2", name="clock"),
)


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    text = ChatTemplate(NATIVE, special_tokens={}).render(TALK, (WEATHER,))
    assert text == 'weather <tool_call>[user|rain?][assistant|{"city": "Ulm"}][tool|rain][tool|12:00]'


def test_for_any_other_template_tools_are_text() -> None:
    text = ChatTemplate(CHATML, special_tokens={}).render(TALK, (WEATHER,))
    system, rest = text.split("][", 1)
    assert json.dumps(WEATHER.json()["function"]) in system
    assert rest == (
        f"user|rain?][assistant|{call('weather', ULM)}]"
        "[user|<tool_response>\nrain\n</tool_response>\n<tool_response>\n12:00\n</tool_response>]"
    )


def test_a_conversation_without_tools_is_left_alone() -> None:
    talk = (ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi"))
    assert plain_chat(talk, ()) == list(talk)
    assert [message.role for message in plain_chat(talk, (CLOCK,))] == ["system", "user"]
    assert plain_chat(talk, (CLOCK,))[0].content.startswith("Be brief.\n\n")
