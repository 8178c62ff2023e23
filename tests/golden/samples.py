"""One fixed instance of every wire message, every field of it set, made from the type hints alone."""

import dataclasses
import enum
import itertools
import types
import typing
from collections.abc import Iterator
from typing import Any

from mooncake_proto.shapes import HexKey, HexSecret, PackedKey, PackedKeys, PackedTokens, strip


def sample(cls: type) -> Any:
    """The sample of *cls*. Depends on names, types and order of its fields, not on their defaults."""
    return _instance(cls, itertools.count(1))


def _instance(cls: type, numbers: Iterator[int]) -> Any:
    hints = typing.get_type_hints(cls, include_extras=True)
    return cls(**{field.name: _value(hints[field.name], field.name, numbers) for field in dataclasses.fields(cls)})


def _value(hint: Any, name: str, numbers: Iterator[int]) -> Any:
    size = {PackedTokens: 8, PackedKeys: 32, PackedKey: 16}.get(hint)
    if size is not None:
        return bytes(range(size))
    if hint == HexKey:
        return bytes(range(16)).hex()
    if hint == HexSecret:
        return bytes(range(32)).hex()
    hint = strip(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value(args[0], name, numbers)
    if origin is tuple and args[-1] is Ellipsis:
        return tuple(_value(args[0], name, numbers) for _ in range(2))
    if origin is tuple:
        return tuple(_value(arg, name, numbers) for arg in args)
    if origin is dict:
        return {f"{name}-{next(numbers)}": _value(args[1], name, numbers) for _ in range(2)}
    if dataclasses.is_dataclass(hint):
        return _instance(typing.cast(type, hint), numbers)
    if issubclass(hint, enum.Enum):
        return list(hint)[-1]
    return _scalar(hint, name, next(numbers))


def _scalar(kind: type, name: str, number: int) -> Any:
    match kind.__name__:
        case "str":
            return f"{name}-{number} ☾"
        case "int":
            return number
        case "float":
            return number + 0.25
        case "bool":
            return True
        case "bytes":
            return f"{name}-{number}".encode()
    raise TypeError(f"no sample for {kind!r}")
