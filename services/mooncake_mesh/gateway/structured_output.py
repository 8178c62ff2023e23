"""What a request wants its answer to be: OpenAI's ``response_format``, and vLLM's fields for the rest.

======================================== ==================================================================
``response_format``                      ``{"type": "json_object"}``, ``{"type": "json_schema", …}``
``structured_outputs``                   one of ``json``, ``json_object``, ``regex``, ``choice``, ``grammar``
``guided_json`` … ``guided_grammar``     the same under their older names
======================================== ==================================================================

A grammar is in llguidance's dialect of Lark. Where the answer is JSON it is written on one line.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.json_fields import Fields, UnsupportedParameter, checked_array, checked_string
from mooncake_proto.grammar import MAX_GRAMMAR_CHARS, GrammarKind

_MAX_CHOICES: Final = 1024
_MAX_NAME_CHARS: Final = 64
_ANY_OBJECT: Final = '{"type":"object"}'
_RULES: Final = ("json", "json_object", "regex", "choice", "grammar")
_OLDER_RULES: Final = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarText:
    """A grammar as it stands in a request; ``param`` is the field it came in."""

    kind: GrammarKind
    text: str
    param: str


def parse_structured_output(fields: Fields) -> GrammarText | None:
    """The one rule for the answer, None for free text. Raises InvalidRequest, for several rules too."""
    found = [rule for rule in (_response_format(fields), _structured_outputs(fields), *_guided(fields)) if rule]
    if len(found) > 1:
        raise InvalidRequest(f"{found[0].param} and {found[1].param} exclude each other", param=found[1].param)
    return found[0] if found else None


def _response_format(fields: Fields) -> GrammarText | None:
    given = fields.object("response_format")
    if given is None:
        return None
    kind = given.string("type", longest=_MAX_NAME_CHARS)
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarText(kind=GrammarKind.JSON_SCHEMA, text=_ANY_OBJECT, param="response_format")
    if kind != "json_schema":
        message = "response_format.type must be text, json_object or json_schema"
        raise UnsupportedParameter(message, param="response_format.type")
    described = given.object("json_schema")
    if described is None:
        raise InvalidRequest("response_format.json_schema is required", param="response_format.json_schema")
    described.string("name", longest=_MAX_NAME_CHARS)
    described.boolean("strict")
    schema = described.raw("schema")
    param = described.param("schema")
    return GrammarText(kind=GrammarKind.JSON_SCHEMA, text=_schema({} if schema is None else schema, param), param=param)


def _structured_outputs(fields: Fields) -> GrammarText | None:
    given = fields.object("structured_outputs")
    if given is None:
        return None
    rules = [rule for name in _RULES if (rule := _rule(given, name, name)) is not None]
    if given.boolean("disable_any_whitespace") is False or given.raw("whitespace_pattern") is not None:
        param = given.param("whitespace_pattern")
        raise UnsupportedParameter("JSON is written on one line: its white space cannot be chosen", param=param)
    for name in given.unknown():
        raise UnsupportedParameter(f"{given.param(name)} is not supported", param=given.param(name))
    if len(rules) != 1:
        message = f"structured_outputs must have exactly one of {', '.join(_RULES)}"
        raise InvalidRequest(message, param="structured_outputs")
    return rules[0]


def _guided(fields: Fields) -> list[GrammarText]:
    for name in ("guided_whitespace_pattern", "guided_decoding_backend"):
        if fields.raw(name) is not None:
            raise UnsupportedParameter(f"{name} is not supported: leave it out", param=name)
    return [rule for name in _OLDER_RULES if (rule := _rule(fields, f"guided_{name}", name)) is not None]


def _rule(fields: Fields, field: str, rule: str) -> GrammarText | None:
    value, param = fields.raw(field), fields.param(field)
    if value is None or (rule == "json_object" and value is False):
        return None
    match rule:
        case "json":
            return GrammarText(kind=GrammarKind.JSON_SCHEMA, text=_schema(value, param), param=param)
        case "json_object":
            fields.boolean(field)
            return GrammarText(kind=GrammarKind.JSON_SCHEMA, text=_ANY_OBJECT, param=param)
        case "regex":
            return GrammarText(kind=GrammarKind.REGEX, text=_text(value, param), param=param)
        case "choice":
            return GrammarText(kind=GrammarKind.LARK, text=_choice(value, param), param=param)
        case _:
            return GrammarText(kind=GrammarKind.LARK, text=_text(value, param), param=param)


def _schema(value: Any, param: str) -> str:
    """A JSON schema, as an object or (as vLLM's clients send it) as its text."""
    if isinstance(value, str):
        text = _text(value, param)
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param} is no JSON: {error}", param=param) from None
        return text
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be a JSON schema, which is an object", param=param)
    return _text(json_text(value, param), param)


def json_text(value: Any, param: str) -> str:
    """*value*, which came as JSON. Raises InvalidRequest when it is nested too deeply to be written again."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None


def _choice(value: Any, param: str) -> str:
    entries = checked_array(value, param, longest=_MAX_CHOICES)
    choices = [checked_string(entry, param, longest=MAX_GRAMMAR_CHARS) for entry in entries]
    if not choices or "" in choices:
        raise InvalidRequest(f"{param} must hold strings that are not empty", param=param)
    return _text("start: " + " | ".join(lark_string(choice) for choice in choices), param)


def lark_string(text: str) -> str:
    """*text* as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _text(value: Any, param: str) -> str:
    text = checked_string(value, param, longest=MAX_GRAMMAR_CHARS)
    if not text:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    return text
