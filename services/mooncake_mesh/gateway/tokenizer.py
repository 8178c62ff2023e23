"""Text to token ids and back: what the doors ask of a tokenizer, and the tokenizer of the fake engine.

Streaming needs the bytes of single tokens, not a decoder that looks back: the text of a sequence is the concatenation
of its tokens' bytes read as UTF-8, whatever the boundaries (see text.py). So the primitive is ``token_bytes``.
"""

import enum
import re
from collections.abc import Sequence
from typing import Final, Protocol

from mooncake_mesh.gateway.tool_form import plain_chat
from mooncake_mesh.gateway.tools import ChatMessage, Tool


class SpecialTokens(enum.Enum):
    """What ``encode`` adds. Markers that are written in the text (``<|im_end|>``) become their ids either way."""

    ADD = "add"  # frame the text as the model saw documents in training (a BOS, for most models)
    KEEP = "keep"  # nothing is added: the text is already a rendered template


class Tokenizer(Protocol):
    """A model's tokenizer. Implementations may be used from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Token ids of prompts are in ``[0, vocab_size)``."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids, ascending: generation ends when one of them is drawn."""

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text than this: a longer text has more tokens than bytes over this."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that mark structure instead of carrying text."""

    def encode(self, text: str, special: SpecialTokens, scope: str | None = None) -> list[int]:
        """The same for every *scope*. Texts of one may be remembered, so that those which go on from them take less
        time; who asks in another scope, or without one, cannot tell."""

    def encode_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), scope: str | None = None
    ) -> list[int]:
        """The prompt that asks for the assistant's next turn, in which *tools* may be called (see tool_form.py).

        *scope* is as in :meth:`encode`. Raises InvalidRequest (param ``messages``) when the model has no chat template
        or its template refuses them.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a whole sequence, special tokens included as their markers."""

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes that *token* adds to a text; a special token's are its marker, an unknown id's are empty."""


BYTE_BOS: Final = 256
BYTE_EOS: Final = 257
BYTE_IM_START: Final = 258
BYTE_IM_END: Final = 259
_BYTE_MARKERS: Final = {
    "<|bos|>": BYTE_BOS,
    "<|eos|>": BYTE_EOS,
    "<|im_start|>": BYTE_IM_START,
    "<|im_end|>": BYTE_IM_END,
}
_BYTE_MARKER_RE: Final = re.compile("(" + "|".join(re.escape(marker) for marker in _BYTE_MARKERS) + ")")


class ByteTokenizer:
    """The fake engine's tokenizer: ids 0..255 are bytes, then four markers; needs no file and no package."""

    vocab_size: Final = 260
    stop_ids: Final = (BYTE_EOS, BYTE_IM_END)
    longest_token_bytes: Final = max(map(len, _BYTE_MARKERS))
    special_ids: Final = frozenset(_BYTE_MARKERS.values())

    def __init__(self) -> None:
        self._bytes = [bytes([value]) for value in range(256)] + [marker.encode() for marker in _BYTE_MARKERS]

    def encode(self, text: str, special: SpecialTokens, scope: str | None = None) -> list[int]:
        tokens = [BYTE_BOS] if special is SpecialTokens.ADD else []
        for part in _BYTE_MARKER_RE.split(text):
            marker = _BYTE_MARKERS.get(part)
            tokens.extend(part.encode() if marker is None else (marker,))
        return tokens

    def encode_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), scope: str | None = None
    ) -> list[int]:
        """ChatML; markers inside a message's content stay plain text."""
        tokens: list[int] = []
        for message in plain_chat(messages, tools):
            tokens += [BYTE_IM_START, *f"{message.role}\n{message.content}".encode(), BYTE_IM_END, *b"\n"]
        return [*tokens, BYTE_IM_START, *b"assistant\n"]

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""
