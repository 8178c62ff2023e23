"""Transfers between two jobs of one arena: at the end the receiver has the sender's blocks, and no byte has moved.

Prefill and decode on one machine need no transport: what prefill wrote for a request is where decode would have it. The
receiver reserves nothing before. So a prompt takes the room of one, and those that are computed never wait for room
that they take themselves.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

from mooncake_mesh.errors import MooncakeError, SliceLost
from mooncake_mesh.kv.block_pool import NoRoom
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.landing import Landing
from mooncake_mesh.messenger.sending import Outbound
from mooncake_proto.ids import TransferId
from mooncake_proto.transfer import Acquire, Acquired, Landed, SendReport, SliceReady

WITHIN: Final = "arena"
"""What stands for a transport where there is none."""


@dataclass(slots=True)
class _Sending:
    outbound: Outbound
    started_s: float
    deadline_s: float
    is_taken: bool = False


class HandOvers:
    """All such transfers under way. *changed* rings for them, and for whatever changes the pool."""

    def __init__(self, core: MessengerCore, changed: Bell) -> None:
        self._core = core
        self._changed = changed
        self._sending: dict[TransferId, _Sending] = {}
        self.transports: set[str] = set()

    # --- the sender ---------------------------------------------------------------------------------------------------

    def __contains__(self, transfer_id: TransferId) -> bool:
        """Whether its sender is here, and not over."""
        return transfer_id in self._sending

    def start(self, outbound: Outbound, deadline_s: float) -> None:
        """Begin a transfer; slices follow by :meth:`announce`."""
        self._sending[outbound.transfer_id] = _Sending(outbound=outbound, started_s=monotonic(), deadline_s=deadline_s)

    def announce(self, ready: SliceReady) -> None:
        """Slices of a running transfer are written. Raises SliceLost outside its blocks."""
        self._sending[ready.transfer_id].outbound.ready(ready)

    async def finish(self, transfer_id: TransferId) -> SendReport:
        """All is written: wait until it is taken. Raises SliceLost when nobody takes it."""
        sending = self._sending[transfer_id]
        sending.outbound.finish()
        self._changed.ring()
        try:
            async with asyncio.timeout(sending.started_s + sending.deadline_s - monotonic()):
                await self._changed.until(lambda: self._is_taken(transfer_id, sending))
        except TimeoutError:
            raise SliceLost(f"transfer {transfer_id} took over {sending.deadline_s:g} s") from None
        self.transports.add(WITHIN)
        return SendReport(
            transfer_id=transfer_id,
            transport=WITHIN,
            sent_bytes=0,
            overlapped_bytes=0,
            skipped_blocks=0,
            elapsed_s=monotonic() - sending.started_s,
        )

    def _is_taken(self, transfer_id: TransferId, sending: _Sending) -> bool | None:
        """None while that is open. Raises SliceLost."""
        if transfer_id not in self._sending:
            raise SliceLost(f"transfer {transfer_id}: the sender's job was released")
        if sending.is_taken:
            return True
        ended = self._core.landing_or_end(transfer_id)
        if ended is None:
            return None
        if isinstance(ended, Landing):
            raise SliceLost(f"transfer {transfer_id}: its receiver waits for blocks of another node")
        raise SliceLost(f"transfer {transfer_id} has ended: {ended.failure}")

    def forget(self, transfer_id: TransferId, why: str) -> None:
        """A job of the transfer is over. If it is the sender's, nothing of it can be taken any more."""
        if transfer_id in self._sending and self._core.outbound(transfer_id) is None:
            if not self._sending.pop(transfer_id).is_taken:
                self._core.give_up(transfer_id, why)
            self._changed.ring()

    # --- the receiver -------------------------------------------------------------------------------------------------

    async def take(self, request: Acquire, transfer_id: TransferId, check: Callable[[], None]) -> Acquired:
        """The sender's blocks, once they are written. *check* raises when the receiver is gone meanwhile.

        Raises SliceLost when the sender has given up, or what *check* raises.
        """
        asked_s = monotonic()
        try:
            acquired = await self._changed.until(lambda: self._taken(request, transfer_id, check))
        except (MooncakeError, asyncio.CancelledError) as error:
            self._core.not_taken(transfer_id, str(error) or "the receiver's call was cancelled")
            self._changed.ring()
            raise
        self._changed.ring()
        waited_s = monotonic() - asked_s
        return replace(acquired, landed=Landed(received_bytes=0, first_slice_s=waited_s, last_slice_s=waited_s))

    def _taken(self, request: Acquire, transfer_id: TransferId, check: Callable[[], None]) -> Acquired | None:
        check()
        why = self._core.take_given_up(transfer_id)
        if why is not None:
            raise SliceLost(f"transfer {transfer_id}: {why}")
        sending = self._sending.get(transfer_id)
        if sending is None or not sending.outbound.is_finishing:
            return None
        acquired = self._core.take_over(request, sending.outbound)
        if isinstance(acquired, NoRoom):
            return None
        sending.is_taken = True
        return acquired
