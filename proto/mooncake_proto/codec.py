"""Messages to frames and back; the only module of the project that knows the wire's JSON.

A message is a frozen dataclass registered under a kind. The decoder of each class is built once from its type hints
and is strict: a missing field, a wrong type or a broken rule is refused with the path of the field. Fields that a newer
peer added are ignored. Nothing here can run code from the wire.
"""

import dataclasses
import enum
import functools
import types
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

_Decoder = Callable[[Any, str], Any]
_M = TypeVar("_M")

_BY_KIND: Final[dict[str, type]] = {}
_KIND_OF: Final[dict[type, str]] = {}
_PAYLOAD_FIELDS: Final[dict[type, tuple[str, ...]]] = {}


def message(kind: str) -> Callable[[type[_M]], type[_M]]:
    """Class decorator: make a frozen dataclass a wire message named *kind*."""

    def register(cls: type[_M]) -> type[_M]:
        if kind in _BY_KIND:
            raise ValueError(f"kind {kind!r} is registered twice")
        _BY_KIND[kind] = cls
        _KIND_OF[cls] = kind
        hints = typing.get_type_hints(cls)
        _PAYLOAD_FIELDS[cls] = tuple(name for name, hint in hints.items() if _strip(hint) is bytes)
        return cls

    return register


def kinds() -> dict[str, type]:
    """Every registered kind with its class (a copy)."""
    return dict(_BY_KIND)


def encode(body: object, envelope: Envelope | None = None) -> list[bytes]:
    """Frames of *body*, without a routing identity. Raises TypeError for a class that is no message."""
    kind = _KIND_OF.get(type(body))
    if kind is None:
        raise TypeError(f"{type(body).__name__} is not a wire message")
    payload_names = _PAYLOAD_FIELDS[type(body)]
    header: dict[str, object] = {}
    if envelope is not None:
        if envelope.id:
            header["id"] = envelope.id
        if envelope.re:
            header["re"] = envelope.re
        if envelope.deadline_s is not None:
            header["deadline_s"] = envelope.deadline_s
        if envelope.cause:
            header["cause"] = envelope.cause
    if payload_names:
        fields = [f.name for f in dataclasses.fields(body) if f.name not in payload_names]  # type: ignore[arg-type]
        header["body"] = {name: getattr(body, name) for name in fields}
        header["frames"] = payload_names
    else:
        header["body"] = body
    frames = [VERSION_FRAME, kind.encode(), orjson.dumps(header)]
    frames.extend(getattr(body, name) for name in payload_names)
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
    header = _header(frames[2])
    envelope = _envelope(header)
    kind = _text(frames[1])
    cls = _BY_KIND.get(kind)
    if cls is None:
        raise UnknownKind(f"unknown kind {kind[:64]!r}")
    body = header.get("body")
    if not isinstance(body, dict):
        raise MalformedMessage(f"expected an object, got {_name(body)}", path="body")
    return envelope, _object_decoder(cls)({**body, **_payloads(cls, header, frames[3:])}, "")


def peek(frames: Sequence[bytes]) -> Envelope:
    """The envelope of a message that :func:`decode` refused, as far as it is readable; else an empty one."""
    try:
        return _envelope(_header(frames[2]))
    except (IndexError, MalformedMessage):
        return Envelope()


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
        raise MalformedMessage(f"expected an object, got {_name(header)}", path="header")
    return header


_ENVELOPE_KEYS: Final = ("id", "re", "deadline_s", "cause")


def _envelope(header: dict[str, Any]) -> Envelope:
    known = {key: header[key] for key in _ENVELOPE_KEYS if key in header}
    envelope: Envelope = _object_decoder(Envelope)(known, "header")
    return envelope


