"""Reading ahead: what placed requests will want from SSD comes into the arena while they wait for their turn.

One announced prefix is read at a time, in pieces, so that the reads of jobs whose turn has come get in between and an
announcement that is over stops within a piece. What was read is soft-pinned for its job: nothing else takes it as long
as there is any other block to give up. Pinned or not, whoever wants it finds it like every cached block.
"""

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final
from uuid import uuid4

import structlog

from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.mesh.arena import Holder
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.ssd import NodeSsd
from mooncake_mesh.messenger.store.announced import AnnouncedPrefixes, AnnouncedState, Announcement, Unannounced
from mooncake_proto.ids import BlockKey, JobId
from mooncake_proto.transfer import ReadAhead

log = structlog.get_logger(__name__)

_PIECE_BYTES: Final = 16 << 20


class AheadReader:
    """Acts on announcements. Everything runs on the event loop; *end_job* gives up the blocks of a read."""

    def __init__(
        self,
        core: MessengerCore,
        ssd: NodeSsd,
        tasks: asyncio.TaskGroup,
        *,
        me: Holder,
        end_job: Callable[[JobId, str], None],
    ) -> None:
        self._core = core
        self._ssd = ssd
        self._tasks = tasks
        self._me = me
        self._end_job = end_job
        self._announced = AnnouncedPrefixes(core.pool.n_blocks)
        self._piece_blocks = max(1, _PIECE_BYTES // core.block_bytes)
        self._current: Announcement | None = None
        self._progress = Bell()
        self._reading: asyncio.Task[None] | None = None
        self._timers: dict[JobId, asyncio.TimerHandle] = {}
        self.read_blocks = 0

    def announce(self, order: ReadAhead) -> None:
        """Read for a job that will come, if there is anything to read and room to keep it."""
        keys = list(split_keys(order.keys))
        if self._core.slots is None or len(self._core.pool.match(keys)) == len(keys):
            return
        entry = self._announced.announce(order.job_id, keys, tenant=order.tenant, until_s=monotonic() + order.keep_s)
        if isinstance(entry, Unannounced):
            log.info("read_ahead_declined", job_id=order.job_id, blocks=len(keys), reason=entry.value)
            return
        loop = asyncio.get_running_loop()
        self._timers[order.job_id] = loop.call_later(order.keep_s, self._expire, order.job_id)
        if self._reading is None:
            self._reading = self._tasks.create_task(self._read_all())

    async def join(self, keys: Sequence[BlockKey], job_id: JobId | None) -> None:
        """Wait while what is missing next of the prefix *keys* is being read: better than to read it twice.

        What was announced for *job_id* and has not begun is left to it.
        """
        if job_id is not None:
            self._announced.arrived(job_id)

        def has_come() -> bool | None:
            entry = self._current
            if entry is None:
                return True
            n_here = len(self._core.pool.match(keys))
            missing = keys[n_here : n_here + 1]
            return None if missing and missing == entry.keys[n_here : n_here + 1] else True

        await self._progress.until(has_come)

    def end(self, job_id: JobId) -> None:
        """The job has its blocks, or is over: nothing is read or kept for it any more."""
        if self._announced.end(job_id):
            self._timers.pop(job_id).cancel()
            self._core.pool.unpin(_pinner(job_id))

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _expire(self, job_id: JobId) -> None:
        log.info("read_ahead_expired", job_id=job_id)
        self.end(job_id)

    async def _read_all(self) -> None:
        try:
            while (entry := self._announced.next()) is not None:
                self._current = entry
                await self._read(entry)
                self._announced.was_read(entry)
        finally:
            self._current = self._reading = None
            self._progress.ring()

    async def _read(self, entry: Announcement) -> None:
        """Piece by piece, until all is here, SSD has no more of it, there is no room, or the announcement is over."""
        pool = self._core.pool
        n_before = n_here = len(pool.match(entry.keys))
        while n_here < len(entry.keys) and entry.state is AnnouncedState.READING:
            await self._read_piece(entry, entry.keys[: n_here + self._piece_blocks])
            blocks = pool.match(entry.keys)
            if len(blocks) <= n_here:
                break
            self.read_blocks += len(blocks) - n_here
            n_here = len(blocks)
            self._progress.ring()
        log.info("read_ahead", job_id=entry.job_id, blocks=n_here - n_before, of=len(entry.keys) - n_before)

    async def _read_piece(self, entry: Announcement, keys: Sequence[BlockKey]) -> None:
        """Leaves what came pinned, unless the announcement ended meanwhile."""
        core, piece = self._core, JobId(f"ahead-{uuid4().hex}")
        cached = core.pool.match(keys)
        await self._ssd.make_room_for(len(keys) - len(cached), cached)
        try:
            target = core.open_promotion(piece, keys, entry.tenant, self._me.instance_id, self._me.incarnation)
            if target is not None:
                await self._ssd.read(target)
                if entry.state is AnnouncedState.READING:
                    core.pool.pin(_pinner(entry.job_id), core.pool.match(keys), entry.until_s)
        finally:
            self._end_job(piece, "the piece was read")


def _pinner(job_id: JobId) -> str:
    return f"ahead:{job_id}"
