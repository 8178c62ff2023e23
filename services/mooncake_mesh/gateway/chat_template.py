"""Rendering of a model's Jinja chat template.

The environment offers what templates published with models rely on: trimmed blocks, loop controls, a ``tojson`` that
leaves non-ASCII and HTML alone, ``raise_exception``, ``strftime_now`` and the ``generation`` block. Templates are other
people's code: they run in Jinja's immutable sandbox.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mooncake_mesh.errors import InvalidRequest, UnsupportedModel
from mooncake_mesh.gateway.tool_form import CALL_BEGINS, plain_chat, template_turn
from mooncake_mesh.gateway.tools import ChatMessage, Tool


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's own tokens for training; for serving its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template with the tokenizer's named special tokens."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UnsupportedModel(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._knows_tools = CALL_BEGINS in source and "tools" in source

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """The conversation as text, opened for the assistant's next turn. Raises InvalidRequest when it objects."""
        variables: dict[str, Any] = dict(self._special_tokens)
        if not self._knows_tools:
            messages = plain_chat(messages, tools)
        elif tools:
            variables["tools"] = [tool.json() for tool in tools]
        turns = [template_turn(message) for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **variables)
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
