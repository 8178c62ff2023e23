"""Layer-wise prefill: the prefix of later layers is loaded, and the KV of earlier ones stored, while one computes.

One thread beside the engine's copies both ways (copying.py). What is stored is reported on the engine's own thread, at
the next layer or at the end of the chunk. With :attr:`Overlap.OFF` the engine's thread makes the same copies itself,
each when it is needed.

A chunk's KV on the device is its sequence's context (see contexts.py), which stays for the next chunk; or, where the
device may hold a few layers only, a :class:`LayerWindow`: each layer's prefix is loaded into a slot that an earlier
layer has left, and nothing stays.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from mooncake_mesh.engine.contexts import Context, ContextCache
from mooncake_mesh.engine.copying import Copy, CopyThread
from mooncake_mesh.engine.kv_storage import ArenaPages, Span, torch_dtype
from mooncake_mesh.engine.large_pages import in_large_pages
from mooncake_mesh.kv.layers import LayerRange

_AHEAD_LAYERS: Final = 2
"""So many layers are loaded before they are needed, where there is room for all: more would keep stores waiting."""

_PENDING_STORES: Final = 2
"""A chunk waits rather than have more: somebody waits for what is stored."""

_SLOT_TOKENS: Final = 1024
"""Slots grow by so many tokens, so that few chunks of a long prompt need larger ones."""


class LayerStores:
    """The KV of one chunk's layers on its way into the arena. *on_layer* is called, on the engine's thread and in
    order, for layers that are there."""

    def __init__(self, copies: CopyThread, arena: ArenaPages, span: Span, on_layer: Callable[[int], None]) -> None:
        self._copies = copies
        self._arena = arena
        self._span = span
        self._on_layer = on_layer
        self._pending: deque[tuple[range, Copy]] = deque()

    def store(self, first_layer: int, kv: torch.Tensor) -> None:
        """Write *kv* (layers, 2, kv_heads, tokens, head_dim), which must not change before :meth:`finish`."""
        span, layers = self._span, range(first_layer, first_layer + len(kv))
        copy = self._copies.run(lambda: self._arena.write_layers(first_layer, span.blocks, span.start, kv), kv.nbytes)
        self._pending.append((layers, copy))
        while self._pending and (self._pending[0][1].is_done or len(self._pending) > _PENDING_STORES):
            self._report()

    def finish(self) -> None:
        """Wait for all, and report them."""
        while self._pending:
            self._report()

    def abandon(self) -> None:
        """Wait for all and report none: the chunk has failed."""
        for _, copy in self._pending:
            copy.abandon()
        self._pending.clear()

    def _report(self) -> None:
        layers, copy = self._pending.popleft()
        copy.finish()
        for layer in layers:
            self._on_layer(layer)


class PrefixLoads:
    """The prefix of one chunk's layers on its way to the device: ``place(layer)`` (2, kv_heads, tokens, head_dim) takes
    that layer's positions from *start* on."""

    def __init__(
        self,
        copies: CopyThread,
        arena: ArenaPages,
        span: Span,
        layers: LayerRange,
        place: Callable[[int], torch.Tensor],
        *,
        start: int,
        ahead: int,
    ) -> None:
        self._copies = copies
        self._arena = arena
        self._span = span
        self._layers = layers
        self._place = place
        self._start = start
        self._ahead = ahead if copies.is_beside else 0
        self._loads: deque[Copy] = deque()
        self._next = layers.first
        if copies.is_beside:
            self._load_to(layers.first + self._ahead)

    def need(self, layer: int) -> None:
        """Wait for *layer*'s; each in order, once. The one before is used no more, and its place is free."""
        self._load_to(layer + self._ahead)
        self._loads.popleft().finish()

    def need_some(self, layer: int, end: int) -> int:
        """Wait for *layer*'s, and take what is there of those behind it: the first layer, up to *end*, that is not."""
        self.need(layer)
        while (layer := layer + 1) < end and self._loads and self._loads[0].is_done:
            self.need(layer)
        return layer

    def abandon(self) -> None:
        """End those that are under way: nothing reads the arena after this."""
        for load in self._loads:
            load.abandon()
        self._loads.clear()

    def _load_to(self, layer: int) -> None:
        while self._next <= min(layer, self._layers.end - 1):
            self._loads.append(self._load(self._next))
            self._next += 1

    def _load(self, layer: int) -> Copy:
        span, out = self._span, self._place(layer)
        return self._copies.run(
            lambda: self._arena.read_positions(layer, span.blocks, self._start, span.start, out), out.nbytes
        )


