"""One messenger without sockets: its event loop, its transfers and its pool are real."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from mooncake_mesh.config import ChecksumKind, MessengerConfig, TransportKind
from mooncake_mesh.errors import PeerUnreachable, SliceLost
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.mesh.arena import Holder
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.cut_arena import CutArena
from mooncake_mesh.messenger.receiver import Receiver
from mooncake_mesh.messenger.sender import Sender
from mooncake_mesh.messenger.ssd import NodeSsd
from mooncake_mesh.messenger.transports import tls
from mooncake_mesh.messenger.transports.api import TcpKind
from mooncake_proto.control import Ok
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId, NodeId, TransferId
from mooncake_proto.transfer import AbortTransfer, Acquire, Acquired, ArenaInfo, OpenTransfer

N_BLOCKS, BLOCK_BYTES, LAYERS = 8, 64, 4
ME = Holder(instance_id=InstanceId("messenger0"), incarnation=Incarnation("life"))
WORKER = Holder(instance_id=InstanceId("prefill0"), incarnation=Incarnation("work"))
KEY = BlockKey(b"k" * 16)
T = TransferId("t")
OTHER = "ipc:///other"
HERE = "ipc:///me"


@contextmanager
def audited_core() -> Iterator[MessengerCore]:
    """A core of N_BLOCKS blocks, whose books must agree at the end, and once all its jobs are over."""
    made = MessengerCore(n_blocks=N_BLOCKS, block_bytes=BLOCK_BYTES)
    yield made
    made.pool.check_invariants()
    for job_id in made.all_jobs():
        made.release(job_id, "the test is over")
    made.pool.check_invariants()
    assert made.pool.available_blocks == N_BLOCKS, "nothing stays held"


class Peer:
    """The other messenger: notes what it is told; *answers* says what to each kind, by a future where it takes time."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.answers: dict[type, Any] = {AbortTransfer: Ok()}
        self.there = True

    async def call(self, body: object, _: type, *, timeout_s: float, connect_timeout_s: float | None = None) -> object:
        if not self.there and connect_timeout_s is not None:
            raise PeerUnreachable(f"no connection within {connect_timeout_s:g} s")
        self.told.append(body)
        answer = self.answers.get(type(body))
        if answer is None:
            await asyncio.sleep(timeout_s)
        return answer


class Rig:
    """One messenger from its event loop down to the pool; its sockets are doubles."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        transport: TransportKind = TransportKind.TCP,
        identity: tls.Identity | None = None,
    ) -> None:
        self.peer = Peer()
        peers = cast(Any, SimpleNamespace(get=lambda _: self.peer))
        self.core = MessengerCore(n_blocks=N_BLOCKS, block_bytes=BLOCK_BYTES)
        arena = memoryview(bytearray(N_BLOCKS * BLOCK_BYTES))
        info = ArenaInfo(
            node_id=NodeId("node0"),
            incarnation=ME.incarnation,
            host_id="host",
            socket_path="",
            block_bytes=BLOCK_BYTES,
            n_blocks=N_BLOCKS,
        )
        publisher = cast(Any, SimpleNamespace(poke=lambda: None))
        self.cut = CutArena(self.core, NodeSsd(MessengerConfig()), publisher, peers, tasks, me=ME, endpoint=HERE)
        crew = cast(Any, None)  # no bytes are moved
        self.receiver = self.cut.receiver = Receiver(
            self.core,
            arena,
            info,
            cast(Any, None),
            crew,
            transport=transport,
            identity=identity,
            data_host="localhost",
            rdma=None,
            on_written=self.cut.pool_changed,
        )
        self.sender = self.cut.sender = Sender(
            arena,
            info,
            peers,
            tasks,
            crew,
            transport=transport,
            tcp=TcpKind.CLEAR if identity is None else TcpKind.TLS,
            checksums=ChecksumKind.XXH3,
            tcp_connections=1,
            rdma=None,
        )
        self.info = info

    async def acquire(self, job: str, life: Incarnation = WORKER.incarnation, **fields: Any) -> Acquired:
        request = Acquire(
            job_id=JobId(job),
            instance_id=WORKER.instance_id,
            incarnation=life,
            keys=join_keys([KEY]),
            n_blocks=2,
            max_cached_blocks=1,
            **fields,
        )
        async with asyncio.timeout(5.0):
            return await self.cut.acquire(request)

    async def open_landing(self, tasks: asyncio.TaskGroup, job: str) -> "tuple[asyncio.Task[object], bytes]":
        """A job that waits for transfer T (its task ends with the failure, if there is one), and T's token."""

        async def wait() -> object:
            try:
                return await self.acquire(job, landing=T, landing_blocks=2, landing_layers=LAYERS)
            except SliceLost as error:
                return error

        waiting = tasks.create_task(wait())
        plan = await self.receiver.open(OpenTransfer(transfer_id=T, source=self.info, transports=("tcp",)))
        return waiting, bytes.fromhex(plan.token)


def run(
    scenario: Callable[[Rig, asyncio.TaskGroup], Any],
    transport: TransportKind = TransportKind.TCP,
    identity: tls.Identity | None = None,
) -> None:
    async def all_of_it() -> None:
        async with asyncio.TaskGroup() as tasks:
            rig = Rig(tasks, transport, identity)
            rig.cut.came(WORKER.incarnation)
            await scenario(rig, tasks)
            await rig.cut.close()
        rig.core.pool.check_invariants()
        assert rig.core.pool.available_blocks == N_BLOCKS, "nothing stays held"

    asyncio.run(all_of_it())
