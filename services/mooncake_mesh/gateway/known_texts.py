"""Tokens of how earlier texts began: of the next turn of a conversation only what is new is encoded.

It is for tokenizers that cut a text into words, without changing it, and look up each word by itself (byte-level BPE).
The tokens of a text up to the start of a word are then those of every text in which a word starts there. So a text is
known up to some word near its end, if encoding what is left by itself has given the tokens that it has in the text; and
found again in texts that have the same start of a word in that place.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import Final

LEAST_CHARS: Final = 2048
"""Shorter texts are encoded sooner than they are looked for."""

_MOST_CHARS: Final = 1 << 23
_TAIL_TOKENS: Final = 64
_ATTEMPTS: Final = 2
_HEAD_CHARS: Final = 256
_SAME_HEADS: Final = 32


@dataclass(frozen=True, slots=True)
class _Beginning:
    """``text`` has ``tokens`` where it is followed by ``start``, that of a word."""

    text: str
    tokens: Sequence[int]
    start: str

    def begins(self, text: str) -> bool:
        return text.startswith(self.text) and text.startswith(self.start, len(self.text))


class KnownTexts:
    """Beginnings in *spaces* that know nothing of each other, those that were used last. Safe to use from threads.

    *encode* adds no special tokens. *markers* are ids that a text is cut at before anything else.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        token_bytes: Callable[[int], bytes],
        markers: frozenset[int],
        *,
        most_chars: int = _MOST_CHARS,
    ) -> None:
        self._encode = encode
        self._token_bytes = token_bytes
        self._markers = markers
        self._most_chars = most_chars
        self._lock = Lock()
        self._by_head: OrderedDict[Hashable, list[_Beginning]] = OrderedDict()
        self.chars = 0

    def split(self, space: Hashable, text: str) -> tuple[list[int], str]:
        """Tokens of the longest beginning of *text* that is known in *space*, and the text behind it."""
        with self._lock:
            alike = self._by_head.get((space, text[:_HEAD_CHARS]), ())
            found = max((one for one in alike if one.begins(text)), key=_length, default=None)
        return ([], text) if found is None else (list(found.tokens), text[len(found.text) :])

    def learn(self, space: Hashable, text: str, tokens: Sequence[int]) -> None:
        """*tokens* are those of *text*, whose earlier turns need not be known any more."""
        new = self._beginning(text, tokens)
        if new is None:
            return
        with self._lock:
            key = (space, text[:_HEAD_CHARS])
            alike = self._by_head.setdefault(key, [])
            self._by_head.move_to_end(key)
            kept = [one for one in alike if not new.text.startswith(one.text)][1 - _SAME_HEADS :]
            self.chars += _length(new) + sum(map(_length, kept)) - sum(map(_length, alike))
            self._by_head[key] = [*kept, new]
            while self.chars > self._most_chars:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        key, alike = next(iter(self._by_head.items()))
        self.chars -= _length(alike.pop(0))
        if not alike:
            del self._by_head[key]

    def _beginning(self, text: str, tokens: Sequence[int]) -> _Beginning | None:
        """Up to a word not far from the end; None where none is sure."""
        for n_tokens in islice(self._word_starts(tokens), _ATTEMPTS):
            tail = tokens[n_tokens:]
            words = b"".join(map(self._token_bytes, tail)).decode(errors="replace")
            if text.endswith(words) and len(text) - len(words) > _HEAD_CHARS and self._encode(words) == list(tail):
                start = self._token_bytes(tail[0]).decode() if tail[0] in self._markers else words[:2]
                return _Beginning(text[: len(text) - len(words)], array("I", tokens[:n_tokens]), start)
        return None

    def _word_starts(self, tokens: Sequence[int]) -> Iterator[int]:
        """Which of the last tokens begin a word by all rules: one with a space behind none, a marker."""
        for index in range(max(1, len(tokens) - _TAIL_TOKENS), len(tokens)):
            piece, before = self._token_bytes(tokens[index]), self._token_bytes(tokens[index - 1])
            is_word = piece[:1] == b" " and piece[1:2].isalpha() and before[-1:].isalnum()
            if is_word or tokens[index] in self._markers:
                yield index


def _length(beginning: _Beginning) -> int:
    return len(beginning.text)
