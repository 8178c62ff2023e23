"""What prefill and decode workers share: a place in the mesh, the arena under the engine, word to the gateways."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import structlog

from mooncake_mesh.config import DecodeConfig, PrefillConfig
from mooncake_mesh.engine.api import Engine, ModelSpec
from mooncake_mesh.engine.factory import make_engine
from mooncake_mesh.errors import Draining, MeshError, MooncakeError, PeerUnreachable, Rejected
from mooncake_mesh.kv.layers import StagePart
from mooncake_mesh.mesh.arena import Holder
from mooncake_mesh.mesh.conductors import Conductors
from mooncake_mesh.mesh.core_board import CoreBoard
from mooncake_mesh.mesh.crew import Crew
from mooncake_mesh.mesh.membership import Membership
from mooncake_mesh.mesh.node_arena import NodeArena
from mooncake_mesh.mesh.orders import check_incarnation, stop_ordered
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.mesh.rpc import Caller, Handler, RpcClient, RpcServer
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_mesh.worker.grammars import Grammars
from mooncake_mesh.worker.home import WorkerHome
from mooncake_mesh.worker.job_waits import EarlyCancels, JobWaits
from mooncake_proto.control import Drain, Load, Member, ModelCard, Ok, Ping, Pong, Role, Stop, SwitchRole
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId, new_incarnation
from mooncake_proto.job_query import JobQuery, JobStanding
from mooncake_proto.serving import JobFailed
from mooncake_proto.transfer import Release

log = structlog.get_logger(__name__)

_T = TypeVar("_T")
_RELEASE_TIMEOUT_S: Final = 5.0
_RELEASE_PAUSE_S: Final = 0.2
_SWITCH_S: Final = 0.0002
"""How long the event loop may keep the engine thread from the interpreter, and the other way round. Python's 5 ms
would be added to a step whenever a message is being handled just as the device is done."""
_LAST_WORDS_S: Final = 5.0

WorkerConfig = PrefillConfig | DecodeConfig


class ArenaUser(Protocol):
    """What is bound to the arena, and again to each that follows; on the engine thread. See Engine."""

    @property
    def spec(self) -> ModelSpec: ...

    def bind(self, arena: memoryview) -> None: ...

    def unbind(self) -> None: ...


class Station:
    """One worker process. ``messenger`` and ``peers`` are for its service to call; all else runs here. ``grammars`` are
    there once the engine is loaded, and ``cores`` where it shares the machine's with other processes.

    *on_stop(error)* must end every job of the service with that error: the arena is gone, or draining took too long.
    *on_gateway_lost(endpoint)* must stop the jobs whose tokens go there. *has_job* says whether a job is here.
    *on_gateway_lost(endpoint)* must stop the jobs whose tokens go there. *is_idle* says that no job is left. With a
    *home* this is one turn of a worker that can switch.
    """

    def __init__(
        self,
        config: WorkerConfig,
        role: Role,
        tasks: asyncio.TaskGroup,
        *,
        load: Callable[[], Load],
        on_stop: Callable[[MooncakeError], None],
        on_gateway_lost: Callable[[str], None],
        has_job: Callable[[JobId], bool] = lambda _: False,
        home: WorkerHome | None = None,
    ) -> None:
        sys.setswitchinterval(_SWITCH_S)
        self.me = Holder(instance_id=InstanceId(config.instance_id), incarnation=new_incarnation())
        self.messenger = RpcClient(config.messenger)
        self.peers = Phonebook(on_lost=on_gateway_lost)
        self.waits = JobWaits()
        self.grammars: Grammars
        self.cores: CoreBoard | None = None if home is None else home.cores
        self.early_cancels = EarlyCancels()
        self.is_draining = False
        self._is_closed = False
        self._config = config
        self._role = role
        self._tasks = tasks
        self._load = load
        self._on_stop = on_stop
        self._has_job = has_job
        self._home = home
        self._engine_thread = Crew(1, name="engine") if home is None else home.thread
        self._conductors = Conductors(config.conductor)
        self._arena: NodeArena | None = None
        self._membership: Membership | None = None

    async def load_engine(self, part: StagePart | None = None) -> Engine:
        """Make the engine, or its *part* for a stage, on its own thread, where it will live; or the one that is there.
        Raises ModelError, or MeshError for a core board."""
        engine = None if self._home is None else self._home.engine
        if engine is None:
            path = self._config.core_board if self._config.device.startswith("cpu") else None
            self.cores = None if path is None else CoreBoard(path, self._config.threads)
            engine = await self.on_engine_thread(make_engine, self._config, part, self.cores)
        if self._home is not None:
            self._home.engine, self._home.cores = engine, self.cores
        self.grammars = Grammars(engine.vocabulary)
        return engine

    @property
    def arena_owner(self) -> Incarnation | None:
        """The messenger whose arena the engine computes on; None while it has none."""
        return None if self._arena is None else self._arena.owner

    def news(self) -> None:
        """The load changed in a way that others wait for: tell the conductor now, not with the next beat."""
        if self._membership is not None:
            self._membership.news()

    def on_engine_thread(self, work: Callable[..., _T], *args: Any) -> "asyncio.Future[_T]":
        """Start *work* on the thread where the engine lives."""
        return self._engine_thread.run(partial(work, *args))

    async def run(
        self,
        engine: ArenaUser,
        lifecycle: Lifecycle,
        handlers: dict[type, Handler],
        background: list[Coroutine[Any, Any, None]],
        idle: Callable[[], Awaitable[object]],
    ) -> None:
        """Serve until *lifecycle* says stop, then let the accepted jobs finish (*idle* returns when they have)."""
        process = lifecycle if self._home is None else self._home.process
        orders: dict[type, Handler] = {
            Ping: self._ping,
            JobQuery: self._job_queried,
            Drain: self._drain_ordered,
            Stop: lambda order, _: stop_ordered(order, self.me.incarnation, process),
        }
        server = self._server(orders | handlers)
        self._arena = self._node_arena(engine)
        running = [self._tasks.create_task(work) for work in (self._arena.run(), *background)]
        if await self._first_attached(self._arena, lifecycle):
            membership = Membership(self._conductors, self._member(engine, server.endpoint), self._load)
            self._membership = membership
            running.append(self._tasks.create_task(membership.run()))
            lifecycle.ready(self._engine_thread.progress, endpoint=server.endpoint, model=engine.spec.name)
            await lifecycle.stopping.wait()
            await self._drain(membership, idle)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._home is None:
            await server.close()
        self._close()

    def check_placement(self, incarnation: Incarnation) -> None:
        """Raise unless a job placed on *incarnation* can be taken now."""
        if incarnation != self.me.incarnation:
            raise PeerUnreachable("the job was placed on another incarnation of this instance")
        if self.is_draining or self.arena_owner is None:
            raise Draining("this instance takes no jobs now")

    def report_failure(self, job_id: JobId, stream_endpoint: str, error: MooncakeError) -> None:
        """Tell the gateway that a job is over here."""
        log.warning("job_failed", job_id=job_id, code=error.code, error=str(error)[:300])
        failed = JobFailed(
            job_id=job_id,
            instance_id=self.me.instance_id,
            code=error.code,
            message=str(error)[:500],
            retryable=error.retryable,
            retry_after_s=error.retry_after_s if isinstance(error, Rejected) else None,
        )
        try:
            self.peers.get(stream_endpoint).post(failed)
        except MeshError as unreachable:
            log.info("gateway_unreachable", job_id=job_id, code=unreachable.code)

    async def release(self, job_id: JobId) -> None:
        """Give the job's blocks back, also to a messenger that was away for a while: it still holds them, unless it has
        begun another life, and then its answer is the same. Nothing is owed once the process ends."""
        while not self._is_closed:
            try:
                await self.messenger.call(Release(job_id=job_id), Ok, timeout_s=_RELEASE_TIMEOUT_S)
                return
            except MooncakeError as error:
                log.warning("release_failed", job_id=job_id, code=error.code)
                await asyncio.sleep(_RELEASE_PAUSE_S)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _node_arena(self, engine: ArenaUser) -> NodeArena:
        async def bind(arena: memoryview) -> None:
            await self.on_engine_thread(engine.bind, arena)

        async def unbind() -> None:
            await self.on_engine_thread(engine.unbind)

        spec = engine.spec
        return NodeArena(
            self.messenger,
            self.me,
            spec.layout.block_bytes,
            layout=f"{spec.fingerprint} {spec.layout.dtype.value} {spec.layout.block_tokens}",
            bind=bind,
            unbind=unbind,
            on_lost=lambda: self._on_stop(PeerUnreachable("the node's messenger is gone")),
        )

    async def _first_attached(self, arena: NodeArena, lifecycle: Lifecycle) -> bool:
        """Wait for the arena, or for the order to stop; whether it was the arena."""
        waits = [self._tasks.create_task(arena.attached.wait()), self._tasks.create_task(lifecycle.stopping.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return arena.attached.is_set()

    def _server(self, handlers: dict[type, Handler]) -> RpcServer:
        if self._home is None:
            return RpcServer(self._config.bind, handlers, self._tasks)
        return self._home.serve(self._config.bind, {SwitchRole: self._switch, **handlers})

    def _switch(self, order: SwitchRole, _: Caller) -> None:
        is_meant = order.incarnation == self.me.incarnation and order.epoch == self._conductors.epoch
        if self._home is not None and is_meant:
            self._home.switch(order)

    async def _drain(self, membership: Membership, idle: Callable[[], Awaitable[object]]) -> None:
        """Finish what was accepted. Who stops has left by then; who only switches goes on telling how far it is."""
        self.is_draining = True
        if self._home is not None and self._home.role is not self._role:
            membership.news()
            await self._finish(idle)
            await membership.leave()
        else:
            await membership.leave()
            await self._finish(idle)

    async def _finish(self, idle: Callable[[], Awaitable[object]]) -> None:
        try:
            async with asyncio.timeout(self._config.drain_s):
                await idle()
        except TimeoutError:
            self._on_stop(Draining("the instance stops"))
            await self._told(idle)

    async def _told(self, idle: Callable[[], Awaitable[object]]) -> None:
        """Wait until the stopped jobs have ended: each tells its gateway, which then need not find out by itself."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await idle()
        except TimeoutError:
            log.warning("stop_incomplete", waited_s=_LAST_WORDS_S)

    def _member(self, engine: ArenaUser, endpoint: str) -> Member:
        spec = engine.spec
        return Member(
            role=self._role,
            instance_id=self.me.instance_id,
            node_id=NodeId(self._config.node_id),
            incarnation=self.me.incarnation,
            endpoint=endpoint,
            kind=self._config.kind,
            can_switch=self._home is not None,
            model=ModelCard(
                name=spec.name,
                fingerprint=spec.fingerprint,
                dtype=spec.layout.dtype.value,
                block_tokens=spec.layout.block_tokens,
                block_bytes=spec.layout.block_bytes,
                max_context_tokens=spec.max_context_tokens,
            ),
        )

    def _ping(self, _: Ping, __: Caller) -> Pong:
        return Pong(role=self._role, instance_id=self.me.instance_id, incarnation=self.me.incarnation)

    def _job_queried(self, query: JobQuery, _: Caller) -> JobStanding:
        return JobStanding(job_id=query.job_id, known=self._has_job(query.job_id))

    def _drain_ordered(self, order: Drain, _: Caller) -> Ok:
        """The load tells that it drains, and when it has drained."""
        check_incarnation(order.incarnation, self.me.incarnation)
        if not self.is_draining:
            log.info("draining", running_jobs=self._load().running_jobs)
            self.is_draining = True
            self.news()
        return Ok()

    def _close(self) -> None:
        self._is_closed = True
        self.peers.close()
        self.messenger.close()
        self._conductors.close()
        self.grammars.close()
        if self._home is None:
            self._engine_thread.close()
