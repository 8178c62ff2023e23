"""Refusal of NaN and infinities before they are sent: JSON has none, and the encoder would write null without a word.

As with the decoders, one check is built for each type from its hints; types that hold no float cost nothing.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from mooncake_proto.shapes import Refused, strip

Check = Callable[[Any], None]


@functools.cache
def finite_check(hint: Any) -> Check | None:
    """A check that raises Refused when a value of type *hint* holds a float that JSON lacks; None if it cannot."""
    hint = strip(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is float:
        return _finite
    if dataclasses.is_dataclass(hint):
        return _fields_finite(typing.cast(type, hint))
    if origin in (typing.Union, types.UnionType):
        inner = finite_check(args[0])
        return None if inner is None else lambda value: None if value is None else inner(value)
    if origin is dict:
        inner = finite_check(args[1])
        return None if inner is None else lambda value: _all_finite((f".{k}", inner, v) for k, v in value.items())
    if origin is tuple and args[-1] is Ellipsis:
        inner = finite_check(args[0])
        return None if inner is None else lambda value: _items_finite(inner, value)
    if origin is tuple:
        checks = [(f"[{i}]", i, check) for i, arg in enumerate(args) if (check := finite_check(arg)) is not None]
        return (lambda value: _all_finite((part, check, value[i]) for part, i, check in checks)) if checks else None
    return None


def _finite(value: float) -> None:
    if not math.isfinite(value):
        raise Refused(f"{value} cannot travel")


def _fields_finite(cls: type) -> Check | None:
    hints = typing.get_type_hints(cls, include_extras=True)
    checks = [(f.name, c) for f in dataclasses.fields(cls) if (c := finite_check(hints[f.name])) is not None]
    if not checks:
        return None

    def fields(value: Any) -> None:
        for name, check in checks:
            try:
                check(getattr(value, name))
            except Refused as refused:
                raise refused.under(f".{name}") from None

    return fields


def _items_finite(check: Check, values: tuple[Any, ...]) -> None:
    for index, value in enumerate(values):
        try:
            check(value)
        except Refused as refused:
            raise refused.under(f"[{index}]") from None


def _all_finite(parts: Iterable[tuple[str, Check, Any]]) -> None:
    for part, check, value in parts:
        try:
            check(value)
        except Refused as refused:
            raise refused.under(part) from None
