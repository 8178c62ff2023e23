"""What a head decides about stages on other nodes: room in their memory, and where KV that they send may land. Pure.

A far stage computes on blocks of its own memory, which the head gives to prompts, as it knows best when one is over.
All far stages of a pipeline have the same ones: what block *b* is for, it is for in each of them.

What a far stage has written comes to the head slice by slice, and goes into the blocks of the job. A slice is named by
its chunk and the block's place in the chunk, never by a block. It is taken while the chunk is open, that is, as long as
the job cannot have given its blocks back.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Final

from mooncake_mesh.errors import InvalidRequest, SliceLost, TransferError
from mooncake_mesh.kv.layers import LayerRange
from mooncake_mesh.kv.layout import KvLayout
from mooncake_mesh.messenger.landing import Destination, SliceSpan
from mooncake_mesh.messenger.sending import OutgoingSlice
from mooncake_mesh.messenger.transports.api import Incoming
from mooncake_proto.ids import BlockId, BlockKey, JobId

_NAMED_CHUNKS: Final = 4096
"""So many chunks have names of their own; far more than are ever open."""


@dataclass(slots=True)
class _Prompt:
    """The first ``held_blocks`` of its blocks hold what a former prompt had there. ``keys`` as in PromptRoom.end."""

    blocks: tuple[int, ...]
    held_blocks: int
    open_chunks: int = 0
    is_begun: bool = False
    has_ended: bool = False
    keys: Sequence[BlockKey] = ()


class PromptRoom:
    """The prompts in a pipeline, and the blocks that each has in the memory of far stages: *n_blocks* there are.

    What a prompt leaves there is kept under its keys until its blocks are needed: far stages need not be sent what they
    have of the next turn of a conversation. Without far stages (None) prompts need no blocks there.
    """

    def __init__(self, n_blocks: int | None) -> None:
        self._n_blocks = n_blocks
        self._free = list(reversed(range(n_blocks or 0)))  # what was free last is used first: its memory is there
        self._kept: OrderedDict[BlockKey, int] = OrderedDict()  # what goes next comes first
        self._prompts: dict[JobId, _Prompt] = {}

    @property
    def jobs(self) -> tuple[JobId, ...]:
        return tuple(self._prompts)

    def enter(self, job_id: JobId, n_blocks: int, prefix: Sequence[BlockKey] = ()) -> bool:
        """Give a prompt its blocks, unless it has them; False while there are too few, or its former life goes on.

        *prefix* are the keys of what is cached of it. Raises InvalidRequest for one that has never room.
        """
        prompt = self._prompts.get(job_id)
        if prompt is not None:
            return not prompt.has_ended
        wanted = n_blocks if self._n_blocks is not None else 0
        if wanted > (self._n_blocks or 0):
            raise InvalidRequest(f"a prompt of {wanted} blocks has no room in a stage of {self._n_blocks}")
        if wanted > len(self._free) + len(self._kept):
            return False
        held = [self._kept.pop(key) for key in takewhile(self._kept.__contains__, prefix[:wanted])]
        fresh = [self._take() for _ in range(wanted - len(held))]
        self._prompts[job_id] = _Prompt(blocks=(*held, *fresh), held_blocks=len(held))
        return True

    def blocks(self, job_id: JobId) -> tuple[int, ...]:
        return self._prompts[job_id].blocks

    def held_blocks(self, job_id: JobId) -> int:
        """So many of its first blocks all far stages have."""
        return self._prompts[job_id].held_blocks

    def begin(self, job_id: JobId) -> bool:
        """One more chunk of it is under way; whether it is the first."""
        prompt = self._prompts[job_id]
        is_first, prompt.is_begun = not prompt.is_begun, True
        prompt.open_chunks += 1
        return is_first

    def over(self, job_id: JobId) -> None:
        """A chunk of it is over in all stages."""
        self._prompts[job_id].open_chunks -= 1
        self._let_go(job_id)

    def end(self, job_id: JobId, keys: Sequence[BlockKey]) -> None:
        """No chunk of it will come any more. Its blocks are free when none is under way.

        *keys* are those of its whole blocks, none unless all stages have computed all of it.
        """
        if job_id in self._prompts:
            self._prompts[job_id].has_ended = True
            self._prompts[job_id].keys = keys
            self._let_go(job_id)

    def _let_go(self, job_id: JobId) -> None:
        prompt = self._prompts[job_id]
        if not prompt.has_ended or prompt.open_chunks:
            return
        del self._prompts[job_id]
        named = list(zip(prompt.keys, prompt.blocks, strict=False))
        self._free.extend(reversed(prompt.blocks[len(named) :]))
        for key, block in reversed(named):  # of a prompt that is kept the end goes first
            self._keep(key, block)

    def _keep(self, key: BlockKey, block: int) -> None:
        if key in self._kept:
            self._free.append(block)
        else:
            self._kept[key] = block
        self._kept.move_to_end(key)

    def _take(self) -> int:
        return self._free.pop() if self._free else self._kept.popitem(last=False)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceNames:
    """Names of slices between a far stage and its head; a chunk has at most ``chunk_blocks`` blocks."""

    chunk_blocks: int

    def logical(self, number: int, index: int) -> int:
        """The block that is *index* blocks behind the first one of chunk *number*."""
        return number % _NAMED_CHUNKS * self.chunk_blocks + index

    def chunk_and_index(self, logical: int) -> tuple[int, int]:
        """Inverse of :meth:`logical`; of the chunk's number what is left of it."""
        return divmod(logical, self.chunk_blocks)

    def key(self, number: int) -> int:
        return number % _NAMED_CHUNKS


