"""Refusal of NaN and infinities before they are sent: JSON has none, and the encoder would write null without a word.

As with the decoders, one predicate is built for each type from its hints; types that hold no float cost nothing.
"""

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable
from typing import Any

from mooncake_proto.shapes import strip

Predicate = Callable[[Any], bool]


@functools.cache
def finiteness(hint: Any) -> Predicate | None:
    """A predicate that is false when a value of type *hint* holds NaN or an infinity; None where no float can be."""
    hint = strip(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is float:
        return math.isfinite
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        return _all_parts([(operator.attrgetter(f.name), hints[f.name]) for f in dataclasses.fields(hint)])
    if origin is tuple and args[-1] is not Ellipsis:
        return _all_parts([(operator.itemgetter(i), arg) for i, arg in enumerate(args)])
    if origin is tuple:
        return _all_of(args[0], iter)
    if origin is dict:
        return _all_of(args[1], dict.values)
    if origin in (typing.Union, types.UnionType):
        inner = finiteness(args[0])
        return None if inner is None else lambda value: value is None or inner(value)
    return None


def _all_parts(parts: list[tuple[Callable[[Any], Any], Any]]) -> Predicate | None:
    """Over parts of different types, each with its getter."""
    checks = [(get, inner) for get, hint in parts if (inner := finiteness(hint)) is not None]
    if not checks:
        return None
    if len(checks) == 1:
        [(only_get, only)] = checks
        return lambda value: only(only_get(value))
    return lambda value: all(inner(get(value)) for get, inner in checks)


def _all_of(hint: Any, items: Callable[[Any], Any]) -> Predicate | None:
    """Over the items of a container, all of one type."""
    inner = finiteness(hint)
    return None if inner is None else lambda value: all(map(inner, items(value)))
