"""The unmodified openai package against a live mesh: fake engines for the protocol, the real model for some answers."""

import asyncio
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any, Final, Literal

import jsonschema
import openai
import pydantic
import pytest

from mooncake_mesh.engine.fake import expected_tokens
from mooncake_mesh.engine.model_files import DEFAULT_MODEL
from mooncake_mesh.gateway.tokenizer import ByteTokenizer
from mooncake_mesh.gateway.tools import ChatMessage
from mooncake_proto.control import StatusReport
from tests.mesh import clients
from tests.mesh.harness import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(180)]

MODEL: Final = "fake"
MESSAGES: Final[list[Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
PROMPT: Final = "Count the ships in the harbour, one after the other, and begin with the smallest."
SLOW: Final = {"decode": ["--fake-decode-s-base=0.05"], "gateway": ["--max-concurrent-requests=1"]}


def connect(mesh: Mesh, **options: Any) -> openai.OpenAI:
    usual: dict[str, Any] = {"base_url": f"{mesh.http}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
    return openai.OpenAI(**usual | options)


def chat_text(messages: list[Any], max_tokens: int) -> str:
    """What fake engines answer, greedily, worked out without a mesh."""
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode_chat([ChatMessage(**message) for message in messages])
    return tokenizer.decode(expected_tokens(clients.FAKE, prompt, max_tokens))


@pytest.fixture(scope="module")
def client(fake_mesh: Mesh) -> Iterator[openai.OpenAI]:
    with connect(fake_mesh) as client:
        yield client


# --- answers ----------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [(model.id, model.object) for model in client.models.list()] == [(MODEL, "model")]
    assert client.models.retrieve(MODEL).owned_by == "mooncake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=30)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", chat_text(MESSAGES, 30))
    assert choice.finish_reason == "length"
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30


def test_chat_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "stream_options": {"include_usage": True}}
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **options) as stream:
        *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat_text(MESSAGES, 30)
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}
    assert (last.choices, last.usage.completion_tokens) == ([], 30)


def test_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    expected = clients.expected_text(PROMPT, 40)
    whole = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=40)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "length")
    with client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=40, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_several_prompts_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], temperature=0, max_tokens=8, echo=True)
    assert [choice.text for choice in answer.choices] == [
        "one" + clients.expected_text("one", 8),
        "two" + clients.expected_text("two", 8),
    ]


def test_two_choices(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "n": 2, "seed": 5, "max_tokens": 20}
    answer = client.chat.completions.create(**options)
    texts = {choice.index: choice.message.content for choice in answer.choices}
    assert texts[0] != texts[1]
    assert answer.usage.completion_tokens == 40
    streamed = {0: "", 1: ""}
    with client.chat.completions.create(**options, stream=True) as stream:
        for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize("start", [0, 7, 25])
def test_stop(client: openai.OpenAI, start: int) -> None:
    """A stop string that lies across tokens, wherever it begins: nothing of it is shown."""
    text = chat_text(MESSAGES, 40)
    stop = text[start : start + 3]
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=40, stop=["no such text", stop]
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    with client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=40, stop=stop, stream=True
    ) as stream:
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == text[: text.index(stop)]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 12
    assert all(entry.top_logprobs[0].token == entry.token and entry.logprob < 0 for entry in entries)
    with client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True) as stream:
        parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [entry for part in parts if part for entry in part.content] == entries


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=10, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens or ()) == answer.choices[0].text
    assert logprobs.text_offset == list(range(10))
    assert all(value < 0 for value in logprobs.token_logprobs)
    assert all(len(top) in (2, 3) for top in logprobs.top_logprobs)


