"""Grammars as filters of tokens, and what both engines make of them."""

import json

import jsonschema
import numpy as np
import pytest

from mooncake_mesh.engine.api import DecodeSlot, PrefillChunk, SampleRequest, TokenFilter, TokenList
from mooncake_mesh.engine.fake import EOS, IM_END, FakeConfig, FakeEngine
from mooncake_mesh.engine.fake_recipe import SPECIAL, TOKEN_BYTES
from mooncake_mesh.engine.grammar import GrammarCompiler, check_grammar
from mooncake_mesh.errors import InvalidRequest
from mooncake_proto.grammar import Grammar, GrammarKind
from mooncake_proto.serving import Sampling

ENDS = (EOS, IM_END)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = list(b"Who are you?")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TokenList(tokens=TOKEN_BYTES, special=SPECIAL))


def grammar(kind: GrammarKind, text: str) -> Grammar:
    return Grammar(kind=kind, text=text, end_tokens=ENDS)


def schema(value: object = SCHEMA) -> Grammar:
    return grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def next_tokens(rule: TokenFilter, text: str) -> set[int]:
    return set(np.flatnonzero(rule.allowed(np.array(list(text.encode()), np.int32))).tolist())


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (grammar(GrammarKind.REGEX, r"[0-9]{3}"), "123"),
        (grammar(GrammarKind.LARK, 'start: "yes" | "n\\"o\\n☾"'), 'n"o\n☾'),
        (schema(), '{"name": "Ada", "age": 36,"tags":[]}'),
        (schema({"const": {"a": [1, None]}}), '{"a": [1, null]}'),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Grammar) else "",
)
def test_a_text_of_the_language_is_allowed_and_can_only_end_at_its_end(
    compiler: GrammarCompiler, rule: Grammar, text: str
) -> None:
    """The multi-byte character is several tokens here."""
    allows, data = compiler.compile(rule).filter(), text.encode()
    for position, token in enumerate(data):
        allowed = allows.allowed(np.array(list(data[:position]), np.int32))
        assert allowed[token], text[:position]
        assert not allowed[list(ENDS)].any()
    assert next_tokens(allows, text) == set(ENDS)


def test_a_filter_that_comes_late_reads_what_was_drawn_before(compiler: GrammarCompiler) -> None:
    """A request that was placed again: another worker, another filter, the same rule."""
    compiled = compiler.compile(schema())
    first = compiled.filter()
    text = '{"name": "Ada", "age": 1'
    steps = [next_tokens(first, text[:end]) for end in range(len(text) + 1)]
    assert [next_tokens(compiled.filter(), text[:end]) for end in range(len(text) + 1)] == steps


def test_filters_of_one_grammar_know_nothing_of_each_other(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(grammar(GrammarKind.REGEX, "ab|cd"))
    one, two = compiled.filter(), compiled.filter()
    assert next_tokens(one, "a") == {ord("b")}
    assert next_tokens(two, "c") == {ord("d")}
    assert next_tokens(one, "ab") == set(ENDS)


def test_a_drawn_token_that_the_grammar_forbids_is_a_failure_and_something_can_still_be_drawn(
    compiler: GrammarCompiler,
) -> None:
    rule = compiler.compile(grammar(GrammarKind.REGEX, "a+")).filter()
    assert next_tokens(rule, "b") >= set(ENDS)
    assert isinstance(rule.failure, InvalidRequest)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "("),
        (GrammarKind.LARK, "start: nobody"),
        (GrammarKind.JSON_SCHEMA, "[1]"),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, '{"type": "text"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/definitions/none"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://example.org/schema.json"}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "("}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 3, "maximum": 2}'),
    ],
)
def test_what_is_no_grammar_is_refused_by_the_check_and_by_the_compiler(
    compiler: GrammarCompiler, kind: GrammarKind, text: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_grammar(kind, text)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidRequest):
        compiler.compile(grammar(kind, text))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
        (GrammarKind.REGEX, "\ud800"),
    ],
    ids=["no text", "half a pair"],
)
def test_what_only_shows_over_a_vocabulary_is_refused_before_anything_is_drawn(
    compiler: GrammarCompiler, kind: GrammarKind, text: str
) -> None:
    """A text that cannot begin, and one that is no Unicode."""
    with pytest.raises(InvalidRequest):
        compiler.compile(grammar(kind, text))


def test_a_mask_that_takes_too_long_ends_its_sequence(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = compiler.compile(grammar(GrammarKind.REGEX, "a*")).filter()
    clock = iter([0.0, 9.0])
    monkeypatch.setattr("mooncake_mesh.engine.grammar.thread_time", lambda: next(clock))
    assert ord("a") in next_tokens(rule, "")
    assert rule.failure is not None


def test_an_end_token_outside_the_vocabulary_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest):
        compiler.compile(Grammar(kind=GrammarKind.REGEX, text="a", end_tokens=(2570,)))


def test_bans_yield_where_nothing_else_is_left(compiler: GrammarCompiler) -> None:
    rule = compiler.compile(grammar(GrammarKind.REGEX, "ab?")).filter()
    request = SampleRequest(
        sampling=Sampling(), position=1, history=np.array([*PROMPT, ord("a")], np.int32), banned=ENDS, filter=rule
    )
    allowed = request.allowed()
    assert allowed is not None
    assert set(np.flatnonzero(allowed)) == {ord("b")}
    request.position, request.history = 2, np.array([*PROMPT, *b"ab"], np.int32)
    allowed = request.allowed()
    assert allowed is not None
    assert set(np.flatnonzero(allowed)) == set(ENDS)


def draw_all(engine: FakeEngine, compiler: GrammarCompiler, seed: int, *, moved_at: int = -1) -> str:
    """One answer under SCHEMA; at *moved_at* drawn tokens the request goes to a filter that knows nothing of it."""
    sampling, compiled = Sampling(seed=seed), compiler.compile(schema())
    blocks, drawn = list(range(32)), list[int]()
    rule = compiled.filter()

    def sample() -> SampleRequest:
        history = np.array([*PROMPT, *drawn], np.int32)
        return SampleRequest(sampling=sampling, position=len(drawn), history=history, filter=rule)

    name = f"{seed} {moved_at}"
    chunk = PrefillChunk(sequence=name, tokens=np.array(PROMPT, np.int32), start=0, blocks=blocks, sample=sample())
    first = engine.prefill(chunk, lambda _: None)
    assert first is not None
    drawn.append(first.token)
    while drawn[-1] not in ENDS:
        if len(drawn) == moved_at:
            rule = compiled.filter()
        position = len(PROMPT) + len(drawn) - 1
        slot = DecodeSlot(sequence=name, token=drawn[-1], position=position, blocks=blocks, sample=sample())
        drawn.append(engine.decode([slot])[0].token)
    return bytes(drawn[:-1]).decode()


def test_the_fake_engine_draws_what_the_schema_allows_and_the_same_after_a_move(compiler: GrammarCompiler) -> None:
    engine = FakeEngine(FakeConfig())
    engine.bind(memoryview(bytearray(engine.spec.layout.block_bytes * 32)))
    texts = [draw_all(engine, compiler, seed) for seed in range(8)]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) == len(texts)
    assert draw_all(engine, compiler, 3, moved_at=5) == texts[3]