def slice_of(layout: KvLayout, span: SliceSpan, block: int) -> OutgoingSlice:
    """*span* of *block* in a memory of whole blocks."""
    return OutgoingSlice(
        span=span,
        block=BlockId(block),
        offset=(block * layout.layers + span.layer) * layout.slice_bytes,
        size_bytes=span.n_layers * layout.slice_bytes,
    )


def _destination(layout: KvLayout, item: Incoming, block: int) -> Destination:
    """Raises SliceLost for a slice of another size."""
    place = slice_of(layout, item.span, block)
    if place.size_bytes != item.size_bytes:
        raise SliceLost(f"{item.span} has {place.size_bytes} bytes, not {item.size_bytes}")
    return Destination(span=item.span, block=place.block, offset=place.offset, size_bytes=place.size_bytes)


class PrefixPlaces:
    """Places (see doors.py) of a far stage's memory: the head says which block. It knows which it has given away."""

    def __init__(self, layout: KvLayout, layers: LayerRange, n_blocks: int) -> None:
        self._layout = layout
        self._layers = layers
        self._n_blocks = n_blocks

    def begin(self, incoming: Sequence[Incoming]) -> list[Destination]:
        for item in incoming:
            span = item.span
            first, end = span.layer, span.layer + span.n_layers
            if span.logical >= self._n_blocks or not self._layers.first <= first < end <= self._layers.end:
                raise SliceLost(f"this stage has no place for {span}")
        return [_destination(self._layout, item, item.span.logical) for item in incoming]

    def end(self, destinations: Sequence[Destination], error: TransferError | None) -> None:
        """The sender hears of it, and says when the prefix is there."""


Landed = Callable[[int, range, range], None]
"""*landed(number, layers, indices)*: these layers of these blocks of a chunk are in the arena."""


@dataclass(slots=True)
class _Chunk:
    """``missing`` and ``in_flight``: a bit for each layer, for each block."""

    number: int
    blocks: Sequence[int]
    missing: list[int]
    in_flight: list[int]
    is_shut: bool = False


class KvLanding:
    """Places (see doors.py) of the head's arena, for the KV of *far* layers of chunks that are open.

    *landed* is called for each run of blocks; *quiet* when writes have ended.
    """

    def __init__(
        self,
        layout: KvLayout,
        far: Sequence[LayerRange],
        names: SliceNames,
        *,
        landed: Landed,
        quiet: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._layers = sum(_mask(layers.first, layers.count) for layers in far)
        self._names = names
        self._landed = landed
        self._quiet = quiet
        self._open: dict[int, _Chunk] = {}

    def open(self, number: int, blocks: Sequence[int]) -> None:
        """KV of chunk *number* goes into arena blocks *blocks*, its own ones."""
        missing = [self._layers] * len(blocks)
        self._open[self._names.key(number)] = _Chunk(number, blocks, missing, [0] * len(blocks))

    def shut(self, number: int) -> None:
        """Take no more of it."""
        self._open[self._names.key(number)].is_shut = True

    def is_quiet(self, number: int) -> bool:
        """Whether nothing is written into its blocks."""
        return not any(self._open[self._names.key(number)].in_flight)

    def close(self, number: int) -> bool:
        """The chunk, which is shut and quiet, is over; whether all of it has come."""
        return not any(self._open.pop(self._names.key(number)).missing)

    def begin(self, incoming: Sequence[Incoming]) -> list[Destination]:
        """All of them or none. A slice that is there already is acknowledged, and not written again."""
        wanted: dict[tuple[int, int], int] = {}
        destinations = []
        for item in incoming:
            place, mask = self._names.chunk_and_index(item.span.logical), _mask(item.span.layer, item.span.n_layers)
            chunk = self._find(item.span, mask)
            if not chunk.missing[place[1]] & mask:
                continue
            if (chunk.in_flight[place[1]] | wanted.get(place, 0)) & mask or chunk.missing[place[1]] & mask != mask:
                raise SliceLost(f"{item.span} is partly here, or on its way")
            destinations.append(_destination(self._layout, item, chunk.blocks[place[1]]))
            wanted[place] = wanted.get(place, 0) | mask
        for (key, index), mask in wanted.items():
            self._open[key].in_flight[index] |= mask
        return destinations

    def end(self, destinations: Sequence[Destination], error: TransferError | None) -> None:
        for place in destinations:
            key, index = self._names.chunk_and_index(place.span.logical)
            mask = _mask(place.span.layer, place.span.n_layers)
            self._open[key].in_flight[index] &= ~mask
            if error is None:
                self._open[key].missing[index] &= ~mask
        if error is None:
            for key, layers, indices in self._runs(destinations):
                self._landed(self._open[key].number, layers, indices)
        self._quiet()

    def _find(self, span: SliceSpan, mask: int) -> _Chunk:
        key, index = self._names.chunk_and_index(span.logical)
        chunk = self._open.get(key)
        if chunk is None or chunk.is_shut:
            raise SliceLost("that chunk is over")
        if index >= len(chunk.blocks) or not mask or mask & ~self._layers:
            raise SliceLost(f"no far stage has {span} of a chunk of {len(chunk.blocks)} blocks")
        return chunk

    def _runs(self, destinations: Sequence[Destination]) -> Iterator[tuple[int, range, range]]:
        """Blocks that follow each other and have the same layers."""

        def run(place: tuple[int, SliceSpan]) -> tuple[int, int, int, int]:
            position, span = place
            key, index = self._names.chunk_and_index(span.logical)
            return key, span.layer, span.n_layers, index - position

        for (key, layer, n_layers, _), group in groupby(enumerate(place.span for place in destinations), run):
            indices = [self._names.chunk_and_index(span.logical)[1] for _, span in group]
            yield key, range(layer, layer + n_layers), range(indices[0], indices[-1] + 1)


def _mask(layer: int, n_layers: int) -> int:
    return ((1 << n_layers) - 1) << layer
