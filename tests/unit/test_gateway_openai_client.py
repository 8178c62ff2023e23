"""The unmodified openai package against the HTTP door, served by uvicorn on a free port, and raw sockets beside it."""

import asyncio
import http.client
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import openai
import orjson
import pytest

from mooncake_mesh.errors import Aborted, Rejected
from mooncake_mesh.gateway.api import TokenEvent, TokenRequest
from mooncake_mesh.gateway.tokenizer import ByteTokenizer
from tests.unit.gateway_doubles import MODEL, fails, hangs, says
from tests.unit.served_gateway import Served

MESSAGES: Final[list[Any]] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "mooncake"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, temperature=0.5)
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 13)


def test_two_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (0, "Hello, world"),
        (1, "Hello, world"),
    ]
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == dict.fromkeys(range(2), "Hello, world")


def test_stop(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=["o, w"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hell", "stop")


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == "Hello, world"
    assert bytes(byte for entry in entries for byte in entry.bytes) == b"Hello, world"
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 12


def test_completion_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=5, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.choices[1].finish_reason == "length"
    assert answer.choices[1].logprobs.text_offset == [0, 1, 2, 3, 4]
    assert answer.usage.total_tokens == 4 + 10


def test_completion_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="a", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "aHello, world"


def test_errors_have_their_types(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.chat.completions.create(model="no-such", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=10**6)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "max_tokens")
    served.gateway.mesh.script = fails(Rejected("slo", unavailable=False, retry_after_s=1))
    with pytest.raises(openai.RateLimitError) as contended:
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert contended.value.response.headers["x-mooncake-reject-reason"] == "slo"
    served.gateway.mesh.script = fails(Rejected("no_decode", unavailable=True, retry_after_s=1))
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)


def test_a_failure_in_the_middle_of_a_stream_is_raised(client: openai.OpenAI, served: Served) -> None:
    served.gateway.mesh.script = fails(Aborted("worker lost"), after=b"ab")
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    seen: list[str | None] = []
    with pytest.raises(openai.APIError, match="worker lost"):
        seen.extend(chunk.choices[0].delta.content for chunk in stream)
    assert seen == ["", "a", "b"]


@pytest.mark.parametrize("stream", [True, False])
def test_closing_the_connection_cancels_the_request(served: Served, stream: bool) -> None:
    began, ended = threading.Event(), threading.Event()

    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        began.set()
        try:
            yield TokenEvent(token=97, cached_tokens=0)
            await asyncio.Event().wait()
        finally:
            ended.set()

    served.gateway.mesh.script = script
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    body = orjson.dumps({"model": MODEL, "messages": MESSAGES, "stream": stream})
    connection.request("POST", "/v1/chat/completions", body)
    assert began.wait(10)
    assert not ended.is_set()
    connection.close()
    assert ended.wait(10)


def test_a_chunked_body_without_end_is_cut_off(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)

    def endless() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * (1 << 20)

    try:
        connection.request("POST", "/v1/completions", endless(), encode_chunked=True)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server may close while we still send
    else:
        assert connection.getresponse().status == 413
    finally:
        connection.close()


def test_a_connection_serves_one_request_after_another(served: Served) -> None:
    served.gateway.mesh.script = says("ok")
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    for stream in (False, True, False):
        body = orjson.dumps({"model": MODEL, "messages": MESSAGES, "stream": stream})
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        text = response.read()
        assert (response.status, b"[DONE]" in text) == (200, stream)
    connection.close()


def test_an_idle_stream_does_not_hold_the_others_up(client: openai.OpenAI, served: Served) -> None:
    served.gateway.mesh.script = hangs(after=b"a")
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
        next(iter(stream))
        served.gateway.mesh.script = says("ok")
        assert client.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message.content == "ok"


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)


def test_tool_calls_make_the_round_trip(served: Served, client: openai.OpenAI) -> None:
    """Asked, called, answered: the package's own objects go back into the conversation as they came."""
    served.gateway.mesh.script = says(CALLS)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name) for call in calls] == [("function", "weather")] * 2
    assert [orjson.loads(call.function.arguments) for call in calls] == [{"city": "Ulm"}, {"city": "Bern"}]
    assert len({call.id for call in calls}) == 2
    served.gateway.mesh.script = says("Rain in both.")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    conversation: list[Any] = [*MESSAGES, choice.message, *results]
    last = client.chat.completions.create(model=MODEL, messages=conversation, tools=TOOLS)
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("Rain in both.", "stop")
    assert last.choices[0].message.tool_calls is None
    prompt = ByteTokenizer().decode(served.gateway.mesh.requests[-1].prompt)
    assert prompt.count("<tool_response>\nrain\n</tool_response>") == 2
    assert CALLS in prompt


def test_streamed_tool_calls_add_up_in_the_package(served: Served, client: openai.OpenAI) -> None:
    served.gateway.mesh.script = says(CALLS)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.content == "I look.\n"
    assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Ulm"}', '{"city": "Bern"}']
    assert kinds.count("tool_calls.function.arguments.delta") > 2  # as they came
    assert kinds.count("tool_calls.function.arguments.done") == 2


def test_without_a_choice_calls_are_text(served: Served, client: openai.OpenAI) -> None:
    served.gateway.mesh.script = says(CALLS)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="none")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALLS, "stop")
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert plain.choices[0].message.content == CALLS
