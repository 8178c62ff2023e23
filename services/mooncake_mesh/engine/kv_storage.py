"""Where K and V live: the arena's pages, and contiguous working copies on the compute device.

The arena in host memory is the truth: every position's K and V are written there, and what other workers' arenas sent
is read from there. Attention over pages would gather the whole context in every step, which costs three times as much
as attention over contiguous K and V. So a sequence in work has a *context*: one tensor on the compute device that grows
with each step; only positions the engine has not seen are read from the pages. Contexts are keyed by the sequence,
whose name is never used again, and not by blocks, which are.

Contexts live within a budget of bytes. A sequence that does not fit is served without one: its pages are gathered anew
in every layer of every step, slower with the same result. CPU and CUDA differ in nothing but the contexts' device.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from mooncake_mesh.engine.page_copies import read_positions, write_positions
from mooncake_mesh.errors import InvariantViolated
from mooncake_mesh.kv.layers import LayerRange
from mooncake_mesh.kv.layout import KvDtype, KvLayout

_TORCH_DTYPES: Final = {KvDtype.FLOAT32: torch.float32, KvDtype.BFLOAT16: torch.bfloat16}
_GROWTH: Final = 1.25  # of a context that ran out of room: few copies, little waste


def torch_dtype(dtype: KvDtype) -> torch.dtype:
    return _TORCH_DTYPES[dtype]


class ArenaPages:
    """The arena as a tensor (blocks, layers, K or V, block_tokens, kv_heads, head_dim) on the host."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self._pages: torch.Tensor | None = None

    def bind(self, arena: memoryview) -> None:
        """View *arena*, a whole number of blocks, as pages. Raises ValueError."""
        if arena.nbytes % self.layout.block_bytes:
            raise ValueError(
                f"arena of {arena.nbytes} bytes is no whole number of {self.layout.block_bytes}-byte blocks"
            )
        self._pages = torch.frombuffer(arena, dtype=torch_dtype(self.layout.dtype)).view(-1, *self.layout.shape)

    def unbind(self) -> None:
        self._pages = None

    @property
    def pages(self) -> torch.Tensor:
        if self._pages is None:
            raise InvariantViolated("the engine is not bound to an arena")
        return self._pages

    def write_layer(self, layer: int, blocks: Sequence[int], start: int, kv: torch.Tensor) -> None:
        """Write one layer's *kv* (2, kv_heads, tokens, head_dim) at positions *start* onwards of a sequence."""
        write_positions(self.pages, layer, blocks, start, kv)

    def read_positions(self, layer: int, blocks: Sequence[int], start: int, end: int, out: torch.Tensor) -> None:
        """Copy one layer of positions *start* to *end* into *out* (2, kv_heads, end - start, head_dim)."""
        read_positions(self.pages, layer, blocks, start, end, out)

    def write_tokens(self, blocks: torch.Tensor, offsets: torch.Tensor, kv: torch.Tensor) -> None:
        """Write all layers of one token of each of several sequences: *kv* (tokens, layers, 2, kv_heads, head_dim)."""
        self.pages[blocks, :, :, offsets] = kv.to("cpu")

    def read_all(self, blocks: Sequence[int], start: int, end: int, out: torch.Tensor, *, first_layer: int = 0) -> None:
        """Copy positions *start* to *end* of a sequence into *out* (layers, 2, kv_heads, end - start, head_dim).

        *out* has the layers from *first_layer* on, as many as it has room for.
        """
        pages, block_tokens = self.pages[:, first_layer : first_layer + len(out)], self.layout.block_tokens
        position = start
        while position < end:
            index, offset = divmod(position, block_tokens)
            count = min(block_tokens - offset, end - position)
            piece = pages[blocks[index], :, :, offset : offset + count].transpose(2, 3)
            out[:, :, :, position - start : position - start + count] = piece.to(out.device)
            position += count

    def read_layer(self, layer: int, block_ids: torch.Tensor, end: int, out: torch.Tensor) -> None:
        """Copy one layer of the first *end* positions into *out* (2, kv_heads, end, head_dim).

        *block_ids* are those of the whole blocks that hold them.
        """
        gathered = self.pages[:, layer].index_select(0, block_ids)  # (blocks, 2, block_tokens, kv_heads, head_dim)
        rows = gathered.permute(1, 3, 0, 2, 4).flatten(2, 3)
        out.copy_(rows[:, :, :end])


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Work on one sequence: positions below ``start`` have K and V in ``blocks``, those up to ``end`` get them now."""

    sequence: str
    blocks: Sequence[int]
    start: int
    end: int


class Context(Protocol):
    """K and V of one sequence during one forward."""

    def extend(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add *kv* (2, kv_heads, end - start, head_dim); K and V (1, kv_heads, end, head_dim) of all positions."""


