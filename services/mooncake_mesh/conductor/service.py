"""The conductor process: one global scheduler over soft state.

====== ============== ======================================================================
socket who connects   what flows
====== ============== ======================================================================
ROUTER everybody      Register, Heartbeat, Goodbye; Schedule, Outcomes; KvEvents, KvSnapshot; StatusQuery
PUB    everybody      ClusterState, on every change and once a second
====== ============== ======================================================================
"""

import asyncio
from contextlib import ExitStack
from time import monotonic
from typing import Final

import structlog

from mooncake_mesh.conductor.core import ConductorCore, Incompatible
from mooncake_mesh.conductor.making import conductor_core, described
from mooncake_mesh.conductor.orders import Order
from mooncake_mesh.conductor.recording import OpenRecording
from mooncake_mesh.config import ConductorConfig
from mooncake_mesh.errors import MooncakeError, Refused
from mooncake_mesh.kv.event_stream import FeedRefused
from mooncake_mesh.mesh import endpoint as sockets
from mooncake_mesh.mesh.peers import HealthChanged, PeerEvent
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.mesh.rpc import Caller, Handler, RpcServer
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_proto import codec
from mooncake_proto.control import (
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Ping,
    Pong,
    Register,
    Registered,
    Role,
    StatusQuery,
    StatusReport,
    SwitchRole,
)
from mooncake_proto.decisions import DecisionsQuery, DecisionsReport
from mooncake_proto.ids import Incarnation, InstanceId, new_incarnation
from mooncake_proto.kvcache import KvEvents, KvEventsAck, KvSnapshot
from mooncake_proto.serving import Outcomes, Placement, Rejected, Schedule

log = structlog.get_logger(__name__)

_PUBLISH_S: Final = 1.0
_TELL_TIMEOUT_S: Final = 1.0
_MAX_TELLING: Final = 64


