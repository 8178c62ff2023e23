"""What may travel, and the strict decoders that are built once from type hints.

A decoder takes a parsed JSON value and returns the typed one, or raises :class:`Refused`. It knows no path: containers
add their part on the way out, so a message that is in order pays nothing for the exactness of the error.

Rules that a type cannot say stand in ``Annotated``, where a type checker ignores them and the decoder obeys.
"""

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Final

from mooncake_proto.ids import BLOCK_KEY_BYTES

Decoder = Callable[[Any], Any]
Rule = Callable[[Any], str | None]
"""What is wrong with a value of the right type, or None."""

TOKEN_BYTES: Final = 4
SECRET_BYTES: Final = 32
_MAX_NATURAL: Final = 2**63 - 1
_HEX_DIGITS: Final = frozenset("0123456789abcdef")
_MISSING: Final = object()


class Refused(Exception):
    """A value broke its declared shape. ``path`` starts with its own name or index and is relative to the root."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.path = ""

    def under(self, part: str) -> "Refused":
        """The same refusal one level further out."""
        self.path = part + self.path
        return self


def _not_natural(value: int) -> str | None:
    return None if 0 <= value <= _MAX_NATURAL else f"expected 0 to 2**63-1, got {value}"


def _not_positive(value: int) -> str | None:
    return None if 1 <= value <= _MAX_NATURAL else f"expected 1 to 2**63-1, got {value}"


def _not_multiple_of(size: int) -> Rule:
    return lambda value: f"{len(value)} bytes are no multiple of {size}" if len(value) % size else None


def _not_one_key(value: bytes) -> str | None:
    return None if len(value) == BLOCK_KEY_BYTES else f"expected {BLOCK_KEY_BYTES} bytes, got {len(value)}"


def _not_hex_key(value: str) -> str | None:
    is_hex = len(value) == 2 * BLOCK_KEY_BYTES and _HEX_DIGITS.issuperset(value)
    return None if is_hex else f"expected {2 * BLOCK_KEY_BYTES} hex digits"


def _not_32_hex_bytes(value: str) -> str | None:
    is_hex = len(value) in (0, 2 * SECRET_BYTES) and _HEX_DIGITS.issuperset(value)
    return None if is_hex else f"expected {2 * SECRET_BYTES} hex digits or none"


Natural = Annotated[int, _not_natural]
"""A count, an index or a token id."""

Positive = Annotated[int, _not_positive]
"""A count of what cannot be nothing."""

PackedTokens = Annotated[bytes, _not_multiple_of(TOKEN_BYTES)]
"""Token ids as little-endian int32."""

PackedKeys = Annotated[bytes, _not_multiple_of(BLOCK_KEY_BYTES)]
"""Concatenated block keys."""

PackedKey = Annotated[bytes, _not_one_key]
"""One block key."""

HexKey = Annotated[str, _not_hex_key]
"""One block key in lower-case hex."""


HexSecret = Annotated[str, _not_32_hex_bytes]
"""A secret of 32 bytes in lower-case hex, or nothing."""

HexSha256 = Annotated[str, _not_32_hex_bytes]
"""A SHA-256 in lower-case hex, or nothing."""


def json_name(value: object) -> str:
    """The name of *value*'s type in error messages."""
    return "null" if value is None else type(value).__name__


def strip(hint: Any) -> Any:
    """*hint* without NewType and Annotated."""
    while True:
        if hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        elif typing.get_origin(hint) is Annotated:
            hint = typing.get_args(hint)[0]
        else:
            return hint


