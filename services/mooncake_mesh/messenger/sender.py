"""Streaming KV out of this node's arena while prefill still computes: one task for each transfer."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Final

import structlog

from mooncake_mesh.config import ChecksumKind, TransportKind
from mooncake_mesh.errors import MooncakeError, SliceLost, TransferError
from mooncake_mesh.mesh.crew import Crew
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.messenger.sending import Outbound, OutgoingSlice
from mooncake_mesh.messenger.transports.api import SealedSlice, SendPath, TcpKind, checksum, offers
from mooncake_mesh.messenger.transports.paths import Connections, LinkPath
from mooncake_mesh.messenger.transports.shm import ShmSendPath
from mooncake_mesh.messenger.transports.tcp import tcp_connections
from mooncake_proto.control import Ok
from mooncake_proto.ids import TransferId
from mooncake_proto.rdma import RdmaMemory
from mooncake_proto.transfer import AbortTransfer, ArenaInfo, OpenTransfer, SendReport, SliceReady, TransferPlan

log = structlog.get_logger(__name__)

_BATCH_BYTES: Final = 8 << 20
_BATCHES_UNDER_WAY: Final = 3
_INLINE_BYTES: Final = 64 << 10
_ACK_TIMEOUT_S: Final = 30.0
_CONNECT_TIMEOUT_S: Final = 1.0
"""Blocks are not held for a receiver that is gone."""

_MOST_RECEIVERS: Final = 1024
_ABORT_TIMEOUT_S: Final = 10.0
_LAST_WORDS_S: Final = 1.0


@dataclass(slots=True)
class _Sending:
    outbound: Outbound
    target: str
    was_asked_for: bool
    started_s: float
    task: asyncio.Task[None] | None = None
    transport: str = ""
    failure: TransferError | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Sender:
    """All transfers on their way out."""

    def __init__(
        self,
        arena: memoryview,
        me: ArenaInfo,
        peers: Phonebook,
        tasks: asyncio.TaskGroup,
        crew: Crew,
        *,
        transport: TransportKind,
        tcp: TcpKind,
        checksums: ChecksumKind,
        tcp_connections: int,
        rdma: RdmaMemory | None,
    ) -> None:
        self._arena = arena
        self._me = me
        self._peers = peers
        self._tasks = tasks
        self._crew = crew
        self._offered = offers(transport, tcp)
        self._checksums = checksums
        self._tcp_connections = tcp_connections
        self._rdma = rdma
        self._tcp: OrderedDict[tuple[str, int], tuple[bytes, Connections]] = OrderedDict()
        self._sending: dict[TransferId, _Sending] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._aborting: set[asyncio.Task[None]] = set()
        self.sent_bytes = 0
        self.transports: set[str] = set()

    def start(self, outbound: Outbound, target: str, deadline_s: float, *, was_asked_for: bool = False) -> None:
        """Begin a transfer to the messenger at *target*, who may have asked for it; slices follow by
        :meth:`announce`."""
        sending = _Sending(outbound=outbound, target=target, was_asked_for=was_asked_for, started_s=monotonic())
        self._sending[outbound.transfer_id] = sending
        sending.task = self._tasks.create_task(self._run(sending, deadline_s))

    def announce(self, ready: SliceReady) -> None:
        """Slices of a running transfer are written. A transfer that has ended is ignored: its job was released."""
        sending = self._sending.get(ready.transfer_id)
        if sending is not None:
            sending.outbound.ready(ready)
            sending.wake.set()

    async def finish(self, transfer_id: TransferId) -> SendReport:
        """Wait until all announced slices are acknowledged. Raises TransferError."""
        sending = self._sending.get(transfer_id)
        if sending is None:
            raise SliceLost(f"no transfer {transfer_id} on its way out")
        sending.outbound.finish()
        sending.wake.set()
        await sending.done.wait()
        if sending.failure is not None:
            raise sending.failure
        return SendReport(
            transfer_id=transfer_id,
            transport=sending.transport,
            sent_bytes=sending.outbound.sent_bytes,
            overlapped_bytes=sending.outbound.overlapped_bytes,
            skipped_blocks=sending.outbound.skipped_blocks,
            elapsed_s=monotonic() - sending.started_s,
        )

    def forget(self, transfer_id: TransferId) -> None:
        """The job of a transfer is over; one that still runs is stopped and the receiver told."""
        sending = self._sending.pop(transfer_id, None)
        if sending is not None and sending.task is not None and not sending.done.is_set():
            self._failed(sending, SliceLost("the sender's job was released"))  # the task may not even have begun
            sending.task.cancel()
            self._stopping.add(sending.task)
            sending.task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """Close the connections, once every stopped transfer has told its receiver, or that takes too long.

        All must be forgotten before.
        """
        await asyncio.gather(*self._stopping, return_exceptions=True)
        if self._aborting:
            await asyncio.wait(self._aborting, timeout=_LAST_WORDS_S)
        for task in self._aborting:
            task.cancel()
        for _, connections in self._tcp.values():
            connections.close()

    async def _run(self, sending: _Sending, deadline_s: float) -> None:
        outbound = sending.outbound
        try:
            async with asyncio.timeout(deadline_s):
                path = await self._open(sending, deadline_s)
                await self._stream(sending, path)
        except TimeoutError:
            self._failed(sending, SliceLost(f"transfer {outbound.transfer_id} took over {deadline_s:g} s"))
        except MooncakeError as error:
            self._failed(sending, error if isinstance(error, TransferError) else TransferError(str(error)))
        finally:
            sending.done.set()

    async def _open(self, sending: _Sending, deadline_s: float) -> SendPath:
        transfer_id = sending.outbound.transfer_id
        peer = self._peers.get(sending.target)
        request = OpenTransfer(
            transfer_id=transfer_id,
            source=self._me,
            transports=self._offered,
            rdma=self._rdma,
            was_asked_for=sending.was_asked_for,
        )
        plan = await peer.call(request, TransferPlan, timeout_s=deadline_s, connect_timeout_s=_CONNECT_TIMEOUT_S)
        self._check(plan)
        sending.outbound.planned(plan.slots)
        sending.transport = plan.transport
        self.transports.add(plan.transport)
        if plan.transport in (TransportKind.SHM.value, TransportKind.RDMA.value):
            return ShmSendPath(peer, transfer_id, name=plan.transport, timeout_s=_ACK_TIMEOUT_S)
        return LinkPath(self._connections_of(plan), bytes.fromhex(plan.token), self._arena)

    def _check(self, plan: TransferPlan) -> None:
        """Raises TransferError for a plan that would have KV travel as this messenger does not let it."""
        if plan.transport not in self._offered:
            raise TransferError(f"transport {plan.transport[:20]!r} was not offered, but {', '.join(self._offered)}")
        if plan.transport == TcpKind.TLS.value and not plan.tls_fingerprint:
            raise TransferError(f"{plan.transport}: the receiver does not say what its certificate is")

    def _connections_of(self, plan: TransferPlan) -> Connections:
        """Those to the receiver's current life: another one on the same address has another secret."""
        address, secret = (plan.tcp_host, plan.tcp_port), bytes.fromhex(plan.link_secret)
        known_secret, connections = self._tcp.get(address, (None, None))
        if connections is None or known_secret != secret:
            if connections is not None:
                connections.close()
            fingerprint = bytes.fromhex(plan.tls_fingerprint)
            connections = tcp_connections(*address, secret, self._tcp_connections, fingerprint=fingerprint)
            self._tcp[address] = secret, connections
            if len(self._tcp) > _MOST_RECEIVERS:  # each life of a receiver has a port of its own
                self._tcp.popitem(last=False)[1][1].close()
        self._tcp.move_to_end(address)
        return connections

    async def _stream(self, sending: _Sending, path: SendPath) -> None:
        """A few batches are under way at a time: one is sealed while another travels. Raises TransferError."""
        outbound = sending.outbound
        places = asyncio.Semaphore(_BATCHES_UNDER_WAY)
        try:
            async with asyncio.TaskGroup() as batches:
                while True:
                    await places.acquire()
                    sending.wake.clear()
                    batch = outbound.take(_BATCH_BYTES)
                    if batch:
                        batches.create_task(self._send_batch(outbound, batch, path, places))
                        continue
                    places.release()
                    if outbound.is_finishing:
                        break
                    await sending.wake.wait()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _send_batch(
        self, outbound: Outbound, batch: Sequence[OutgoingSlice], path: SendPath, places: asyncio.Semaphore
    ) -> None:
        await path.send(await self._sealed(batch))
        outbound.acknowledged(batch)
        self.sent_bytes += sum(piece.size_bytes for piece in batch)
        places.release()

    async def _sealed(self, batch: Sequence[OutgoingSlice]) -> list[SealedSlice]:
        if self._checksums is ChecksumKind.NONE:
            return [SealedSlice(piece=piece, checksum=None) for piece in batch]
        if sum(piece.size_bytes for piece in batch) <= _INLINE_BYTES:
            return self._with_checksums(batch)
        return await self._crew.run(partial(self._with_checksums, batch))

    def _with_checksums(self, batch: Sequence[OutgoingSlice]) -> list[SealedSlice]:
        return [
            SealedSlice(piece=piece, checksum=checksum(self._arena[piece.offset : piece.offset + piece.size_bytes]))
            for piece in batch
        ]

    def _failed(self, sending: _Sending, error: TransferError) -> None:
        sending.failure = error
        transfer_id = sending.outbound.transfer_id
        log.warning("send_failed", transfer_id=transfer_id, target=sending.target, code=error.code, error=str(error))
        task = self._tasks.create_task(self._abort(sending.target, transfer_id, str(error)[:200]))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, target: str, transfer_id: TransferId, why: str) -> None:
        """Tell the receiver, who may be waiting for slices; also over a connection that does not stand yet."""
        abort = AbortTransfer(transfer_id=transfer_id, reason=why)
        try:
            await self._peers.get(target).call(abort, Ok, timeout_s=_ABORT_TIMEOUT_S)
        except MooncakeError as error:
            log.info("abort_undelivered", transfer_id=transfer_id, code=error.code)