class _Loading:
    """A kept context whose prefix is still coming."""

    def __init__(self, kept: Context, loads: PrefixLoads) -> None:
        self._kept = kept
        self._loads = loads

    def extend(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._loads.need(layer)
        return self._kept.extend(layer, kv)

    def writable(self, layer: int, end: int) -> torch.Tensor | None:
        return self._kept.writable(layer, self._loads.need_some(layer, end))


class LayerWindow:
    """Slots for the KV of *n_layers* layers of one sequence at a time."""

    def __init__(self, arena: ArenaPages, layers: LayerRange, n_layers: int, device: torch.device) -> None:
        self._layout = arena.layout
        self._layers = layers
        self._n_slots = min(n_layers, layers.count)
        self._device = device
        self._storage = torch.empty(0)
        self._slot_tokens = 0

    @property
    def n_slots(self) -> int:
        return self._n_slots

    @property
    def kept_bytes(self) -> int:
        return self._storage.nbytes

    def fit(self, tokens: int) -> None:
        """Have room for *tokens* in each slot."""
        if tokens > self._slot_tokens:
            self._slot_tokens = -(-tokens // _SLOT_TOKENS) * _SLOT_TOKENS
            self._storage = torch.empty(0)  # first: the old and the new ones are more than the budget
            shape = (self._n_slots, 2 * self._layout.kv_heads * self._slot_tokens * self._layout.head_dim)
            self._storage = self._empty(shape)

    def _empty(self, shape: tuple[int, int]) -> torch.Tensor:
        dtype = torch_dtype(self._layout.dtype)
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        return in_large_pages(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def slot(self, layer: int, tokens: int) -> torch.Tensor:
        """That of *layer* and of every *n_slots*-th one: (2, kv_heads, tokens, head_dim), contiguous."""
        shape = (2, self._layout.kv_heads, tokens, self._layout.head_dim)
        flat = self._storage[(layer - self._layers.first) % self._n_slots]
        return flat[: 2 * self._layout.kv_heads * tokens * self._layout.head_dim].view(shape)


class _Windowed:
    """KV of one chunk in a window. The views are valid until the next layer."""

    def __init__(self, window: LayerWindow, span: Span, loads: PrefixLoads) -> None:
        self._window = window
        self._span = span
        self._loads = loads

    def extend(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._loads.need(layer)
        slot = self._window.slot(layer, self._span.end)
        slot[:, :, self._span.start :] = kv
        return slot[None, 0], slot[None, 1]

    def writable(self, layer: int, end: int) -> None:
        """What is stored must not change, and the slot is soon another layer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenChunk:
    """What one chunk's forward computes with."""

    context: Context
    stores: LayerStores


class ChunkContexts:
    """Contexts and stores for chunks: in the *cache*, or, with a *layer_budget*, in a window of so many layers."""

    def __init__(
        self,
        arena: ArenaPages,
        cache: ContextCache,
        layers: LayerRange,
        device: torch.device,
        copies: CopyThread,
        *,
        layer_budget: int,
    ) -> None:
        self._arena = arena
        self._cache = cache
        self._layers = layers
        self._copies = copies
        self._window = LayerWindow(arena, layers, layer_budget, device) if layer_budget else None

    @property
    def window_bytes(self) -> int:
        return 0 if self._window is None else self._window.kept_bytes

    @contextmanager
    def open(self, span: Span, on_layer: Callable[[int], None]) -> Iterator[OpenChunk]:
        """At the end all layers are stored and reported; after an exception no copy is under way."""
        context, loads = self._kept(span) if self._window is None else self._windowed(self._window, span)
        stores = LayerStores(self._copies, self._arena, span, on_layer)
        try:
            yield OpenChunk(context=context, stores=stores)
            stores.finish()
        finally:
            stores.abandon()
            if loads is not None:
                loads.abandon()

    def _kept(self, span: Span) -> tuple[Context, PrefixLoads | None]:
        context, missing = self._cache.open_to_fill(span)
        if missing is None:
            return context, None
        first = self._layers.first
        loads = PrefixLoads(
            self._copies,
            self._arena,
            span,
            self._layers,
            lambda layer: missing[layer - first],
            start=span.start - missing.shape[3],
            ahead=_AHEAD_LAYERS,
        )
        return _Loading(context, loads), loads

    def _windowed(self, window: LayerWindow, span: Span) -> tuple[Context, PrefixLoads]:
        window.fit(span.end)
        loads = PrefixLoads(
            self._copies,
            self._arena,
            span,
            self._layers,
            lambda layer: window.slot(layer, span.end)[:, :, : span.start],
            start=0,
            ahead=window.n_slots - 1,
        )
        return _Windowed(window, span, loads), loads
