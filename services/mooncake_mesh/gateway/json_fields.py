"""Strict reading of a JSON object that a stranger sent: every refusal is an InvalidRequest that names the field."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from mooncake_mesh.errors import InvalidRequest

_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a pair, or a whole one, as JSON writes it."""


class InvalidJson(InvalidRequest):
    """The body is not one JSON object in UTF-8."""

    code = "invalid_json"


class UnsupportedParameter(InvalidRequest):
    """The field is known and asks for something this server does not do."""

    code = "unsupported_parameter"


def read_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in *body*. InvalidJson for what JSON forbids (NaN, invalid UTF-8) and for repeated keys;
    InvalidRequest for a string that is no text, wherever it is."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        if _SURROGATE.search(text):
            _check_characters(value, "")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise InvalidJson("the body is nested too deeply") from None
    except InvalidJson:
        raise
    except ValueError as error:  # JSONDecodeError, or an integer of thousands of digits
        raise InvalidJson(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidJson(f"the body must be a JSON object, not {_kind(value)}")
    return value


def json_value(text: str) -> Any:
    """The JSON value in *text*. Raises RecursionError, or ValueError also for strings that have no UTF-8 form."""
    value = json.loads(text)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_characters(value: object, param: str) -> None:
    """As checked_string, for all strings in *value*."""
    if isinstance(value, str):
        checked_string(value, param, longest=len(value))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_characters(entry, f"{param}[{index}]")
    elif isinstance(value, dict):
        for name, entry in value.items():
            checked_string(name, f"a key of {param}" if param else "a key", longest=len(name))
            _check_characters(entry, f"{param}.{name}" if param else name)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidJson(f"the body is ambiguous: key {key[:100]!r} appears twice in one object")
            seen.add(key)
    return found


def _no_constant(name: str) -> NoReturn:
    raise InvalidJson(f"the body is not valid JSON: {name} is no JSON number")


def _kind(value: object) -> str:
    """JSON's name for the type of *value*."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


class Fields:
    """The fields of one JSON object, taken one by one. ``null`` counts as absent, as OpenAI's clients expect.

    ``path`` is where the object lies in the body; it prefixes the names in errors.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._taken: set[str] = set()

    def param(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """The value as it is, None when absent."""
        self._taken.add(name)
        return self._values.get(name)

    def unknown(self) -> list[str]:
        """Names that nobody asked for, sorted."""
        return sorted(self._values.keys() - self._taken)

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        value = self.raw(name)
        return None if value is None else checked_integer(value, self.param(name), low=low, high=high)

    def number(self, name: str, *, low: float, high: float) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{self.param(name)} must be a number, not {_kind(value)}", param=self.param(name))
        if not (low <= value <= high) or not math.isfinite(value):
            message = f"{self.param(name)} must be between {low:g} and {high:g}"
            raise InvalidRequest(message, param=self.param(name))
        return float(value)

    def boolean(self, name: str) -> bool | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(f"{self.param(name)} must be a boolean, not {_kind(value)}", param=self.param(name))
        return value

    def string(self, name: str, *, longest: int) -> str | None:
        value = self.raw(name)
        return None if value is None else checked_string(value, self.param(name), longest=longest)

    def array(self, name: str, *, longest: int) -> list[Any] | None:
        value = self.raw(name)
        return None if value is None else checked_array(value, self.param(name), longest=longest)

    def object(self, name: str) -> "Fields | None":
        value = self.raw(name)
        return None if value is None else checked_object(value, self.param(name))

    def refuse(self, names: Sequence[str], *, why: str) -> None:
        """UnsupportedParameter when one of *names* is given with something in it."""
        for name in names:
            if self.raw(name) not in (None, [], {}, False):
                raise UnsupportedParameter(f"{self.param(name)} is not supported: {why}", param=self.param(name))


def checked_integer(value: object, param: str, *, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{param} must be an integer, not {_kind(value)}", param=param)
    if not low <= value <= high:
        raise InvalidRequest(f"{param} must be between {low} and {high}", param=param)
    return value


def checked_string(value: object, param: str, *, longest: int) -> str:
    """Refuses lone surrogates too: such a string has no UTF-8 form."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string, not {_kind(value)}", param=param)
    if len(value) > longest:
        raise InvalidRequest(f"{param} is longer than {longest} characters", param=param)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} holds a lone surrogate, which is no character", param=param) from None
    return value


def checked_array(value: object, param: str, *, longest: int) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{param} must be an array, not {_kind(value)}", param=param)
    if len(value) > longest:
        raise InvalidRequest(f"{param} has {len(value)} entries, at most {longest} are allowed", param=param)
    return value


def checked_object(value: object, param: str) -> Fields:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object, not {_kind(value)}", param=param)
    return Fields(value, param)