def test_usage_tells_what_came_from_the_cache(client: openai.OpenAI) -> None:
    """Whole blocks of 16 tokens; the byte tokenizer puts one token before the text."""
    prompt = "A prompt that no other test of this module has said before. " * 3
    answers = [
        client.completions.create(model=MODEL, prompt=prompt + end, temperature=0, max_tokens=2) for end in ("x", "y")
    ]
    assert [answer.usage.prompt_tokens for answer in answers] == [len(prompt) + 2] * 2
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached == [0, (len(prompt) + 1) // 16 * 16]
    assert [answer.choices[0].text for answer in answers] == [clients.expected_text(prompt + end, 2) for end in "xy"]


def test_request_ids(client: openai.OpenAI) -> None:
    """The package's own way to the headers, and to the request id."""
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    raw = client.chat.completions.with_raw_response.create(**options, extra_headers={"x-request-id": "mine-1"})
    assert raw.status_code == 200
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().usage.completion_tokens == 2
    ours = [client.chat.completions.create(**options)._request_id for _ in range(2)]
    assert len({*ours, None}) == 3
    with client.chat.completions.with_streaming_response.create(**options, stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert list(streamed.iter_lines())[-2:] == ["data: [DONE]", ""]


def test_async_client(fake_mesh: Mesh) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        prompt = f"request {number}"
        if number % 2:
            answer = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=24)
            return answer.choices[0].text
        stream = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=24, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{fake_mesh.http}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(12)))

    assert asyncio.run(main()) == [clients.expected_text(f"request {number}", 24) for number in range(12)]


# --- structured output ------------------------------------------------------------------------------------------------

PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON_FORMAT: Final[Any] = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def test_json_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    """One seed, one answer, whether it is streamed or not, and whoever draws its first token."""
    for seed in range(4):
        options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": seed, "response_format": PERSON_FORMAT}
        (choice,) = client.chat.completions.create(**options, max_tokens=200).choices
        jsonschema.validate(json.loads(choice.message.content), PERSON)
        assert choice.finish_reason == "stop"
        with client.chat.completions.create(**options, max_tokens=200, stream=True) as stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content


def test_a_form_wins_over_what_would_make_it_longer(client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": True, "min_tokens": 50}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=100, extra_body=extra)
    assert answer.choices[0].text in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}}, "[a-f]{4}-[0-9]{2}"),
        ({"guided_regex": "x+y"}, "x+y"),
        ({"guided_grammar": 'start: "a" item*\nitem: "b" | "c"'}, "a[bc]*"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
    ],
)
def test_other_forms(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=400, extra_body=extra)
    assert re.fullmatch(pattern, answer.choices[0].text)


class Trip(pydantic.BaseModel):
    """Book a trip."""

    model_config = pydantic.ConfigDict(extra="forbid")
    to: Literal["Ulm", "Bern"]
    nights: Annotated[int, pydantic.Field(ge=1, le=14)]


def test_a_tool_that_must_be_called_is_called_with_valid_arguments(client: openai.OpenAI) -> None:
    """The fake engine knows nothing of tools: it is the grammar that makes the call."""
    tools: list[Any] = [openai.pydantic_function_tool(Trip)]
    for choice in ("required", {"type": "function", "function": {"name": "Trip"}}):
        options: dict[str, Any] = {
            "model": MODEL,
            "messages": MESSAGES,
            "tools": tools,
            "tool_choice": choice,
            "seed": 3,
        }
        answer = client.chat.completions.parse(**options, parallel_tool_calls=False, max_tokens=200)
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Trip)
        assert answer.choices[0].message.content is None
        with client.chat.completions.stream(**options, parallel_tool_calls=False, max_tokens=200) as stream:
            final = stream.get_final_completion()
        assert [call.function.parsed_arguments for call in final.choices[0].message.tool_calls] == [
            call.function.parsed_arguments
        ]


def test_the_package_parses_a_model_out_of_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Trip, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Trip)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "code", "param"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 3}, openai.BadRequestError, "invalid_request", "temperature"),
        ({"n": 99}, openai.BadRequestError, "invalid_request", "n"),
        ({"messages": []}, openai.BadRequestError, "invalid_request", "messages"),
        ({"max_tokens": 1_000_000}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
        ({"stop": ["a"] * 5}, openai.BadRequestError, "invalid_request", "stop"),
        ({"top_logprobs": 3}, openai.BadRequestError, "invalid_request", "top_logprobs"),
    ],
)
def test_bad_requests(
    client: openai.OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], code: str, param: str
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id
    assert client.completions.create(model=MODEL, prompt="and on", max_tokens=1).choices


