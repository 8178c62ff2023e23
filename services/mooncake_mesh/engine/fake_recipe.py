"""What the fake engine computes: cells from tokens, tokens from cells, and the same again without an arena."""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_mesh.engine.api import Drawn, TokenArray, TokenMask
from mooncake_mesh.kv.layers import LayerRange
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_proto.serving import Sampling, TokenLogprob

BYTE_TOKENS: Final = 256
BOS: Final = 256
EOS: Final = 257
IM_START: Final = 258
IM_END: Final = 259
VOCAB_SIZE: Final = 260
SPECIAL: Final = (BOS, EOS, IM_START, IM_END)
TOKEN_BYTES: Final = (
    *(bytes([value]) for value in range(BYTE_TOKENS)),
    b"<|bos|>",
    b"<|eos|>",
    b"<|im_start|>",
    b"<|im_end|>",
)

UTF8_TEXT: Final = "Zażółć gęślą jaźń — 月饼圆又圆 🥮🏮 naïve façade, こんにちは世界 👩‍🚀🇨🇳 Ω≈ç√∫ 😀 plain ASCII too. "
_UTF8_BYTES: Final = UTF8_TEXT.encode()

_WORD_BYTES: Final = 8
WORD_MASK: Final = 0xFFFFFFFFFFFFFFFF
_GOLDEN: Final = 0x9E3779B97F4A7C15

Words = npt.NDArray[np.uint64]


class FakeOutput(enum.Enum):
    """The drawn tokens: printable bytes that depend on the KVCache, or the bytes of a fixed text in many scripts."""

    ECHO_HASH = "echo_hash"
    UTF8 = "utf8"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTiming:
    """How long the pretended device is busy; the time our own code takes is part of it, not added to it."""

    prefill_s_base: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_s_base: float = 0.0
    decode_s_per_slot: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """``eos_after``: draw EOS once that many tokens were drawn; None never draws it."""

    name: str = "fake"
    layout: KvLayout = field(
        default_factory=lambda: KvLayout(layers=4, kv_heads=1, head_dim=8, dtype=KvDtype.FLOAT32, block_tokens=16)
    )
    max_context_tokens: int = 65_536
    output: FakeOutput = FakeOutput.ECHO_HASH
    eos_after: int | None = None
    timing: FakeTiming = field(default_factory=FakeTiming)

    def __post_init__(self) -> None:
        if self.row_bytes % _WORD_BYTES:
            raise ValueError(f"a K row of {self.row_bytes} bytes is no whole number of {_WORD_BYTES}-byte words")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.layout.kv_heads * self.layout.head_dim * self.layout.dtype.item_bytes

    @property
    def row_words(self) -> int:
        return self.row_bytes // _WORD_BYTES

    @property
    def fingerprint(self) -> str:
        parts = f"{self.layout.layers} {self.layout.kv_heads} {self.layout.head_dim} {self.output.value}"
        return "fake-" + hashlib.sha256(parts.encode()).hexdigest()[:32]


class CellRecipe:
    """What a position writes into its cells, and what the cells of a position add to its sequence's sum.

    Both go by *seeds*, one word for each position, made of its token; a stage of a pipeline gets them from the one
    before. ``layers`` restricts both to some layers: what all stages add to a sum is what the whole model adds.
    """

    def __init__(self, config: FakeConfig, layers: LayerRange | None = None) -> None:
        shape = (config.layout.layers, 2, config.row_words)
        salts = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
        every: Words = _mix(salts * np.uint64(_GOLDEN)).reshape(shape)
        self._salts = every if layers is None else every[layers.first : layers.end]

    @staticmethod
    def seeds(tokens: TokenArray, positions: npt.NDArray[np.int64]) -> Words:
        return _mix(tokens.astype(np.uint64) << np.uint64(40) | positions.astype(np.uint64))

    def write(self, seeds: Words) -> Words:
        """Cells (positions, layers, K or V, words)."""
        return _mix(seeds[:, None, None, None] ^ self._salts)

    def digest(self, cells: Words, positions: npt.NDArray[np.int64]) -> Words:
        """What each position adds to the sum; depends on every bit of its cells and on where each cell lies."""
        rows: Words = _mix(cells + self._salts).sum(axis=(2, 3), dtype=np.uint64)  # (positions, layers)
        places = positions.astype(np.uint64)[:, None] * np.uint64(_GOLDEN)
        digests: Words = _mix(rows + places).sum(axis=1, dtype=np.uint64)
        return digests


