"""What a conductor does for as long as it leads: answers over one ConductorCore, and what follows from them.

The only conductor of a mesh leads in one term without end. With standbys there is a core for each term: members
register again and messengers send their blocks again, as after a restart. Whether the term still runs is asked at the
moment of every act, for the process may have slept since it last was.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Final

import structlog

from mooncake_mesh.conductor.core import ConductorCore, Incompatible
from mooncake_mesh.conductor.orders import Order
from mooncake_mesh.config import ConductorConfig
from mooncake_mesh.errors import MooncakeError, NotLeader, Refused
from mooncake_mesh.kv.event_stream import FeedRefused
from mooncake_mesh.mesh import endpoint as sockets
from mooncake_mesh.mesh.peers import HealthChanged, PeerEvent
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.mesh.rpc import Caller, Handler
from mooncake_proto import codec
from mooncake_proto.control import (
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Register,
    Registered,
    StatusQuery,
    StatusReport,
    SwitchRole,
)
from mooncake_proto.decisions import DecisionsQuery, DecisionsReport
from mooncake_proto.ids import Incarnation
from mooncake_proto.kvcache import KvEvents, KvEventsAck, KvSnapshot
from mooncake_proto.serving import Outcomes, Placement, Rejected, Schedule

log = structlog.get_logger(__name__)

KINDS: Final = (
    Register, Heartbeat, Goodbye, Schedule, KvEvents, KvSnapshot, Outcomes, StatusQuery, DecisionsQuery,
)  # fmt: skip
"""What only a conductor that leads takes."""

_PUBLISH_S: Final = 1.0
_TELL_TIMEOUT_S: Final = 1.0
_MAX_TELLING: Final = 64
_SETTLED_S: Final = 2.0
"""How long after a takeover "nobody is there" means that they have not registered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mandate:
    """The right to lead: ``epoch`` 0 is that of the only conductor, which always ``runs``."""

    epoch: int = 0
    runs: Callable[[], bool] = lambda: True


class Term:
    """Its handlers raise NotLeader once *mandate* has run out."""

    def __init__(
        self,
        config: ConductorConfig,
        core: ConductorCore,
        incarnation: Incarnation,
        publisher: sockets.Publisher,
        tasks: asyncio.TaskGroup,
        mandate: Mandate,
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._incarnation = incarnation
        self._core = core
        self._publisher = publisher
        self._mandate = mandate
        self._began_s = monotonic()
        self._told = Phonebook()
        self._telling: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[type, Handler]:
        plain: dict[type, Callable[[Any], object]] = {
            Register: self._register,
            Heartbeat: self._heartbeat,
            Goodbye: self._goodbye,
            KvEvents: self._kv_events,
            KvSnapshot: self._kv_snapshot,
            Outcomes: self._outcomes,
            StatusQuery: self._status,
            DecisionsQuery: self._decisions,
        }
        return {Schedule: self._schedule, **{kind: self._while_it_runs(handler) for kind, handler in plain.items()}}

    async def run(self) -> None:
        """Keep the time until cancelled; nothing is under way any more then."""
        try:
            await self._tick_forever()
        finally:
            for telling in self._telling:
                telling.cancel()
            await asyncio.gather(*self._telling, return_exceptions=True)
            self._told.close()

    def _while_it_runs(self, handler: Callable[[Any], object]) -> Handler:
        def answer(body: Any, _: Caller) -> object:
            self._check()
            return handler(body)

        return answer

    def _check(self) -> None:
        if not self._mandate.runs():
            raise NotLeader("this conductor leads no more")

    async def _tick_forever(self) -> None:
        published_s = monotonic()
        while True:
            await asyncio.sleep(self._config.heartbeat_s / 2)
            if not self._mandate.runs():
                continue  # whoever gave the mandate ends this
            self._changed(self._core.expire(monotonic()))
            self._tell_all()
            if monotonic() - published_s >= _PUBLISH_S:
                published_s = monotonic()
                self._publish()

    # --- members ------------------------------------------------------------------------------------------------------

    def _register(self, request: Register) -> Registered:
        result = self._core.register(request.member, request.load, monotonic())
        if isinstance(result, Incompatible):
            log.warning("member_refused", instance_id=request.member.instance_id, difference=result.difference)
            raise Refused("incompatible_member", result.difference)
        self._changed(result)
        return Registered(
            conductor=self._incarnation,
            heartbeat_s=self._config.heartbeat_s,
            publish_endpoint=self._publisher.endpoint,
            epoch=self._mandate.epoch,
        )

    def _heartbeat(self, beat: Heartbeat) -> HeartbeatAck:
        events = self._core.heartbeat(beat.instance_id, beat.incarnation, beat.load, monotonic())
        self._changed(events or [])
        return HeartbeatAck(conductor=self._incarnation, known=events is not None)

    def _goodbye(self, request: Goodbye) -> None:
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

    def _kv_events(self, batch: KvEvents) -> KvEventsAck:
        return _applied(self._core.kv_events(batch))

    def _kv_snapshot(self, snapshot: KvSnapshot) -> KvEventsAck:
        return _applied(self._core.kv_snapshot(snapshot))

    async def _schedule(self, request: Schedule, _: Caller) -> Placement | Rejected:
        """A task, so that what the gateway has cancelled meanwhile is not placed at all."""
        self._check()
        result = self._core.schedule(request, monotonic())
        if isinstance(result, Rejected):
            self._check_settled(result)
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

    def _check_settled(self, refusal: Rejected) -> None:
        """Right after a start or a takeover whoever asks is to ask again: the workers register within a beat or two."""
        if refusal.unavailable and monotonic() - self._began_s < _SETTLED_S:
            raise NotLeader(f"this conductor has just begun: {refusal.reason}")

    def _outcomes(self, batch: Outcomes) -> None:
        self._core.outcomes(batch, monotonic())

    def _tell_all(self) -> None:
        for order in self._core.orders.take():
            if isinstance(order.message, SwitchRole):
                _log_switch(order.message)
                order = replace(order, message=replace(order.message, epoch=self._mandate.epoch))
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

    def _status(self, _: StatusQuery) -> StatusReport:
        return self._core.status(monotonic())

    def _decisions(self, query: DecisionsQuery) -> DecisionsReport:
        return self._core.decisions.report(query, self._incarnation, monotonic())


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
