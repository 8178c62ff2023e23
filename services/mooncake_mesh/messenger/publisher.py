"""Telling the conductor which blocks this node holds: events in order, a snapshot when it lost the thread."""

import asyncio
from typing import Final

import structlog

from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.kv.event_stream import EventLog, Unsendable
from mooncake_mesh.mesh.conductors import Conductors
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_proto.ids import Incarnation, NodeId
from mooncake_proto.kvcache import KvEvents, KvEventsAck, KvSnapshot

log = structlog.get_logger(__name__)

_REPLAY_EVENTS: Final = 8_192
_BATCH_EVENTS: Final = 4_096
_CALL_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.5
_GATHER_S: Final = 0.02
"""News is gathered this long before it is sent: placement hints may be that old, and most changes come in bursts."""


class KvPublisher:
    """Sends what the pool reports. :meth:`poke` after every change of the pool; :meth:`restart` after registration."""

    def __init__(self, conductors: Conductors, node_id: NodeId, incarnation: Incarnation) -> None:
        self._conductors = conductors
        self._log = EventLog(node_id, incarnation, replay_events=_REPLAY_EVENTS)
        self._core: MessengerCore | None = None
        self._acked_seq = 1
        self._wake = asyncio.Event()

    def attach(self, core: MessengerCore) -> None:
        """The pool exists now."""
        self._core = core

    def poke(self) -> None:
        """The pool may have news."""
        if self._core is not None:
            self._log.append(self._core.drain_events())
            if self._log.next_seq != self._acked_seq:
                self._wake.set()

    def restart(self) -> None:
        """The conductor knows nothing of this node (any more): it expects event 1."""
        self._acked_seq = 1
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
            self._wake.clear()
            try:
                await self._catch_up()
            except MooncakeError as error:
                log.warning("kv_events_undelivered", code=error.code, error=str(error)[:200])
                self._wake.set()
                await asyncio.sleep(_RETRY_S)

    async def _catch_up(self) -> None:
        while (message := self._next()) is not None:
            ack = await self._conductors.leader.call(message, KvEventsAck, timeout_s=_CALL_TIMEOUT_S)
            self._acked_seq = ack.next_seq

    def _next(self) -> KvEvents | KvSnapshot | None:
        batch = self._log.batch(self._acked_seq, max_events=_BATCH_EVENTS)
        if batch is Unsendable.NOTHING_NEW:
            return None
        if isinstance(batch, Unsendable):
            return self._log.snapshot(*(self._core.keys() if self._core is not None else ([], [])))
        return batch
