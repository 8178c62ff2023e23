"""Grammars as filters of tokens: the one home of llguidance. Knows neither torch nor the mesh.

A filter is a function of the grammar and the tokens drawn so far, so a sequence that moves to another worker, or is
begun anew, goes on under the same rule.
"""

from collections.abc import Sequence
from time import thread_time
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mooncake_mesh.engine.api import TokenArray, TokenFilter, TokenizerFile, TokenMask, Vocabulary
from mooncake_mesh.errors import InvalidRequest
from mooncake_proto.grammar import Grammar, GrammarKind

_JSON_LAYOUT: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""One line, one space at most after a comma or colon: free white space is where small models never stop."""
_SILENT: Final = 0
_LIMITS: Final = LLParserLimits(verbose_errors=False, initial_lexer_fuel=200_000, max_lexer_states=50_000)
"""A fifth of the library's own limits: more than any sensible schema takes, and `a{4294967295}` fails within
milliseconds instead of seconds."""
_LONGEST_MASK_S: Final = 0.5
"""Of processor time. Everybody in the batch waits for a mask."""
_LONGEST_REASON_CHARS: Final = 300


def check_grammar(kind: GrammarKind, text: str) -> None:
    """Raises InvalidRequest when *text* is no grammar of *kind*, or one that is too large or does not make sense.

    Takes milliseconds; up to a second for texts that are meant to take long.
    """
    try:
        problem = LLMatcher.validate_grammar(_source(kind, text), limits=_LIMITS)
    except ValueError as error:  # half a surrogate pair
        raise InvalidRequest(_shortened(str(error))) from error
    if problem and not problem.startswith("WARNING"):
        raise InvalidRequest(_shortened(problem))


class CompiledGrammar:
    """One grammar over one vocabulary, from which any number of sequences can start. Immutable."""

    def __init__(self, start: LLMatcher, end_tokens: Sequence[int]) -> None:
        self._start = start
        self._end_tokens = tuple(end_tokens)

    def filter(self) -> TokenFilter:
        """For one sequence, which need not be at its beginning."""
        return _GrammarFilter(self._start.deep_copy(), self._end_tokens)


class GrammarCompiler:
    """Compiles grammars over *vocabulary*, which is read when the first one comes (a second, for a large one)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidRequest as :func:`check_grammar`, when an end token is none of the vocabulary's, and when no
        text can begin or the first mask takes too long."""
        tokenizer = self._tokenizer(grammar.end_tokens)
        try:
            matcher = LLMatcher(tokenizer, _source(grammar.kind, grammar.text), log_level=_SILENT, limits=_LIMITS)
        except ValueError as error:
            raise InvalidRequest(_shortened(str(error)), param="sampling.grammar") from error
        if matcher.is_error():
            raise InvalidRequest(_shortened(matcher.get_error()), param="sampling.grammar")
        compiled = CompiledGrammar(matcher, grammar.end_tokens)
        first = compiled.filter()
        first.allowed(np.zeros(0, np.int32))
        if first.failure is not None:
            raise first.failure
        return compiled

    def _tokenizer(self, end_tokens: tuple[int, ...]) -> LLTokenizer:
        """Every request of a model names the same end tokens, so the last tokenizer is nearly always the right one."""
        known = self._tokenizers.get(end_tokens)
        if known is None:
            try:
                known = _tokenizer(self._vocabulary, end_tokens)
            except ValueError as error:
                raise InvalidRequest(_shortened(str(error)), param="sampling.grammar.end_tokens") from error
            self._tokenizers = {end_tokens: known}
        return known


class _GrammarFilter:
    """See TokenFilter."""

    def __init__(self, matcher: LLMatcher, end_tokens: tuple[int, ...]) -> None:
        self.failure: InvalidRequest | None = None
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._seen = 0

    def allowed(self, drawn: TokenArray) -> TokenMask:
        began_s = thread_time()
        fresh = drawn[self._seen :].tolist()
        self._seen = len(drawn)
        if fresh:
            self._matcher.consume_tokens(fresh)
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(packed, bitorder="little").view(np.bool_)
        if self._matcher.is_error():
            self.failure = InvalidRequest(f"the grammar: {_shortened(self._matcher.get_error())}")
            mask[list(self._end_tokens)] = True  # something has to be drawn, and whoever steps sees the failure
        elif thread_time() - began_s > _LONGEST_MASK_S:
            self.failure = InvalidRequest("the grammar is too complex: finding the next tokens takes too long")
        return mask


def _source(kind: GrammarKind, text: str) -> str:
    if kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(text)
    if kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_LAYOUT)
    except ValueError as error:
        raise InvalidRequest(f"no JSON schema: {error}") from error


def _tokenizer(vocabulary: Vocabulary, end_tokens: tuple[int, ...]) -> LLTokenizer:
    ends = list(end_tokens)
    if isinstance(vocabulary, TokenizerFile):
        return LLTokenizer(vocabulary.path.read_text(encoding="utf-8"), n_vocab=vocabulary.size, eos_token=ends)
    return LLTokenizer(TokenizerWrapper(_Listed(vocabulary.tokens, vocabulary.special, ends[0])), eos_token=ends)


class _Listed:
    """A list of tokens as llguidance wants it; it never has to encode a text."""

    bos_token_id = None

    def __init__(self, tokens: tuple[bytes, ...], special: tuple[int, ...], end_token: int) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = list(special)
        self.eos_token_id = end_token

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _shortened(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_REASON_CHARS]
