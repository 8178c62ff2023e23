"""Answers in OpenAI's shapes, over a scripted mesh: both endpoints, whole and streamed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from mooncake_mesh.errors import Aborted
from mooncake_mesh.gateway.api import TokenEvent, TokenRequest
from mooncake_mesh.gateway.completion import CompletionLimits
from mooncake_mesh.gateway.generation import choice_seed
from mooncake_mesh.gateway.tokenizer import BYTE_BOS, BYTE_EOS, BYTE_IM_END
from mooncake_proto.serving import FinishReason, TokenLogprob
from tests.unit.gateway_doubles import MODEL, Exchange, Gateway, ask, hangs, says

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
HELLO_TOKENS = 21


def streamed(chunks: list[Any]) -> dict[int, str]:
    """Text of each choice of a stream."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + delta
    return texts


def test_a_whole_chat_answer() -> None:
    gateway = Gateway(says("Hi €", cached=16))
    answer = ask(gateway, CHAT, HELLO).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi €", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": HELLO_TOKENS,
            "completion_tokens": 7,  # six bytes and the end token
            "total_tokens": HELLO_TOKENS + 7,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }
    assert gateway.mesh.cancelled == []


def test_a_whole_completion() -> None:
    answer = ask(Gateway(says("ok")), TEXT, {"prompt": "hi"}).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["prompt_tokens"] == 3  # with the begin token


def test_a_chat_stream_chunk_by_chunk() -> None:
    chunks = ask(Gateway(says("a€")), CHAT, {**HELLO, "stream": True}).events()
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["model"] == MODEL for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)
    plain = {"index": 0, "logprobs": None, "finish_reason": None}
    assert [chunk["choices"] for chunk in chunks] == [
        [{**plain, "delta": {"role": "assistant", "content": ""}}],
        [{**plain, "delta": {"content": "a"}}],
        [{**plain, "delta": {"content": "€"}}],
        [{**plain, "delta": {}, "finish_reason": "stop"}],
    ]


def test_a_completion_stream_chunk_by_chunk() -> None:
    chunks = ask(Gateway(says("ab", end=FinishReason.LENGTH)), TEXT, {"prompt": "hi", "stream": True}).events()
    plain = {"index": 0, "logprobs": None, "finish_reason": None}
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert [chunk["choices"] for chunk in chunks] == [
        [{**plain, "text": "a"}],
        [{**plain, "text": "b"}],
        [{**plain, "text": "", "finish_reason": "length"}],
    ]


@pytest.mark.parametrize(("path", "fields"), [(CHAT, HELLO), (TEXT, {"prompt": "hi"})])
def test_usage_comes_in_one_more_chunk_when_asked_for(path: str, fields: dict[str, Any]) -> None:
    gateway = Gateway(says("abc", cached=3))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = ask(gateway, path, {**fields, **options}).events()
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == ask(gateway, path, fields).json()["usage"]
    assert last["usage"]["completion_tokens"] == 4


