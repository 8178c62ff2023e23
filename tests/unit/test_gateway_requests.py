"""Parsing of request bodies: whatever comes in, it is a bounded request or an InvalidRequest that names the field."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway import openai_requests as limits
from mooncake_mesh.gateway.json_fields import read_json_object
from mooncake_mesh.gateway.openai_requests import parse_chat, parse_completion

_T = TypeVar("_T")

NAMES = [
    "model",
    "messages",
    "prompt",
    "n",
    "stop",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "top_logprobs",
    "echo",
    "best_of",
    "suffix",
    "logit_bias",
    "tools",
    "tool_choice",
    "response_format",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "cache_salt",
    "return_token_ids",
    "add_special_tokens",
    "user",
    "modalities",
    "role",
    "content",
    "type",
    "text",
    "include_usage",
    "continuous_usage_stats",
]

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-3, 20),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["user", "text", "auto", "\ud800", "fake"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=20), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)),
    max_leaves=12,
)
OVERRIDES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)


@given(OVERRIDES)
def test_a_chat_body_is_a_bounded_request_or_refused(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    request = parsed_or_refusal(parse_chat, body)
    if isinstance(request, InvalidRequest):
        assert request.param
        assert request.param.partition("[")[0].partition(".")[0] in str(request)
        return
    assert 1 <= len(request.messages) <= limits.MAX_MESSAGES
    check_options(request.options)


@given(OVERRIDES)
def test_a_completion_body_is_a_bounded_request_or_refused(fields: dict[str, Any]) -> None:
    request = parsed_or_refusal(parse_completion, {"model": "m", "prompt": "hi", **fields})
    if isinstance(request, InvalidRequest):
        assert request.param
        assert request.param.partition("[")[0].partition(".")[0] in str(request)
        return
    assert 1 <= len(request.prompts) <= limits.MAX_PROMPTS
    assert all(request.prompts)
    check_options(request.options)


def parsed_or_refusal(parse: Callable[[Any], _T], body: object) -> "_T | InvalidRequest":
    try:
        return parse(body)
    except InvalidRequest as error:
        return error


def check_options(options: limits.GenerationOptions) -> None:
    assert 1 <= options.n <= limits.MAX_CHOICES
    assert len(options.text.stop) <= limits.MAX_STOP_STRINGS
    assert all(1 <= len(stop) <= limits.MAX_STOP_CHARS for stop in options.text.stop)
    assert len(options.stop_token_ids) <= limits.MAX_STOP_TOKEN_IDS
    assert options.max_tokens is None or options.max_tokens >= max(1, options.text.min_tokens)
    sampling = options.sampling
    assert 0 <= sampling.temperature <= 2
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert sampling.top_k >= 0
    assert sampling.repetition_penalty > 0
    assert sampling.top_logprobs is None or 0 <= sampling.top_logprobs <= limits.MAX_CHAT_LOGPROBS


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    result = parsed_or_refusal(read_json_object, body)
    assert isinstance(result, dict | InvalidRequest)


@given(st.dictionaries(st.text(max_size=5), VALUES.filter(lambda value: value == value), max_size=4))
def test_any_json_object_is_read_as_it_is(value: dict[str, Any]) -> None:
    try:
        body = json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return  # holds a NaN or infinity, which JSON cannot say
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # holds half a surrogate pair
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            read_json_object(body)
    else:
        assert read_json_object(body) == value


@pytest.mark.parametrize(
    ("given_value", "stop"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), (["a", "a"], ("a",)), ([], ())]
)
def test_stop_strings(given_value: object, stop: tuple[str, ...]) -> None:
    assert parse_completion({"model": "m", "prompt": "x", "stop": given_value}).options.text.stop == stop


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_forms_of_prompts(prompt: object, prompts: tuple[object, ...]) -> None:
    assert parse_completion({"model": "m", "prompt": prompt}).prompts == prompts


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2, "n": 2},
        {"suffix": ""},
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
        {"stop_token_ids": [1, 2]},
        {"top_k": -1},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"stream": True, "stream_options": {}},
        {"logprobs": 0},
    ],
)
def test_harmless_forms_are_accepted(fields: dict[str, Any]) -> None:
    parse_completion({"model": "m", "prompt": "x", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"modalities": ["text"]},
        {"logprobs": False, "top_logprobs": 0},
        {"logprobs": True},
        {"parallel_tool_calls": True},
    ],
)
def test_harmless_chat_forms_are_accepted(fields: dict[str, Any]) -> None:
    parse_chat({"model": "m", "messages": [{"role": "user", "content": "hi", "name": "n"}], **fields})
