"""Transfers between two jobs of one arena: at the end the receiver's job has the sender's blocks, and no byte moved.

Prefill and decode on one machine need no transport: what prefill wrote for a request is where decode would put it.
While it is written nothing happens here but bookkeeping; then the receiver gives its fresh blocks for the sender's.
"""

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import Final

from mooncake_mesh.errors import SliceLost
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.endings import Ended
from mooncake_mesh.messenger.landing import Landing
from mooncake_mesh.messenger.sending import Outbound
from mooncake_proto.ids import TransferId
from mooncake_proto.transfer import SendReport, SliceReady

WITHIN: Final = "arena"
"""What stands for a transport where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    started_s: float
    deadline_s: float


class HandOvers:
    """All such transfers under way. *changed* is rung, and rings, when landings open and end."""

    def __init__(self, core: MessengerCore, changed: Bell) -> None:
        self._core = core
        self._changed = changed
        self._under_way: dict[TransferId, _UnderWay] = {}
        self.transports: set[str] = set()

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._under_way

    def start(self, outbound: Outbound, deadline_s: float) -> None:
        """Begin a transfer; slices follow by :meth:`announce`."""
        self._under_way[outbound.transfer_id] = _UnderWay(started_s=monotonic(), deadline_s=deadline_s)

    def announce(self, ready: SliceReady) -> None:
        """Slices of a running transfer are written. Raises SliceLost outside its blocks."""
        outbound = self._core.outbound(ready.transfer_id)
        if outbound is not None:
            outbound.ready(ready)

    async def finish(self, transfer_id: TransferId) -> SendReport:
        """Wait for the landing, and hand over. Raises SliceLost when none comes, or some slice was not written."""
        way = self._under_way[transfer_id]
        try:
            async with asyncio.timeout(way.started_s + way.deadline_s - monotonic()):
                outbound, landing = await self._changed.until(lambda: self._met(transfer_id))
        except TimeoutError:
            raise SliceLost(f"transfer {transfer_id} took over {way.deadline_s:g} s") from None
        self.transports.add(WITHIN)
        return SendReport(
            transfer_id=transfer_id,
            transport=WITHIN,
            sent_bytes=0,
            overlapped_bytes=0,
            skipped_blocks=outbound.n_blocks - self._handed(outbound, landing),
            elapsed_s=monotonic() - way.started_s,
        )

    def _handed(self, outbound: Outbound, landing: Landing | Ended) -> int:
        """How many blocks have changed hands. A landing that is over wanted none, or raises SliceLost."""
        if isinstance(landing, Landing):
            self._core.hand_over(outbound, landing, monotonic())
            self._changed.ring()
            return len(landing.slots)
        if landing.failure:
            raise SliceLost(f"transfer {outbound.transfer_id} has ended: {landing.failure}")
        return 0

    def forget(self, transfer_id: TransferId, why: str) -> None:
        """A job of the transfer is over. If it is the sender's, a landing that still waits has failed."""
        if transfer_id in self._under_way and self._core.outbound(transfer_id) is None:
            del self._under_way[transfer_id]
            self._core.give_up(transfer_id, why)
            self._changed.ring()

    def _met(self, transfer_id: TransferId) -> tuple[Outbound, Landing | Ended] | None:
        outbound = self._core.outbound(transfer_id)
        if outbound is None:
            raise SliceLost(f"transfer {transfer_id}: the sender's job was released")
        landing = self._core.landing_or_end(transfer_id)
        return None if landing is None else (outbound, landing)
