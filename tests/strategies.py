"""Hypothesis strategies that several test modules share."""

import dataclasses
import enum
import types
import typing
from typing import Annotated, Any

from hypothesis import strategies as st

from mooncake_proto import client, control, kvcache, serving, transfer  # noqa: F401  registers every kind
from mooncake_proto.codec import kinds
from mooncake_proto.envelope import Envelope
from mooncake_proto.grammar import Grammar
from mooncake_proto.shapes import HexKey, HexSecret, Natural, PackedKey, PackedKeys, PackedTokens, Positive

WIRE_INTS = st.integers(-(2**63), 2**64 - 1)
NATURALS = st.integers(0, 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: WIRE_INTS,
    float: FLOATS,
    bool: st.booleans(),
    bytes: st.binary(max_size=64),
    Natural: NATURALS,
    Positive: NATURALS.map(lambda n: max(1, n)),
    PackedTokens: st.integers(0, 16).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n)),
    PackedKeys: st.integers(0, 4).flatmap(lambda n: st.binary(min_size=16 * n, max_size=16 * n)),
    PackedKey: st.binary(min_size=16, max_size=16),
    HexKey: st.binary(min_size=16, max_size=16).map(bytes.hex),
    HexSecret: (st.just(b"") | st.binary(min_size=32, max_size=32)).map(bytes.hex),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type that can travel."""
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    if hint in _LEAVES:
        return _LEAVES[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.none() | values_of(args[0])
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values_of(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    if origin is dict:
        return st.dictionaries(TEXT, values_of(args[1]), max_size=4)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        return instances_of(typing.cast(type, hint))
    raise TypeError(f"no strategy for {hint!r}" + (" (an Annotated without one)" if origin is Annotated else ""))


def instances_of(cls: type) -> st.SearchStrategy[Any]:
    """Instances of a wire dataclass; rules of its own __post_init__ are met by narrowing a field here."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {name: values_of(hint) for name, hint in hints.items()}
    if cls is serving.Stopping:
        fields["max_new_tokens"] = st.integers(1, 2**63 - 1)
    if cls is Grammar:
        fields["text"] = TEXT.filter(bool)
        fields["end_tokens"] = st.lists(NATURALS, min_size=1, max_size=4).map(tuple)
    if cls is serving.DecodeGate:
        times = st.floats(0.0, 1e9)
        fields |= dict.fromkeys(("step_base_s", "step_sequence_s", "step_token_s", "decode_s"), times)
        fields["tbt_s"] = st.floats(1e-9, 1e9)
    if cls is serving.MixedStep:
        fields |= {name: st.floats(0.0, 1e9) for name, hint in hints.items() if hint is float}
        fields["limit_s"] = st.floats(1e-9, 1e9)
    return st.builds(cls, **fields)


def messages() -> st.SearchStrategy[Any]:
    """Messages of every kind."""
    return st.sampled_from(sorted(kinds())).flatmap(lambda kind: instances_of(kinds()[kind]))


def envelopes() -> st.SearchStrategy[Envelope]:
    """Envelopes, empty ones among them."""
    return instances_of(Envelope)
