"""The bytes on a link, pure: packing, and strict unpacking of whatever a stranger may send.

A link is one *control* connection and, over TCP, a few *lanes*, all opened by the sender. Over shared memory the hello
travels on a Unix socket, together with the descriptor of the sender's memory (SCM_RIGHTS)::

    hello    "MKV2" | kind (u8) | sender (16 bytes) | epoch (u32) | lane (u8) | number of lanes (u8)     first, on each
    welcome  0x01                                                                              back, on each

over TCP with proofs of who speaks around them (see link_auth.py), then::

    control  sender → receiver, any number of frames:
        head     frame (u32) | token (16 bytes) | number of slices (u16) | carriage (u8) | payload bytes (u32)
        entries  each: logical block (u32) | layer (u16) | n_layers (u16) | length (u32) | flags (u8) | XXH3-64 (u64)
        offsets  only where the carriage is MAPPED, each: first byte of a slice in the sender's memory (u64)
        payload  only where the carriage is INLINE
    control  receiver → sender:
        ack      frame (u32) | verdict (u8)
    lane k   sender → receiver, for each frame with bytes on this lane, in the order of the heads:
        payload  the lane's cut of the frame's payload (see :func:`cut`)
        trailer  frame (u32) | 0x01 whole, 0x00 given up (the bytes before it mean nothing)

Heads run ahead of the bytes they announce, so a receiver has prepared a frame's places before its payload comes and no
lane ever waits for an answer. The token is drawn by the receiver for each transfer and travels over the mesh's own
control channel only: who does not know it can write nothing.
"""

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.errors import TransferError
from mooncake_mesh.messenger.landing import SliceSpan
from mooncake_mesh.messenger.transports.api import Incoming, SealedSlice

MAGIC: Final = b"MKV2"
WELCOME: Final = b"\x01"
HELLO: Final = struct.Struct("<4sB16sIBB")
HEAD: Final = struct.Struct("<I16sHBI")
ENTRY: Final = struct.Struct("<IHHIBQ")
OFFSET: Final = struct.Struct("<Q")
ACK: Final = struct.Struct("<IB")
TRAILER: Final = struct.Struct("<IB")
_HAS_CHECKSUM: Final = 1

MAX_SLICES: Final = 512
MAX_LANES: Final = 16
MAX_FRAME_BYTES: Final = 64 << 20
INLINE_BYTES: Final = 64 << 10
"""A payload up to this size travels with its head and never meets a thread."""
_STRIPE_BYTES: Final = 512 << 10
"""Below this, waking a second lane costs more than it brings."""
_ALIGNMENT: Final = 4096


class FrameError(TransferError):
    """Bytes that are no frame. The connection they came from is closed."""


class Kind(enum.IntEnum):
    CONTROL = 0
    LANE = 1


class Carriage(enum.IntEnum):
    """Where a frame's payload travels: over the lanes, with its head, or not at all (the receiver reads it itself)."""

    LANES = 0
    INLINE = 1
    MAPPED = 2


class Verdict(enum.IntEnum):
    """What became of a frame."""

    REFUSED = 0
    WRITTEN = 1
    DAMAGED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """``sender`` is the same for all connections of one sender to one receiver, ``epoch`` for those of one link."""

    kind: Kind
    sender: bytes
    epoch: int
    lane: int
    n_lanes: int

    def pack(self) -> bytes:
        return HELLO.pack(MAGIC, self.kind, self.sender, self.epoch, self.lane, self.n_lanes)


def unpack_hello(data: bytes) -> Hello:
    """Raises FrameError."""
    magic, kind, sender, epoch, lane, n_lanes = HELLO.unpack(data)
    if magic != MAGIC or kind > Kind.LANE or not 0 < n_lanes <= MAX_LANES or lane >= n_lanes:
        raise FrameError("not a sender of this protocol")
    return Hello(kind=Kind(kind), sender=sender, epoch=epoch, lane=lane, n_lanes=n_lanes)


@dataclass(slots=True, kw_only=True)
class Head:
    """A frame as announced: what comes, and how; ``following_bytes`` of it on the control connection."""

    frame: int
    token: bytes
    n_slices: int
    carriage: Carriage
    payload_bytes: int
    following_bytes: int


def pack_head(frame: int, token: bytes, carriage: Carriage, batch: Sequence[SealedSlice], payload_bytes: int) -> bytes:
    """Head and entries of *batch*, which has *payload_bytes*."""
    entries = [_pack_entry(item) for item in batch]
    if carriage is Carriage.MAPPED:
        entries += [OFFSET.pack(item.piece.offset) for item in batch]
    return HEAD.pack(frame, token, len(batch), carriage, payload_bytes) + b"".join(entries)


def _pack_entry(item: SealedSlice) -> bytes:
    span = item.piece.span
    flags = 0 if item.checksum is None else _HAS_CHECKSUM
    return ENTRY.pack(span.logical, span.layer, span.n_layers, item.piece.size_bytes, flags, item.checksum or 0)


def unpack_head(data: memoryview) -> Head:
    """Raises FrameError for what no sender of ours would announce."""
    frame, token, n_slices, carriage, payload_bytes = HEAD.unpack(data)
    largest = INLINE_BYTES if carriage == Carriage.INLINE else MAX_FRAME_BYTES
    if carriage > Carriage.MAPPED or not 0 < n_slices <= MAX_SLICES or not 0 < payload_bytes <= largest:
        raise FrameError("not a frame of this protocol")
    following_bytes = n_slices * ENTRY.size
    if carriage == Carriage.INLINE:
        following_bytes += payload_bytes
    elif carriage == Carriage.MAPPED:
        following_bytes += n_slices * OFFSET.size
    return Head(
        frame=frame,
        token=token,
        n_slices=n_slices,
        carriage=Carriage(carriage),
        payload_bytes=payload_bytes,
        following_bytes=following_bytes,
    )


def unpack_entries(data: memoryview, head: Head) -> list[Incoming]:
    """The slices of *head*. Raises FrameError when they do not add up."""
    incoming = [_incoming(*fields) for fields in ENTRY.iter_unpack(data)]
    if sum(item.size_bytes for item in incoming) != head.payload_bytes:
        raise FrameError("the slices of a frame do not add up to its payload")
    return incoming


def unpack_offsets(data: memoryview) -> list[int]:
    """Where the slices of a MAPPED frame begin in the sender's memory."""
    return [offset for (offset,) in OFFSET.iter_unpack(data)]


def _incoming(logical: int, layer: int, n_layers: int, size_bytes: int, flags: int, digest: int) -> Incoming:
    return Incoming(
        span=SliceSpan(logical=logical, layer=layer, n_layers=n_layers),
        size_bytes=size_bytes,
        checksum=digest if flags & _HAS_CHECKSUM else None,
    )


def cut(payload_bytes: int, frame: int, n_lanes: int) -> list[tuple[int, int, int]]:
    """(lane, first byte, byte after the last) of each lane that carries bytes of this frame; the same at both ends."""
    if n_lanes == 1 or payload_bytes < _STRIPE_BYTES:
        return [(frame % n_lanes, 0, payload_bytes)]
    share = -(-payload_bytes // n_lanes)
    share += -share % _ALIGNMENT
    starts = range(0, payload_bytes, share)
    return [(lane, start, min(start + share, payload_bytes)) for lane, start in enumerate(starts)]
