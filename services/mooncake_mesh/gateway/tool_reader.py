"""Calls of tools read out of an answer while it comes: pure.

What is no call is content, a broken call too: nothing of an answer is lost. Arguments go out as they come once the
name is known. White space around calls is nobody's content.
"""

import enum
import json
import secrets
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.gateway.json_fields import json_value
from mooncake_mesh.gateway.tool_form import CALL_BEGINS, CALL_ENDS

_OPENING: Final = frozenset("{[")
_CLOSING: Final = frozenset("}]")
_ARGUMENTS: Final = ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBegins:
    """Call number ``index`` of this answer; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """More of the JSON text of the arguments of call ``index``."""

    index: int
    text: str


Part = Content | CallBegins | CallArguments


class _Place(enum.Enum):
    OUTSIDE = "outside"
    INSIDE = "inside"
    BEHIND = "behind"  # the object is complete, its end mark is not


class ToolCallReader:
    """Text of one answer in, parts of it out: ``feed`` all of it, then ``finish``."""

    def __init__(self) -> None:
        self.calls = 0
        """Calls whose name went out."""
        self._place = _Place.OUTSIDE
        self._held = ""
        self._is_bare = True  # nothing visible since the beginning, or since a call
        self._call = _CallText()

    def feed(self, text: str) -> list[Part]:
        """The parts that *text* completes."""
        parts: list[Part] = []
        self._held += text
        while self._held:
            before = self._place, len(self._held)
            if self._place is _Place.OUTSIDE:
                self._outside(parts)
            elif self._place is _Place.INSIDE:
                self._inside(parts)
            else:
                self._behind()
            if before == (self._place, len(self._held)):
                break
        return parts

    def finish(self) -> list[Part]:
        """What was held back."""
        parts: list[Part] = []
        if self._place is _Place.OUTSIDE:
            self._content(self._held, parts)
        elif self._place is _Place.INSIDE and not self._call.is_told:
            self._content(f"{CALL_BEGINS}{self._call.text}{self._held}", parts)
        self._held = ""
        return parts

    def _outside(self, parts: list[Part]) -> None:
        start = self._held.find(CALL_BEGINS)
        if start >= 0:
            self._content(self._held[:start], parts)
            self._held = self._held[start + len(CALL_BEGINS) :]
            self._place, self._call = _Place.INSIDE, _CallText()
            return
        keep = _overlap(self._held, CALL_BEGINS)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if self._is_bare and not shown.strip():
            self._held = shown + self._held  # white space goes out with what follows it, or with nothing
        else:
            self._content(shown, parts)

    def _content(self, text: str, parts: list[Part]) -> None:
        if self._is_bare and self.calls:
            text = text.lstrip()
        if text and not (self._is_bare and text.isspace()):
            self._is_bare = False
            parts.append(Content(text=text))

    def _inside(self, parts: list[Part]) -> None:
        read = self._call.read(self._held)
        self._held = self._held[read:]
        if self._call.is_broken:
            if not self._call.is_told:
                self._is_bare = False
                parts.append(Content(text=f"{CALL_BEGINS}{self._call.text}"))
            self._place = _Place.OUTSIDE
            return
        self._tell(parts)
        if self._call.is_complete:
            self._place = _Place.BEHIND
            self._is_bare = True

    def _tell(self, parts: list[Part]) -> None:
        call = self._call
        if call.name is None or not call.has_arguments:
            return
        if not call.is_told:
            call.is_told = True
            parts.append(CallBegins(index=self.calls, id=f"call_{secrets.token_hex(12)}", name=call.name))
            self.calls += 1
        text = call.take_arguments()
        if text:
            parts.append(CallArguments(index=self.calls - 1, text=text))

    def _behind(self) -> None:
        """The end mark and the white space before it are dropped; anything else is content again."""
        text = self._held.lstrip()
        if text.startswith(CALL_ENDS):
            self._held = text[len(CALL_ENDS) :]
            self._place = _Place.OUTSIDE
        elif not CALL_ENDS.startswith(text):
            self._place = _Place.OUTSIDE


class _CallText:
    """The JSON object of one call, read character by character: where its name and its arguments are."""

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.is_told = False
        self.is_complete = False
        self.is_broken = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key: str | None = None
        self._value_from = -1
        self._arguments_from = -1
        self._arguments_to = -1
        self._taken = 0

    @property
    def has_arguments(self) -> bool:
        """Whether their text can go out as it comes, or is complete."""
        if self._arguments_from < 0:
            return self.is_complete  # none are given: there are none
        return self.text[self._arguments_from] == "{" or self._arguments_to >= 0

    def read(self, text: str) -> int:
        """Takes what belongs to the object; how many characters that were."""
        for position, char in enumerate(text):
            if self.is_complete or self.is_broken:
                return position
            is_end = self._step(char)
            self.text += char
            if is_end:
                self._check()
        return len(text)

    def take_arguments(self) -> str:
        """Their text that was not taken yet; arguments that were written as a string are read out of it."""
        end = self._arguments_to if self._arguments_to >= 0 else len(self.text)
        whole = self.text[self._arguments_from : end] if self._arguments_from >= 0 else "{}"
        if not whole.startswith("{"):
            value = json.loads(whole)
            whole = _text(value) if isinstance(value, str) else "{}" if value is None else whole
        fresh, self._taken = whole[self._taken :], len(whole)
        return fresh

    def _step(self, char: str) -> bool:
        """Look at *char*, the next one; whether the object ends with it."""
        index = len(self.text)
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
            return False
        if self._depth == 0:
            if char == "{":
                self._depth, self._value_from = 1, index + 1
            else:
                self.is_broken = not char.isspace()
            return False
        if self._depth == 1 and char in ":,}":
            self._value_ends(index, char)
        if (
            self._depth == 1
            and self._key in _ARGUMENTS
            and self._arguments_from < 0
            and not (char.isspace() or char == ":")
        ):
            self._arguments_from = index
        self._in_string = char == '"'
        self._depth += (char in _OPENING) - (char in _CLOSING)
        self.is_complete = self._depth == 0
        return self.is_complete

    def _value_ends(self, index: int, char: str) -> None:
        """A key, or the value of one, lies behind."""
        span = self.text[self._value_from : index].strip()
        self._value_from = index + 1
        if char == ":":
            self._key = span.strip('"')
            return
        if self._key == "name":
            name = _string(span)
            self.name, self.is_broken = name, not name
        elif self._key in _ARGUMENTS:
            self._arguments_to = self._arguments_from + len(span)
        self._key = None

    def _check(self) -> None:
        try:
            json.loads(self.text)
        except ValueError:
            self.is_broken = True
        self.is_broken = self.is_broken or self.name is None


def _text(value: str) -> str:
    """*value* with a mark for each half of a surrogate pair: a model may write one, and it is no character."""
    return value.encode(errors="replace").decode()


def _string(text: str) -> str | None:
    try:
        value = json_value(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _overlap(text: str, mark: str) -> int:
    """How much of *text*'s end may be the beginning of *mark*."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
