"""Activations on their way from one stage to the next, over the transports that KV takes.

The receiving stage has a *door*: memory of some slots, with a listener for shared memory and one for TCP before it.
The sending stage has an *outlet*: memory of as many slots, and a path to the next stage's door. Chunk *n* uses slot
``n % slots`` at both ends. Nothing here decides when a slot is free: the head sends chunk *n* when every stage is done
with chunk ``n - slots``.
"""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mooncake_mesh.config import PagesKind
from mooncake_mesh.errors import SliceLost, TransferError
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.mesh.host import host_id
from mooncake_mesh.messenger.landing import Destination, SliceSpan
from mooncake_mesh.messenger.sending import OutgoingSlice
from mooncake_mesh.messenger.transports.api import Incoming, SealedSlice, checksum
from mooncake_mesh.messenger.transports.link_auth import new_secret
from mooncake_mesh.messenger.transports.paths import Connections, LinkPath
from mooncake_mesh.messenger.transports.shm_link import ShmListener, shm_connections
from mooncake_mesh.messenger.transports.tcp import tcp_connections
from mooncake_mesh.messenger.transports.tcp_listener import TcpListener
from mooncake_proto.ids import BlockId
from mooncake_proto.pipeline import StageDoor

_TCP_LANES: Final = 1
_LOOPBACK: Final = "127.0.0.1"
"""Stages share a node, so a machine. Over TCP go activations of stages that do not see each other's folders."""


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
    """Landings (see transports/api.py) of a door: slice *n* goes to slot ``n % slots``."""

    def __init__(self, token: bytes, memory: SlotMemory, on_arrived: Callable[[int, int], None]) -> None:
        self._token = token
        self._memory = memory
        self._on_arrived = on_arrived

    def begin(self, token: bytes, incoming: Sequence[Incoming]) -> list[Destination]:
        if not secrets.compare_digest(token, self._token):
            raise SliceLost("these activations are for another pipeline")
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

    def end(self, token: bytes, destinations: Sequence[Destination], error: TransferError | None) -> None:
        if error is None:  # else the sender hears of it, or sends again
            for place in destinations:
                self._on_arrived(place.span.logical, place.size_bytes)


class Door:
    """Where a stage takes activations, into *memory*. Create on the loop.

    *on_arrived(number, size_bytes)* is called on the loop for each chunk, and again for one that is sent again.
    """

    def __init__(
        self,
        path: Path,
        memory: SlotMemory,
        on_arrived: Callable[[int, int], None],
    ) -> None:
        """Raises MeshError where it cannot listen."""
        token = secrets.token_bytes(16)
        landings = _Slots(token, memory, on_arrived)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)  # of a former life that was killed
        self._shm = ShmListener(path, memory.arena.view, landings)
        secret = new_secret()
        self._tcp = TcpListener(_LOOPBACK, 0, memory.arena.view, landings, secret=secret)
        self.address = StageDoor(
            host_id=host_id(),
            shm_path=str(path),
            tcp_host=_LOOPBACK,
            tcp_port=self._tcp.port,
            token=token.hex(),
            link_secret=secret.hex(),
        )

    async def close(self) -> None:
        """Take nothing any more. Returns when nothing is written into the memory."""
        await self._shm.close()
        await self._tcp.close()


class Outlet:
    """The way out of *memory* to the next stage's door. Create on the loop."""

    def __init__(self, door: StageDoor, memory: SlotMemory) -> None:
        self._memory = memory
        self._connections = _connections(door, memory)
        self._path = LinkPath(self._connections, bytes.fromhex(door.token), memory.arena.view)
        self.transport = self._connections.name

    async def send(self, number: int, size_bytes: int) -> None:
        """Return when the activations are at the next stage, their checksum compared. Raises TransferError."""
        piece = OutgoingSlice(
            span=SliceSpan(logical=number, layer=0, n_layers=1),
            block=BlockId(number % self._memory.slots),
            offset=self._memory.offset(number),
            size_bytes=size_bytes,
        )
        sealed = SealedSlice(piece=piece, checksum=checksum(self._memory.view(number, size_bytes)))
        await self._path.send([sealed])

    def close(self) -> None:
        """End what is under way."""
        self._connections.close()


def _connections(door: StageDoor, memory: SlotMemory) -> Connections:
    if door.host_id == host_id() and Path(door.shm_path).is_socket():
        return shm_connections(Path(door.shm_path), memory.arena.fd)
    return tcp_connections(door.tcp_host, door.tcp_port, bytes.fromhex(door.link_secret), _TCP_LANES)
