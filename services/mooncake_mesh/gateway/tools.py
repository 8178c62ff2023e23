"""A conversation: its messages, the tools that it offers, and calls of them. Values."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments, an object."""

    name: str
    parameters: Mapping[str, Any]
    description: str = ""

    def json(self) -> dict[str, Any]:
        """As chat templates and prompts show it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made earlier in the conversation. ``arguments`` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation. ``tool_call_id`` and ``name`` (of the function) are those of a ``tool`` turn."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class ToolChoice(enum.Enum):
    """Whether tools are called: never, as the model likes, at least one, or the one that is named."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a chat may do with its ``tools``, of which there is at least one.

    ``callable`` are those that ``choice`` leaves. ``is_parallel``: several calls in one answer are fine.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice.AUTO
    name: str = ""
    is_parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.choice is not ToolChoice.NAMED or tool.name == self.name)
