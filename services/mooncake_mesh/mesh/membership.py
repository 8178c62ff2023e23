"""A process' standing with the conductor: register, beat, hear who else is there.

The conductor holds soft state only. When it answers a beat with "unknown" (it restarted, or it had declared us dead)
the process registers again and *on_registered* gives it the chance to publish what the conductor needs, such as a
snapshot of its blocks. Of several conductors it registers with the one that leads.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from mooncake_mesh.errors import MeshError, MooncakeError
from mooncake_mesh.mesh.conductors import Conductors
from mooncake_mesh.mesh.connecting import subscriber
from mooncake_mesh.mesh.endpoint import Channel
from mooncake_mesh.mesh.log_allowance import LogAllowance
from mooncake_proto import codec
from mooncake_proto.control import (
    ClusterState,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Load,
    Member,
    Register,
    Registered,
)
from mooncake_proto.errors import WireError

log = structlog.get_logger(__name__)

_CALL_TIMEOUT_S = 2.0
_RETRY_S = 0.25
_GOODBYE_TIMEOUT_S = 0.2


class Membership:
    """Keeps one member registered for as long as :meth:`run` runs."""

    def __init__(
        self,
        conductors: Conductors,
        member: Member,
        load: Callable[[], Load],
        *,
        on_registered: Callable[[], Awaitable[None]] | None = None,
        on_cluster: Callable[[ClusterState], None] | None = None,
    ) -> None:
        self._conductors = conductors
        self._member = member
        self._load = load
        self._on_registered = on_registered
        self._on_cluster = on_cluster
        self._states: Channel | None = None
        self._states_endpoint = ""
        self._beat_now = asyncio.Event()
        self._has_left = False
        self._told = LogAllowance()
        self.registered = asyncio.Event()

    async def run(self) -> None:
        """Register and beat until :meth:`leave`, and hear cluster states until cancelled.

        A refused registration (incompatible member) is logged and tried again.
        """
        try:
            while not self._has_left:
                try:
                    await self._conductors.follow()
                    registered = await self._register()
                    await self._beat(registered)
                except MooncakeError as error:
                    self._tell(error)
                    self.registered.clear()
                    await asyncio.sleep(_RETRY_S)
            await asyncio.get_running_loop().create_future()
        finally:
            if self._states is not None:
                self._states.close()

    def news(self) -> None:
        """The load changed in a way that others wait for: beat now, not at the next turn."""
        self._beat_now.set()

    async def leave(self) -> None:
        """Say goodbye, for good; a conductor that is gone need not hear it."""
        self._has_left = True
        goodbye = Goodbye(instance_id=self._member.instance_id, incarnation=self._member.incarnation)
        try:
            await self._conductors.leader.send(goodbye, timeout_s=_GOODBYE_TIMEOUT_S)
        except MeshError as error:
            log.info("goodbye_undelivered", code=error.code)

    def _tell(self, error: MooncakeError) -> None:
        """A conductor may be away for long, and it is tried several times a second."""
        unsaid = self._told.take(asyncio.get_running_loop().time())
        if unsaid is not None:
            log.warning("conductor_unavailable", code=error.code, error=str(error)[:500], unsaid=unsaid)

    async def _register(self) -> Registered:
        register = Register(member=self._member, load=self._load())
        reply = await self._conductors.leader.call(register, Registered, timeout_s=_CALL_TIMEOUT_S)
        log.info("registered", conductor=reply.conductor)
        self._conductors.registered(reply.epoch)
        if self._on_cluster is not None:
            self._subscribe(reply.publish_endpoint)
        if self._on_registered is not None:
            await self._on_registered()
        self.registered.set()
        return reply

    def _subscribe(self, endpoint: str) -> None:
        """Hear the states published at *endpoint*, which a restarted conductor may have moved."""
        if endpoint == self._states_endpoint:
            return
        if self._states is not None:
            self._states.close()
        self._states = subscriber(endpoint, self._hear)
        self._states_endpoint = endpoint

    async def _beat(self, registered: Registered) -> None:
        while True:
            await self._next_beat(registered.heartbeat_s)
            beat = Heartbeat(
                instance_id=self._member.instance_id, incarnation=self._member.incarnation, load=self._load()
            )
            ack = await self._conductors.leader.call(beat, HeartbeatAck, timeout_s=_CALL_TIMEOUT_S)
            if self._has_left:
                return
            if not ack.known or ack.conductor != registered.conductor:
                log.info("registering_again", conductor=ack.conductor)
                self.registered.clear()
                return

    async def _next_beat(self, heartbeat_s: float) -> None:
        try:
            async with asyncio.timeout(heartbeat_s):
                await self._beat_now.wait()
        except TimeoutError:
            return
        finally:
            self._beat_now.clear()

    def _hear(self, frames: list[bytes]) -> None:
        try:
            _, body = codec.decode(frames)
        except WireError as error:
            log.warning("message_refused", code=error.code, error=str(error)[:200])
            return
        if isinstance(body, ClusterState) and self._on_cluster is not None:
            self._on_cluster(body)