def test_an_unknown_path(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.post("/nothing", cast_to=object)
    assert caught.value.code == "not_found"


def test_what_is_not_here_says_so_once(fake_mesh: Mesh) -> None:
    """The package tries again after most errors of a server; not after this one."""
    with connect(fake_mesh, max_retries=3) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.embeddings.create(model=MODEL, input="text")
        assert (caught.value.status_code, caught.value.code) == (501, "not_implemented")
        assert "x-stainless-retry-count" in caught.value.request.headers
        assert caught.value.request.headers["x-stainless-retry-count"] == "0"


# --- the newer endpoint -----------------------------------------------------------------------------------------------


def test_a_response_is_the_chat_in_other_words(client: openai.OpenAI) -> None:
    """Whole and streamed, with the same tokens, and with what came from the cache."""
    question = f"{PROMPT} {PROMPT} Once more."
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    options: dict[str, Any] = {"model": MODEL, "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(input=question, **options)
    assert whole.output_text == chat_text(messages, 24)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *events, last = client.responses.create(input=messages[1:], stream=True, **options)
    deltas: list[str] = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = last.response
    assert "".join(deltas) == final.output_text == whole.output_text
    assert len(deltas) > 1
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.usage.input_tokens_details.cached_tokens >= 64
    assert final.usage.output_tokens == 24


def test_a_response_calls_a_tool(client: openai.OpenAI) -> None:
    function: Any = openai.pydantic_function_tool(Trip)["function"]
    tool: Any = {"type": "function", **function}
    answer = client.responses.create(
        model=MODEL,
        input="hello",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
        extra_body={"seed": 3},
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert isinstance(Trip.model_validate_json(call.arguments), Trip)


# --- contention, and callers who leave --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_mesh() -> Iterator[Mesh]:
    """20 tokens a second, one request at a time."""
    with Mesh(flags=SLOW) as mesh:
        yield mesh


def wait_cancelled(mesh: Mesh) -> None:
    """Wait until nothing is left of a request whose caller went away.

    The gateway first: it has room for the next one only when it has noticed, and what the members last reported may be
    older than the request.
    """

    def look() -> str | None:
        metrics = clients.get(mesh.http, "/metrics").body.decode()
        return metrics if "\nmooncake_requests_running 0.0\n" in metrics else None

    mesh.wait(look, what="the gateway to notice that its caller has left")
    mesh.wait_idle()


def test_one_too_many_gets_a_rate_limit_error(slow_mesh: Mesh) -> None:
    with connect(slow_mesh) as client:
        with client.completions.create(model=MODEL, prompt="a", max_tokens=2000, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=MODEL, prompt="b", max_tokens=1)
        assert caught.value.response.headers["x-mooncake-reject-reason"] == "gateway_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        wait_cancelled(slow_mesh)  # closing the stream has cancelled its request
        assert client.completions.create(model=MODEL, prompt="b", max_tokens=1).choices


def test_the_package_retries_until_there_is_room(slow_mesh: Mesh) -> None:
    with connect(slow_mesh, max_retries=20) as client, connect(slow_mesh) as first:
        stream = first.completions.create(model=MODEL, prompt="a", temperature=0, max_tokens=20, stream=True)
        next(iter(stream))
        answer = client.completions.create(model=MODEL, prompt="b", temperature=0, max_tokens=3)
        stream.close()
    assert answer.choices[0].text == clients.expected_text("b", 3)


def test_a_timeout_cancels_the_request(slow_mesh: Mesh) -> None:
    with connect(slow_mesh, timeout=0.5) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2000)
    wait_cancelled(slow_mesh)


def test_a_structured_answer_goes_on_after_the_loss_of_its_decode_worker(slow_mesh: Mesh) -> None:
    """The next worker makes up the state of the grammar from the tokens drawn so far."""
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 100, "seed": 5}
    options["extra_body"] = {"structured_outputs": {"regex": "([0-9]{3}[a-z]-){8}end"}}
    with connect(slow_mesh) as client:
        expected = client.completions.create(**options).choices[0].text
        with client.completions.create(**options, stream=True) as stream:
            parts = [next(iter(stream)).choices[0].text for _ in range(10)]
            slow_mesh.kill("decode0")
            slow_mesh.start("decode0")
            parts += [chunk.choices[0].text for chunk in stream]
    assert "".join(parts) == expected
    assert re.fullmatch("([0-9]{3}[a-z]-){8}end", expected)


def test_nobody_to_decode_is_a_server_error(slow_mesh: Mesh) -> None:
    slow_mesh.kill("decode0")

    def look() -> StatusReport | None:
        report = slow_mesh.status()
        return None if report.healthy else report

    slow_mesh.wait(look, what="the conductor to miss decode0")
    with connect(slow_mesh) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="a", max_tokens=4)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        slow_mesh.start("decode0")
        slow_mesh.wait_healthy()
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=4).usage.completion_tokens == 4


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_client(_forks_real_meshes: None) -> Iterator[openai.OpenAI]:
    if find_spec("torch") is None:
        pytest.skip("needs the engine extra")
    patient = {"conductor": ["--ttft-slo-s=600", "--tbt-slo-s=60"]}
    with (
        Mesh(
            engine="transformers",
            model=DEFAULT_MODEL,
            dtype="float32",
            arena_bytes="256MiB",
            flags=patient,
            ready_s=120,
        ) as mesh,
        connect(mesh, timeout=150) as client,
    ):
        yield client


