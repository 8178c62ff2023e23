"""Messages to frames and back; the only module of the project that knows the wire's JSON.

A message is a frozen dataclass registered under a kind. Decoding is strict: a missing field, a wrong type or a broken
rule is refused with the path of the field (see shapes.py). Fields that a newer peer added are ignored. Nothing here can
run code from the wire.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import orjson

from mooncake_proto.envelope import (
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    VERSION_FRAME,
    Envelope,
)
from mooncake_proto.errors import MalformedMessage, UnknownKind, VersionMismatch
from mooncake_proto.finite import Predicate, finiteness
from mooncake_proto.shapes import Decoder, Refused, json_name, object_decoder, strip

_M = TypeVar("_M")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What the codec knows of one kind. ``payload``: names of the fields that travel as frames of their own."""

    name: str
    cls: type
    payload: tuple[str, ...]
    in_header: tuple[str, ...]
    decode: Decoder
    is_finite: Predicate | None


_BY_NAME: Final[dict[str, _Kind]] = {}
_BY_CLASS: Final[dict[type, _Kind]] = {}


def message(kind: str) -> Callable[[type[_M]], type[_M]]:
    """Class decorator: make a frozen dataclass a wire message named *kind*.

    Raises TypeError when a field has a type that cannot travel.
    """

    def register(cls: type[_M]) -> type[_M]:
        if kind in _BY_NAME:
            raise ValueError(f"kind {kind!r} is registered twice")
        hints = typing.get_type_hints(cls)
        payload = tuple(name for name, hint in hints.items() if strip(hint) is bytes)
        entry = _Kind(
            name=kind,
            cls=cls,
            payload=payload,
            in_header=tuple(name for name in hints if name not in payload),
            decode=object_decoder(typing.cast(Any, cls)),
            is_finite=finiteness(typing.cast(Any, cls)),
        )
        _BY_NAME[kind] = _BY_CLASS[cls] = entry
        return cls

    return register


def kinds() -> dict[str, type]:
    """Every registered kind with its class (a copy)."""
    return {name: kind.cls for name, kind in _BY_NAME.items()}


def encode(body: object, envelope: Envelope | None = None) -> list[bytes]:
    """Frames of *body*, without a routing identity.

    Raises MalformedMessage for what no peer would take (a float that is not finite, a message over the size limits),
    TypeError for a class that is no message.
    """
    kind = _BY_CLASS.get(type(body))
    if kind is None:
        raise TypeError(f"{type(body).__name__} is not a wire message")
    if kind.is_finite is not None and not kind.is_finite(body):
        raise MalformedMessage(f"{kind.name} holds a float that is not finite")
    header = _envelope_fields(envelope)
    if kind.payload:
        header["body"] = {name: getattr(body, name) for name in kind.in_header}
        header["frames"] = kind.payload
    else:
        header["body"] = body
    frames = [VERSION_FRAME, kind.name.encode(), orjson.dumps(header)]
    frames.extend(getattr(body, name) for name in kind.payload)
    _bounded(frames)
    return frames


def decode(frames: Sequence[bytes]) -> tuple[Envelope, Any]:
    """Envelope and body of one message (frames without routing identity).

    Raises VersionMismatch, UnknownKind or MalformedMessage; see :func:`peek` for what can still be answered then.
    """
    if len(frames) < 3:
        raise MalformedMessage(f"expected at least 3 frames, got {len(frames)}")
    if len(frames) > MAX_FRAMES:
        raise MalformedMessage(f"{len(frames)} frames exceed the limit of {MAX_FRAMES}")
    if frames[0] != VERSION_FRAME:
        raise VersionMismatch(f"peer speaks {frames[0][:32]!r}, this process {VERSION_FRAME!r}")
    _bounded(frames)
    header = _header(frames[2])
    envelope = _envelope(header)
    name = _text(frames[1])
    kind = _BY_NAME.get(name)
    if kind is None:
        raise UnknownKind(f"unknown kind {name[:64]!r}")
    body = header.get("body")
    if not isinstance(body, dict):
        raise MalformedMessage(f"expected an object, got {json_name(body)}", path="body")
    try:
        return envelope, kind.decode(body | _payload(kind, header, frames[3:]))
    except Refused as refused:
        raise MalformedMessage(refused.message, path=refused.path.removeprefix(".")) from refused


def peek(frames: Sequence[bytes]) -> Envelope:
    """The envelope of a message that :func:`decode` refused, as far as it is readable; else an empty one."""
    try:
        return _envelope(_header(frames[2]))
    except (IndexError, MalformedMessage):
        return Envelope()


def _bounded(frames: Sequence[bytes]) -> None:
    if len(frames[2]) > MAX_HEADER_BYTES:
        raise MalformedMessage(f"{len(frames[2])} bytes exceed {MAX_HEADER_BYTES}", path="header")
    if sum(map(len, frames[3:])) > MAX_PAYLOAD_BYTES:
        raise MalformedMessage(f"payload exceeds {MAX_PAYLOAD_BYTES} bytes", path="frames")


def _text(frame: bytes) -> str:
    try:
        return frame.decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage("not UTF-8", path="kind") from error


def _header(frame: bytes) -> dict[str, Any]:
    if len(frame) > MAX_HEADER_BYTES:
        raise MalformedMessage(f"{len(frame)} bytes exceed {MAX_HEADER_BYTES}", path="header")
    try:
        header = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        raise MalformedMessage(f"not JSON ({error})", path="header") from error
    if not isinstance(header, dict):
        raise MalformedMessage(f"expected an object, got {json_name(header)}", path="header")
    return header


def _envelope_fields(envelope: Envelope | None) -> dict[str, object]:
    """Fields that are set; absent ones cost no bytes."""
    header: dict[str, object] = {}
    if envelope is None:
        return header
    if envelope.id:
        header["id"] = envelope.id
    if envelope.re:
        header["re"] = envelope.re
    if envelope.deadline_s is not None:
        header["deadline_s"] = envelope.deadline_s
    if envelope.cause:
        header["cause"] = envelope.cause
    return header


_decode_envelope: Final = object_decoder(Envelope)


def _envelope(header: dict[str, Any]) -> Envelope:
    try:
        envelope: Envelope = _decode_envelope(header)
    except Refused as refused:
        raise MalformedMessage(refused.message, path="header" + refused.path) from refused
    return envelope


def _payload(kind: _Kind, header: dict[str, Any], frames: Sequence[bytes]) -> dict[str, bytes]:
    """Payload frames by name; names that a newer peer added are dropped."""
    names = header.get("frames", [])
    if not isinstance(names, list) or len(names) != len(frames):
        raise MalformedMessage(f"does not name the {len(frames)} payload frames", path="frames")
    payload = {name: frame for name, frame in zip(names, frames, strict=True) if name in kind.payload}
    if len(payload) != sum(name in kind.payload for name in names):
        raise MalformedMessage("names a payload frame twice", path="frames")
    return payload
