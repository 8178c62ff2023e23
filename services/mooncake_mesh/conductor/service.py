"""The conductor process: one global scheduler over soft state.

====== ============== ======================================================================
socket who connects   what flows
====== ============== ======================================================================
ROUTER everybody      Register, Heartbeat, Goodbye; Schedule, Outcomes; KvEvents, KvSnapshot; StatusQuery; LeaderQuery
PUB    everybody      ClusterState, on every change and once a second
HTTP   etcd           the lease of the leader, where there are standbys
====== ============== ======================================================================

A conductor that does not lead is a standby: it is ready, and answers all but Ping and LeaderQuery with "not leader".
"""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import structlog

from mooncake_mesh.conductor.candidate import Candidate
from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.conductor.making import conductor_core, described
from mooncake_mesh.conductor.recording import OpenRecording
from mooncake_mesh.conductor.term import KINDS, Mandate, Term
from mooncake_mesh.config import ConductorConfig
from mooncake_mesh.errors import NotLeader
from mooncake_mesh.mesh import endpoint as sockets
from mooncake_mesh.mesh.conductors import standing
from mooncake_mesh.mesh.rpc import Caller, Handler, RpcServer
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_proto.control import LeaderQuery, LeaderReport, Ping, Pong, Role
from mooncake_proto.ids import Incarnation, InstanceId, new_incarnation

log = structlog.get_logger(__name__)


class ConductorService:
    """The sockets, which stay from one term to the next, and the terms."""

    def __init__(self, config: ConductorConfig, tasks: asyncio.TaskGroup) -> None:
        self._config = config
        self._tasks = tasks
        self._incarnation = new_incarnation()
        self._publisher = sockets.Publisher(config.publish)
        handlers: dict[type, Handler] = {Ping: self._ping, LeaderQuery: self._leader}
        handlers |= dict.fromkeys(KINDS, self._refuse)
        self._server = RpcServer(config.bind, handlers, tasks)
        me = f"{config.instance_id} at {self._server.endpoint}"
        self._candidate = Candidate(config.etcd, me, self.lead, tasks) if config.etcd.urls else None

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serve until *lifecycle* says stop. The only conductor leads before anybody can ask it anything."""
        with ExitStack() as files:
            leads = self._begin(Mandate(), files).run() if self._candidate is None else self._candidate.run()
            leading = self._tasks.create_task(leads)
            lifecycle.ready(endpoint=self._server.endpoint, publish=self._publisher.endpoint)
            await lifecycle.stopping.wait()
            await self._server.close()
            if self._candidate is None:
                leading.cancel()
            else:
                self._candidate.stop()
            await asyncio.gather(leading, return_exceptions=True)
            self._publisher.close()

    async def lead(self, mandate: Mandate) -> None:
        """Be the conductor until cancelled."""
        with ExitStack() as files:
            try:
                await self._begin(mandate, files).run()
            finally:
                self._server.take(dict.fromkeys(KINDS, self._refuse))

    def _begin(self, mandate: Mandate, files: ExitStack) -> Term:
        """A term with nothing known at first, which takes all messages from now on."""
        incarnation = new_incarnation() if mandate.epoch else self._incarnation
        core = self._core(incarnation, mandate, files)
        term = Term(self._config, core, incarnation, self._publisher, self._tasks, mandate)
        self._server.take(term.handlers())
        return term

    def _core(self, incarnation: Incarnation, mandate: Mandate, files: ExitStack) -> ConductorCore:
        config, started_s = self._config, monotonic()
        recording = None
        if config.record is not None:
            about = described(config, incarnation, started_s)
            recording = files.enter_context(OpenRecording(_record_of(config.record, mandate.epoch), about))
        return conductor_core(config, incarnation, started_s, recording)

    def _refuse(self, _: object, __: Caller) -> None:
        raise NotLeader(standing(self._report()))

    def _leader(self, _: LeaderQuery, __: Caller) -> LeaderReport:
        return self._report()

    def _report(self) -> LeaderReport:
        me = InstanceId(self._config.instance_id)
        if self._candidate is None:
            return LeaderReport(instance_id=me, leads=True, epoch=0, leader="", trouble="")
        return self._candidate.report(me)

    def _ping(self, _: Ping, __: Caller) -> Pong:
        return Pong(
            role=Role.CONDUCTOR, instance_id=InstanceId(self._config.instance_id), incarnation=self._incarnation
        )


def _record_of(record: Path, epoch: int) -> Path:
    """Where there are standbys, each term has a file of its own: a recording is that of one core."""
    return record.with_name(f"{record.name}.{epoch}") if epoch else record


async def run(config: ConductorConfig, lifecycle: Lifecycle) -> None:
    """Run a conductor until *lifecycle* says stop. Raises ConfigError for what no term could begin with."""
    conductor_core(config, new_incarnation(), monotonic())
    if config.etcd.urls_in_clear:
        log.warning(
            "etcd_in_clear",
            endpoints=config.etcd.urls_in_clear,
            danger="who can write to it, or change what goes there and back, decides who leads",
            remedy="https:// endpoints, with etcd.ca, and etcd.cert where it asks for one",
        )
    async with asyncio.TaskGroup() as tasks:
        await ConductorService(config, tasks).run(lifecycle)
