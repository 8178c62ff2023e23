"""What a worker asks of an engine. Knows neither torch nor the mesh; both engines and the tests meet here.

All methods but the constructor run on one thread, the worker's engine thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.kv.layers import LayerRange
from mooncake_mesh.kv.layout import KvLayout
from mooncake_proto.ids import BlockKey
from mooncake_proto.serving import Sampling, TokenLogprob

TokenArray = npt.NDArray[np.int32]
TokenMask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """A vocabulary of ``size`` logits whose tokens are in a ``tokenizer.json``."""

    path: Path
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenList:
    """A vocabulary by the bytes of its tokens, in order of id; ``special`` ids mark structure and are no text."""

    tokens: tuple[bytes, ...]
    special: tuple[int, ...]


Vocabulary = TokenizerFile | TokenList


class TokenFilter(Protocol):
    """Which tokens may come next in one sequence. Called on the engine thread only.

    Once ``failure`` is set, the sequence cannot go on: what :meth:`allowed` says from then on means nothing.
    """

    failure: InvalidRequest | None

    def allowed(self, drawn: TokenArray) -> TokenMask:
        """One entry for each token of the vocabulary, at least one of them true. *drawn* are all tokens drawn so far;
        they begin with those of the call before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The loaded model as the mesh sees it. ``fingerprint`` covers weights' origin, config and tokenizer.

    ``layers`` are those that are loaded; ``layout`` is that of the whole model. ``hidden_bytes`` is the size of one
    token's activations on their way from one stage to the next.
    """

    name: str
    fingerprint: str
    layout: KvLayout
    vocab_size: int
    max_context_tokens: int
    layers: LayerRange
    hidden_bytes: int


@dataclass(slots=True, kw_only=True)
class SampleRequest:
    """How to draw the next token of one sequence. Belongs to the caller, who updates it between calls.

    ``position`` counts the tokens drawn before (the sampler's counter, so that a moved request draws the same tokens).
    ``history`` are prompt and drawn tokens so far, for the penalties; its last ``position`` tokens were drawn.
    ``banned`` token ids cannot be drawn (the stop tokens while ``min_new_tokens`` is not reached), and where ``filter``
    is set only what it allows; it has the last word.
    """

    sampling: Sampling
    position: int
    history: TokenArray
    banned: tuple[int, ...] = ()
    filter: TokenFilter | None = None

    def allowed(self) -> TokenMask | None:
        """What filter and bans leave, True for a token that can be drawn; None where there is no filter."""
        if self.filter is None:
            return None
        filtered = self.filter.allowed(self.history[len(self.history) - self.position :])
        left = filtered.copy()
        left[list(self.banned)] = False
        return left if left.any() else filtered


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """``tokens`` at positions ``start`` onwards of a sequence whose KV lies in arena blocks ``blocks``.

    Positions below ``start`` are already valid there. ``sample`` is set on the last chunk only. ``sequence`` names the
    job and is never used for another one: engines key what they remember of it by this name, since blocks are reused.
    ``keys`` are those of the whole blocks before ``start``, as far as they are known: an engine that has their K and V
    on the device already need not read them. ``blocks`` may go on behind this chunk.

    A stage that lacks the embedding reads ``hidden_in`` instead of ``tokens``, one that lacks the head writes
    ``hidden_out``: ``hidden_bytes`` for each token, in order, in memory that is the engine's until prefill returns.
    """

    sequence: str
    tokens: TokenArray
    start: int
    blocks: Sequence[int]
    sample: SampleRequest | None = None
    keys: Sequence[BlockKey] = ()
    hidden_in: memoryview | None = None
    hidden_out: memoryview | None = None


@dataclass(slots=True, kw_only=True)
class DecodeSlot:
    """One sequence in a decode step: ``token`` is fed at ``position``. Belongs to the caller, as SampleRequest.

    KV of all earlier positions is valid in ``blocks``. ``sequence`` is as in :class:`PrefillChunk`.
    """

    sequence: str
    token: int
    position: int
    blocks: Sequence[int]
    sample: SampleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A drawn token and, where asked for, its log-probabilities."""

    token: int
    logprob: TokenLogprob | None = None


class Cores(Protocol):
    """The cores of a machine that several instances compute on."""

    def begin(self) -> int:
        """This instance computes from now on, with so many threads. To be called again now and then; the first time it
        waits for those who have more than their share, for a moment at most."""

    def end(self) -> None:
        """It has done what it had to."""


class Engine(Protocol):
    """A model that computes on the pages of an arena."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def vocabulary(self) -> Vocabulary:
        """What a grammar has to know to filter tokens."""

    def bind(self, arena: memoryview) -> None:
        """Use *arena* (``n_blocks * layout.block_bytes`` writable bytes) as page memory from now on.

        Called at start, and again with another arena after the node's messenger restarted. The engine keeps a view.
        """

    def unbind(self) -> None:
        """Drop every view of the arena, so that its mapping can be closed."""

    def prefill(self, chunk: PrefillChunk, on_layer: Callable[[int], None]) -> Drawn | None:
        """Compute one chunk through this engine's layers; write their K and V into the pages.

        *on_layer(layer)* is called on this thread as soon as that layer's K and V of the whole chunk are in the arena
        and will not change; it may raise to stop the forward (the exception passes through). Returns the drawn token
        when ``chunk.sample`` is set, which takes an engine with the head.
        """

    def preload(self, sequence: str, blocks: Sequence[int], n_tokens: int, keys: Sequence[BlockKey]) -> "Future[None]":
        """Get ready to decode *sequence*, whose first *n_tokens* positions have valid K and V in *blocks*: what of them
        is to be copied to the device is copied beside what this thread computes meanwhile.

        The blocks are not read for it any more when the future is done; it may not be cancelled. Its exception is that
        of a copy which failed. *keys* are as in :class:`PrefillChunk`, of the whole blocks below *n_tokens*.
        """

    def retire(self, sequence: str, keys: Sequence[BlockKey]) -> None:
        """*sequence* is over; *keys* are those of its whole blocks, as far as they are known. What the engine has of it
        on the device may serve another one that begins with them. An unknown one is fine."""

    def decode(self, batch: Sequence[DecodeSlot]) -> list[Drawn]:
        """One step for every slot, in order: write the K and V of each slot's token, draw its next token.

        Takes an engine with all layers.
        """