class KeptContext:
    """A context kept between steps: ``kv`` (layers, 2, kv_heads, capacity, head_dim), the first ``length`` valid.

    It has the layers from ``first_layer`` on.
    """

    def __init__(self, kv: torch.Tensor, length: int, first_layer: int) -> None:
        self.kv = kv
        self.length = length
        self._first_layer = first_layer
        self._span = (0, 0)
        self._keys: tuple[torch.Tensor, ...] = ()
        self._values: tuple[torch.Tensor, ...] = ()
        self._new: tuple[torch.Tensor, ...] = ()

    @property
    def capacity(self) -> int:
        return self.kv.shape[3]

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

    def extend(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._new:
            self._view()
        index = layer - self._first_layer
        self._new[index].copy_(kv)
        return self._keys[index], self._values[index]


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


class ContextCache:
    """The contexts of the sequences in work, least recently used first; at most *budget_bytes* of them.

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

    @property
    def kept_bytes(self) -> int:
        return sum(context.kv.nbytes for context in self._kept.values())

    def clear(self) -> None:
        self._kept.clear()

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
        missing = context.kv[:, :, :, context.length : span.start] if context.length < span.start else None
        self._use(context, span)
        return context, missing

    def commit(self, spans: Sequence[Span]) -> None:
        """The forward is done: what it wrote counts."""
        for span in spans:
            if context := self._kept.get(span.sequence):
                context.length = span.end

    def abandon(self, spans: Sequence[Span]) -> None:
        """The forward broke off: some layers may hold what others do not."""
        for span in spans:
            self._kept.pop(span.sequence, None)

    def _open(self, span: Span, pinned: set[str]) -> Context:
        context = self._place(span, pinned)
        if context is None:
            return _Gathered(self._arena, span, self._device)
        if context.length < span.start:
            missing = context.kv[:, :, :, context.length : span.start]
            self._arena.read_all(span.blocks, context.length, span.start, missing, first_layer=self._layers.first)
        self._use(context, span)
        return context

    def _place(self, span: Span, pinned: set[str]) -> KeptContext | None:
        """The sequence's context, with room for the span; None when there is none."""
        context = self._kept.get(span.sequence)
        if context is None or context.capacity < span.end:
            context = self._make_room(span, context, pinned)
        return context

    def _use(self, context: KeptContext, span: Span) -> None:
        context.length = span.start
        context.open(span.start, span.end)
        self._kept.move_to_end(span.sequence)

    def _make_room(self, span: Span, old: KeptContext | None, pinned: set[str]) -> KeptContext | None:
        """A new or larger context with the old one's content, or None (and no context) when the budget is too small."""
        layout = self._arena.layout
        capacity = max(span.end, len(span.blocks) * layout.block_tokens)
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
        """Drop contexts outside of this forward until *needed_bytes* more fit; False when they cannot."""
        used_bytes = self.kept_bytes
        for sequence in [name for name in self._kept if name not in pinned]:
            if used_bytes + needed_bytes <= self._budget_bytes:
                break
            used_bytes -= self._kept.pop(sequence).kv.nbytes
        return used_bytes + needed_bytes <= self._budget_bytes
