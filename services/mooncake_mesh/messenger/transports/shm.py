"""Shared memory between two nodes of one host.

The receiver maps the sender's arena read-only and copies into its own when slices are offered over the control channel.
The copy runs on a thread and releases the GIL (``np.copyto``; assigning to a memoryview would hold it). The checksum is
taken after the copy, over the receiver's bytes: it covers the copy itself and a source that changed under it.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np
import structlog

from mooncake_mesh.errors import ChecksumMismatch, MeshError, PeerUnreachable, SliceLost, TransferError
from mooncake_mesh.mesh.arena import BorrowedArena, Holder, borrow_to_read
from mooncake_mesh.mesh.crew import Crew
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.messenger.landing import Destination
from mooncake_mesh.messenger.transports.api import SealedSlice, checksum
from mooncake_proto.ids import Incarnation, TransferId
from mooncake_proto.transfer import ArenaInfo, OfferedSlice, SliceAck, SliceOffer

log = structlog.get_logger(__name__)

_AT_ONCE_BYTES: Final = 64 << 10
"""Copied sooner than a thread has woken up."""
_TWO_THREADS_BYTES: Final = 512 << 10


class ShmSendPath:
    """Offers slices to the receiver, which fetches them (*name*: by copy from shared memory, or by RDMA)."""

    def __init__(self, receiver: RpcClient, transfer_id: TransferId, *, name: str, timeout_s: float) -> None:
        self.name = name
        self._receiver = receiver
        self._transfer_id = transfer_id
        self._timeout_s = timeout_s

    async def send(self, batch: Sequence[SealedSlice]) -> None:
        offer = SliceOffer(
            transfer_id=self._transfer_id,
            slices=tuple(
                OfferedSlice(
                    logical=item.piece.span.logical,
                    layer=item.piece.span.layer,
                    n_layers=item.piece.span.n_layers,
                    source_block=item.piece.block,
                    checksum=item.checksum,
                )
                for item in batch
            ),
        )
        try:
            await self._receiver.call(offer, SliceAck, timeout_s=self._timeout_s)
        except MeshError as error:
            raise TransferError(f"transfer {self._transfer_id} over {self.name}: {error}") from error


class SourceArenas:
    """Other nodes' arenas, mapped read-only, one for each messenger incarnation."""

    def __init__(self, me: Holder) -> None:
        self._me = me
        self._borrowed: dict[Incarnation, BorrowedArena] = {}

    async def map(self, source: ArenaInfo) -> BorrowedArena:
        """The arena of *source*. Raises PeerUnreachable when its socket is not reachable from here."""
        self.forget_lost()
        borrowed = self._borrowed.get(source.incarnation)
        if borrowed is None:
            borrowed = await borrow_to_read(source.socket_path, self._me)
            if borrowed.owner != source.incarnation:
                borrowed.close()
                raise PeerUnreachable(f"{source.socket_path} belongs to another incarnation of {source.node_id}")
            if (other := self._borrowed.get(source.incarnation)) is not None:  # a twin of this transfer was faster
                borrowed.close()
                return other
            self._borrowed[source.incarnation] = borrowed
        return borrowed

    def forget_lost(self) -> None:
        """Unmap the arenas of messengers that are gone, once no copy uses them."""
        for incarnation, borrowed in list(self._borrowed.items()):
            if borrowed.lost.is_set() and borrowed.in_use == 0:
                del self._borrowed[incarnation]
                borrowed.close()

    def close(self) -> None:
        for borrowed in self._borrowed.values():
            if borrowed.in_use == 0:
                borrowed.close()
        self._borrowed.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One slice to copy: into ``destination`` from byte ``source_offset`` of the source arena."""

    destination: Destination
    source_offset: int
    checksum: int | None


async def copy_in(copies: Sequence[Copy], source: BorrowedArena, arena: memoryview, crew: Crew) -> None:
    """Copy all of *copies* on threads. Raises SliceLost for an offset outside the source, or ChecksumMismatch.

    Returns, also when cancelled, only after the last byte was written.
    """
    if sum(copy.destination.size_bytes for copy in copies) <= _AT_ONCE_BYTES:
        _copy_all(copies, source.arena.view, arena)
        return
    source.in_use += 1
    works = [crew.run(partial(_copy_all, part, source.arena.view, arena)) for part in _shares(copies)]
    cancelled: asyncio.CancelledError | None = None
    while not all(work.done() for work in works):
        try:
            await asyncio.wait(works)
        except asyncio.CancelledError as error:  # a second one comes when the call's deadline follows its cancellation
            cancelled = error
    source.in_use -= 1
    failures = [failure for work in works if (failure := work.exception()) is not None]
    if cancelled is not None:
        raise cancelled
    if failures:
        raise failures[0]


def _shares(copies: Sequence[Copy]) -> list[Sequence[Copy]]:
    """*copies* for one thread, or two halves of about the same size where that is worth a second one."""
    sizes = list(accumulate(copy.destination.size_bytes for copy in copies))
    if len(copies) < 2 or sizes[-1] < _TWO_THREADS_BYTES:
        return [copies]
    middle = 1 + bisect_left(sizes, sizes[-1] // 2)
    return [part for part in (copies[:middle], copies[middle:]) if part]


def _copy_all(copies: Sequence[Copy], source: memoryview, arena: memoryview) -> None:
    for copy in copies:
        place = copy.destination
        if not 0 <= copy.source_offset <= len(source) - place.size_bytes:
            raise SliceLost(f"source offset {copy.source_offset} lies outside the arena of {len(source)} bytes")
        target = arena[place.offset : place.offset + place.size_bytes]
        np.copyto(
            np.frombuffer(target, np.uint8),
            np.frombuffer(source[copy.source_offset : copy.source_offset + place.size_bytes], np.uint8),
        )
        if copy.checksum is not None and checksum(target) != copy.checksum:
            raise ChecksumMismatch(f"{place.span} arrived damaged")
