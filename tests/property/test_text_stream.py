"""TextStream against a brute-force reading of the same tokens, for any boundaries, stop strings and broken bytes."""

import codecs
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.engine.model_files import DEFAULT_MODEL, resolve_model
from mooncake_mesh.gateway.model_tokenizer import ModelTokenizer
from mooncake_mesh.gateway.text import Piece, TextRules, TextStream
from mooncake_mesh.gateway.tokenizer import SpecialTokens, Tokenizer

# Few letters, so that stop strings match, nearly match and overlap; characters of 1 to 4 bytes, joined emoji.
ALPHABET = st.sampled_from("aab,.é한国😀👩‍🚀 ")
TEXTS = st.text(ALPHABET, max_size=40)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4).map(tuple)


class ChoppedTokenizer:
    """Token k is the k-th of *parts*: any cut of any bytes."""

    stop_ids = ()

    def __init__(self, parts: Sequence[bytes], special: frozenset[int]) -> None:
        self._parts = parts
        self.special_ids = special
        self.vocab_size = len(parts)

    def token_bytes(self, token: int) -> bytes:
        return self._parts[token]


@st.composite
def chopped(draw: st.DrawFn) -> ChoppedTokenizer:
    """A text cut at random bytes, sometimes with garbage bytes in it and hidden tokens between."""
    data = draw(st.one_of(TEXTS.map(str.encode), st.binary(max_size=12), TEXTS.map(lambda text: text.encode()[:-1])))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=30)))
    edges = [0, *cuts, len(data)]
    parts = [data[start:end] for start, end in itertools.pairwise(edges)]
    special = draw(st.frozensets(st.integers(0, len(parts) - 1), max_size=2))
    return ChoppedTokenizer(parts, special)


def decoded(tokenizer: Tokenizer, tokens: Sequence[int], *, skip_special: bool, final: bool) -> tuple[str, bool]:
    """Text of *tokens*, and whether bytes of an unfinished character are left."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown = [token for token in tokens if not (skip_special and token in tokenizer.special_ids)]
    text = decoder.decode(b"".join(map(tokenizer.token_bytes, shown)), final)
    return text, bool(decoder.getstate()[0])


class Oracle:
    """What is right, computed from the whole."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int], rules: TextRules) -> None:
        self._tokenizer, self._tokens, self._rules = tokenizer, tokens, rules
        self.text = self._decoded(len(tokens), final=True)[0]
        early = len(self._decoded(min(rules.min_tokens, len(tokens)), final=False)[0])
        ends = [end for end in range(early + 1, len(self.text) + 1) if self._stops_ending_at(end)]
        self.cut = self.end = None
        if ends:
            self.end = ends[0]
            longest = max(map(len, self._stops_ending_at(self.end)))
            self.cut = self.end if rules.include_stop else self.end - longest
        self.shown = self.text if self.cut is None else self.text[: self.cut]

    def _decoded(self, count: int, *, final: bool) -> tuple[str, bool]:
        return decoded(self._tokenizer, self._tokens[:count], skip_special=self._rules.skip_special, final=final)

    def _stops_ending_at(self, end: int) -> list[str]:
        return [stop for stop in self._rules.stop if end >= len(stop) and self.text[end - len(stop) : end] == stop]

    def shown_after(self, count: int) -> str:
        """Text that must have been let out after *count* tokens, before the end is known."""
        text = self._decoded(count, final=False)[0]
        if self._rules.include_stop:
            return text
        held = [length for stop in self._rules.stop for length in range(1, len(stop)) if text.endswith(stop[:length])]
        return text[: len(text) - max(held, default=0)]

    def piece_ends(self) -> list[tuple[int, int]]:
        """Where each token's text starts and where it is whole."""
        spans = []
        for count in range(len(self._tokens)):
            start = len(self._decoded(count, final=False)[0])
            text, unfinished = self._decoded(count + 1, final=False)
            spans.append((start, len(text) + unfinished))
        return spans


def check(tokenizer: Tokenizer, tokens: Sequence[int], rules: TextRules) -> str:
    """Stream *tokens* and compare every step with the oracle. Returns the text that was shown."""
    oracle = Oracle(tokenizer, tokens, rules)
    spans = oracle.piece_ends()
    stream = TextStream(tokenizer, rules)
    shown = ""
    pieces: list[Piece] = []
    stopped = False
    for count, token in enumerate(tokens, 1):
        delta = stream.feed(token)
        shown += delta.text
        pieces += delta.pieces
        stopped = delta.stopped
        if stopped:
            break
        assert shown == oracle.shown_after(count)
        assert len(pieces) == sum(end <= len(shown) for _, end in spans[:count])
    else:
        rest = stream.finish()
        shown += rest.text
        pieces += rest.pieces
        stopped = rest.stopped
    assert stopped == (oracle.cut is not None)
    assert shown == oracle.shown
    assert [piece.token for piece in pieces] == list(tokens[: len(pieces)])
    assert [piece.offset for piece in pieces] == [start for start, _ in spans[: len(pieces)]]
    if oracle.cut is None:
        assert len(pieces) == len(tokens)
    else:
        assert all(start < oracle.cut or end <= oracle.cut for start, end in spans[: len(pieces)])
        assert len(pieces) >= sum(start < oracle.cut for start, end in spans if start < end)
    return shown


RULES = st.builds(
    TextRules, stop=STOPS, include_stop=st.booleans(), skip_special=st.booleans(), min_tokens=st.integers(0, 6)
)


@given(tokenizer=chopped(), rules=RULES)
def test_any_cut_of_any_bytes_reads_like_the_whole(tokenizer: ChoppedTokenizer, rules: TextRules) -> None:
    check(tokenizer, range(tokenizer.vocab_size), rules)  # type: ignore[arg-type]


@given(text=TEXTS, stop=STOPS, first=st.data())
def test_the_cut_does_not_depend_on_token_boundaries(text: str, stop: tuple[str, ...], first: st.DataObject) -> None:
    rules = TextRules(stop=stop)
    data = text.encode()
    by_byte = ChoppedTokenizer([bytes([byte]) for byte in data], frozenset())
    cuts = sorted(first.draw(st.lists(st.integers(0, len(data)), max_size=10)))
    edges = [0, *cuts, len(data)]
    by_chunk = ChoppedTokenizer([data[a:b] for a, b in itertools.pairwise(edges)], frozenset())
    assert check(by_byte, range(by_byte.vocab_size), rules) == check(by_chunk, range(by_chunk.vocab_size), rules)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def smollm() -> ModelTokenizer:
    return ModelTokenizer(resolve_model(DEFAULT_MODEL))


@pytest.mark.model
@given(text=st.one_of(TEXTS, st.text(max_size=60)), rules=RULES)
def test_a_models_tokens_stream_to_the_text_they_came_from(smollm: ModelTokenizer, text: str, rules: TextRules) -> None:
    tokens = smollm.encode(text, SpecialTokens.KEEP)
    check(smollm, tokens, rules)
    assert check(smollm, tokens, TextRules(skip_special=False)) == smollm.decode(tokens)


@pytest.mark.model
@given(tokens=st.lists(st.integers(0, 49151), max_size=40), rules=RULES)
def test_any_tokens_of_a_model_stream_to_their_decoded_text(
    smollm: ModelTokenizer, tokens: list[int], rules: TextRules
) -> None:
    check(smollm, tokens, rules)
    assert check(smollm, tokens, TextRules(skip_special=False)) == smollm.decode(tokens)
