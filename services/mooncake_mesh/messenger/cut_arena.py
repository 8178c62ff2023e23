"""What a messenger has once its arena is cut into blocks: the pool's core, transfers both ways, the SSD tier."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Final
from uuid import uuid4

import structlog

from mooncake_mesh.errors import MooncakeError, PeerUnreachable, SliceLost
from mooncake_mesh.kv.block_hash import join_keys, split_keys
from mooncake_mesh.kv.block_pool import NoRoom
from mooncake_mesh.mesh.arena import Holder
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.hand_over import HandOvers
from mooncake_mesh.messenger.prefix_pins import PrefixPins
from mooncake_mesh.messenger.publisher import KvPublisher
from mooncake_mesh.messenger.read_ahead import AheadReader
from mooncake_mesh.messenger.receiver import Receiver
from mooncake_mesh.messenger.sender import Sender
from mooncake_mesh.messenger.ssd import NodeSsd
from mooncake_proto.control import Load
from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey, Incarnation, JobId, TransferId
from mooncake_proto.transfer import (
    Acquire,
    Acquired,
    CloseWrite,
    FinishSend,
    Grow,
    Grown,
    OpenWrite,
    PushBlocks,
    Pushing,
    ReadAhead,
    Replicate,
    Seal,
    SendReport,
    SliceReady,
    StartSend,
)

log = structlog.get_logger(__name__)

_FETCH_TIMEOUT_S: Final = 20.0
_CONNECT_TIMEOUT_S: Final = 0.5
"""A node that died a moment ago may still be said to have a prefix: to compute it is quicker than to wait for it."""

_RECENT_COPIES: Final = 8
_MOST_WORKERS: Final = 4096
_MOST_RELEASED: Final = 4096
_TENANTS_REPORTED: Final = 32


class CutArena:
    """Blocks for jobs, and transfers into and out of them. Everything runs on the event loop.

    *me* is this messenger as an owner of jobs, *endpoint* its ROUTER.
    """

    def __init__(
        self,
        core: MessengerCore,
        ssd: NodeSsd,
        publisher: KvPublisher,
        peers: Phonebook,
        tasks: asyncio.TaskGroup,
        *,
        me: Holder,
        endpoint: str,
    ) -> None:
        self.core = core
        self.receiver: Receiver
        self.sender: Sender
        self._ssd = ssd
        self._publisher = publisher
        self._peers = peers
        self._tasks = tasks
        self._me = me
        self._endpoint = endpoint
        self._room = Bell()
        self.hand_overs = HandOvers(core, self._room)
        self._copies = 0
        self._recent_copies: deque[tuple[int, float]] = deque(maxlen=_RECENT_COPIES)
        self._fetches: dict[TransferId, str] = {}
        self._fetching: dict[BlockKey, asyncio.Event] = {}  # the first key of what is being fetched
        self._attached: OrderedDict[Incarnation, None] = OrderedDict()
        self._released: OrderedDict[JobId, None] = OrderedDict()
        self._replicating: asyncio.Task[None] | None = None
        self.prefix_pins = PrefixPins(core.pool, ssd.save)
        self._ahead = AheadReader(core, ssd, tasks, me=me, end_job=self.end_job)

    def load(self) -> Load:
        pool = self.core.pool
        load = Load(
            running_jobs=self.core.n_jobs,
            blocks_total=pool.n_blocks,
            blocks_free=pool.free_blocks,
            blocks_cached=pool.sealed_blocks,
            blocks_evictable=pool.evictable_blocks,
            tenants=dict(Counter(pool.tenant_usage()).most_common(_TENANTS_REPORTED)),
            transferred_bytes=self.sender.sent_bytes,
            transports=",".join(sorted(self.sender.transports | self.hand_overs.transports)),
            copies=self._copies,
            recent_copies=tuple(self._recent_copies),
        )
        return self._ssd.counted(load)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def came(self, incarnation: Incarnation) -> None:
        """A worker attached."""
        self._attached[incarnation] = None
        if len(self._attached) > _MOST_WORKERS:
            self._attached.popitem(last=False)

    async def acquire(self, request: Acquire) -> Acquired:
        """Waits for room, and for the landing if there is one, for as long as the call's deadline allows.

        Raises PeerUnreachable for a worker that has not attached to this life of the messenger, or has died since:
        nobody would ever release what it got.
        """
        core, receiver = self.core, self.receiver
        self._check_wanted(request)
        if request.landing is not None and request.landing_from == self._endpoint:
            acquired = await self.hand_overs.take(request, request.landing, lambda: self._check_wanted(request))
            self._publish()
            return acquired
        if request.fetch_from and request.fetch_blocks:
            await self._fetch_prefix(request)

        def attempt() -> Acquired | None:
            self._check_wanted(request)
            result = core.acquire(request, monotonic())
            return None if isinstance(result, NoRoom) else result

        if request.landing is None:
            await self._ahead.join(core.readable_prefix(request), request.job_id)
        await self._ssd.make_room(core, request)
        acquired = await self._room.until(attempt)
        self._ahead.end(request.job_id)
        self._publish()
        if request.landing is None:
            return await self._ssd.promoted(core, request, acquired)
        receiver.changed.ring()
        landed = await receiver.landed(request.landing)
        return replace(acquired, landed=landed, blocks=core.blocks_of(request.job_id) or acquired.blocks)

    def _check_wanted(self, request: Acquire) -> None:
        """Raises PeerUnreachable, or SliceLost for a job that was released before it had any blocks."""
        self._check_attached(request)
        if request.job_id in self._released:
            raise SliceLost(f"job {request.job_id} was released before it had any blocks")

    def _check_attached(self, request: Acquire | OpenWrite) -> None:
        if request.incarnation not in self._attached:
            raise PeerUnreachable(f"{request.instance_id} has not attached to this arena, or is gone")

    def replicate(self, order: Replicate) -> None:
        """Copy a hot prefix in the background, one at a time."""
        if self._replicating is not None and not self._replicating.done():
            log.info("replica_declined", source=order.source)
            return
        n_blocks = len(order.keys) // BLOCK_KEY_BYTES
        request = Acquire(
            job_id=JobId(f"replica-{uuid4().hex}"),
            instance_id=self._me.instance_id,
            incarnation=self._me.incarnation,
            keys=order.keys,
            n_blocks=n_blocks,
            max_cached_blocks=n_blocks,
            fetch_from=order.source,
            fetch_blocks=n_blocks,
            tenant=order.tenant,
        )
        self._replicating = self._tasks.create_task(self._fetch_prefix(request))

    async def _fetch_prefix(self, request: Acquire) -> None:
        """Copy missing prefix blocks from another node. Whatever goes wrong, the job computes them instead.

        What is being fetched for somebody else is waited for, and not fetched twice.
        """
        while (keys := self.core.missing_prefix(request)) and keys[0] in self._fetching:
            await self._fetching[keys[0]].wait()
        if not keys:
            return
        over = self._fetching[keys[0]] = asyncio.Event()
        try:
            await self._fetch(request, keys)
        finally:
            del self._fetching[keys[0]]
            over.set()

    async def _fetch(self, request: Acquire, keys: Sequence[BlockKey]) -> None:
        core, receiver = self.core, self.receiver
        transfer_id = TransferId(uuid4().hex)
        self._fetches[transfer_id] = request.fetch_from
        try:
            landing = core.open_fetch(transfer_id, request, keys, monotonic())
            receiver.changed.ring()
            push = PushBlocks(
                transfer_id=transfer_id,
                target=self._endpoint,
                keys=join_keys(keys),
                deadline_s=_FETCH_TIMEOUT_S,
                job_id=request.job_id,
                tenant=request.tenant,
            )
            source = self._peers.get(request.fetch_from)
            pushing = await source.call(push, Pushing, timeout_s=_FETCH_TIMEOUT_S, connect_timeout_s=_CONNECT_TIMEOUT_S)
            landing.shorten(pushing.n_blocks)
            core.settle(landing)
            async with asyncio.timeout(_FETCH_TIMEOUT_S):
                landed = await receiver.landed(transfer_id)
            self._copies += 1
            self._recent_copies.append((landed.received_bytes, landed.last_slice_s))
            log.info(
                "prefix_fetched",
                job_id=request.job_id,
                source=request.fetch_from,
                blocks=pushing.n_blocks,
                received_bytes=landed.received_bytes,
                elapsed_s=round(landed.last_slice_s, 4),
            )
        except (MooncakeError, TimeoutError) as error:
            log.warning("prefix_fetch_failed", job_id=request.job_id, source=request.fetch_from, error=str(error)[:200])
        finally:
            del self._fetches[transfer_id]
            self.end_job(JobId(transfer_id), "the fetch is over")

    def peer_lost(self, endpoint: str) -> None:
        """The connection to another messenger is gone: what it was to push will not come, and its job computes it."""
        for transfer_id in [one for one, source in self._fetches.items() if source == endpoint]:
            self.core.give_up(transfer_id, f"{endpoint} is gone")
            self.receiver.changed.ring()

    def grow(self, request: Grow) -> Grown:
        got = {job_id: self.core.grow(JobId(job_id), wanted) for job_id, wanted in request.wanted.items()}
        self._publish()
        return Grown(blocks={job_id: tuple(blocks) for job_id, blocks in got.items() if blocks})

    def seal(self, request: Seal) -> None:
        self.core.seal(request.job_id, request.first_block, list(split_keys(request.keys)))
        self._publish()

    def open_write(self, request: OpenWrite) -> None:
        """Raises PeerUnreachable for a stage that has not attached, or is gone: nobody would ever close it."""
        self._check_attached(request)
        self.core.open_write(request)

    def close_write(self, request: CloseWrite) -> None:
        self.core.close_write(request)
        self.pool_changed()

    def worker_gone(self, holder: Holder) -> None:
        """The kernel closed a worker's connection: it writes no more, whatever became of it."""
        self._attached.pop(holder.incarnation, None)
        self.core.writer_gone(holder.incarnation)
        jobs = self.core.jobs_of(holder.instance_id, holder.incarnation)
        log.info("holder_gone", holder=holder.instance_id, jobs=len(jobs))
        for job_id in jobs:
            self.end_job(job_id, f"{holder.instance_id} is gone")
        self._room.ring()

    def read_ahead(self, order: ReadAhead) -> None:
        """A request was placed whose prefix is on this node's SSD."""
        self._ahead.announce(order)

    def release(self, job_id: JobId) -> None:
        """End a job for its worker. One that comes first, on a newer connection, is remembered: nobody would ever give
        back what its Acquire gets then."""
        if not self.core.has_job(job_id):
            self._released[job_id] = None
            if len(self._released) > _MOST_RELEASED:
                self._released.popitem(last=False)
        self.end_job(job_id, "the job was released")

    def end_job(self, job_id: JobId, why: str) -> None:
        for transfer_id in self.core.release(job_id, why):
            self.sender.forget(transfer_id)
            self.receiver.forget(transfer_id)
            self.hand_overs.forget(transfer_id, why)
        self._ahead.end(job_id)
        self.pool_changed()

    def pool_changed(self) -> None:
        """Blocks may have become free or findable: by a release, or by the last write into one that was released."""
        self._publish()
        self._room.ring()

    def _publish(self) -> None:
        """The pool has changed: others want to know what it holds, and it may have become too full."""
        self._publisher.poke()
        self._ssd.pool_changed()

    # --- transfers ----------------------------------------------------------------------------------------------------

    def start_send(self, request: StartSend) -> None:
        outbound = self.core.start_send(request.transfer_id, request.job_id, request.n_blocks, request.layers)
        if request.target == self._endpoint:
            self.hand_overs.start(outbound, request.deadline_s)
        else:
            self.sender.start(outbound, request.target, request.deadline_s)

    def announce(self, ready: SliceReady) -> None:
        way = self.hand_overs if ready.transfer_id in self.hand_overs else self.sender
        way.announce(ready)

    async def finish_send(self, request: FinishSend) -> SendReport:
        outbound = self.core.outbound(request.transfer_id)
        way = self.hand_overs if request.transfer_id in self.hand_overs else self.sender
        try:
            return await way.finish(request.transfer_id)
        finally:
            if outbound is not None:
                self.end_job(outbound.job_id, "the transfer is over")

    async def push_blocks(self, request: PushBlocks) -> Pushing:
        core, sender = self.core, self.sender
        promotion, keys = JobId(f"promote-{uuid4().hex}"), list(split_keys(request.keys))
        await self._ahead.join(keys, request.job_id)
        try:
            target = core.open_promotion(promotion, keys, request.tenant, self._me.instance_id, self._me.incarnation)
            if target is not None:
                await self._ssd.read(target)
            outbound = core.start_push(request, self._me.instance_id, self._me.incarnation)
        finally:
            self.end_job(promotion, "the prefix is in the arena")
            if request.job_id is not None:
                self._ahead.end(request.job_id)
        n_blocks = outbound.n_blocks
        if n_blocks == 0:
            self.end_job(outbound.job_id, "nothing to push")
        else:
            sender.start(outbound, request.target, request.deadline_s, was_asked_for=True)
            whole = SliceReady(transfer_id=request.transfer_id, layer=0, n_layers=1, first_block=0, n_blocks=n_blocks)
            sender.announce(whole)
            self._tasks.create_task(self._end_push(outbound.job_id, request.transfer_id))
        return Pushing(transfer_id=request.transfer_id, n_blocks=n_blocks)

    async def _end_push(self, job_id: JobId, transfer_id: TransferId) -> None:
        try:
            await self.sender.finish(transfer_id)
        except MooncakeError as error:
            log.info("push_failed", transfer_id=transfer_id, code=error.code)
        finally:
            self.end_job(job_id, "the push is over")

    async def close(self) -> None:
        """End all jobs; senders have told their receivers when this returns."""
        await self._ahead.close()
        self.prefix_pins.close()
        if self._replicating is not None:
            self._replicating.cancel()
            await asyncio.gather(self._replicating, return_exceptions=True)
        for job_id in self.core.all_jobs():
            self.end_job(job_id, "the messenger stops")
        await self.sender.close()