def expected_tokens(
    config: FakeConfig, prompt: Sequence[int], n: int, *, sampling: Sampling | None = None, drawn: int = 0
) -> list[int]:
    """The *n* tokens that a FakeEngine of *config* draws after *prompt*, worked out without an arena.

    *sampling* defaults to greedy; the last *drawn* tokens of *prompt* were drawn before.
    """
    sampling = sampling or Sampling(temperature=0.0)
    recipe = CellRecipe(config)

    def digest(token: int, position: int) -> int:
        positions = np.array([position])
        seeds = recipe.seeds(np.array([token], dtype=np.int32), positions)
        return int(recipe.digest(recipe.write(seeds), positions)[0])

    total = sum(digest(token, position) for position, token in enumerate(prompt)) & WORD_MASK
    tokens: list[int] = []
    for index in range(n):
        length = len(prompt) + index
        token = draw(config, sampling, drawn + index, (), length, total).token
        total = (total + digest(token, length)) & WORD_MASK
        tokens.append(token)
    return tokens


def draw(
    config: FakeConfig,
    sampling: Sampling,
    position: int,
    banned: tuple[int, ...],
    length: int,
    total: int,
    *,
    allowed: TokenMask | None = None,
) -> Drawn:
    """The token after *length* tokens whose cells add up to *total*: one of the *allowed*, where that is said."""
    seed = sampling.seed & WORD_MASK if sampling.temperature > 0.0 else 0
    noise = _mix_int(total ^ _mix_int(length * _GOLDEN) ^ _mix_int(seed))
    if allowed is not None:
        candidates = np.flatnonzero(allowed[:VOCAB_SIZE])
        token = int(candidates[noise % len(candidates)])
        return Drawn(token=token, logprob=_invented_logprob(token, noise, sampling.top_logprobs))
    if config.eos_after is not None and position >= config.eos_after and EOS not in banned:
        token = EOS
    elif config.output is FakeOutput.UTF8:
        token = _UTF8_BYTES[position % len(_UTF8_BYTES)]
    else:
        token = _printable(noise)
    while token in banned:
        noise = _mix_int(noise + _GOLDEN)
        token = _printable(noise)
    return Drawn(token=token, logprob=_invented_logprob(token, noise, sampling.top_logprobs))


def _printable(noise: int) -> int:
    return 32 + noise % 95


def _invented_logprob(token: int, noise: int, top_logprobs: int | None) -> TokenLogprob | None:
    """The drawn token is the most likely one; each further token is half as likely as the one before."""
    if top_logprobs is None:
        return None
    logprob = -0.6931471805599453 - (noise >> 44) / 2**20
    others = (candidate for candidate in range(BYTE_TOKENS) if candidate != token)
    ranked = [token, *(next(others) for _ in range(min(top_logprobs, BYTE_TOKENS) - 1))][:top_logprobs]
    return TokenLogprob(
        logprob=logprob,
        top=tuple((candidate, logprob - 0.6931471805599453 * rank) for rank, candidate in enumerate(ranked)),
    )


def _mix(words: Words) -> Words:
    """A bijection of 64-bit words that spreads every bit (the finaliser of SplitMix64, Steele et al., OOPSLA 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix_int(word: int) -> int:
    """:func:`_mix` of one Python integer."""
    word &= WORD_MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD_MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD_MASK
    return word ^ word >> 31
