"""What a transport is: the few words that shared memory, TCP and RDMA have in common, and the messenger speaks.

A sender has a *path* to one receiver for one transfer. It submits batches of slices and awaits their completion. A
slice never names an address at the other end: it names a span of a logical block, and the receiver's *landings* say,
before the first byte, where that goes and whether it may. So a receiver can end a transfer alone.
"""

import enum
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from mooncake_mesh.config import TransportKind
from mooncake_mesh.errors import TransferError
from mooncake_mesh.messenger.landing import Destination, SliceSpan
from mooncake_mesh.messenger.sending import OutgoingSlice


class TcpKind(enum.Enum):
    """Whether a link over TCP is encrypted, by the names on the wire: an end that wants it meets none that does not."""

    CLEAR = "tcp"
    TLS = "tcp+tls"


def offers(transport: TransportKind, tcp: TcpKind) -> tuple[str, ...]:
    """What a messenger set to *transport* uses, best first, by the names on the wire."""
    kinds = (TransportKind.SHM, TransportKind.TCP) if transport is TransportKind.AUTO else (transport,)
    return tuple(tcp.value if kind is TransportKind.TCP else kind.value for kind in kinds)


class LinkLost(TransferError):
    """The connection broke under a transfer; what had not arrived may be sent again on another."""

    code = "slice_lost"
    retryable = True


class SliceRefused(TransferError):
    """The receiver did not take a frame: its transfer is over, or the bytes arrived damaged."""

    code = "slice_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSlice:
    """An outgoing slice with the checksum of its bytes, where checksums are on."""

    piece: OutgoingSlice
    checksum: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """One slice as announced by a sender."""

    span: SliceSpan
    size_bytes: int
    checksum: int | None


class Submission(Protocol):
    """A batch on its way. Awaiting it ends when every slice is written and verified, or raises TransferError."""

    def __await__(self) -> Generator[Any, None, None]: ...

    @property
    def is_over(self) -> bool:
        """Whether the sender's memory is free again: awaiting returns at once then."""

    def cancel(self) -> None:
        """Give up; awaiting raises TransferError, no sooner than the last byte of the memory was read."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call *callback* on the event loop once it is over; at once if it is."""


class SendPath(Protocol):
    """The way out for one transfer, opened to one receiver."""

    @property
    def name(self) -> str:
        """As on the wire: shm, tcp, tcp+tls or rdma."""

    async def send(self, batch: Sequence[SealedSlice]) -> None:
        """Return when the receiver has acknowledged every slice as written and verified. Raises TransferError.

        Returns, also when cancelled, only when nothing reads the batch's memory any more.
        """


class SubmitPath(SendPath, Protocol):
    """A path on which several batches may be under way."""

    async def submit(self, batch: Sequence[SealedSlice]) -> Submission:
        """Put *batch* on its way; waits while the window is full or there is no connection. Raises TransferError."""


class Landings(Protocol):
    """What the receiving end asks the owner of the memory, on the event loop. Neither call may block."""

    def begin(self, token: bytes, incoming: Sequence[Incoming]) -> list[Destination]:
        """Places for the slices that are new. Raises TransferError for a token or a slice that has no place."""

    def end(self, token: bytes, destinations: Sequence[Destination], error: TransferError | None) -> None:
        """The writes that *begin* allowed are over. LinkLost says that the same slices may come once more."""


def checksum(data: memoryview) -> int:
    """XXH3-64 of *data*."""
    return xxhash.xxh3_64_intdigest(data)
