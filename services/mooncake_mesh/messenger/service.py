"""The messenger process: one per node, owner of the arena and of every block in it.

====== ======================= =========================================================
socket who connects            what flows
====== ======================= =========================================================
ROUTER workers of this node    Attach, Acquire, Grow, Seal, Release, StartSend …
ROUTER other messengers        OpenTransfer, SliceOffer, ConnectQp, AbortTransfer, PushBlocks
Unix   workers, messengers     the arena's descriptor; open for the life of the process
TCP    other messengers        slices, where the transport is tcp
====== ======================= =========================================================
"""

import asyncio
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import structlog

from mooncake_mesh.config import MessengerConfig, TransportKind
from mooncake_mesh.errors import (
    ConfigError,
    InvalidRequest,
    MooncakeError,
    NoFreeBlocks,
    PeerUnreachable,
    TransferError,
)
from mooncake_mesh.kv.block_hash import join_keys, split_keys
from mooncake_mesh.kv.block_pool import NoRoom
from mooncake_mesh.mesh.arena import Arena, ArenaServer, Holder
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.mesh.membership import Membership
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.mesh.rpc import Caller, Handler, RpcClient, RpcServer
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.publisher import KvPublisher
from mooncake_mesh.messenger.receiver import Receiver
from mooncake_mesh.messenger.sender import Sender
from mooncake_mesh.messenger.ssd import NodeSsd
from mooncake_mesh.messenger.store.records import Namespace
from mooncake_mesh.messenger.transports.shm import SourceArenas
from mooncake_mesh.messenger.transports.tcp_listener import TcpListener
from mooncake_proto.control import Load, Member, Ok, Ping, Pong, Role
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId, TransferId, new_incarnation
from mooncake_proto.rdma import ConnectQp, QpConnected
from mooncake_proto.transfer import (
    AbortTransfer,
    Acquire,
    Acquired,
    ArenaInfo,
    Attach,
    FinishSend,
    Grow,
    Grown,
    OpenTransfer,
    PushBlocks,
    Pushing,
    Release,
    Seal,
    SendReport,
    SliceAck,
    SliceOffer,
    SliceReady,
    StartSend,
    TransferPlan,
)

if TYPE_CHECKING:  # needs pyverbs
    from mooncake_mesh.messenger.transports.rdma.arena import RdmaArena

log = structlog.get_logger(__name__)

_COPY_THREADS: Final = 2
_FETCH_TIMEOUT_S: Final = 20.0
_REMEMBERED_DEAD: Final = 1024


