"""Strings that no UTF-8 can say are refused wherever they are, and emoji written as two halves are text."""

import pytest

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.json_fields import json_value, read_json_object
from mooncake_mesh.gateway.tool_reader import CallArguments, ToolCallReader

PAIR = r"\ud83d\ude00"


@pytest.mark.parametrize("half", [r"\ud83d", r"\uDE00", r"\ude00\ud83d"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"a": "%s"}', "a"),
        ('{"a": {"b": ["x", {"c": "%s"}]}}', "a.b[1].c"),
        ('{"a": [{"%s": 1}]}', "a key of a[0]"),
        ('{"%s": 1}', "a key"),
    ],
)
def test_half_a_pair_is_refused_by_its_place(body: str, param: str, half: str) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        read_json_object((body % half).encode())
    assert caught.value.param == param


@pytest.mark.parametrize("depth", [100, 900, 950, 990, 5_000])
def test_half_a_pair_is_refused_however_deep_it_lies(depth: int) -> None:
    with pytest.raises(InvalidRequest):
        read_json_object(b'{"a": ' + b"[" * depth + rb'"\ud83d"' + b"]" * depth + b"}")


def test_a_pair_is_one_character() -> None:
    assert read_json_object(f'{{"a": ["{PAIR}", {{"{PAIR}": 1}}]}}'.encode()) == {"a": ["😀", {"😀": 1}]}
    assert json_value(f'"{PAIR}"') == "😀"
    assert json_value(r'"\\ud83d"') == r"\ud83d"


def test_text_with_half_a_pair_is_no_value() -> None:
    for text in (r'"\ud83d"', r'{"a": [{"\udc00": 1}]}'):
        with pytest.raises(ValueError, match="surrogates"):
            json_value(text)


def test_half_a_pair_that_a_model_writes_reaches_no_client() -> None:
    reader = ToolCallReader()
    parts = reader.feed('<tool_call>{"name": "look", "arguments": "{\\"at\\": \\"\\ud83d\\"}"}</tool_call>')
    told = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert told == '{"at": "?"}'
    told.encode()
