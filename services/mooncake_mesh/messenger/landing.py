"""The receiving side of a transfer, pure: which slices may still land where.

A landing names, for each logical block, the arena block it lands in and the generation that the right to write it is
bound to. A slice is admitted before a byte of it is written and reported after the last one, so that the pool knows of
every write in flight. Each slice is applied at most once; a repeated one is acknowledged and not written again.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_mesh.errors import SliceLost
from mooncake_mesh.kv.block_pool import BlockPool
from mooncake_proto.ids import BlockId, JobId, TransferId
from mooncake_proto.transfer import Slot


class LandingState(enum.Enum):
    OPEN = "open"
    LANDED = "landed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSpan:
    """``n_layers`` layers from ``layer`` on of one logical block; contiguous in the arena."""

    logical: int
    layer: int
    n_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where an admitted span goes: bytes ``offset`` .. ``offset + size_bytes`` of the arena."""

    span: SliceSpan
    block: BlockId
    offset: int
    size_bytes: int


class Landing:
    """One transfer on its way in. Mutated only by its methods; ``pool`` hears of each write."""

    def __init__(
        self,
        transfer_id: TransferId,
        job_id: JobId,
        slots: Sequence[Slot],
        *,
        layers: int,
        slice_bytes: int,
        now_s: float,
    ) -> None:
        self.transfer_id = transfer_id
        self.job_id = job_id
        self.slots = tuple(slots)
        self.layers = layers
        self.state = LandingState.OPEN if slots else LandingState.LANDED
        self.failure = ""
        self.received_bytes = 0
        self.opened_s = now_s
        self.first_slice_s = now_s
        self.last_slice_s = now_s
        self._slice_bytes = slice_bytes
        self._slot_of = {slot.logical: slot for slot in slots}
        self._missing = {slot.logical: (1 << layers) - 1 for slot in slots}
        self._in_flight: set[tuple[int, int]] = set()

    @property
    def is_quiet(self) -> bool:
        """No write is in flight."""
        return not self._in_flight

    def admit(self, spans: Sequence[SliceSpan], pool: BlockPool) -> list[Destination]:
        """Destinations of those *spans* that are new; a write is begun for each. All of them or none.

        Raises SliceLost when the landing is over, a span lies outside it, or the right to write is gone.
        """
        if self.state is LandingState.FAILED:
            raise SliceLost(f"transfer {self.transfer_id} has ended: {self.failure}")
        for span in spans:
            self._check(span, pool)
        fresh = [span for span in spans if self._missing[span.logical] & _mask(span)]
        if len({(span.logical, layer) for span in fresh for layer in _layers(span)}) < sum(s.n_layers for s in fresh):
            raise SliceLost(f"transfer {self.transfer_id}: slices of one batch overlap")
        destinations = []
        for span in fresh:
            block = BlockId(self._slot_of[span.logical].block)
            pool.begin_write(block)
            self._in_flight.update((span.logical, layer) for layer in _layers(span))
            offset = (block * self.layers + span.layer) * self._slice_bytes
            size = span.n_layers * self._slice_bytes
            destinations.append(Destination(span=span, block=block, offset=offset, size_bytes=size))
        return destinations

    def written(self, destinations: Sequence[Destination], pool: BlockPool, now_s: float) -> None:
        """The bytes of *destinations* are in place and verified. May complete the landing."""
        if self.received_bytes == 0:
            self.first_slice_s = now_s
        self.last_slice_s = now_s
        for destination in destinations:
            self._end(destination, pool)
            self.received_bytes += destination.size_bytes
            if destination.span.logical in self._missing:  # else it was cut off while it came in
                self._missing[destination.span.logical] &= ~_mask(destination.span)
        self._complete()

    def spoiled(self, destinations: Sequence[Destination], pool: BlockPool, why: str) -> None:
        """Writing *destinations* failed: the landing fails with it."""
        for destination in destinations:
            self._end(destination, pool)
        self.fail(why)

    def withdrawn(self, destinations: Sequence[Destination], pool: BlockPool) -> None:
        """The path broke under *destinations*: they are still missing, and may come again by another."""
        for destination in destinations:
            self._end(destination, pool)

    def shorten(self, n_blocks: int) -> None:
        """The sender has only logical blocks below *n_blocks*; no more is waited for. May complete the landing."""
        self.slots = tuple(slot for slot in self.slots if slot.logical < n_blocks)
        self._missing = {logical: mask for logical, mask in self._missing.items() if logical < n_blocks}
        self._complete()

    def fail(self, why: str) -> None:
        """End an open landing; one that is over stays as it is."""
        if self.state is LandingState.OPEN:
            self.state = LandingState.FAILED
            self.failure = why

    def _complete(self) -> None:
        if self.state is LandingState.OPEN and not any(self._missing.values()):
            self.state = LandingState.LANDED

    def _check(self, span: SliceSpan, pool: BlockPool) -> None:
        slot = self._slot_of.get(span.logical)
        if (
            slot is None
            or span.logical not in self._missing
            or span.layer < 0
            or span.n_layers < 1
            or span.layer + span.n_layers > self.layers
        ):
            raise SliceLost(f"transfer {self.transfer_id} has no place for {span}")
        if any((span.logical, layer) in self._in_flight for layer in _layers(span)):
            raise SliceLost(f"transfer {self.transfer_id}: {span} is being written already")
        if self._missing[span.logical] & _mask(span) not in (0, _mask(span)):
            raise SliceLost(f"transfer {self.transfer_id}: {span} is partly here already")
        if self._missing[span.logical] & _mask(span) and not pool.may_write(BlockId(slot.block), slot.generation):
            raise SliceLost(f"transfer {self.transfer_id}: the right to write block {slot.block} is gone")

    def _end(self, destination: Destination, pool: BlockPool) -> None:
        pool.end_write(destination.block)
        span = destination.span
        self._in_flight.difference_update((span.logical, layer) for layer in _layers(span))


def _layers(span: SliceSpan) -> range:
    return range(span.layer, span.layer + span.n_layers)


def _mask(span: SliceSpan) -> int:
    return ((1 << span.n_layers) - 1) << span.layer