class MessengerService:
    """Handlers over one MessengerCore. The pool is cut when the first worker says how large its blocks are."""

    def __init__(self, config: MessengerConfig, tasks: asyncio.TaskGroup) -> None:
        self._ssd = NodeSsd(config)  # first: it may refuse, and nothing is open yet
        self._config = config
        self._tasks = tasks
        self._incarnation = new_incarnation()
        self._arena = Arena.create(config.arena_bytes)
        self._holder = Holder(instance_id=InstanceId(config.instance_id), incarnation=self._incarnation)
        self._threads = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="copy")
        self._sources = SourceArenas(self._holder)
        self._peers = Phonebook()
        self._conductor = RpcClient(config.conductor)
        self._publisher = KvPublisher(self._conductor, NodeId(config.node_id), self._incarnation)
        self._room = Bell()
        self._gone: OrderedDict[Incarnation, None] = OrderedDict()
        self._membership: Membership | None = None
        self._core: MessengerCore | None = None
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._listener: TcpListener | None = None
        self._rdma: RdmaArena | None = None
        self._lifecycle: Lifecycle | None = None
        self._arena_server = ArenaServer(
            Path(config.run_dir) / f"{config.instance_id}.arena",
            self._arena,
            self._incarnation,
            on_gone=self._worker_gone,
        )
        self._server = RpcServer(config.bind, self._handlers(), tasks)

    def _handlers(self) -> dict[type, Handler]:
        return {
            Ping: self._ping,
            Attach: self._attach,
            Acquire: self._acquire,
            Grow: self._grow,
            Seal: self._seal,
            Release: self._release,
            StartSend: self._start_send,
            SliceReady: self._slice_ready,
            FinishSend: self._finish_send,
            OpenTransfer: self._open_transfer,
            ConnectQp: self._connect_qp,
            SliceOffer: self._slice_offer,
            AbortTransfer: self._abort_transfer,
            PushBlocks: self._push_blocks,
        }

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serve until *lifecycle* says stop. Raises ConfigError if the SSD folder turns out to be of another model."""
        self._lifecycle = lifecycle
        member = Member(
            role=Role.MESSENGER,
            instance_id=InstanceId(self._config.instance_id),
            node_id=NodeId(self._config.node_id),
            incarnation=self._incarnation,
            endpoint=self._server.endpoint,
        )
        membership = self._membership = Membership(self._conductor, member, self._load, on_registered=self._registered)
        background = [
            self._tasks.create_task(membership.run()),
            self._tasks.create_task(self._publisher.run()),
            self._tasks.create_task(self._arena_server.run()),
        ]
        if self._config.transport is TransportKind.RDMA:
            self._rdma = self._open_rdma()
        lifecycle.ready(endpoint=self._server.endpoint, arena_bytes=self._config.arena_bytes)
        await lifecycle.stopping.wait()
        await membership.leave()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self._close()
        if self._ssd.refusal is not None:
            raise self._ssd.refusal

    async def _close(self) -> None:
        await self._server.close()
        if self._core is not None and self._sender is not None and self._listener is not None:
            for job_id in self._core.all_jobs():
                self._end_job(job_id, "the messenger stops")
            await self._listener.close()
            self._sender.close()
        if self._rdma is not None:
            self._rdma.close()
        self._peers.close()
        self._conductor.close()
        self._threads.shutdown()
        await self._ssd.close()
        self._sources.close()

    # --- membership ---------------------------------------------------------------------------------------------------

    async def _registered(self) -> None:
        self._publisher.restart()

    def _load(self) -> Load:
        if self._core is None or self._sender is None or self._receiver is None:
            return Load()
        pool = self._core.pool
        load = Load(
            running_jobs=self._core.n_jobs,
            blocks_total=pool.n_blocks,
            blocks_free=pool.free_blocks,
            blocks_cached=pool.sealed_blocks,
            blocks_evictable=pool.evictable_blocks,
            transferred_bytes=self._sender.sent_bytes,
            transports=",".join(sorted(self._sender.transports)),
        )
        return self._ssd.counted(load)

    def _ping(self, _: Ping, __: Caller) -> Pong:
        return Pong(
            role=Role.MESSENGER, instance_id=InstanceId(self._config.instance_id), incarnation=self._incarnation
        )

    # --- workers ------------------------------------------------------------------------------------------------------

    def _attach(self, request: Attach, _: Caller) -> ArenaInfo:
        if request.block_bytes < 1 or request.block_bytes > self._config.arena_bytes:
            raise InvalidRequest(
                f"a block of {request.block_bytes} bytes does not fit an arena of {self._config.arena_bytes}",
                param="block_bytes",
            )
        if self._core is None:
            self._cut_arena(Namespace(block_bytes=request.block_bytes, layout=request.layout))
            if self._membership is not None:
                self._membership.news()
        self._gone.pop(request.incarnation, None)
        core = self._ready_core()
        if request.block_bytes != core.block_bytes:
            raise InvalidRequest(
                f"{request.instance_id} has blocks of {request.block_bytes} bytes, this arena of {core.block_bytes}; "
                "all instances of a node must agree on model, dtype and block_tokens",
                param="block_bytes",
            )
        return self._info(core)

    def _cut_arena(self, namespace: Namespace) -> None:
        config, block_bytes = self._config, namespace.block_bytes
        try:
            self._ssd.check(namespace)
        except ConfigError:
            if self._lifecycle is not None:
                self._lifecycle.stop("ssd_dir refused")
            raise
        n_blocks = config.arena_bytes // block_bytes
        core = MessengerCore(n_blocks=n_blocks, block_bytes=block_bytes, eviction=config.eviction)
        info = self._info(core)
        view = self._arena.view
        receiver = Receiver(
            core,
            view,
            info,
            self._sources,
            self._threads,
            transport=config.transport,
            data_host=config.data_host,
            rdma=self._rdma,
            on_written=self._pool_changed,
        )
        self._listener = TcpListener(config.data_host, config.data_port, view, receiver)
        receiver.data_host, receiver.data_port = config.advertised_data(self._listener.port)
        self._sender = Sender(
            view,
            info,
            self._peers,
            self._tasks,
            self._threads,
            transport=config.transport,
            checksums=config.checksum,
            tcp_connections=config.tcp_connections,
            rdma=None if self._rdma is None else self._rdma.memory,
        )
        self._core, self._receiver = core, receiver
        self._publisher.attach(core)
        self._ssd.start(core, view, namespace, self._tasks, changed=self._pool_changed)
        log.info("arena_cut", block_bytes=block_bytes, n_blocks=core.pool.n_blocks, data_port=self._listener.port)

    def _open_rdma(self) -> "RdmaArena":
        """The arena registered with this machine's NICs. Raises TransferError: what was asked for is not replaced."""
        try:
            from mooncake_mesh.messenger.transports.rdma.arena import RdmaArena
        except ImportError as error:
            raise TransferError(f"transport rdma: pyverbs cannot be imported: {error} (see mooncake doctor)") from error
        return RdmaArena(
            self._config.rdma,
            self._arena.view,
            self._peers,
            self._threads,
            incarnation=self._incarnation,
            endpoint=self._server.endpoint,
        )

    def _info(self, core: MessengerCore) -> ArenaInfo:
        return ArenaInfo(
            node_id=NodeId(self._config.node_id),
            incarnation=self._incarnation,
            host_id=_host_id(),
            socket_path=os.fspath(self._arena_server.path),
            block_bytes=core.block_bytes,
            n_blocks=core.pool.n_blocks,
        )

    async def _acquire(self, request: Acquire, _: Caller) -> Acquired:
        """Waits for room, and for the landing if there is one, for as long as the call's deadline allows."""
        core, receiver = self._ready_core(), self._ready_receiver()
        if request.fetch_from and request.fetch_blocks:
            await self._fetch_prefix(core, receiver, request)

        def attempt() -> Acquired | None:
            if request.incarnation in self._gone:  # nobody would ever release what it got
                raise PeerUnreachable(f"{request.instance_id} is gone")
            result = core.acquire(request, monotonic())
            return None if isinstance(result, NoRoom) else result

        await self._ssd.make_room(core, request)
        acquired = await self._room.until(attempt)
        self._publish()
        if request.landing is None:
            return await self._ssd.promoted(core, request, acquired)
        receiver.changed.ring()
        return replace(acquired, landed=await receiver.landed(request.landing))

    async def _fetch_prefix(self, core: MessengerCore, receiver: Receiver, request: Acquire) -> None:
        """Copy missing prefix blocks from another node. Whatever goes wrong, the job computes them instead."""
        keys = core.missing_prefix(request)
        if not keys:
            return
        transfer_id = TransferId(uuid4().hex)
        try:
            landing = core.open_fetch(transfer_id, request, keys, monotonic())
            receiver.changed.ring()
            push = PushBlocks(
                transfer_id=transfer_id, target=self._server.endpoint, keys=join_keys(keys), deadline_s=_FETCH_TIMEOUT_S
            )
            pushing = await self._peers.get(request.fetch_from).call(push, Pushing, timeout_s=_FETCH_TIMEOUT_S)
            landing.shorten(pushing.n_blocks)
            core.settle(landing)
            async with asyncio.timeout(_FETCH_TIMEOUT_S):
                landed = await receiver.landed(transfer_id)
            log.info(
                "prefix_fetched",
                job_id=request.job_id,
                source=request.fetch_from,
                blocks=pushing.n_blocks,
                received_bytes=landed.received_bytes,
                elapsed_s=round(landed.last_slice_s, 4),
            )
        except (MooncakeError, TimeoutError) as error:
            log.warning("prefix_fetch_failed", job_id=request.job_id, source=request.fetch_from, error=str(error)[:200])
        finally:
            self._end_job(JobId(transfer_id), "the fetch is over")

    def _grow(self, request: Grow, _: Caller) -> Grown:
        core = self._ready_core()
        got = {job_id: core.grow(JobId(job_id), wanted) for job_id, wanted in request.wanted.items()}
        self._publish()
        return Grown(blocks={job_id: tuple(blocks) for job_id, blocks in got.items() if blocks})

    def _seal(self, request: Seal, _: Caller) -> None:
        self._ready_core().seal(request.job_id, request.first_block, list(split_keys(request.keys)))
        self._publish()

    def _release(self, request: Release, _: Caller) -> Ok:
        self._end_job(request.job_id, "the job was released")
        return Ok()

    def _worker_gone(self, holder: Holder) -> None:
        """The kernel closed a worker's connection: it writes no more, whatever became of it."""
        self._gone[holder.incarnation] = None
        if len(self._gone) > _REMEMBERED_DEAD:
            self._gone.popitem(last=False)
        if self._core is None:
            return
        jobs = self._core.jobs_of(holder.instance_id, holder.incarnation)
        log.info("holder_gone", holder=holder.instance_id, jobs=len(jobs))
        for job_id in jobs:
            self._end_job(job_id, f"{holder.instance_id} is gone")
        self._room.ring()

    def _end_job(self, job_id: JobId, why: str) -> None:
        if self._core is None or self._sender is None or self._receiver is None:
            return
        for transfer_id in self._core.release(job_id, why):
            self._sender.forget(transfer_id)
            self._receiver.forget(transfer_id)
        self._pool_changed()

    def _pool_changed(self) -> None:
        """Blocks may have become free or findable: by a release, or by the last write into one that was released."""
        self._publish()
        self._room.ring()

    def _publish(self) -> None:
        """The pool has changed: others want to know what it holds, and it may have become too full."""
        self._publisher.poke()
        self._ssd.pool_changed()

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _start_send(self, request: StartSend, _: Caller) -> None:
        outbound = self._ready_core().start_send(request.transfer_id, request.job_id, request.n_blocks, request.layers)
        self._ready_sender().start(outbound, request.target, request.deadline_s)

    def _slice_ready(self, ready: SliceReady, _: Caller) -> None:
        self._ready_sender().announce(ready)

    async def _finish_send(self, request: FinishSend, _: Caller) -> SendReport:
        outbound = self._ready_core().outbound(request.transfer_id)
        try:
            return await self._ready_sender().finish(request.transfer_id)
        finally:
            if outbound is not None:
                self._end_job(outbound.job_id, "the transfer is over")

    async def _open_transfer(self, request: OpenTransfer, _: Caller) -> TransferPlan:
        return await self._ready_receiver().open(request)

    def _connect_qp(self, request: ConnectQp, _: Caller) -> QpConnected:
        if self._rdma is None:
            raise TransferError(f"{self._config.node_id} does not use RDMA")
        return self._rdma.engine.accept(request)

    async def _slice_offer(self, offer: SliceOffer, _: Caller) -> SliceAck:
        return await self._ready_receiver().take_offer(offer)

    def _abort_transfer(self, request: AbortTransfer, _: Caller) -> Ok:
        self._ready_receiver().abort(request.transfer_id, request.reason)
        return Ok()

    async def _push_blocks(self, request: PushBlocks, _: Caller) -> Pushing:
        core, sender = self._ready_core(), self._ready_sender()
        promotion = JobId(f"promote-{uuid4().hex}")
        try:
            target = core.open_promotion(promotion, request, self._holder.instance_id, self._incarnation)
            if target is not None:
                await self._ssd.read(target)
            outbound = core.start_push(request, self._holder.instance_id, self._incarnation)
        finally:
            self._end_job(promotion, "the prefix is in the arena")
        n_blocks = outbound.n_blocks
        if n_blocks == 0:
            self._end_job(outbound.job_id, "nothing to push")
        else:
            sender.start(outbound, request.target, request.deadline_s)
            whole = SliceReady(transfer_id=request.transfer_id, layer=0, n_layers=1, first_block=0, n_blocks=n_blocks)
            sender.announce(whole)
            self._tasks.create_task(self._end_push(outbound.job_id, request.transfer_id))
        return Pushing(transfer_id=request.transfer_id, n_blocks=n_blocks)

    async def _end_push(self, job_id: JobId, transfer_id: TransferId) -> None:
        try:
            await self._ready_sender().finish(transfer_id)
        except MooncakeError as error:
            log.info("push_failed", transfer_id=transfer_id, code=error.code)
        finally:
            self._end_job(job_id, "the push is over")

    # --- not before a worker came ------------------------------------------------------------------------------------

    def _ready_core(self) -> MessengerCore:
        if self._core is None:
            raise NoFreeBlocks("no worker has attached to this messenger yet")
        return self._core

    def _ready_receiver(self) -> Receiver:
        if self._receiver is None:
            raise PeerUnreachable("no worker has attached to this messenger yet")
        return self._receiver

    def _ready_sender(self) -> Sender:
        if self._sender is None:
            raise PeerUnreachable("no worker has attached to this messenger yet")
        return self._sender


def _host_id() -> str:
    """The same for all processes of one running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def run(config: MessengerConfig, lifecycle: Lifecycle) -> None:
    """Run a messenger until *lifecycle* says stop."""
    async with asyncio.TaskGroup() as tasks:
        await MessengerService(config, tasks).run(lifecycle)
