"""Contiguous working copies of K and V on the compute device.

Attention over the arena's pages would gather the whole context in every step, which costs three times as much as
attention over contiguous K and V. So a sequence in work has a *context*: one tensor on the compute device that grows
with each step; only positions the engine has not seen are read from the pages. Contexts are keyed by the sequence,
whose name is never used again, and not by blocks, which are.

The context of a sequence that is over is kept as long as there is room, under the keys of its blocks: who begins behind
the same prefix goes on in it, and reads nothing (retired_contexts.py).

Contexts live within a budget of bytes. A sequence that does not fit is served without one: its pages are gathered anew
in every layer of every step, slower with the same result. CPU and CUDA differ in nothing but the contexts' device.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

import torch

from mooncake_mesh.engine.kv_storage import ArenaPages, Span, torch_dtype
from mooncake_mesh.engine.retired_contexts import RetiredContexts
from mooncake_mesh.kv.layers import LayerRange
from mooncake_proto.ids import BlockKey

_GROWTH: Final = 1.25
"""Of a context that ran out of room: few copies, little waste."""

_SPARE: Final = 16
"""A new context has room for a sixteenth more than is known to come: to draw tokens into, and for the next turn."""


class Context(Protocol):
    """K and V of one sequence during one forward."""

    def extend(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add *kv* (2, kv_heads, end - start, head_dim); K and V (1, kv_heads, end, head_dim) of all positions."""

    def writable(self, layer: int, end: int) -> torch.Tensor | None:
        """*layer* and perhaps more before layer *end*, their prefix in place: (layers, 2, kv_heads, capacity,
        head_dim). The caller writes the forward's positions itself. None where each must be extended."""


