"""The tokenizer of a real model, read from its folder without torch or transformers.

Importing transformers costs a gateway three seconds and 400 MB; all that serving needs is in ``tokenizer.json`` (read
by the tokenizers package), the chat template and a few lines of JSON.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from mooncake_mesh.errors import InvalidRequest, UnsupportedModel
from mooncake_mesh.gateway.chat_template import ChatTemplate
from mooncake_mesh.gateway.known_texts import LEAST_CHARS, KnownTexts
from mooncake_mesh.gateway.tokenizer import SpecialTokens
from mooncake_mesh.gateway.tools import ChatMessage, Tool

_LONGEST_CHAR_BYTES: Final = 4
_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ModelTokenizer:
    """``tokenizer.json``, the chat template and the end-of-sequence ids of a model folder, as transformers saves it.

    Raises UnsupportedModel when the folder has no ``tokenizer.json``.
    """

    def __init__(self, folder: Path) -> None:
        source = folder / "tokenizer.json"
        if not source.is_file():
            raise UnsupportedModel(f"{folder} holds no tokenizer.json (a fast tokenizer saved by transformers)")
        self._backend = Backend.from_file(str(source))
        self._backend.no_truncation()
        self._backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        named = _named_tokens(config)
        added: dict[int, Any] = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, info in added.items() if info.special)
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = _vocab_size(vocab, _read_json(folder / "config.json"))
        self.stop_ids = _stop_ids(folder, self._backend.token_to_id(named.get("eos_token", "")))
        template = _template_source(folder, config)
        self._template = None if template is None else ChatTemplate(template, special_tokens=named)
        self._text_of = _piece_decoder(self._backend)
        self._bytes: dict[int, bytes] = {token: info.content.encode() for token, info in added.items()}
        self.longest_token_bytes = self._longest_of(vocab)
        known = KnownTexts(self._plain, self.token_bytes, frozenset(added))
        self._known = known if _looks_up_words(self._backend) else None

    def encode(self, text: str, special: SpecialTokens, scope: str | None = None) -> list[int]:
        if self._known is None or scope is None or len(text) < LEAST_CHARS:
            return self._encoded(text, special)
        tokens, rest = self._known.split((scope, special), text)
        tokens += self._encoded(rest, SpecialTokens.KEEP if tokens else special)
        self._known.learn((scope, special), text, tokens)
        return tokens

    def _plain(self, text: str) -> list[int]:
        return self._encoded(text, SpecialTokens.KEEP)

    def _encoded(self, text: str, special: SpecialTokens) -> list[int]:
        # A batch of one lets other threads run meanwhile, and this call leaves out the offsets that nobody needs.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special is SpecialTokens.ADD)
        return list(encoding.ids)

    def encode_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), scope: str | None = None
    ) -> list[int]:
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        return self.encode(self._template.render(messages, tools), SpecialTokens.KEEP, scope)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def _longest_of(self, vocab: dict[str, int]) -> int:
        longest = 1
        for piece in sorted(vocab, key=len, reverse=True):
            if len(piece) * _LONGEST_CHAR_BYTES <= longest:
                break
            longest = max(longest, len(self.token_bytes(vocab[piece])))
        return longest

    def token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            piece = self._backend.id_to_token(token) if 0 <= token < 1 << 31 else None
            known = b"" if piece is None else self._text_of(token, piece)
            self._bytes[token] = known
        return known


def _looks_up_words(backend: Backend) -> bool:
    """Whether a text is cut into words as it stands, each of which has tokens of its own: see known_texts.py."""
    normalizer, splitting = _declared(backend.normalizer), _declared(backend.pre_tokenizer)
    steps: list[dict[str, Any]] = splitting.get("pretokenizers", [splitting])
    by_bytes = [step for step in steps if step.get("type") == "ByteLevel"]
    return (
        normalizer.get("type") in (None, "NFC")
        and any(step.get("use_regex") or step.get("type") == "Split" for step in steps)
        and bool(by_bytes)
        and not any(step.get("add_prefix_space") for step in by_bytes)
    )


def _declared(component: Any) -> dict[str, Any]:
    """A part of a tokenizer as its file has it."""
    declared: dict[str, Any] = {} if component is None else json.loads(component.__getstate__())
    return declared


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by role; older folders write them as objects with a ``content``."""
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _vocab_size(vocab: dict[str, int], config: dict[str, Any]) -> int:
    """One more than the highest id that both the tokenizer and the model's embedding know."""
    known = max(vocab.values(), default=-1) + 1
    text_config = config.get("text_config")
    embedding = config.get("vocab_size") or (text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    return min(known, embedding) if isinstance(embedding, int) else known


def _stop_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    """End ids of the generation config, else of the model config, and the tokenizer's own."""
    ids = set() if eos_id is None else {eos_id}
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(folder / name).get("eos_token_id")
        if declared is not None:
            ids.update(declared if isinstance(declared, list) else [declared])
            break
    return tuple(sorted(ids))


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    declared = config.get("chat_template")
    if isinstance(declared, list):
        by_name = {entry["name"]: entry["template"] for entry in declared}
        declared = by_name.get("default")
    return declared if isinstance(declared, str) else None


def _piece_decoder(backend: Backend) -> Callable[[int, str], bytes]:
    """How a vocabulary entry becomes bytes, from the kinds of decoder that the tokenizer names.

    The leading space of a SentencePiece word is kept even at the start: a completion continues its prompt.
    """
    declared = _declared(backend.decoder)
    kinds = {step["type"] for step in declared.get("decoders", [declared] if declared else [])}
    if "ByteLevel" in kinds:
        return lambda _, piece: _byte_level(piece)
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return lambda _, piece: _sentence_piece(piece)
    return _Neighboured(backend)


_BYTE_OF_CHAR: Final = {
    chr(code): code for code in range(256) if 0x21 <= code <= 0x7E or 0xA1 <= code <= 0xAC or 0xAE <= code <= 0xFF
}
_BYTE_OF_CHAR.update(
    (chr(256 + rank), code)
    for rank, code in enumerate(code for code in range(256) if chr(code) not in frozenset(_BYTE_OF_CHAR))
)


def _byte_level(piece: str) -> bytes:
    """GPT-2's alphabet: a printable Latin-1 character is its own byte, the other bytes follow from U+0100 in order."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    except KeyError:  # an entry from outside the alphabet is plain text
        return piece.encode()


def _sentence_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


class _Neighboured:
    """Any other decoder: the text a token adds behind another one (word pieces need the space between them)."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, token: int, piece: str) -> bytes:
        alone = self._backend.decode([token], skip_special_tokens=False)
        pair = self._backend.decode([token, token], skip_special_tokens=False)
        return str(pair[len(alone) :] if pair.startswith(alone) else alone).encode()
