"""Activations on their way from one stage to the next, through a door (see doors.py).

The receiving stage has memory of some slots, the sending one memory of as many: chunk *n* uses slot ``n % slots`` at
both ends. Nothing here decides when a slot is free: the head sends chunk *n* when every stage is done with chunk
``n - slots``.
"""

from collections.abc import Callable, Sequence

from mooncake_mesh.config import PagesKind
from mooncake_mesh.errors import SliceLost, TransferError
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.messenger.landing import Destination, SliceSpan
from mooncake_mesh.messenger.sending import OutgoingSlice
from mooncake_mesh.messenger.transports.api import Incoming
from mooncake_mesh.prefill.doors import Door, Reach, Way
from mooncake_proto.ids import BlockId
from mooncake_proto.pipeline import StageDoor


class SlotMemory:
    """Memory of *slots* slots of *slot_bytes* bytes, kept for the life of the process: see :meth:`fitting`."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.arena = Arena.create(slots * slot_bytes, PagesKind.SMALL)

    def fitting(self, slots: int, slot_bytes: int) -> "SlotMemory":
        """This memory, or a new one when it has another shape.

        The old one is not unmapped then: a thread may still read a slot of a pipeline that has ended. That happens
        when a head comes back with another configuration, so rarely enough.
        """
        if (slots, slot_bytes) == (self.slots, self.slot_bytes):
            return self
        return SlotMemory(slots, slot_bytes)

    def offset(self, number: int) -> int:
        return number % self.slots * self.slot_bytes

    def view(self, number: int, size_bytes: int) -> memoryview:
        """The first bytes of the slot of chunk *number*. Raises SliceLost for more than a slot has."""
        if not 0 < size_bytes <= self.slot_bytes:
            raise SliceLost(f"{size_bytes} bytes of activations do not fit a slot of {self.slot_bytes}")
        start = self.offset(number)
        return self.arena.view[start : start + size_bytes]


class _Slots:
    """Places of a door: slice *n* goes to slot ``n % slots``."""

    def __init__(self, memory: SlotMemory, on_arrived: Callable[[int, int], None]) -> None:
        self._memory = memory
        self._on_arrived = on_arrived

    def begin(self, incoming: Sequence[Incoming]) -> list[Destination]:
        if any(not 0 < item.size_bytes <= self._memory.slot_bytes for item in incoming):
            raise SliceLost(f"activations of a chunk have 1 to {self._memory.slot_bytes} bytes")
        return [
            Destination(
                span=item.span,
                block=BlockId(item.span.logical % self._memory.slots),
                offset=self._memory.offset(item.span.logical),
                size_bytes=item.size_bytes,
            )
            for item in incoming
        ]

    def end(self, destinations: Sequence[Destination], error: TransferError | None) -> None:
        if error is None:  # else the sender hears of it, or sends again
            for place in destinations:
                self._on_arrived(place.span.logical, place.size_bytes)


def open_door(reach: Reach, name: str, memory: SlotMemory, on_arrived: Callable[[int, int], None]) -> Door:
    """Where a stage takes activations, into *memory*. Raises MeshError.

    *on_arrived(number, size_bytes)* is called on the loop for each chunk, and again for one that is sent again.
    """
    return Door(reach, name, memory.arena.view, _Slots(memory, on_arrived))


class Outlet:
    """The way out of *memory* to the next stage's door. Create on the loop."""

    def __init__(self, door: StageDoor, memory: SlotMemory, reach: Reach) -> None:
        """Raises MeshError."""
        self._memory = memory
        self._way = Way(door, memory.arena, reach)
        self.transport = self._way.transport

    async def send(self, number: int, size_bytes: int) -> None:
        """Return when the activations are at the next stage, their checksum compared. Raises TransferError."""
        self._memory.view(number, size_bytes)  # or it does not fit
        piece = OutgoingSlice(
            span=SliceSpan(logical=number, layer=0, n_layers=1),
            block=BlockId(number % self._memory.slots),
            offset=self._memory.offset(number),
            size_bytes=size_bytes,
        )
        await self._way.send([piece])

    def close(self) -> None:
        """End what is under way."""
        self._way.close()
