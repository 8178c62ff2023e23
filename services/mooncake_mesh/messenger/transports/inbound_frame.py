"""One frame on its way in: which bytes of its payload go where, and whether they are what was announced."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mooncake_mesh.errors import ChecksumMismatch, TransferError
from mooncake_mesh.messenger.landing import Destination
from mooncake_mesh.messenger.transports.api import Incoming, checksum
from mooncake_mesh.messenger.transports.frames import Head


@dataclass(slots=True, kw_only=True)
class InboundPiece:
    """One slice of a frame: its first byte in the payload, and its place, if it is wanted."""

    offset: int
    incoming: Incoming
    target: memoryview | None
    source_offset: int = 0

    def is_damaged(self) -> bool:
        wanted = self.incoming.checksum
        return wanted is not None and self.target is not None and checksum(self.target) != wanted

    def lies_within(self, start: int, stop: int) -> bool:
        return start <= self.offset and self.offset + self.incoming.size_bytes <= stop


class InboundFrame:
    """One frame on its way in. The lanes' threads share ``cuts_left`` and ``error`` under ``lock``."""

    def __init__(self, head: Head, pieces: Sequence[InboundPiece], destinations: Sequence[Destination]) -> None:
        self.head = head
        self.pieces = pieces
        self.destinations = destinations
        self.is_refused = False
        self.lock = threading.Lock()
        self.cuts: list[tuple[int, int, int]] = []
        self.cuts_left = 0
        self.error: TransferError | None = None

    def verify(self, pieces: Iterable[InboundPiece]) -> None:
        for piece in pieces:
            if piece.is_damaged():
                self.error = self.error or ChecksumMismatch(f"{piece.incoming.span} arrived damaged")

    def parts(self, start: int, stop: int) -> Iterator[tuple[InboundPiece, int, int]]:
        """The pieces that have payload bytes between *start* and *stop*, with the first and last of them."""
        for piece in self.pieces:
            first = max(start - piece.offset, 0)
            last = min(stop - piece.offset, piece.incoming.size_bytes)
            if first < last:
                yield piece, first, last

    def pieces_within(self, start: int, stop: int) -> list[InboundPiece]:
        return [piece for piece in self.pieces if piece.lies_within(start, stop)]

    def divided_pieces(self) -> list[InboundPiece]:
        """Those that came over more than one lane."""
        edges = [stop for _, _, stop in self.cuts[:-1]]
        return [
            piece
            for piece in self.pieces
            if any(piece.offset < edge < piece.offset + piece.incoming.size_bytes for edge in edges)
        ]


def lay_out(
    memory: memoryview, incoming: Sequence[Incoming], offsets: Sequence[int], destinations: Sequence[Destination]
) -> list[InboundPiece]:
    """The slices of a frame as pieces, in the order of its payload; *offsets* are theirs in the sender's memory."""
    places = {place.span: place for place in destinations}
    pieces = []
    offset = 0
    for item, source_offset in zip(incoming, offsets, strict=True):
        place = places.pop(item.span, None)  # a span named twice in one frame is taken once
        target = None if place is None else memory[place.offset : place.offset + place.size_bytes]
        pieces.append(InboundPiece(offset=offset, incoming=item, target=target, source_offset=source_offset))
        offset += item.size_bytes
    return pieces
