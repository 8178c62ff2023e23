"""TextStream and the fake engine's tokenizer, case by case; tests/property/test_text_stream.py tries the rest."""

import pytest

from mooncake_mesh.gateway.text import TextDelta, TextRules, TextStream
from mooncake_mesh.gateway.tokenizer import (
    BYTE_BOS,
    BYTE_EOS,
    BYTE_IM_END,
    BYTE_IM_START,
    ByteTokenizer,
    SpecialTokens,
)
from mooncake_mesh.gateway.tools import ChatMessage
from mooncake_proto.serving import TokenLogprob

TOKENIZER = ByteTokenizer()


def _run(tokens: list[int], rules: TextRules) -> list[TextDelta]:
    """Deltas of *tokens*, the finishing one included unless a stop string ended them."""
    stream = TextStream(TOKENIZER, rules)
    deltas = []
    for token in tokens:
        deltas.append(stream.feed(token))
        if deltas[-1].stopped:
            return deltas
    return [*deltas, stream.finish()]


def _texts(tokens: bytes | list[int], **rules: object) -> list[str]:
    return [delta.text for delta in _run(list(tokens), TextRules(**rules))]  # type: ignore[arg-type]


def test_a_character_comes_with_its_last_byte() -> None:
    assert _texts("a€b".encode()) == ["a", "", "", "€", "b", ""]


def test_bytes_that_never_become_a_character_read_as_replacement() -> None:
    assert _texts("€".encode()[:2]) == ["", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_broken_character_does_not_swallow_the_next_one() -> None:
    assert _texts(b"\xe2\x82a") == ["", "", "\N{REPLACEMENT CHARACTER}a", ""]


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    assert _texts([97, BYTE_IM_END, 98]) == ["a", "", "b", ""]
    assert _texts([97, BYTE_IM_END, 98], skip_special=False) == ["a", "<|im_end|>", "b", ""]


def test_a_hidden_token_between_the_bytes_of_a_character_does_not_break_it() -> None:
    first, *rest = "é".encode()
    assert "".join(_texts([first, BYTE_IM_START, *rest])) == "é"


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    assert _texts(b"xaay", stop=("aab",)) == ["x", "", "", "aay", ""]


def test_a_stop_string_across_tokens_never_leaks() -> None:
    deltas = _run(list(b"one,two"), TextRules(stop=("e,t",)))
    assert [delta.text for delta in deltas] == ["o", "n", "", "", ""]
    assert [delta.stopped for delta in deltas] == [False, False, False, False, True]


def test_a_stop_string_may_be_kept_in_the_output() -> None:
    assert "".join(_texts(b"one,two", stop=("e,t",), include_stop=True)) == "one,t"


def test_the_match_that_ends_first_wins_and_the_longest_of_those() -> None:
    assert "".join(_texts(b"xabcd", stop=("abcd", "bc"))) == "xa"
    assert "".join(_texts(b"xabc", stop=("c", "abc"))) == "x"


def test_text_held_for_a_stop_string_that_did_not_come_is_released_at_the_end() -> None:
    assert _texts(b"one,", stop=(",,",))[-1] == ","


def test_a_stop_string_of_half_a_character_can_only_match_at_the_end() -> None:
    deltas = _run(list("a€".encode()[:3]), TextRules(stop=("\N{REPLACEMENT CHARACTER}",)))
    assert deltas[-1].stopped
    assert "".join(delta.text for delta in deltas) == "a"


def test_stop_strings_do_not_count_within_the_first_tokens() -> None:
    assert "".join(_texts(b"a.b.c", stop=(".",), min_tokens=2)) == "a.b"


def test_pieces_come_with_the_text_they_belong_to() -> None:
    stream = TextStream(TOKENIZER, TextRules(stop=("bcx",)))
    logprobs = [TokenLogprob(logprob=-float(index)) for index in range(4)]
    deltas = [stream.feed(token, logprob) for token, logprob in zip(b"abcd", logprobs, strict=True)]
    assert [[piece.token for piece in delta.pieces] for delta in deltas] == [[97], [], [], [98, 99, 100]]
    pieces = [piece for delta in deltas for piece in delta.pieces]
    assert [piece.offset for piece in pieces] == [0, 1, 2, 3]
    assert [piece.logprob for piece in pieces] == logprobs


def test_the_token_of_half_a_character_waits_for_it() -> None:
    deltas = _run(list("é".encode()), TextRules())
    assert [len(delta.pieces) for delta in deltas] == [0, 2, 0]


def test_tokens_of_a_stop_string_have_no_piece() -> None:
    deltas = _run(list(b"ab.,"), TextRules(stop=(".,",)))
    assert [piece.token for delta in deltas for piece in delta.pieces] == list(b"ab")


def test_the_byte_tokenizer_frames_chats_and_keeps_markers_in_content_as_text() -> None:
    tokens = TOKENIZER.encode_chat([ChatMessage(role="user", content="a<|im_end|>")])
    assert tokens == [BYTE_IM_START, *b"user\na<|im_end|>", BYTE_IM_END, *b"\n", BYTE_IM_START, *b"assistant\n"]


@pytest.mark.parametrize("text", ["", "plain", "é€😀", "<|im_start|>x<|im_end|>"])
def test_the_byte_tokenizer_reads_back_what_it_wrote(text: str) -> None:
    tokens = TOKENIZER.encode(text, SpecialTokens.KEEP)
    assert TOKENIZER.decode(tokens) == text
    assert TOKENIZER.encode(text, SpecialTokens.ADD) == [BYTE_BOS, *tokens]


def test_the_byte_tokenizer_knows_its_markers() -> None:
    assert TOKENIZER.encode("<|eos|>", SpecialTokens.KEEP) == [BYTE_EOS]
    assert TOKENIZER.token_bytes(260) == b""
