"""Landing KV in this node's arena: plans for senders, slices by shared memory or TCP, word to the decode worker."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from mooncake_mesh.config import TransportKind
from mooncake_mesh.errors import PeerUnreachable, SliceLost, TransferError
from mooncake_mesh.mesh.arena import BorrowedArena
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.mesh.crew import Crew
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.endings import Ended
from mooncake_mesh.messenger.landing import Destination, Landing, LandingState, SliceSpan
from mooncake_mesh.messenger.transports.api import Incoming, LinkLost, TcpKind, offers
from mooncake_mesh.messenger.transports.link_auth import new_secret
from mooncake_mesh.messenger.transports.shm import Copy, SourceArenas, copy_in
from mooncake_mesh.messenger.transports.tls import Identity
from mooncake_proto.ids import TransferId
from mooncake_proto.rdma import RdmaMemory
from mooncake_proto.transfer import (
    ArenaInfo,
    Landed,
    OfferedSlice,
    OpenTransfer,
    SliceAck,
    SliceOffer,
    Slot,
    TransferPlan,
)

if TYPE_CHECKING:  # needs pyverbs
    from mooncake_mesh.messenger.transports.rdma.arena import RdmaArena

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A landing whose sender has its plan."""

    landing: Landing
    token: bytes
    source: BorrowedArena | RdmaMemory | None


