"""One setting's value: from text (environment, flags) and from TOML, and back to both.

All readers raise ValueError with what is allowed; the caller knows the setting's name and where the value came from.
"""

import enum
import json
import math
import re
from pathlib import Path
from typing import Final, assert_never

Value = str | int | float | bool | Path | enum.Enum | None

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
_TRUE: Final = frozenset({"true", "1", "yes", "on"})
_FALSE: Final = frozenset({"false", "0", "no", "off"})


class Unit(enum.Enum):
    """What an integer counts, where that changes how people write it."""

    PLAIN = "plain"
    BYTES = "bytes"


def from_text(kind: type, unit: Unit, text: str) -> Value:
    """Value of type *kind* as people write it in a flag or a variable."""
    if kind is bool:
        return _bool_from_text(text)
    if kind is int:
        return size_from_text(text) if unit is Unit.BYTES else _int_from_text(text)
    if kind is float:
        return _finite(_float_from_text(text), text)
    if issubclass(kind, enum.Enum):
        return _member(kind, text)
    return _string(kind, text)


def from_toml(kind: type, unit: Unit, value: object) -> Value:
    """Value of type *kind* as it stands in a TOML file; nothing is converted but integers to floats and sizes."""
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, got {value!r}")
        return value
    if kind is int:
        if unit is Unit.BYTES and isinstance(value, str):
            return size_from_text(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"expected {_int_expectation(unit)}, got {value!r}")
        return value
    if kind is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"expected a number, got {value!r}")
        return _finite(float(value), value)
    if not isinstance(value, str):
        raise ValueError(
            f"expected {'one of ' + choices(kind) if issubclass(kind, enum.Enum) else 'a string'}, got {value!r}"
        )
    return _member(kind, value) if issubclass(kind, enum.Enum) else _string(kind, value)


def to_text(unit: Unit, value: Value) -> str:
    """How a flag or a variable says *value*; reading it gives the value again. None is the empty text."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case enum.Enum():
            return str(value.value)
        case int() if unit is Unit.BYTES:
            return size_to_text(value)
        case int() | float() | str() | Path():
            return str(value)
        case _:
            assert_never(value)


def to_toml(unit: Unit, value: str | float | bool | Path | enum.Enum) -> str:
    """A TOML value; reading it gives *value* again."""
    if isinstance(value, int | float) and not isinstance(value, bool) and unit is Unit.PLAIN:
        return repr(value)
    text = to_text(unit, value)
    if isinstance(value, bool):
        return text
    # TOML's basic strings escape as JSON's do, and the DEL character besides.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def size_from_text(text: str) -> int:
    """Bytes of a size such as ``512MiB``, ``1.5 GiB``, ``2GB`` or ``4096``."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"expected {_int_expectation(Unit.BYTES)}, got {text!r}")
    size = float(match["number"]) * factor if "." in match["number"] else int(match["number"]) * factor
    if size != int(size):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(size)


def size_to_text(size_bytes: int) -> str:
    """The size in the largest binary unit that divides it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _UNITS[unit.lower()] == 0:
            return f"{size_bytes // _UNITS[unit.lower()]}{unit}"
    return str(size_bytes)


def choices(kind: type[enum.Enum]) -> str:
    return ", ".join(str(member.value) for member in kind)


def _int_expectation(unit: Unit) -> str:
    return "a size such as 512MiB or 1GiB, or a number of bytes" if unit is Unit.BYTES else "an integer"


def _bool_from_text(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"expected true or false, got {text!r}")


def _int_from_text(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected an integer, got {text!r}") from None


def _float_from_text(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r}") from None


def _finite(number: float, shown: object) -> float:
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {shown!r}")
    return number


def _member(kind: type[enum.Enum], text: str) -> enum.Enum:
    for member in kind:
        if member.value == text:
            return member
    raise ValueError(f"expected one of {choices(kind)}, got {text!r}")


def _string(kind: type, text: str) -> str | Path:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"expected valid UTF-8, got {text!r}")
    return Path(text) if kind is Path else text
