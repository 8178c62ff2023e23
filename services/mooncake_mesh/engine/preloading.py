"""What landed for a sequence is copied to the device beside the steps of others, before its first own step.

A prompt of thousands of tokens takes as long to copy as several steps take, and everybody in the batch would wait for
it.
"""

from collections.abc import Callable
from concurrent.futures import Future

import torch

from mooncake_mesh.engine.contexts import ContextCache
from mooncake_mesh.engine.copying import CopyThread
from mooncake_mesh.engine.kv_storage import ArenaPages, Span
from mooncake_mesh.kv.layers import LayerRange


class Preloads:
    """Fills contexts of *cache*, on the thread of *copies*."""

    def __init__(self, arena: ArenaPages, cache: ContextCache, layers: LayerRange, copies: CopyThread) -> None:
        self._arena = arena
        self._cache = cache
        self._layers = layers
        self._copies = copies

    def begin(self, span: Span) -> Future[None]:
        """Fill the context of a sequence up to the span's start. The future ends when nothing reads the span's blocks
        for it any more, with the exception of a copy that failed: the context is as it was then."""
        copy = self._cache.fill(span, lambda missing: self._copies.run(self._all_layers(span, missing), missing.nbytes))
        if copy is not None:
            return copy.outcome()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _all_layers(self, span: Span, missing: torch.Tensor) -> Callable[[], None]:
        start = span.start - missing.shape[3]
        return lambda: self._arena.read_all(span.blocks, start, span.start, missing, first_layer=self._layers.first)
