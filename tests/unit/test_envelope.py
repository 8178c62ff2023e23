"""The envelope: what surrounds a body, and what can still be answered when the body is refused."""

import json

import pytest

from mooncake_proto.codec import decode, encode, peek
from mooncake_proto.control import Ping
from mooncake_proto.envelope import VERSION_FRAME, Envelope
from mooncake_proto.errors import MalformedMessage, UnknownKind, VersionMismatch
from mooncake_proto.ids import MessageId

FULL = Envelope(id=MessageId("7"), re=MessageId("3"), deadline_s=1.5, cause="req-1")


def test_an_absent_envelope_costs_no_bytes() -> None:
    assert encode(Ping()) == [VERSION_FRAME, b"control.ping", b'{"body":{}}']
    assert decode(encode(Ping())) == (Envelope(), Ping())


def test_every_field_travels() -> None:
    assert decode(encode(Ping(), FULL))[0] == FULL


def test_a_deadline_of_zero_is_no_absent_deadline() -> None:
    assert decode(encode(Ping(), Envelope(deadline_s=0.0)))[0].deadline_s == 0.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("id", 7, "header.id: expected str, got int"),
        ("re", None, "header.re: expected str, got null"),
        ("deadline_s", "soon", "header.deadline_s: expected float, got str"),
        ("deadline_s", True, "header.deadline_s: expected float, got bool"),
        ("cause", {}, "header.cause: expected str, got dict"),
    ],
)
def test_a_bad_field_is_named(field: str, value: object, message: str) -> None:
    frames = [VERSION_FRAME, b"control.ping", json.dumps({field: value, "body": {}}).encode()]
    with pytest.raises(MalformedMessage) as refusal:
        decode(frames)
    assert str(refusal.value) == message
    assert peek(frames) == Envelope()


@pytest.mark.parametrize(
    ("frame", "replacement", "error"),
    [(0, b"mooncake/2", VersionMismatch), (1, b"control.sing", UnknownKind), (1, b"\xff", MalformedMessage)],
)
def test_a_refused_message_can_still_be_answered(frame: int, replacement: bytes, error: type[Exception]) -> None:
    frames = encode(Ping(), FULL)
    frames[frame] = replacement
    with pytest.raises(error):
        decode(frames)
    assert peek(frames) == FULL


@pytest.mark.parametrize("frames", [[], [b""], [VERSION_FRAME, b"x"], [VERSION_FRAME, b"x", b"{"], [b"", b"", b"[]"]])
def test_peek_never_raises(frames: list[bytes]) -> None:
    assert peek(frames) == Envelope()