@functools.cache
def decoder_of(hint: Any) -> Decoder:
    """The decoder of a field of type *hint*. Raises TypeError for a type that has no place on the wire."""
    if hasattr(hint, "__supertype__"):
        return decoder_of(hint.__supertype__)
    origin = typing.get_origin(hint)
    if origin is Annotated:
        inner, *rules = typing.get_args(hint)
        return _ruled(decoder_of(inner), rules)
    if origin in (typing.Union, types.UnionType):
        return _optional(hint)
    if origin is tuple:
        return _tuple(typing.get_args(hint))
    if origin is dict:
        return _mapping(*typing.get_args(hint))
    if dataclasses.is_dataclass(hint):
        return object_decoder(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member(hint)
    if hint is float:
        return _float
    if hint in (str, int, bool, bytes):
        return _exactly(hint)
    raise TypeError(f"{hint!r} cannot travel")


def _exactly(kind: type) -> Decoder:
    def scalar(value: Any) -> Any:
        if type(value) is kind:  # bool is no int here
            return value
        raise Refused(f"expected {kind.__name__}, got {json_name(value)}")

    return scalar


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise Refused(f"expected float, got {json_name(value)}")


def _ruled(inner: Decoder, rules: list[Rule]) -> Decoder:
    def ruled(value: Any) -> Any:
        decoded = inner(value)
        for rule in rules:
            if (wrong := rule(decoded)) is not None:
                raise Refused(wrong)
        return decoded

    return ruled


def _member(kind: type[enum.Enum]) -> Decoder:
    members = {member.value: member for member in kind}
    allowed = ", ".join(map(str, members))

    def member(value: Any) -> Any:
        if type(value) is not str:
            raise Refused(f"expected one of {allowed}, got {json_name(value)}")
        if value not in members:
            raise Refused(f"expected one of {allowed}, got {value[:40]!r}")
        return members[value]

    if not all(type(value) is str for value in members):
        raise TypeError(f"{kind!r}: only enums of str can travel")
    return member


def _optional(hint: Any) -> Decoder:
    arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
    if len(arms) != 1 or len(typing.get_args(hint)) != 2:
        raise TypeError(f"{hint!r}: only X | None can travel")
    inner = decoder_of(arms[0])
    return lambda value: None if value is None else inner(value)


def _tuple(hints: tuple[Any, ...]) -> Decoder:
    if len(hints) == 2 and hints[1] is Ellipsis:
        item = decoder_of(hints[0])
        inline = {_inline_type(hints[0])}

        def many(value: Any) -> Any:
            if type(value) is not list:
                raise Refused(f"expected a list, got {json_name(value)}")
            if set(map(type, value)) == inline:
                return tuple(value)
            done: list[Any] = []
            try:
                for entry in value:
                    done.append(item(entry))  # noqa: PERF401  how far it came is the index of the bad entry
            except Refused as refused:
                raise refused.under(f"[{len(done)}]") from None
            return tuple(done)

        return many
    items = [decoder_of(hint) for hint in hints]
    inlines = [_inline_type(hint) for hint in hints]

    def fixed(value: Any) -> Any:
        if type(value) is list and list(map(type, value)) == inlines:
            return tuple(value)
        if type(value) is not list or len(value) != len(items):
            raise Refused(f"expected a list of {len(items)}")
        done: list[Any] = []
        try:
            for item, entry in zip(items, value, strict=True):
                done.append(item(entry))
        except Refused as refused:
            raise refused.under(f"[{len(done)}]") from None
        return tuple(done)

    return fixed


def _mapping(key_hint: Any, value_hint: Any) -> Decoder:
    if strip(key_hint) is not str:
        raise TypeError(f"keys of {key_hint!r}: only str can travel")
    item = decoder_of(value_hint)

    def mapping(value: Any) -> Any:
        if type(value) is not dict:
            raise Refused(f"expected an object, got {json_name(value)}")
        done = {}
        key = ""
        try:
            for key, entry in value.items():
                done[key] = item(entry)
        except Refused as refused:
            raise refused.under(f".{key[:64]}") from None
        return done

    return mapping


@functools.cache
def object_decoder(cls: type) -> Decoder:
    """The decoder of dataclass *cls* from a JSON object. Fields that *cls* does not know are ignored.

    Objects are filled slot by slot, as the __init__ of a frozen dataclass does it too: this saves a dict and a call.
    """
    plan = _plan(cls)
    new: Callable[[type], Any] = object.__new__
    validate: Callable[[Any], None] | None = getattr(cls, "__post_init__", None)

    def build(value: Any) -> Any:
        if type(value) is not dict:
            raise Refused(f"expected an object, got {json_name(value)}")
        built = new(cls)
        name = ""
        try:
            for name, fill, inline, decode, default in plan:
                given = value.get(name, _MISSING)
                if type(given) is inline:
                    fill(built, given)
                elif given is not _MISSING:
                    fill(built, decode(given))
                elif default is not dataclasses.MISSING:
                    fill(built, default)
                else:
                    raise Refused("missing")
        except Refused as refused:
            raise refused.under(f".{name}") from None
        if validate is not None:
            try:
                validate(built)
            except ValueError as error:
                raise Refused(str(error)) from error
        return built

    return build


def _plan(cls: type) -> list[tuple[str, Callable[[Any, Any], None], type | None, Decoder, Any]]:
    """For each field: its name, setter, type of values that need no decoding, decoder, and value when absent."""
    hints = typing.get_type_hints(cls, include_extras=True)
    if not hasattr(cls, "__slots__"):
        raise TypeError(f"{cls.__name__} must be a dataclass with slots to travel")
    return [
        (f.name, getattr(cls, f.name).__set__, _inline_type(hints[f.name]), decoder_of(hints[f.name]), f.default)
        for f in dataclasses.fields(cls)
    ]


def _inline_type(hint: Any) -> type | None:
    """The exact type of values that need no call of the field's decoder, if there is one."""
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    if hint in (str, int, bool, float, bytes):
        return typing.cast(type, hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return types.NoneType
    return None