class KeptContext:
    """A context kept between steps: ``kv`` (layers, 2, kv_heads, capacity, head_dim), the first ``length`` valid.

    It has the layers from ``first_layer`` on.
    """

    def __init__(self, kv: torch.Tensor, length: int, first_layer: int) -> None:
        self.kv = kv
        self.length = length
        self.first_layer = first_layer
        self._span = (0, 0)
        self._keys: tuple[torch.Tensor, ...] = ()
        self._values: tuple[torch.Tensor, ...] = ()
        self._new: tuple[torch.Tensor, ...] = ()

    @property
    def capacity(self) -> int:
        return self.kv.shape[3]

    @property
    def n_bytes(self) -> int:
        return self.kv.nbytes

    def open(self, start: int, end: int) -> None:
        """For a forward over positions *start* to *end*."""
        self._span = (start, end)
        self._keys = self._values = self._new = ()

    def _view(self) -> None:
        """Make the views of all layers at once: far cheaper than layer by layer. A kernel in C needs none."""
        start, end = self._span
        self._keys = self.kv[:, 0:1, :, :end].unbind(0)
        self._values = self.kv[:, 1:2, :, :end].unbind(0)
        self._new = self.kv[:, :, :, start:end].unbind(0)

    def writable(self, layer: int, end: int) -> torch.Tensor:
        return self.kv[layer - self.first_layer : end - self.first_layer]

    def extend(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._new:
            self._view()
        index = layer - self.first_layer
        self._new[index].copy_(kv)
        return self._keys[index], self._values[index]


def kept_contexts(contexts: Sequence[Context]) -> list[KeptContext] | None:
    """All of *contexts*, if each is kept."""
    kept = [context for context in contexts if isinstance(context, KeptContext)]
    return kept if len(kept) == len(contexts) else None


class _Gathered:
    """No room to keep it: gathers the prefix from the pages for every layer."""

    def __init__(self, arena: ArenaPages, span: Span, device: torch.device) -> None:
        self._arena = arena
        self._start = span.start
        layout = arena.layout
        self._block_ids = torch.tensor(list(span.blocks[: layout.blocks_for(span.start)]), dtype=torch.long)
        self._kv = torch.empty(
            (2, 1, layout.kv_heads, span.end, layout.head_dim), dtype=torch_dtype(layout.dtype), device=device
        )

    def extend(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._start:
            self._arena.read_layer(layer, self._block_ids, self._start, self._kv[:, 0, :, : self._start])
        self._kv[:, 0, :, self._start :] = kv
        return self._kv[0], self._kv[1]

    def writable(self, layer: int, end: int) -> None:
        """The next layer has the same place."""


class Filling(Protocol):
    """A context's missing positions on their way into it."""

    def finish(self) -> None:
        """They are there when this returns. Raises why they are not."""

    def abandon(self) -> None:
        """Nobody reads the arena for them any more when this returns."""


_F = TypeVar("_F", bound=Filling)


class ContextCache:
    """The contexts of the sequences in work, least recently used first, and of those that are over: at most
    *budget_bytes* of them.

    They have the layers *layers*; all of the arena's by default.
    """

    def __init__(
        self, arena: ArenaPages, device: torch.device, budget_bytes: int, layers: LayerRange | None = None
    ) -> None:
        self._layers = layers or LayerRange.whole(arena.layout.layers)
        self._arena = arena
        self._device = device
        self._budget_bytes = budget_bytes
        self._kept: OrderedDict[str, KeptContext] = OrderedDict()
        self._filling: dict[str, tuple[Filling, int]] = {}
        self._retired = RetiredContexts[KeptContext]()

    @property
    def kept_bytes(self) -> int:
        return sum(context.n_bytes for context in self._kept.values()) + self._retired.n_bytes

    def clear(self) -> None:
        for filling, _ in self._filling.values():
            filling.abandon()
        self._filling.clear()
        self._kept.clear()
        self._retired.clear()

    def open(self, spans: Sequence[Span]) -> list[Context]:
        """Contexts for one forward over *spans*, filled up to each span's start.

        Follow with :meth:`commit` or :meth:`abandon`.
        """
        pinned = {span.sequence for span in spans}
        return [self._open(span, pinned) for span in spans]

    def open_to_fill(self, span: Span) -> tuple[Context, torch.Tensor | None]:
        """As :meth:`open`, for one sequence. What is missing of its prefix up to the span's start is the caller's to
        write, each layer before it is extended: (layers, 2, kv_heads, positions, head_dim), None where it is all there.
        """
        context = self._place(span, {span.sequence})
        if context is None:
            return _Gathered(self._arena, span, self._device), None
        missing = _missing(context, span)
        self._use(context, span)
        return context, missing

    def fill(self, span: Span, begin: Callable[[torch.Tensor], _F]) -> _F | None:
        """Have *begin* write what a context lacks below the span's start, as in :meth:`open_to_fill`: whoever opens the
        context next waits for it. None is begun where nothing is missing, or there is no room beside all that are in
        work: these would be read anew."""
        context = self._place(span, {span.sequence, *self._kept})
        missing = None if context is None else _missing(context, span)
        if missing is None:
            return None
        filling = begin(missing)
        self._filling[span.sequence] = filling, span.start
        return filling

    def commit(self, spans: Sequence[Span]) -> None:
        """The forward is done: what it wrote counts."""
        for span in spans:
            if context := self._kept.get(span.sequence):
                context.length = span.end

    def abandon(self, spans: Sequence[Span]) -> None:
        """The forward broke off: some layers may hold what others do not."""
        for span in spans:
            self._drop(span.sequence)

    def retire(self, sequence: str, keys: Sequence[BlockKey]) -> None:
        """The sequence is over; *keys* are those of its whole blocks."""
        context = self._drop(sequence)
        if context is None:
            return
        n_blocks = min(len(keys), context.length // self._arena.layout.block_tokens)
        if n_blocks:
            self._retired.add(context, keys[:n_blocks])

    def _open(self, span: Span, pinned: set[str]) -> Context:
        context = self._place(span, pinned)
        if context is None:
            return _Gathered(self._arena, span, self._device)
        missing = _missing(context, span)
        if missing is not None:
            self._arena.read_all(span.blocks, context.length, span.start, missing, first_layer=self._layers.first)
        self._use(context, span)
        return context

    def _place(self, span: Span, pinned: set[str]) -> KeptContext | None:
        """The sequence's context, with room for the span; None when there is none."""
        self._filled(span.sequence)
        kept = self._kept.get(span.sequence)
        context = kept or self._taken_over(span)
        if context is None or context.capacity < (span.end if kept else self._positions(span)):
            context = self._make_room(span, context, pinned)
        return context

    def _positions(self, span: Span) -> int:
        """As many as the sequence is known to come to."""
        return max(span.end, len(span.blocks) * self._arena.layout.block_tokens)

    def _taken_over(self, span: Span) -> KeptContext | None:
        """A context of a sequence that is over and began as this one does, which has it from now on."""
        found = self._retired.take(span.keys) if span.keys else None
        if found is None:
            return None
        context, n_blocks = found
        context.length = min(n_blocks * self._arena.layout.block_tokens, span.start)
        self._kept[span.sequence] = context
        return context

    def _filled(self, sequence: str) -> None:
        filling = self._filling.pop(sequence, None)
        if filling is not None:
            copies, length = filling
            copies.finish()
            if context := self._kept.get(sequence):
                context.length = length

    def _use(self, context: KeptContext, span: Span) -> None:
        context.length = span.start
        context.open(span.start, span.end)
        self._kept.move_to_end(span.sequence)

    def _make_room(self, span: Span, old: KeptContext | None, pinned: set[str]) -> KeptContext | None:
        """A new or larger context with the old one's content, or None (and no context) when the budget is too small."""
        layout = self._arena.layout
        capacity = self._positions(span)
        capacity += capacity // _SPARE
        if old is not None:
            capacity = max(capacity, int(old.capacity * _GROWTH))
            del self._kept[span.sequence]
        token_bytes = layout.token_bytes // layout.layers * self._layers.count
        if not self._evict_for(capacity * token_bytes, pinned):
            return None
        kv = torch.empty(
            (self._layers.count, 2, layout.kv_heads, capacity, layout.head_dim),
            dtype=torch_dtype(layout.dtype),
            device=self._device,
        )
        length = 0
        if old is not None:
            length = min(old.length, span.start)
            kv[:, :, :, :length] = old.kv[:, :, :, :length]
        context = self._kept[span.sequence] = KeptContext(kv, length, self._layers.first)
        return context

    def _evict_for(self, needed_bytes: int, pinned: set[str]) -> bool:
        """Drop contexts until *needed_bytes* more fit, those that are over first and none of this forward's; False when
        they cannot."""
        in_work = [name for name in self._kept if name not in pinned]
        while self.kept_bytes + needed_bytes > self._budget_bytes:
            if self._retired:
                self._retired.drop_oldest()
            elif in_work:
                self._drop(in_work.pop(0))
            else:
                return False
        return True

    def _drop(self, sequence: str) -> KeptContext | None:
        """Without what it was being filled with."""
        if filling := self._filling.pop(sequence, None):
            filling[0].abandon()
        return self._kept.pop(sequence, None)


def _missing(context: KeptContext, span: Span) -> torch.Tensor | None:
    """The positions before the span that are not in its context."""
    return context.kv[:, :, :, context.length : span.start] if context.length < span.start else None
