"""An engine without a model: deterministic tokens, configurable delays, and a KVCache that matters.

Every position writes words that mix its token, position and layer into all of its K and V cells. The next token is a
function of what the *arena* holds for all positions and layers, so a slice that was lost, corrupted or put in the wrong
place changes the output, and a test that compares with :func:`expected_tokens` sees it.

What a sequence's positions add up to is remembered per sequence, so that a step reads only positions not seen before.
Nothing here imports torch.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_mesh.engine.api import DecodeSlot, Drawn, ModelSpec, PrefillChunk, SampleRequest, TokenList
from mooncake_mesh.engine.fake_recipe import (
    BOS,
    EOS,
    IM_END,
    IM_START,
    SPECIAL,
    TOKEN_BYTES,
    UTF8_TEXT,
    VOCAB_SIZE,
    WORD_MASK,
    CellRecipe,
    FakeConfig,
    FakeOutput,
    FakeTiming,
    Words,
    draw,
    expected_tokens,
)
from mooncake_mesh.kv.layers import LayerRange
from mooncake_proto.ids import BlockKey

__all__ = [
    "BOS",
    "EOS",
    "IM_END",
    "IM_START",
    "UTF8_TEXT",
    "VOCAB_SIZE",
    "FakeConfig",
    "FakeEngine",
    "FakeOutput",
    "FakeTiming",
    "expected_tokens",
]

_REMEMBERED_SEQUENCES: Final = 4096
_HIDDEN_WORDS: Final = 2
_WORD_BYTES: Final = 8


@dataclass(slots=True)
class _Seen:
    """Sum of the digests of the first ``tokens`` positions of a sequence, of the engine's layers, modulo 2**64."""

    tokens: int = 0
    total: int = 0


