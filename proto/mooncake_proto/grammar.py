"""What the text of an answer may be. A part of Sampling (serving.py), so every worker that draws a token knows it."""

import enum
from dataclasses import dataclass
from typing import Final

from mooncake_proto.shapes import Natural

MAX_GRAMMAR_CHARS: Final = 1 << 16


class GrammarKind(enum.Enum):
    """In what language a grammar is written: a JSON schema, a regular expression, or Lark's notation for grammars."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The whole answer is a text of the language that ``text`` describes.

    ``end_tokens`` are the tokens that end it: they can be drawn exactly where the text may end.
    """

    kind: GrammarKind
    text: str
    end_tokens: tuple[Natural, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.text) <= MAX_GRAMMAR_CHARS:
            raise ValueError(f"a grammar must have 1 to {MAX_GRAMMAR_CHARS} characters, got {len(self.text)}")
        if not self.end_tokens:
            raise ValueError("a grammar needs a token that ends the text")