def test_continuous_usage_counts_up() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = ask(Gateway(says("ab")), CHAT, {**HELLO, **options}).events()
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), [(CHAT, HELLO), (TEXT, {"prompt": "hi", "max_tokens": 100})])
def test_a_stop_string_across_tokens_ends_the_answer_and_cancels_the_rest(
    path: str, fields: dict[str, Any], stream: bool
) -> None:
    gateway = Gateway(says("one, two, three"))
    exchange = ask(gateway, path, {**fields, "stop": [", tw", "xyz"], "stream": stream})
    if stream:
        chunks = exchange.events()
        assert streamed(chunks) == {0: "one"}
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        (choice,) = exchange.json()["choices"]
        assert (choice.get("text") or choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")
        assert exchange.json()["usage"]["completion_tokens"] == len("one, tw")
    assert len(gateway.mesh.cancelled) == 1


def test_a_stop_string_may_stay_in_the_answer() -> None:
    fields = {"prompt": "hi", "stop": ",", "include_stop_str_in_output": True}
    assert ask(Gateway(says("a,b")), TEXT, fields).json()["choices"][0]["text"] == "a,"


def test_an_answer_that_ends_at_its_length_says_so_and_releases_what_was_held() -> None:
    answer = ask(Gateway(says("aaaa")), TEXT, {"prompt": "hi", "max_tokens": 2, "stop": "aab"}).json()
    assert answer["choices"][0] == {"index": 0, "text": "aa", "logprobs": None, "finish_reason": "length"}
    assert answer["usage"]["completion_tokens"] == 2


def test_half_a_character_at_the_end_is_released() -> None:
    chunks = ask(Gateway(says("€")), TEXT, {"prompt": "hi", "max_tokens": 2, "stream": True}).events()
    assert streamed(chunks) == {0: "\N{REPLACEMENT CHARACTER}"}


def test_the_stop_token_is_counted_and_not_shown() -> None:
    gateway = Gateway(says("aX"))
    fields = {"prompt": "hi", "stop_token_ids": [ord("X")], "logprobs": 0, "return_token_ids": True}
    answer = ask(gateway, TEXT, fields).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("a", "stop", [97, 88])
    assert choice["logprobs"]["tokens"] == ["a"]
    assert answer["usage"]["completion_tokens"] == 2
    assert gateway.mesh.requests[0].stopping.stop_token_ids == (88, BYTE_EOS, BYTE_IM_END)


def test_ignore_eos_leaves_only_the_callers_stop_tokens_and_special_text_can_be_shown() -> None:
    gateway = Gateway(says(b"a", end=None))
    fields = {"prompt": "hi", "ignore_eos": True, "skip_special_tokens": False, "min_tokens": 2}
    answer = ask(gateway, TEXT, fields).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a<|eos|>", "length")
    assert gateway.mesh.requests[0].stopping.stop_token_ids == ()
    assert gateway.mesh.requests[0].stopping.min_new_tokens == 2


def test_the_defaults_of_max_tokens() -> None:
    gateway = Gateway(says("x"))
    ask(gateway, CHAT, HELLO)
    ask(gateway, TEXT, {"prompt": "hi"})
    ask(gateway, TEXT, {"prompt": [1] * 1020})
    ask(gateway, TEXT, {"prompt": "hi", "min_tokens": 40})
    ask(gateway, CHAT, {**HELLO, "max_completion_tokens": 9})
    limits = [request.stopping.max_new_tokens for request in gateway.mesh.requests]
    assert limits == [1024 - HELLO_TOKENS, 16, 4, 40, 9]


def test_sampling_reaches_the_mesh() -> None:
    gateway = Gateway(says("x"))
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "seed": -3,
        "logprobs": True,
        "top_logprobs": 4,
        "cache_salt": "s",
        "user": "u",
    }
    ask(gateway, CHAT, {**HELLO, **fields})
    (request,) = gateway.mesh.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, -1.0, 1.5)
    assert (sampling.seed, sampling.top_logprobs) == ((1 << 63) - 3, 4)
    assert (request.cache_salt, request.model) == ("s", MODEL)
    assert bytes(request.prompt[1:8]) == b"user\nhi"


def test_null_fields_count_as_absent() -> None:
    names = [
        "stop",
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "seed",
        "logprobs",
        "stream",
        "stream_options",
        "user",
        "logit_bias",
        "tools",
    ]
    gateway = Gateway(says("ok"))
    assert ask(gateway, CHAT, {**HELLO, **dict.fromkeys(names)}).status == 200
    assert gateway.mesh.requests[0].sampling.temperature == 1.0


