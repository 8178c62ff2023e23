"""The endpoint ``/v1/responses``, as the unmodified openai package sees it, and what it refuses."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import orjson
import pytest
from openai.types.responses import ResponseFunctionToolCall

from mooncake_mesh.errors import Aborted, InvalidRequest, Rejected
from mooncake_mesh.gateway.openai_errors import Problem
from mooncake_mesh.gateway.responses_requests import in_own_words, parse_responses
from mooncake_mesh.gateway.tokenizer import ByteTokenizer
from tests.unit.gateway_doubles import MODEL, Exchange, Gateway, fails, says
from tests.unit.served_gateway import Served

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)
BEGIN = ["response.created", "response.in_progress"]
MESSAGE_BEGINS = ["response.output_item.added", "response.content_part.added"]
MESSAGE_ENDS = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
CALL_ENDS = ["response.function_call_arguments.done", "response.output_item.done"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def prompt_of(served: Served) -> str:
    """Of the last request that came to the mesh."""
    return ByteTokenizer().decode(served.gateway.mesh.requests[-1].prompt)


def ask(body: dict[str, Any], path: str = "/v1/responses", method: str = "POST") -> tuple[Gateway, Exchange]:
    gateway = Gateway(says("ok"))
    return gateway, asyncio.run(Exchange(gateway.app, path, orjson.dumps(body), method=method).run())


def once_each(kinds: list[str]) -> list[str]:
    """*kinds*, with deltas in a row counted as one."""
    return [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_text_is_answered(client: openai.OpenAI, served: Served) -> None:
    answer = client.responses.create(
        model=MODEL, input="hi", instructions="Be brief.", temperature=0.5, top_p=0.9, metadata={"a": "b"}, store=False
    )
    assert answer.output_text == "Hello, world"
    assert (answer.status, answer.object, answer.model) == ("completed", "response", MODEL)
    assert (answer.incomplete_details, answer.error) == (None, None)
    assert (answer.instructions, answer.temperature, answer.top_p) == ("Be brief.", 0.5, 0.9)
    assert answer.metadata == {"a": "b"}
    usage = answer.usage
    assert usage.input_tokens == len(served.gateway.mesh.requests[-1].prompt)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens) == (16, 13)
    assert usage.total_tokens == usage.input_tokens + 13
    assert served.gateway.mesh.requests[-1].sampling.temperature == 0.5
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")


def test_it_is_the_chat_that_it_reads_like(client: openai.OpenAI, served: Served) -> None:
    conversation: list[Any] = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "th"}, {"type": "input_text", "text": "ree"}]},
    ]
    client.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=conversation,
    )
    as_response = prompt_of(served)
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages)
    assert prompt_of(served) == as_response


def test_a_stream_is_typed_events_that_add_up(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds: list[str] = [event.type for event in events]
    middle = ["response.output_text.delta"]
    assert once_each(kinds) == [*BEGIN, *MESSAGE_BEGINS, *middle, *MESSAGE_ENDS, "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello, world"
    assert final.output_text == "Hello, world"
    assert final.usage.output_tokens == 13
    assert events[0].response.id == final.id


def test_a_plain_stream_too(client: openai.OpenAI) -> None:
    events: list[Any] = list(client.responses.create(model=MODEL, input="hi", stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output[0].content[0].text == "Hello, world"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_cut_off_is_incomplete(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.responses.create(model=MODEL, input="hi", max_output_tokens=5, stream=stream)
    if stream:
        *_, done, last = answer
        assert (last.type, done.item.status) == ("response.incomplete", "incomplete")
        answer = last.response
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output_text, answer.output[0].status) == ("Hello", "incomplete")


def test_an_answer_without_text_is_an_empty_message(client: openai.OpenAI, served: Served) -> None:
    served.gateway.mesh.script = says("")
    answer: Any = client.responses.create(model=MODEL, input="hi")
    assert answer.output[0].content[0].text == ""
    events = [event.type for event in client.responses.create(model=MODEL, input="hi", stream=True)]
    assert events == [*BEGIN, *MESSAGE_BEGINS, *MESSAGE_ENDS, "response.completed"]


# --- tools and forms --------------------------------------------------------------------------------------------------


def test_tool_calls_make_the_round_trip(client: openai.OpenAI, served: Served) -> None:
    served.gateway.mesh.script = says(CALLS)
    conversation: list[Any] = [{"role": "user", "content": "hi"}]
    answer = client.responses.create(model=MODEL, input=conversation, tools=[WEATHER])
    assert answer.output_text == "I look.\n"
    calls = [item for item in answer.output if isinstance(item, ResponseFunctionToolCall)]
    assert [(call.name, orjson.loads(call.arguments)["city"]) for call in calls] == [
        ("weather", "Ulm"),
        ("weather", "Bern"),
    ]
    served.gateway.mesh.script = says("Rain in both.")
    conversation += answer.output
    conversation += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    last = client.responses.create(model=MODEL, input=conversation, tools=[WEATHER])
    assert last.output_text == "Rain in both."
    assert prompt_of(served).count("<tool_response>\nrain\n</tool_response>") == 2
    assert CALLS in prompt_of(served)


def test_streamed_tool_calls_add_up_in_the_package(client: openai.OpenAI, served: Served) -> None:
    served.gateway.mesh.script = says(CALLS)
    with client.responses.stream(model=MODEL, input="hi", tools=[WEATHER]) as stream:
        kinds = once_each([event.type for event in stream])
        final = stream.get_final_response()
    call = ["response.output_item.added", "response.function_call_arguments.delta", *CALL_ENDS]
    message = [*MESSAGE_BEGINS, "response.output_text.delta", *MESSAGE_ENDS]
    assert kinds == [*BEGIN, *message, *call, *call, "response.completed"]
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert [item.arguments for item in final.output[1:]] == ['{"city": "Ulm"}', '{"city": "Bern"}']
    assert len({item.id for item in final.output}) == 3


def test_a_tool_may_be_chosen_and_a_form_given() -> None:
    chosen = parse_responses(
        {"model": MODEL, "input": "hi", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
    )
    assert chosen.chat.tool_use is not None
    assert chosen.chat.tool_use.name == "weather"
    schema = {"type": "json_schema", "name": "city", "schema": {"type": "string"}, "strict": True}
    formed = parse_responses({"model": MODEL, "input": "hi", "text": {"format": schema}})
    assert formed.chat.options.grammar is not None
    assert "string" in formed.chat.options.grammar.text
    assert parse_responses({"model": MODEL, "input": "hi", "text": {"format": {"type": "text"}}})


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input.role"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input.tool_call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 4000}, "max_output_tokens"),
        ({"input": "x" * 3000}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"model": None}, "model"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    gateway, answer = ask({"model": MODEL, "input": "hi", **more})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert gateway.outcome("chat", "invalid") == 1
    assert gateway.mesh.requests == []


def test_only_names_are_put_into_other_words() -> None:
    problem = Problem(status=400, type="t", code="c", message="messages[1].content: the submessages", param="messages")
    told = in_own_words(problem)
    assert (told.message, told.param) == ("input.content: the submessages", "input")
    with pytest.raises(InvalidRequest):
        parse_responses({"model": MODEL, "input": 5})


def test_errors_have_their_types(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-4o", input="hi")
    served.gateway.mesh.script = fails(Rejected("busy", unavailable=False, retry_after_s=3))
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model=MODEL, input="hi", stream=True)
    served.gateway.mesh.script = fails(ValueError("a secret"))
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model=MODEL, input="hi")
    assert "secret" not in str(caught.value)


def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(client: openai.OpenAI, served: Served) -> None:
    served.gateway.mesh.script = fails(Aborted("the worker is gone"), after=b"Hel")
    *_, last = client.responses.create(model=MODEL, input="hi", stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "the worker is gone"


def test_nothing_is_kept() -> None:
    for method, path in (("GET", "/v1/responses/resp_1"), ("DELETE", "/v1/responses/resp_1"), ("GET", "/v1/responses")):
        assert ask({}, path, method)[1].status == 501
