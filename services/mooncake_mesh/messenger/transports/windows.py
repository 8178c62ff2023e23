"""Landings for whoever uses a transport without a messenger: windows of equal slots in one registered memory.

The receiver opens a window over part of its memory and gives its token to one sender, by whatever channel the two
have. Logical block *i* of a slice is slot *i* of the window. Revoking a window refuses what comes later and waits for
the writes that have begun.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mooncake_mesh.errors import SliceLost, TransferError
from mooncake_mesh.messenger.landing import Destination, SliceSpan
from mooncake_mesh.messenger.sending import OutgoingSlice
from mooncake_mesh.messenger.transports.api import Incoming, SealedSlice, checksum
from mooncake_proto.ids import BlockId


@dataclass(slots=True)
class _Window:
    first_byte: int
    slot_bytes: int
    n_slots: int
    writes: int = 0
    is_revoked: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Windows:
    """Windows of one memory of *size_bytes* bytes. *on_landed* hears of each batch that arrived, by slots."""

    def __init__(self, size_bytes: int, *, on_landed: Callable[[bytes, list[int]], None] | None = None) -> None:
        self._size_bytes = size_bytes
        self._on_landed = on_landed
        self._windows: dict[bytes, _Window] = {}
        self.received_bytes = 0

    def open(self, *, first_byte: int, slot_bytes: int, n_slots: int) -> bytes:
        """The token of a new window. Raises ValueError when it does not lie in the memory."""
        if first_byte < 0 or slot_bytes < 1 or n_slots < 1 or first_byte + slot_bytes * n_slots > self._size_bytes:
            raise ValueError(f"{n_slots} slots of {slot_bytes} bytes at {first_byte} exceed {self._size_bytes} bytes")
        token = secrets.token_bytes(16)
        self._windows[token] = _Window(first_byte, slot_bytes, n_slots)
        return token

    async def revoke(self, token: bytes) -> None:
        """Refuse what comes from now on; returns when nothing is written into the window any more."""
        window = self._windows.get(token)
        if window is None:
            return
        window.is_revoked = True
        if window.writes:
            await window.idle.wait()
        self._windows.pop(token, None)

    def begin(self, token: bytes, incoming: Sequence[Incoming]) -> list[Destination]:
        """As :class:`Landings`: a slice is a whole slot, or the first bytes of one."""
        window = self._windows.get(token)
        if window is None or window.is_revoked:
            raise SliceLost("no window for this token")
        for item in incoming:
            if item.span.logical >= window.n_slots or not 0 < item.size_bytes <= window.slot_bytes:
                raise SliceLost(f"{item.span} with {item.size_bytes} bytes is no slot of this window")
        window.writes += 1
        return [
            Destination(
                span=item.span,
                block=BlockId(item.span.logical),
                offset=window.first_byte + item.span.logical * window.slot_bytes,
                size_bytes=item.size_bytes,
            )
            for item in incoming
        ]

    def end(self, token: bytes, destinations: Sequence[Destination], error: TransferError | None) -> None:
        """As :class:`Landings`."""
        window = self._windows[token]
        window.writes -= 1
        if window.writes == 0 and window.is_revoked:
            window.idle.set()
        if error is None:
            self.received_bytes += sum(place.size_bytes for place in destinations)
            if self._on_landed is not None:
                self._on_landed(token, [place.span.logical for place in destinations])


def slot_slice(memory: memoryview, slot: int, offset: int, size_bytes: int, *, seal: bool = True) -> SealedSlice:
    """Bytes ``offset .. offset + size_bytes`` of *memory*, to go to *slot* of a window; *seal* adds their checksum."""
    piece = OutgoingSlice(
        span=SliceSpan(logical=slot, layer=0, n_layers=1), block=BlockId(slot), offset=offset, size_bytes=size_bytes
    )
    return SealedSlice(piece=piece, checksum=checksum(memory[offset : offset + size_bytes]) if seal else None)