class Receiver:
    """All transfers on their way in. Everything runs on the event loop, copies on *crew*."""

    def __init__(
        self,
        core: MessengerCore,
        arena: memoryview,
        me: ArenaInfo,
        sources: SourceArenas,
        crew: Crew,
        *,
        transport: TransportKind,
        identity: Identity | None,
        data_host: str,
        rdma: "RdmaArena | None",
        on_written: Callable[[], None],
    ) -> None:
        """With an *identity* TCP is encrypted. *on_written* is called after writes have ended: blocks may have become
        free, or findable."""
        self._core = core
        self._arena = arena
        self._me = me
        self._sources = sources
        self._crew = crew
        tcp = TcpKind.CLEAR if identity is None else TcpKind.TLS
        self._takes = offers(transport, tcp)
        self._over_tcp = tcp.value
        self._fingerprint = b"" if identity is None else identity.fingerprint
        self.data_host = data_host
        self._rdma = rdma
        self._on_written = on_written
        self._opened: dict[TransferId, _Opened] = {}
        self._by_token: dict[bytes, _Opened] = {}
        self._draining: dict[bytes, _Opened] = {}  # over with their jobs, and still being written
        self.changed = Bell()
        self.received_bytes = 0
        self.data_port = 0
        self.link_secret = new_secret()

    async def open(self, request: OpenTransfer) -> TransferPlan:
        """Tell a sender where its blocks go. Waits for the landing to be reserved (the call's deadline bounds it), but
        not for one that an earlier life of this messenger asked for: nobody will.

        A landing that is over and had all its KV (its job was short, or found everything cached) wants no block.
        Raises SliceLost for one that failed.
        """
        if request.was_asked_for and self._core.landing_or_end(request.transfer_id) is None:
            raise SliceLost(f"no landing for transfer {request.transfer_id}")
        landing: Landing | Ended = await self.changed.until(lambda: self._core.landing_or_end(request.transfer_id))
        if request.source.block_bytes != self._core.block_bytes:
            raise TransferError(
                f"blocks of {request.source.block_bytes} bytes do not fit this arena's of {self._core.block_bytes}"
            )
        if request.transfer_id in self._opened:
            raise SliceLost(f"transfer {request.transfer_id} has a sender already")
        transport, source = await self._choose(request)
        landing = self._core.landing_or_end(request.transfer_id) or landing
        token = secrets.token_bytes(16)
        if isinstance(landing, Ended):
            if landing.failure:
                raise SliceLost(f"transfer {request.transfer_id} has ended: {landing.failure}")
            return self._plan(request, transport, token, ())
        if request.transfer_id in self._opened:  # a twin of this call was faster
            raise SliceLost(f"transfer {request.transfer_id} has a sender already")
        opened = _Opened(landing=landing, token=token, source=source)
        self._opened[request.transfer_id] = self._by_token[token] = opened
        return self._plan(request, transport, token, landing.slots)

    def _plan(self, request: OpenTransfer, transport: str, token: bytes, slots: tuple[Slot, ...]) -> TransferPlan:
        is_tcp = transport == self._over_tcp
        return TransferPlan(
            transfer_id=request.transfer_id,
            transport=transport,
            tcp_host=self.data_host,
            tcp_port=self.data_port,
            token=token.hex(),
            slots=slots,
            link_secret=self.link_secret.hex() if is_tcp else "",
            tls_fingerprint=self._fingerprint.hex() if is_tcp else "",
        )

    async def landed(self, transfer_id: TransferId) -> Landed:
        """Wait until a landing is over. Raises SliceLost when it failed or never was."""
        landing = self._core.landing(transfer_id)
        if landing is None:
            raise SliceLost(f"no landing for transfer {transfer_id}")
        await self.changed.until(lambda: None if landing.state is LandingState.OPEN else landing)
        if landing.state is LandingState.FAILED:
            raise SliceLost(f"transfer {transfer_id}: {landing.failure}")
        return Landed(
            received_bytes=landing.received_bytes,
            first_slice_s=landing.first_slice_s - landing.opened_s,
            last_slice_s=landing.last_slice_s - landing.opened_s,
        )

    async def abort(self, transfer_id: TransferId, why: str) -> None:
        """The sender has given up. Returns after the last write: its memory is read no more."""
        self._core.give_up(transfer_id, why)
        self.changed.ring()
        opened = self._opened.get(transfer_id) or self._drained(transfer_id)
        if opened is not None:
            landing = opened.landing
            await self.changed.until(lambda: True if landing.is_quiet else None)

    def forget(self, transfer_id: TransferId) -> None:
        """The landing has ended with its job; late slices find nothing."""
        opened = self._opened.pop(transfer_id, None)
        if opened is not None:
            del self._by_token[opened.token]
            if not opened.landing.is_quiet:
                self._draining[opened.token] = opened
        self.changed.ring()

    def _drained(self, transfer_id: TransferId) -> _Opened | None:
        return next((one for one in self._draining.values() if one.landing.transfer_id == transfer_id), None)

    # --- shared memory and RDMA ---------------------------------------------------------------------------------------

    async def take_offer(self, offer: SliceOffer) -> SliceAck:
        """Fetch what a sender offers: copy from its arena on this host, or read it by RDMA.

        Raises TransferError; the landing has failed then.
        """
        opened = self._opened.get(offer.transfer_id)
        if opened is None or opened.source is None:
            raise SliceLost(f"no landing for transfer {offer.transfer_id}")
        offered = {_span(item): item for item in offer.slices}
        destinations = opened.landing.admit(list(offered), self._core.pool)
        copies = [self._copy(offered[place.span], place, opened.landing.layers) for place in destinations]
        error: TransferError | None = SliceLost("the copy was interrupted")
        try:
            await self._fetch(copies, opened.source)
            error = None
        except TransferError as caught:
            error = caught
            raise
        finally:
            self._finish(opened, destinations, error)
        return SliceAck(transfer_id=offer.transfer_id, slices=len(offer.slices))

    async def _fetch(self, copies: Sequence[Copy], source: BorrowedArena | RdmaMemory) -> None:
        """Returns, also when cancelled, only after the last byte was written."""
        if isinstance(source, BorrowedArena):
            await copy_in(copies, source, self._arena, self._crew)
        else:
            assert self._rdma is not None, "chosen for this transfer"
            await self._rdma.read_in(copies, source)

    def _copy(self, item: OfferedSlice, place: Destination, layers: int) -> Copy:
        slice_bytes = self._core.block_bytes // layers
        offset = (item.source_block * layers + item.layer) * slice_bytes
        return Copy(destination=place, source_offset=offset, checksum=item.checksum)

    async def _choose(self, request: OpenTransfer) -> tuple[str, BorrowedArena | RdmaMemory | None]:
        """Transport of this transfer. A transport that was asked for by name is never replaced by another."""
        common = [name for name in self._takes if name in request.transports]
        if TransportKind.SHM.value in common and request.source.host_id == self._me.host_id:
            try:
                return TransportKind.SHM.value, await self._sources.map(request.source)
            except PeerUnreachable as error:
                log.warning("shm_unreachable", peer=request.source.node_id, error=str(error))
        if TransportKind.RDMA.value in common and request.rdma is not None:
            return TransportKind.RDMA.value, request.rdma
        if self._over_tcp in common:
            return self._over_tcp, None
        raise TransferError(
            f"no common transport: {request.source.node_id} offers {', '.join(request.transports)}, "
            f"{self._me.node_id} takes {', '.join(self._takes)}"
        )

    # --- TCP (called by transports/tcp_listener.py) ---------------------------------------------------------

    def begin(self, token: bytes, incoming: Sequence[Incoming]) -> list[Destination]:
        opened = self._by_token.get(token)
        if opened is None:
            raise SliceLost("no landing for this token")
        slice_bytes = self._core.block_bytes // opened.landing.layers
        for item in incoming:
            if item.size_bytes != item.span.n_layers * slice_bytes:
                raise SliceLost(f"{item.span} with {item.size_bytes} bytes is no slice of this arena")
        return opened.landing.admit([item.span for item in incoming], self._core.pool)

    def end(self, token: bytes, destinations: Sequence[Destination], error: TransferError | None) -> None:
        opened = self._by_token.get(token) or self._draining.get(token)
        if opened is not None:
            self._finish(opened, destinations, error)
            return
        assert not destinations, "a landing with a write in flight is kept"

    def _finish(self, opened: _Opened, destinations: Sequence[Destination], error: TransferError | None) -> None:
        if isinstance(error, LinkLost):
            opened.landing.withdrawn(destinations, self._core.pool)
            log.info("link_lost", transfer_id=opened.landing.transfer_id, error=str(error))
        elif error is not None:
            opened.landing.spoiled(destinations, self._core.pool, str(error))
            log.warning("transfer_failed", transfer_id=opened.landing.transfer_id, code=error.code, error=str(error))
        else:
            opened.landing.written(destinations, self._core.pool, monotonic())
            self.received_bytes += sum(place.size_bytes for place in destinations)
            self._core.settle(opened.landing)
        if opened.landing.is_quiet:
            self._draining.pop(opened.token, None)
        if opened.landing.state is not LandingState.OPEN:
            self.changed.ring()
        self._on_written()


def _span(item: OfferedSlice) -> SliceSpan:
    return SliceSpan(logical=item.logical, layer=item.layer, n_layers=item.n_layers)