def _payloads(cls: type, header: dict[str, Any], frames: Sequence[bytes]) -> dict[str, bytes]:
    names = header.get("frames", [])
    if not isinstance(names, list) or len(names) != len(frames):
        raise MalformedMessage(f"does not name the {len(frames)} payload frames", path="frames")
    if sum(map(len, frames)) > MAX_PAYLOAD_BYTES:
        raise MalformedMessage(f"payload exceeds {MAX_PAYLOAD_BYTES} bytes", path="frames")
    expected = _PAYLOAD_FIELDS[cls]
    return {name: frame for name, frame in zip(names, frames, strict=True) if name in expected}


# --- decoders, one per type, built once -------------------------------------------------------------------------------


def _strip(hint: Any) -> Any:
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    return hint


def _name(value: object) -> str:
    return "null" if value is None else type(value).__name__


@functools.cache
def _decoder(hint: Any) -> _Decoder:
    hint = _strip(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional_decoder(hint)
    if origin is tuple:
        return _tuple_decoder(hint)
    if origin is dict:
        return _dict_decoder(hint)
    if dataclasses.is_dataclass(hint):
        return _object_decoder(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_decoder(hint)
    if hint in (str, int, float, bool, bytes):
        return _scalar_decoder(hint)
    raise TypeError(f"{hint!r} cannot travel")


def _scalar_decoder(kind: type) -> _Decoder:
    def scalar(value: Any, path: str) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise MalformedMessage(f"expected {kind.__name__}, got {_name(value)}", path=path)

    return scalar


def _enum_decoder(kind: type[enum.Enum]) -> _Decoder:
    def member(value: Any, path: str) -> Any:
        try:
            return kind(value)
        except ValueError:
            allowed = ", ".join(str(m.value) for m in kind)
            raise MalformedMessage(f"expected one of {allowed}, got {value!r:.40}", path=path) from None

    return member


def _optional_decoder(hint: Any) -> _Decoder:
    arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
    if len(arms) != 1 or len(typing.get_args(hint)) != 2:
        raise TypeError(f"{hint!r}: only X | None can travel")
    inner = _decoder(arms[0])
    return lambda value, path: None if value is None else inner(value, path)


def _tuple_decoder(hint: Any) -> _Decoder:
    args = typing.get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        item = _decoder(args[0])

        def many(value: Any, path: str) -> Any:
            if not isinstance(value, list):
                raise MalformedMessage(f"expected a list, got {_name(value)}", path=path)
            return tuple([item(v, f"{path}[{i}]") for i, v in enumerate(value)])

        return many
    items = [_decoder(arg) for arg in args]

    def fixed(value: Any, path: str) -> Any:
        if not isinstance(value, list) or len(value) != len(items):
            raise MalformedMessage(f"expected a list of {len(items)}", path=path)
        return tuple([item(v, f"{path}[{i}]") for i, (item, v) in enumerate(zip(items, value, strict=True))])

    return fixed


def _dict_decoder(hint: Any) -> _Decoder:
    key_hint, value_hint = typing.get_args(hint)
    if _strip(key_hint) is not str:
        raise TypeError(f"{hint!r}: keys must be str")
    item = _decoder(value_hint)

    def mapping(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise MalformedMessage(f"expected an object, got {_name(value)}", path=path)
        return {key: item(v, f"{path}.{key}") for key, v in value.items()}

    return mapping


@functools.cache
def _object_decoder(cls: type) -> _Decoder:
    hints = typing.get_type_hints(cls)
    plan = [
        (f.name, _decoder(hints[f.name]), f.default is dataclasses.MISSING)
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
    ]

    def build(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise MalformedMessage(f"expected an object, got {_name(value)}", path=path)
        dot = f"{path}." if path else ""
        fields = {}
        for name, decoder, required in plan:
            if name in value:
                fields[name] = decoder(value[name], dot + name)
            elif required:
                raise MalformedMessage("missing", path=dot + name)
        try:
            return cls(**fields)
        except ValueError as error:  # a rule of the class's own __post_init__: "field: what is wrong"
            raise MalformedMessage(str(error), path=path) from error

    return build
