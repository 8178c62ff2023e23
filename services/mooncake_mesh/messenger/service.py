"""The messenger process: one per node, owner of the arena and of every block in it.

====== ======================= =========================================================
socket who connects            what flows
====== ======================= =========================================================
ROUTER workers of this node    Attach, Acquire, Grow, Seal, Release, StartSend …
ROUTER other messengers        OpenTransfer, SliceOffer, ConnectQp, AbortTransfer, PushBlocks
ROUTER conductor               ReadAhead, Replicate
ROUTER gateways                PinPrefix
ROUTER operators               Stop
Unix   workers, messengers     the arena's descriptor; open for the life of the process
TCP    other messengers        slices, where the transport is tcp
====== ======================= =========================================================
"""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from mooncake_mesh.config import MessengerConfig, TransportKind
from mooncake_mesh.config_tenants import tenant_quotas
from mooncake_mesh.errors import (
    ConfigError,
    Draining,
    InvalidRequest,
    NoFreeBlocks,
    TransferError,
)
from mooncake_mesh.mesh.arena import ArenaServer, Holder
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.mesh.conductors import Conductors
from mooncake_mesh.mesh.crew import Crew
from mooncake_mesh.mesh.host import host_id
from mooncake_mesh.mesh.membership import Membership
from mooncake_mesh.mesh.orders import stop_ordered
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.mesh.rpc import Caller, Handler, RpcServer
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.cut_arena import CutArena
from mooncake_mesh.messenger.identity import identity_of
from mooncake_mesh.messenger.publisher import KvPublisher
from mooncake_mesh.messenger.receiver import Receiver
from mooncake_mesh.messenger.sender import Sender
from mooncake_mesh.messenger.ssd import NodeSsd
from mooncake_mesh.messenger.store.records import Namespace
from mooncake_mesh.messenger.transports.api import TcpKind
from mooncake_mesh.messenger.transports.shm import SourceArenas
from mooncake_mesh.messenger.transports.tcp_listener import TcpListener
from mooncake_proto.control import Load, Member, Ok, Ping, Pong, Role, Stop
from mooncake_proto.ids import InstanceId, NodeId, new_incarnation
from mooncake_proto.rdma import ConnectQp, QpConnected
from mooncake_proto.transfer import (
    AbortTransfer,
    Acquire,
    Acquired,
    ArenaInfo,
    Attach,
    CloseWrite,
    FinishSend,
    Grow,
    Grown,
    OpenTransfer,
    OpenWrite,
    PinPrefix,
    PrefixPinned,
    PushBlocks,
    Pushing,
    ReadAhead,
    Release,
    Replicate,
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


class MessengerService:
    """Handlers over one arena. It is cut into blocks when the first worker says how large they are."""

    def __init__(self, config: MessengerConfig, tasks: asyncio.TaskGroup) -> None:
        self._ssd = NodeSsd(config)  # first: it may refuse, and nothing is open yet
        self._identity = identity_of(config)  # so may this
        self._config = config
        self._tasks = tasks
        self._incarnation = new_incarnation()
        self._arena = Arena.create(config.arena_bytes, config.pages, config.commit)
        self._holder = Holder(instance_id=InstanceId(config.instance_id), incarnation=self._incarnation)
        self._crew = Crew(_COPY_THREADS, name="kv-work")
        self._sources = SourceArenas(self._holder)
        self._peers = Phonebook(on_lost=self._peer_lost)
        self._conductors = Conductors(config.conductor)
        self._publisher = KvPublisher(self._conductors, NodeId(config.node_id), self._incarnation)
        self._membership: Membership | None = None
        self._cut: CutArena | None = None
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
            Stop: self._stop,
            Attach: self._attach,
            Acquire: self._acquire,
            Grow: self._grow,
            Seal: self._seal,
            OpenWrite: self._open_write,
            CloseWrite: self._close_write,
            Release: self._release,
            StartSend: self._start_send,
            SliceReady: self._slice_ready,
            FinishSend: self._finish_send,
            OpenTransfer: self._open_transfer,
            ConnectQp: self._connect_qp,
            SliceOffer: self._slice_offer,
            AbortTransfer: self._abort_transfer,
            PushBlocks: self._push_blocks,
            ReadAhead: self._read_ahead,
            Replicate: self._replicate,
            PinPrefix: self._pin_prefix,
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
        membership = self._membership = Membership(self._conductors, member, self._load, on_registered=self._registered)
        background = [
            self._tasks.create_task(membership.run()),
            self._tasks.create_task(self._publisher.run()),
            self._tasks.create_task(self._arena_server.run()),
        ]
        if self._config.transport is TransportKind.RDMA:
            self._rdma = self._open_rdma()
        lifecycle.ready(
            endpoint=self._server.endpoint, arena_bytes=self._config.arena_bytes, pages=self._arena.pages.value
        )
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
        if self._cut is not None and self._listener is not None:
            await self._cut.close()
            await self._listener.close()
        if self._rdma is not None:
            self._rdma.close()
        self._peers.close()
        self._conductors.close()
        self._crew.close()
        await self._ssd.close()
        self._sources.close()

    # --- membership ---------------------------------------------------------------------------------------------------

    async def _registered(self) -> None:
        self._publisher.restart()

    def _load(self) -> Load:
        return replace(Load() if self._cut is None else self._cut.load(), pages=self._arena.pages.value)

    def _ping(self, _: Ping, __: Caller) -> Pong:
        return Pong(
            role=Role.MESSENGER, instance_id=InstanceId(self._config.instance_id), incarnation=self._incarnation
        )

    def _stop(self, order: Stop, _: Caller) -> Ok:
        if self._lifecycle is None:
            raise Draining("the messenger has not begun yet")
        return stop_ordered(order, self._incarnation, self._lifecycle)

    # --- workers ------------------------------------------------------------------------------------------------------

    def _attach(self, request: Attach, _: Caller) -> ArenaInfo:
        if request.block_bytes < 1 or request.block_bytes > self._config.arena_bytes:
            raise InvalidRequest(
                f"a block of {request.block_bytes} bytes does not fit an arena of {self._config.arena_bytes}",
                param="block_bytes",
            )
        if self._cut is None:
            self._cut = self._cut_arena(Namespace(block_bytes=request.block_bytes, layout=request.layout))
            if self._membership is not None:
                self._membership.news()
        self._cut.came(request.incarnation)
        core = self._cut.core
        if request.block_bytes != core.block_bytes:
            raise InvalidRequest(
                f"{request.instance_id} has blocks of {request.block_bytes} bytes, this arena of {core.block_bytes}; "
                "all instances of a node must agree on model, dtype and block_tokens",
                param="block_bytes",
            )
        return self._info(core)

    def _cut_arena(self, namespace: Namespace) -> CutArena:
        config, block_bytes = self._config, namespace.block_bytes
        try:
            self._ssd.check(namespace)
        except ConfigError:
            if self._lifecycle is not None:
                self._lifecycle.stop("ssd_dir refused")
            raise
        n_blocks = config.arena_bytes // block_bytes
        quotas = tenant_quotas(config.tenant_quotas, n_blocks)
        core = MessengerCore(n_blocks=n_blocks, block_bytes=block_bytes, eviction=config.eviction, quotas=quotas)
        info = self._info(core)
        view = self._arena.view
        cut = CutArena(
            core,
            self._ssd,
            self._publisher,
            self._peers,
            self._tasks,
            me=self._holder,
            endpoint=self._server.endpoint,
        )
        receiver = cut.receiver = Receiver(
            core,
            view,
            info,
            self._sources,
            self._crew,
            transport=config.transport,
            identity=self._identity,
            data_host=config.data_host,
            rdma=self._rdma,
            on_written=cut.pool_changed,
        )
        self._listener = TcpListener(
            config.data_host, config.data_port, view, receiver, secret=receiver.link_secret, identity=self._identity
        )
        receiver.data_host, receiver.data_port = config.advertised_data(self._listener.port)
        cut.sender = Sender(
            view,
            info,
            self._peers,
            self._tasks,
            self._crew,
            transport=config.transport,
            tcp=TcpKind.TLS if config.tcp_tls else TcpKind.CLEAR,
            checksums=config.checksum,
            tcp_connections=config.tcp_connections,
            rdma=None if self._rdma is None else self._rdma.memory,
        )
        self._publisher.attach(core)
        self._ssd.start(core, view, namespace, self._tasks, changed=cut.pool_changed)
        log.info("arena_cut", block_bytes=block_bytes, n_blocks=core.pool.n_blocks, data_port=self._listener.port)
        return cut

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
            self._crew,
            incarnation=self._incarnation,
            endpoint=self._server.endpoint,
        )

    def _info(self, core: MessengerCore) -> ArenaInfo:
        return ArenaInfo(
            node_id=NodeId(self._config.node_id),
            incarnation=self._incarnation,
            host_id=host_id(),
            socket_path=os.fspath(self._arena_server.path),
            block_bytes=core.block_bytes,
            n_blocks=core.pool.n_blocks,
        )

    def _worker_gone(self, holder: Holder) -> None:
        if self._cut is not None:
            self._cut.worker_gone(holder)

    def _peer_lost(self, endpoint: str) -> None:
        if self._cut is not None:
            self._cut.peer_lost(endpoint)

    # --- what needs the pool ------------------------------------------------------------------------------------------

    def _ready(self) -> CutArena:
        if self._cut is None:
            raise NoFreeBlocks("no worker has attached to this messenger yet")
        return self._cut

    async def _acquire(self, request: Acquire, _: Caller) -> Acquired:
        return await self._ready().acquire(request)

    def _grow(self, request: Grow, _: Caller) -> Grown:
        return self._ready().grow(request)

    def _seal(self, request: Seal, _: Caller) -> None:
        self._ready().seal(request)

    def _open_write(self, request: OpenWrite, _: Caller) -> Ok:
        self._ready().open_write(request)
        return Ok()

    def _close_write(self, request: CloseWrite, _: Caller) -> Ok:
        self._ready().close_write(request)
        return Ok()

    def _release(self, request: Release, _: Caller) -> Ok:
        if self._cut is not None:
            self._cut.release(request.job_id)
        return Ok()

    def _start_send(self, request: StartSend, _: Caller) -> None:
        self._ready().start_send(request)

    def _slice_ready(self, ready: SliceReady, _: Caller) -> None:
        self._ready().announce(ready)

    async def _finish_send(self, request: FinishSend, _: Caller) -> SendReport:
        return await self._ready().finish_send(request)

    async def _open_transfer(self, request: OpenTransfer, _: Caller) -> TransferPlan:
        return await self._ready().receiver.open(request)

    def _connect_qp(self, request: ConnectQp, _: Caller) -> QpConnected:
        if self._rdma is None:
            raise TransferError(f"{self._config.node_id} does not use RDMA")
        return self._rdma.engine.accept(request)

    async def _slice_offer(self, offer: SliceOffer, _: Caller) -> SliceAck:
        return await self._ready().receiver.take_offer(offer)

    async def _abort_transfer(self, request: AbortTransfer, _: Caller) -> Ok:
        await self._ready().receiver.abort(request.transfer_id, request.reason)
        return Ok()

    def _read_ahead(self, order: ReadAhead, _: Caller) -> None:
        if self._cut is not None:
            self._cut.read_ahead(order)

    def _replicate(self, order: Replicate, _: Caller) -> None:
        if self._cut is not None:
            self._cut.replicate(order)

    def _pin_prefix(self, request: PinPrefix, _: Caller) -> PrefixPinned:
        return PrefixPinned(n_blocks=0) if self._cut is None else self._cut.prefix_pins.pin(request)

    async def _push_blocks(self, request: PushBlocks, _: Caller) -> Pushing:
        return await self._ready().push_blocks(request)


async def run(config: MessengerConfig, lifecycle: Lifecycle) -> None:
    """Run a messenger until *lifecycle* says stop."""
    async with asyncio.TaskGroup() as tasks:
        await MessengerService(config, tasks).run(lifecycle)