def test_text_parts_and_developer_messages_are_understood() -> None:
    gateway = Gateway(says("ok"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    ask(gateway, CHAT, {"messages": messages})
    prompt = gateway.mesh.requests[0].prompt
    assert b"system\nbe brief" in bytes(token for token in prompt if token < 256)
    assert b"user\na\nb" in bytes(token for token in prompt if token < 256)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_run_with_seeds_of_their_own_and_the_prompt_is_counted_once(stream: bool) -> None:
    gateway = Gateway(says("abc", cached=16))
    fields = {**HELLO, "n": 3, "seed": 5, "stream": stream, "max_tokens": 8}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    exchange = ask(gateway, CHAT, fields)
    if stream:
        chunks = exchange.events()
        assert streamed(chunks) == dict.fromkeys(range(3), "abc")
        usage = chunks[-1]["usage"]
        for index in range(3):
            mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert mine[-1]["finish_reason"] == "stop"
    else:
        answer = exchange.json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        usage = answer["usage"]
    assert usage["prompt_tokens"] == HELLO_TOKENS
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert [request.sampling.seed for request in gateway.mesh.requests] == [choice_seed(5, k) for k in range(3)]
    assert len({request.request_id for request in gateway.mesh.requests}) == 3


def test_choice_seeds_are_fixed_for_ever() -> None:
    assert [choice_seed(5, k) for k in range(3)] == [5, 7446742046784720853, 8534903776630314597]


def test_without_a_seed_every_request_draws_another() -> None:
    gateway = Gateway(says("x"))
    for _ in range(3):
        ask(gateway, CHAT, HELLO)
    seeds = {request.sampling.seed for request in gateway.mesh.requests}
    assert len(seeds) == 3
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_siblings_start_when_the_first_choice_has_its_first_token() -> None:
    release = asyncio.Event()

    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        await release.wait()
        yield TokenEvent(token=97, finish=FinishReason.LENGTH, cached_tokens=0)

    gateway = Gateway(script)

    async def run() -> None:
        body = orjson.dumps({"model": MODEL, **HELLO, "n": 4})
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(Exchange(gateway.app, CHAT, body).run())
            await gateway.mesh.until(lambda: bool(gateway.mesh.requests))
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(gateway.mesh.requests) == 1
            release.set()
            assert len((await task).json()["choices"]) == 4

    asyncio.run(run())


def test_several_prompts_run_side_by_side_and_answer_in_order() -> None:
    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        cached = request.prompt[0]
        yield TokenEvent(token=request.prompt[1], cached_tokens=cached)
        yield TokenEvent(token=request.prompt[2], finish=FinishReason.LENGTH)

    gateway = Gateway(script)
    fields = {"prompt": [[1, 97, 98], [2, 99, 100], [3, 101, 102]], "n": 2, "seed": 9}
    answer = ask(gateway, TEXT, fields).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "cd", "cd", "ef", "ef"]
    assert answer["usage"]["prompt_tokens"] == 9
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    by_id = {request.request_id.rpartition("-")[2]: request.sampling.seed for request in gateway.mesh.requests}
    assert by_id == {str(index): choice_seed(9, index % 2) for index in range(6)}


def test_of_many_prompts_only_some_run_at_a_time() -> None:
    gateway = Gateway(hangs(), limits=CompletionLimits(max_concurrent_prompts=3))

    async def run() -> None:
        exchange = Exchange(gateway.app, TEXT, orjson.dumps({"model": MODEL, "prompt": ["a"] * 10}))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(exchange.run())
            await gateway.mesh.until(lambda: len(gateway.mesh.open) == 3)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(gateway.mesh.requests) == 3
            exchange.disconnect()
            await task
        assert len(gateway.mesh.requests) == 3

    asyncio.run(run())


def test_an_error_of_one_choice_cancels_its_siblings_everywhere() -> None:
    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        yield TokenEvent(token=97, cached_tokens=0)
        if request.request_id.endswith("-2"):
            await gateway.mesh.until(lambda: len(gateway.mesh.open) == 3)
            raise Aborted("worker lost")
        await asyncio.Event().wait()

    gateway = Gateway(script)
    exchange = ask(gateway, CHAT, {**HELLO, "n": 3})
    assert (exchange.status, exchange.json()["error"]["code"]) == (500, "aborted")
    assert gateway.mesh.open == set()
    assert len(gateway.mesh.cancelled) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_breaks_off_is_an_error(stream: bool) -> None:
    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        yield TokenEvent(token=97, cached_tokens=0)

    exchange = ask(Gateway(script), CHAT, {**HELLO, "stream": stream})
    error = exchange.events()[-1]["error"] if stream else exchange.json()["error"]
    assert error["code"] == "aborted"


def test_a_request_cancelled_inside_the_mesh_is_an_error() -> None:
    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        yield TokenEvent(token=97, cached_tokens=0, finish=FinishReason.CANCELLED)

    assert ask(Gateway(script), CHAT, HELLO).json()["error"]["code"] == "aborted"


def test_chat_logprobs() -> None:
    gateway = Gateway(says("é"))
    fields = {**HELLO, "logprobs": True, "top_logprobs": 2}
    top = [
        {"token": "a", "logprob": -97.5, "bytes": [97]},
        {"token": "b", "logprob": -98.5, "bytes": [98]},
    ]
    expected = {
        "content": [
            {"token": "bytes:\\xc3", "logprob": 0.0, "bytes": [0xC3], "top_logprobs": top},
            {"token": "bytes:\\xa9", "logprob": -0.25, "bytes": [0xA9], "top_logprobs": top},
        ],
        "refusal": None,
    }
    assert ask(gateway, CHAT, fields).json()["choices"][0]["logprobs"] == expected
    chunks = ask(gateway, CHAT, {**fields, "stream": True}).events()
    with_text = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["delta"].get("content")]
    assert [choice["logprobs"] for choice in with_text] == [expected]


