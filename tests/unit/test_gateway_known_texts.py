"""What an earlier text has told of the next one: the same tokens, for less work."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from mooncake_mesh.engine.model_files import DEFAULT_MODEL, resolve_model
from mooncake_mesh.gateway.known_texts import LEAST_CHARS, KnownTexts
from mooncake_mesh.gateway.model_tokenizer import ModelTokenizer
from mooncake_mesh.gateway.tokenizer import SpecialTokens
from mooncake_mesh.gateway.tools import ChatMessage
from tests.unit.test_gateway_model_tokenizer import byte_fallback, byte_level, folder_with, word_pieces

KEEP = SpecialTokens.KEEP
WORDS = "the next turn of a conversation begins as the one before it did and goes on from there "


class Counted(ModelTokenizer):
    """``encoded`` are the texts that were worked on."""

    def __init__(self, folder: Path) -> None:
        self.encoded: list[str] = []
        super().__init__(folder)

    def _encoded(self, text: str, special: SpecialTokens) -> list[int]:
        self.encoded.append(text)
        return super()._encoded(text, special)

    def cost(self, text: str, special: SpecialTokens = KEEP, scope: str | None = "me") -> int:
        """Characters that were worked on for *text*, whose tokens are as ever."""
        self.encoded.clear()
        tokens = self.encode(text, special, scope)
        cost = sum(map(len, self.encoded))
        assert tokens == self.encode(text, special)
        return cost


@pytest.fixture(scope="module")
def real() -> Counted:
    return Counted(resolve_model(DEFAULT_MODEL))


def test_only_what_is_new_is_encoded(real: Counted) -> None:
    text = "Once. " + WORDS * 40
    real.cost(text)
    for turn in range(5):
        more = f" turn {turn} and {WORDS}"
        assert real.cost(text + more) < 2 * len(more) + 1000
        text += more


@pytest.mark.parametrize("other", [{"scope": "you"}, {"special": SpecialTokens.ADD}, {"scope": None}])
def test_nobody_else_can_tell(real: Counted, other: dict[str, Any]) -> None:
    text = f"A secret of mine ({sorted(other)}). " + WORDS * 40
    real.cost(text)
    assert real.cost(text + " and more", **other) >= len(text)


def test_a_chat_goes_on_from_its_turn_before(real: Counted) -> None:
    chat = [ChatMessage(role="user", content=WORDS * 40)]
    real.encode_chat(chat, scope="me")
    chat += [ChatMessage(role="assistant", content="yes"), ChatMessage(role="user", content="so?")]
    real.encoded.clear()
    tokens = real.encode_chat(chat, scope="me")
    assert sum(map(len, real.encoded)) < 1000
    assert tokens == real.encode_chat(chat)


def test_short_texts_are_not_remembered(real: Counted) -> None:
    short = (WORDS * 40)[: LEAST_CHARS - 200]
    real.cost(short)
    assert real.cost(short + "x") == len(short) + 1


_numbers = count()
_WORD_LIKE = ["the", " cat", "  two", " 12345", "don't", " I'll", "!?", "...", " x" * 50, "word " * 9]
_BLANK = ["\n", "\n\n", "\t", " ", "   "]
_FOREIGN = ["héllo", " 한국어", "日本", "👩‍🚀", "e\u0301"]
_MARKERS = ["<|im_end|>", "<|im_start|>user\n", "<|endoftext|>"]
PIECES = st.sampled_from([*_WORD_LIKE, *_BLANK, *_FOREIGN, *_MARKERS])


@given(st.lists(st.tuples(st.integers(0, 400), st.lists(PIECES, min_size=1, max_size=40)), min_size=2, max_size=6))
@settings(deadline=None, max_examples=150)
def test_whatever_is_said_the_tokens_are_those_of_the_whole(real: Counted, turns: list[tuple[int, list[str]]]) -> None:
    """Each turn goes on from the one before, or from some characters before its end."""
    text, scope = "A talk. " + WORDS * 25, f"talk {next(_numbers)}"
    for n_back, turn in turns:
        text = text[: len(text) - n_back] + "".join(turn)
        for special in SpecialTokens:
            assert real.encode(text, special, scope) == real.encode(text, special)


@pytest.mark.parametrize("more", [" dog", " category", "m", "-", "", " ", " \u0301", "'s"])
def test_where_a_word_was_over_it_need_not_be(more: str, real: Counted) -> None:
    """Texts are known up to the word that is 64 tokens before their end, which is " cat" here."""
    beginning = f"{more!r} " + WORDS * 30 + "the"
    real.cost(beginning + " cat" + " and so on" * 21)
    real.cost(beginning + more)


@pytest.mark.parametrize("end", ["a word that goes o", "white space   ", "12", "\u1112", "caf\u0065", " it's", "<|im_"])
@pytest.mark.parametrize("more", ["n", " n", "3 4", "\u0301 ", "\u1161\u11ab", "\n", "ve", "end|>"])
def test_the_end_of_a_text_may_become_another_word(real: Counted, end: str, more: str) -> None:
    text = f"{end!r} {more!r} " + WORDS * 30 + end
    real.cost(text)
    assert real.cost(text + more) < LEAST_CHARS


def _normalized(kind: Any) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = kind
    return tokenizer


def _spaced() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _unsplit() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


@pytest.mark.parametrize(
    "backend", [byte_fallback(), word_pieces(), _normalized(normalizers.Lowercase()), _spaced(), _unsplit()]
)
def test_tokenizers_that_work_otherwise_encode_everything(backend: Tokenizer, tmp_path: Path) -> None:
    tokenizer, text = Counted(folder_with(tmp_path, backend)), WORDS * 40
    tokenizer.cost(text)
    assert tokenizer.cost(text + " hi") >= len(text)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@pytest.mark.parametrize("special", SpecialTokens)
def test_byte_level_tokenizers_know_what_they_had(normalizer: Any, special: SpecialTokens, tmp_path: Path) -> None:
    tokenizer, text = Counted(folder_with(tmp_path, _normalized(normalizer))), "e\u0301 " + WORDS * 40
    tokenizer.cost(text, special)
    assert tokenizer.cost(text + " the mat", special) < 1000


# --- room -------------------------------------------------------------------------------------------------------------


def known(most_chars: int) -> KnownTexts:
    """Of a tokenizer with a token for each character."""
    return KnownTexts(
        lambda text: [*text.encode()], lambda token: bytes([token]), frozenset(b"|"), most_chars=most_chars
    )


def learnt(texts: KnownTexts, chosen: Sequence[str]) -> list[bool]:
    return [texts.split("s", text)[0] != [] for text in chosen]


def learn(texts: KnownTexts, text: str) -> None:
    texts.learn("s", text, [*text.encode()])


def test_the_ones_that_were_used_longest_ago_go_first() -> None:
    texts, chosen = known(2500), [f"{number}" * 1000 + "|x" for number in range(4)]
    for text in chosen:
        learn(texts, text)
    assert learnt(texts, chosen) == [False, False, True, True]
    assert texts.chars == 2000
    learn(texts, "y" * 3000 + "|x")
    assert texts.chars == 0, "more than there is room for"


def test_a_turn_takes_the_place_of_the_one_before() -> None:
    texts, text = known(10_000), "z" * 1000 + "|x"
    for _ in range(5):
        text += "|and more"
        learn(texts, text)
    assert texts.chars < len(text)
    beginning, rest = texts.split("s", text + "!")
    assert bytes(beginning).decode() + rest == text + "!"


def test_texts_with_one_head_are_few() -> None:
    texts, head = known(1 << 20), "h" * 300
    for number in range(40):
        learn(texts, f"{head}{number:03}|x")
    assert learnt(texts, [f"{head}{number:03}|x" for number in (0, 7, 8, 39)]) == [False, False, True, True]
    assert texts.chars == 32 * 303