@pytest.mark.model
def test_a_conversation_with_the_real_model(real_client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 2+2?"}]
    options: dict[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0, "max_tokens": 40}
    first = real_client.chat.completions.create(messages=messages, **options)
    answer = first.choices[0].message.content
    assert "4" in answer
    assert first.choices[0].finish_reason == "stop"

    with real_client.chat.completions.create(messages=messages, stream=True, **options) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer

    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And 3+3?"}]
    second = real_client.chat.completions.create(messages=messages, **options)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16 > 0


@pytest.mark.model
def test_logprobs_of_the_real_model(real_client: openai.OpenAI) -> None:
    chat = real_client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "Name three colours."}],
        temperature=0,
        max_tokens=16,
        logprobs=True,
        top_logprobs=5,
    )
    entries = chat.choices[0].logprobs.content
    shown = "".join(entry.token for entry in entries if entry.bytes is not None)
    assert shown == chat.choices[0].message.content
    for entry in entries:
        values = [other.logprob for other in entry.top_logprobs]
        assert entry.token == entry.top_logprobs[0].token  # greedy
        assert values == sorted(values, reverse=True)
        assert values[0] == entry.logprob <= 0

    text = real_client.completions.create(
        model=DEFAULT_MODEL, prompt="The sea is", temperature=0, max_tokens=8, logprobs=2
    )
    logprobs = text.choices[0].logprobs
    assert "".join(logprobs.tokens or ()) == text.choices[0].text
    assert (logprobs.text_offset or [])[0] == 0


@pytest.mark.model
def test_choices_and_stop_of_the_real_model(real_client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": DEFAULT_MODEL, "prompt": "Once upon a time", "seed": 3, "max_tokens": 16}
    answer = real_client.completions.create(n=2, **options)
    texts = [choice.text for choice in answer.choices]
    assert texts[0] != texts[1]
    assert [choice.text for choice in real_client.completions.create(n=2, **options).choices] == texts
    stop = texts[0][5:9]
    stopped = real_client.completions.create(stop=stop, **options).choices[0]
    assert (stopped.text, stopped.finish_reason) == (texts[0][: texts[0].index(stop)], "stop")


@pytest.mark.model
def test_the_real_model_keeps_to_a_schema_and_calls_a_tool(real_client: openai.OpenAI) -> None:
    """A real vocabulary: tokens of many bytes, which end in the middle of a rule. All is drawn at temperature 1."""
    messages: list[Any] = [{"role": "user", "content": "Book a trip, and say for whom."}]
    options: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": messages, "temperature": 1, "max_tokens": 150}
    people = real_client.chat.completions.create(**options, response_format=PERSON_FORMAT, n=4, seed=1)
    for choice in people.choices:
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    answer = real_client.chat.completions.parse(
        **options, tools=[openai.pydantic_function_tool(Trip)], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Trip)