def test_completion_logprobs() -> None:
    answer = ask(Gateway(says("xé")), TEXT, {"prompt": "hi", "logprobs": 1}).json()
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["x", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [0.0, -0.25, -0.5],
        "top_logprobs": [
            {"a": -97.5, "x": 0.0},
            {"a": -97.5, "bytes:\\xc3": -0.25},
            {"a": -97.5, "bytes:\\xa9": -0.5},
        ],
        "text_offset": [0, 1, 1],
    }


def test_an_impossible_token_has_a_finite_logprob() -> None:
    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        logprob = TokenLogprob(logprob=float("-inf"))
        yield TokenEvent(token=97, logprob=logprob, finish=FinishReason.LENGTH, cached_tokens=0)

    answer = ask(Gateway(script), TEXT, {"prompt": "hi", "logprobs": 0}).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_logprobs_of_held_text_come_with_it() -> None:
    fields = {**HELLO, "logprobs": True, "stream": True, "stop": "bcx"}
    chunks = ask(Gateway(says("abcd")), CHAT, fields).events()
    seen = [
        (choice["delta"]["content"], [entry["token"] for entry in choice["logprobs"]["content"]])
        for choice in (chunk["choices"][0] for chunk in chunks)
        if choice["logprobs"]
    ]
    assert seen == [("a", ["a"]), ("bcd", ["b", "c", "d"])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hé", [104, 195, 169]])
def test_echo_puts_the_prompt_first(prompt: object, stream: bool) -> None:
    exchange = ask(Gateway(says("ok")), TEXT, {"prompt": prompt, "echo": True, "stream": stream})
    text = streamed(exchange.events())[0] if stream else exchange.json()["choices"][0]["text"]
    assert text == "héok"


def test_token_ids_of_a_chat() -> None:
    gateway = Gateway(says("ab"))
    fields = {**HELLO, "return_token_ids": True}
    whole = ask(gateway, CHAT, fields).json()
    assert whole["choices"][0]["token_ids"] == [97, 98, BYTE_EOS]
    assert len(whole["prompt_token_ids"]) == HELLO_TOKENS
    chunks = ask(gateway, CHAT, {**fields, "stream": True}).events()
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == [97, 98, BYTE_EOS]


def test_token_ids_of_a_completion() -> None:
    gateway = Gateway(says("ab"))
    fields = {"prompt": "x", "return_token_ids": True, "stop": "b"}
    (choice,) = ask(gateway, TEXT, fields).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([BYTE_BOS, 120], [97, 98])
    chunks = ask(gateway, TEXT, {**fields, "stream": True}).events()
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [BYTE_BOS, 120]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == [97, 98]


def test_a_chat_whose_stop_string_comes_with_the_stop_token_keeps_it_when_asked() -> None:
    fields = {"prompt": "x", "include_stop_str_in_output": True, "stop_token_ids": [ord("b")]}
    assert ask(Gateway(says("ab")), TEXT, fields).json()["choices"][0]["text"] == "ab"