class ConductorService:
    """Handlers over one ConductorCore."""

    def __init__(
        self, config: ConductorConfig, core: ConductorCore, incarnation: Incarnation, tasks: asyncio.TaskGroup
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._incarnation = incarnation
        self._core = core
        self._publisher = sockets.Publisher(config.publish)
        self._told = Phonebook()
        self._telling: set[asyncio.Task[None]] = set()
        handlers: dict[type, Handler] = {
            Ping: self._ping,
            Register: self._register,
            Heartbeat: self._heartbeat,
            Goodbye: self._goodbye,
            Schedule: self._schedule,
            KvEvents: self._kv_events,
            KvSnapshot: self._kv_snapshot,
            Outcomes: self._outcomes,
            StatusQuery: self._status,
            DecisionsQuery: self._decisions,
        }
        self._server = RpcServer(config.bind, handlers, tasks)

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serve until *lifecycle* says stop."""
        clock = self._tasks.create_task(self._tick_forever())
        lifecycle.ready(endpoint=self._server.endpoint, publish=self._publisher.endpoint)
        await lifecycle.stopping.wait()
        clock.cancel()
        await asyncio.gather(clock, return_exceptions=True)
        await self._server.close()
        for telling in self._telling:
            telling.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        self._told.close()
        self._publisher.close()

    async def _tick_forever(self) -> None:
        published_s = monotonic()
        while True:
            await asyncio.sleep(self._config.heartbeat_s / 2)
            self._changed(self._core.expire(monotonic()))
            self._tell_all()
            if monotonic() - published_s >= _PUBLISH_S:
                published_s = monotonic()
                self._publish()

    # --- members ------------------------------------------------------------------------------------------------------

    def _register(self, request: Register, _: Caller) -> Registered:
        result = self._core.register(request.member, request.load, monotonic())
        if isinstance(result, Incompatible):
            log.warning("member_refused", instance_id=request.member.instance_id, difference=result.difference)
            raise Refused("incompatible_member", result.difference)
        self._changed(result)
        return Registered(
            conductor=self._incarnation,
            heartbeat_s=self._config.heartbeat_s,
            publish_endpoint=self._publisher.endpoint,
        )

    def _heartbeat(self, beat: Heartbeat, _: Caller) -> HeartbeatAck:
        events = self._core.heartbeat(beat.instance_id, beat.incarnation, beat.load, monotonic())
        self._changed(events or [])
        return HeartbeatAck(conductor=self._incarnation, known=events is not None)

    def _goodbye(self, request: Goodbye, _: Caller) -> None:
        self._changed(self._core.goodbye(request.instance_id, request.incarnation))

    def _changed(self, events: list[PeerEvent]) -> None:
        for event in events:
            health = event.health.value if isinstance(event, HealthChanged) else "joined"
            log.info(
                "member",
                instance_id=event.member.instance_id,
                health=health,
                node=event.member.node_id,
                incarnation=event.member.incarnation,
            )
        if events:
            self._publish()

    def _publish(self) -> None:
        self._publisher.publish(codec.encode(self._core.cluster_state(monotonic())))

    # --- blocks, placing, telling -------------------------------------------------------------------------------------

    def _kv_events(self, batch: KvEvents, _: Caller) -> KvEventsAck:
        return _applied(self._core.kv_events(batch))

    def _kv_snapshot(self, snapshot: KvSnapshot, _: Caller) -> KvEventsAck:
        return _applied(self._core.kv_snapshot(snapshot))

    async def _schedule(self, request: Schedule, _: Caller) -> Placement | Rejected:
        """A task, so that what the gateway has cancelled meanwhile is not placed at all."""
        result = self._core.schedule(request, monotonic())
        if isinstance(result, Rejected):
            log.info("request_rejected", job_id=request.job_id, reason=result.reason)
        else:
            log.info(
                "request_placed",
                job_id=request.job_id,
                prefill=result.prefill.instance_id,
                decode=result.decode.instance_id,
                prefix_blocks=result.local_prefix_blocks,
                fetch_blocks=result.fetch_prefix_blocks,
                ttft_est_s=round(result.ttft_est_s, 3),
            )
            self._tell_all()
        return result

    def _outcomes(self, batch: Outcomes, _: Caller) -> None:
        self._core.outcomes(batch, monotonic())

    def _tell_all(self) -> None:
        for order in self._core.orders.take():
            if isinstance(order.message, SwitchRole):
                _log_switch(order.message)
            self._tell(order)

    def _tell(self, order: Order) -> None:
        """In the background; what is too much for that is not said, as the mesh works without."""
        if len(self._telling) >= _MAX_TELLING:
            return
        telling = self._tasks.create_task(self._deliver(order))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _deliver(self, order: Order) -> None:
        try:
            await self._told.get(order.endpoint).send(order.message, timeout_s=_TELL_TIMEOUT_S)
        except MooncakeError as error:
            log.info("order_undelivered", endpoint=order.endpoint, code=error.code)

    def _status(self, _: StatusQuery, __: Caller) -> StatusReport:
        return self._core.status(monotonic())

    def _decisions(self, query: DecisionsQuery, _: Caller) -> DecisionsReport:
        return self._core.decisions.report(query, self._incarnation, monotonic())

    def _ping(self, _: Ping, __: Caller) -> Pong:
        return Pong(
            role=Role.CONDUCTOR, instance_id=InstanceId(self._config.instance_id), incarnation=self._incarnation
        )


def _log_switch(order: SwitchRole) -> None:
    """Who is to take which role, and the figures that tipped it."""
    log.info(
        "role_switch",
        instance_id=order.instance_id,
        to=order.role.value,
        prefill_demand=order.prefill_demand,
        decode_demand=order.decode_demand,
        prefill=order.prefill,
        decode=order.decode,
    )


def _applied(ack: KvEventsAck | FeedRefused | None) -> KvEventsAck:
    if ack is None:
        raise Refused("unknown_messenger", "the node's messenger is not registered")
    if isinstance(ack, FeedRefused):
        raise Refused("old_incarnation", f"incarnation {ack.got} was replaced by {ack.expected}")
    return ack


async def run(config: ConductorConfig, lifecycle: Lifecycle) -> None:
    """Run a conductor until *lifecycle* says stop."""
    incarnation, started_s = new_incarnation(), monotonic()
    with ExitStack() as files:
        recording = None
        if config.record is not None:
            about = described(config, incarnation, started_s)
            recording = files.enter_context(OpenRecording(config.record, about))
        core = conductor_core(config, incarnation, started_s, recording)
        async with asyncio.TaskGroup() as tasks:
            await ConductorService(config, core, incarnation, tasks).run(lifecycle)
