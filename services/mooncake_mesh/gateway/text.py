"""Token ids to text, while they arrive: pure.

The text of a sequence is the concatenation of its tokens' bytes, decoded as UTF-8. An incremental decoder keeps an
unfinished character until its last byte has come, so no character is lost, doubled or replaced however the boundaries
fall, and the deltas concatenate to the text of the whole.

Stop strings are matched character by character with one Knuth-Morris-Pratt automaton each. The automaton's state *is*
the length of the longest suffix that may still become the stop string: exactly that much text is held back. The match
that ends first cuts the text (the longest one, if several end at the same character), so the cut does not depend on
token boundaries.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_mesh.gateway.tokenizer import Tokenizer
from mooncake_proto.serving import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What becomes of the drawn tokens' text.

    ``stop`` holds non-empty strings; a match ends the text before itself, or behind itself with ``include_stop``. A
    stop string that would be complete within the first ``min_tokens`` tokens is not looked at.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0


class Piece(NamedTuple):
    """One token beside its text. ``offset`` is where its text starts, in characters from the start of the stream."""

    token: int
    offset: int
    logprob: TokenLogprob | None


class TextDelta(NamedTuple):
    """New text and the tokens it came from. ``stopped``: a stop string is complete, nothing follows.

    A token comes with the delta that shows the last of its text, so tokens stay in step with what a reader has seen.
    """

    text: str
    pieces: Sequence[Piece]
    stopped: bool


class TextStream:
    """Tokens of one choice in, text out: ``feed`` each token, then ``finish`` unless a delta was ``stopped``."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if rules.skip_special else frozenset()
        self._rules = rules
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = tuple(_StopMatcher(stop) for stop in rules.stop)
        self._tokens = 0
        self._decoded = 0  # characters decoded so far
        self._held = ""  # the last of them, not shown yet
        self._waiting: deque[tuple[int, Piece]] = (
            deque()
        )  # (character count at which the token's text is complete, token)

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> TextDelta:
        """Text that *token* lets out."""
        self._tokens += 1
        data = b"" if token in self._hidden else self._token_bytes(token)
        piece = Piece(token, self._decoded, logprob)
        fresh = self._utf8.decode(data) if data else ""
        unfinished = 1 if self._utf8.getstate()[0] else 0
        if not (self._matchers or self._waiting or unfinished):
            self._decoded += len(fresh)
            return TextDelta(fresh, (piece,), False)
        self._waiting.append((self._decoded + len(fresh) + unfinished, piece))
        return self._show(fresh)

    def finish(self) -> TextDelta:
        """All that was held back; bytes that never became a character read as U+FFFD."""
        delta = self._show(self._utf8.decode(b"", True))
        if delta.stopped:
            return delta
        text, self._held = delta.text + self._held, ""
        pieces = (*delta.pieces, *(piece for _, piece in self._waiting))
        self._waiting.clear()
        return TextDelta(text, pieces, False)

    def _show(self, fresh: str) -> TextDelta:
        text = self._held + fresh
        shown_before = self._decoded - len(self._held)
        self._decoded += len(fresh)
        cut = self._match(fresh) if self._matchers else None
        if cut is not None:
            text = text[: cut - shown_before]
            kept = [piece for _, piece in self._waiting if piece.offset < cut]
            self._waiting.clear()
            self._held = ""
            return TextDelta(text, kept, True)
        held = 0 if self._rules.include_stop else max((matcher.state for matcher in self._matchers), default=0)
        self._held = text[len(text) - held :]
        shown_end = self._decoded - held
        pieces = []
        while self._waiting and self._waiting[0][0] <= shown_end:
            pieces.append(self._waiting.popleft()[1])
        return TextDelta(text[: len(text) - held], pieces, False)

    def _match(self, fresh: str) -> int | None:
        """Advance the automata over *fresh*, the newest characters; where the text ends once a stop is complete."""
        matchers = self._matchers
        counts = self._tokens > self._rules.min_tokens
        start = self._decoded - len(fresh)
        for position, char in enumerate(fresh, start + 1):
            longest = 0
            for matcher in matchers:
                if matcher.step(char) and len(matcher.stop) > longest:
                    longest = len(matcher.stop)
            if longest and counts:
                return position if self._rules.include_stop else position - longest
        return None


class _StopMatcher:
    """``state`` is the length of the longest proper prefix of ``stop`` that is a suffix of the characters seen."""

    __slots__ = ("_fall", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fall = [0] * len(stop)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fall[length - 1]
            length += stop[index] == stop[length]
            self._fall[index] = length

    def step(self, char: str) -> bool:
        """Take one character; True when it completes ``stop``."""
        state, stop = self.state, self.stop
        while state and stop[state] != char:
            state = self._fall[state - 1]
        if stop[state] == char:
            state += 1
        complete = state == len(stop)
        self.state = self._fall[state - 1] if complete else state
        return complete
