"""The codec under generated messages and under noise."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_proto.codec import decode, encode, kinds, peek
from mooncake_proto.envelope import VERSION_FRAME, Envelope
from mooncake_proto.errors import WireError
from tests.strategies import envelopes, instances_of, messages


@pytest.mark.parametrize("kind", sorted(kinds()))
@settings(max_examples=settings().max_examples // 5)  # per kind, and there are many
@given(data=st.data(), envelope=envelopes())
def test_decode_undoes_encode(kind: str, data: st.DataObject, envelope: Envelope) -> None:
    body = data.draw(instances_of(kinds()[kind]))
    frames = encode(body, envelope)
    assert decode(frames) == (envelope, body)
    assert peek(frames) == envelope
    assert encode(body, envelope) == frames


@given(st.lists(st.binary(max_size=64), max_size=20))
def test_noise_raises_only_wire_errors(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)
    peek(frames)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(kind=st.sampled_from(sorted(kinds())), message=messages(), data=st.data())
def test_mutated_messages_raise_only_wire_errors(kind: str, message: Any, data: st.DataObject) -> None:
    frames = encode(message)
    for _ in range(data.draw(st.integers(1, 3))):
        _mutate(frames, kind, data)
    with contextlib.suppress(WireError):
        decode(frames)
    peek(frames)


def _mutate(frames: list[bytes], kind: str, data: st.DataObject) -> None:
    if not frames:
        frames.append(VERSION_FRAME)
    at = data.draw(st.integers(0, len(frames) - 1))
    match data.draw(st.sampled_from(["cut", "drop", "repeat", "flip", "retype", "rekind"])):
        case "cut":
            frames[at] = frames[at][: data.draw(st.integers(0, len(frames[at])))]
        case "drop":
            del frames[at]
        case "repeat":
            frames.insert(at, frames[at])
        case "flip" if frames[at]:
            changed = bytearray(frames[at])
            changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
            frames[at] = bytes(changed)
        case "retype" if len(frames) > 2:
            frames[2] = _replace_one_value(frames[2], data)
        case "rekind" if len(frames) > 1:
            frames[1] = kind.encode()


def _replace_one_value(header: bytes, data: st.DataObject) -> bytes:
    """The header with one value, at any depth, replaced by other JSON."""
    with contextlib.suppress(ValueError):
        tree = json.loads(header)
        places = list(_places(tree))
        if places:
            container, key = data.draw(st.sampled_from(places))
            container[key] = data.draw(JSON)
            return json.dumps(tree, allow_nan=True).encode()
    return header


def _places(tree: Any) -> Any:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield tree, key
        yield from _places(value)