class FakeEngine:
    """Engine of :mod:`mooncake_mesh.engine.api` that needs no model. ``sleep`` pretends the device's work.

    A stage with *layers* passes on, for each token, its seed and the sum of what its cells in the layers so far say,
    for the first one also of what those of all positions before it say: activations that were lost or damaged change
    the output as well. Each stage reads the cells of its own layers only.
    """

    def __init__(
        self,
        config: FakeConfig,
        *,
        layers: LayerRange | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._sleep = sleep
        self._cells = CellRecipe(config)
        self._layers = layers or LayerRange.whole(config.layout.layers)
        self._own_cells = CellRecipe(config, self._layers)
        self._pages: Words | None = None
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            name=self._config.name,
            fingerprint=self._config.fingerprint,
            layout=self._config.layout,
            vocab_size=VOCAB_SIZE,
            max_context_tokens=self._config.max_context_tokens,
            layers=self._layers,
            hidden_bytes=_HIDDEN_WORDS * _WORD_BYTES,
        )

    @property
    def vocabulary(self) -> TokenList:
        return TokenList(tokens=TOKEN_BYTES, special=SPECIAL)

    def bind(self, arena: memoryview) -> None:
        """Use *arena*; its size must be a whole number of blocks."""
        layout = self._config.layout
        if arena.nbytes % layout.block_bytes:
            raise ValueError(f"arena of {arena.nbytes} bytes is no whole number of {layout.block_bytes}-byte blocks")
        shape = (-1, layout.layers, 2, layout.block_tokens, self._config.row_words)
        self._pages = np.frombuffer(arena, dtype=np.uint64).reshape(shape)
        self._seen.clear()

    def unbind(self) -> None:
        self._pages = None
        self._seen.clear()

    def prefill(self, chunk: PrefillChunk, on_layer: Callable[[int], None]) -> Drawn | None:
        began_s = time.perf_counter()
        pages, own = self._bound(), self._layers
        seeds, sums = self._seeds(chunk)
        positions = np.arange(chunk.start, chunk.start + len(seeds))
        busy_s = self._busy_s(len(seeds))
        blocks, offsets = self._places(chunk.blocks, positions)
        cells = self._own_cells.write(seeds)
        for index, layer in enumerate(range(own.first, own.end)):
            self._wait_until(began_s + busy_s * (index + 1) / own.count)
            pages[blocks, layer, :, offsets] = cells[:, index]
            on_layer(layer)
        if own.count < own.total:
            sums = sums + self._own_cells.digest(pages[blocks, own.first : own.end, :, offsets], positions)
            sums[:1] += np.uint64(self._total(chunk.sequence, chunk.blocks, chunk.start))
        if not own.has_head:
            hidden = _hidden(chunk.hidden_out)
            hidden[:, 0], hidden[:, 1] = seeds, sums
        if chunk.sample is None or not own.has_head:
            return None
        end = chunk.start + len(seeds)
        is_whole = own.count == own.total
        total = self._total(chunk.sequence, chunk.blocks, end) if is_whole else int(sums.sum(dtype=np.uint64))
        return self._draw(chunk.sample, end, total)

    def preload(self, sequence: str, blocks: Sequence[int], n_tokens: int, keys: Sequence[BlockKey]) -> "Future[None]":
        """There is no device to copy to."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def retire(self, sequence: str, keys: Sequence[BlockKey]) -> None:
        self._seen.pop(sequence, None)

    def _busy_s(self, n_tokens: int) -> float:
        timing = self._config.timing
        whole_s = timing.prefill_s_base + timing.prefill_s_per_token * n_tokens
        return whole_s * self._layers.count / self._layers.total

    def _seeds(self, chunk: PrefillChunk) -> tuple[Words, Words]:
        """Seed of each token, and the sums that the stages before have passed on."""
        if self._layers.has_embedding:
            positions = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            return self._cells.seeds(chunk.tokens, positions), np.zeros(len(positions), np.uint64)
        hidden = _hidden(chunk.hidden_in)
        return hidden[:, 0], hidden[:, 1]

    def decode(self, batch: Sequence[DecodeSlot]) -> list[Drawn]:
        if not batch:
            return []
        timing = self._config.timing
        began_s = time.perf_counter()
        pages = self._bound()
        block_tokens = self._config.layout.block_tokens
        positions = np.array([slot.position for slot in batch])
        blocks = np.array([slot.blocks[slot.position // block_tokens] for slot in batch])
        offsets = positions % block_tokens
        tokens = np.array([slot.token for slot in batch], dtype=np.int32)
        pages[blocks, :, :, offsets] = self._cells.write(self._cells.seeds(tokens, positions))
        digests = self._cells.digest(pages[blocks, :, :, offsets], positions).tolist()
        drawn = []
        for slot, digest in zip(batch, digests, strict=True):
            before = self._total(slot.sequence, slot.blocks, slot.position)
            total = (before + digest) & WORD_MASK
            self._remember(slot.sequence, _Seen(slot.position + 1, total))
            drawn.append(self._draw(slot.sample, slot.position + 1, total))
        self._wait_until(began_s + timing.decode_s_base + timing.decode_s_per_slot * len(batch))
        return drawn

    def _bound(self) -> Words:
        if self._pages is None:
            raise RuntimeError("the engine is not bound to an arena")
        return self._pages

    def _places(self, blocks: Sequence[int], positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray, npt.NDArray]:
        block_tokens = self._config.layout.block_tokens
        return np.asarray(blocks)[positions // block_tokens], positions % block_tokens

    def _total(self, sequence: str, blocks: Sequence[int], end: int) -> int:
        """Sum over positions below *end*, reading from the arena those not read before."""
        seen = self._seen.get(sequence)
        if seen is None or seen.tokens > end:
            seen = _Seen()
        if seen.tokens < end:
            positions = np.arange(seen.tokens, end)
            block_ids, offsets = self._places(blocks, positions)
            cells = self._bound()[block_ids, self._layers.first : self._layers.end, :, offsets]
            added = int(self._own_cells.digest(cells, positions).sum(dtype=np.uint64))
            seen = _Seen(end, (seen.total + added) & WORD_MASK)
        self._remember(sequence, seen)
        return seen.total

    def _remember(self, sequence: str, seen: _Seen) -> None:
        self._seen[sequence] = seen
        self._seen.move_to_end(sequence)
        if len(self._seen) > _REMEMBERED_SEQUENCES:
            self._seen.popitem(last=False)

    def _draw(self, request: SampleRequest, length: int, total: int) -> Drawn:
        return draw(
            self._config, request.sampling, request.position, request.banned, length, total, allowed=request.allowed()
        )

    def _wait_until(self, moment_s: float) -> None:
        left_s = moment_s - time.perf_counter()
        if left_s > 0:
            self._sleep(left_s)


def _hidden(buffer: memoryview | None) -> Words:
    """(tokens, _HIDDEN_WORDS), a view of *buffer*."""
    if buffer is None:
        raise RuntimeError("a stage was given no place for activations")
    return np.frombuffer(buffer, dtype=np.uint64).reshape(-1, _HIDDEN_WORDS)
