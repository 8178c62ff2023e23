"""What a messenger decides, pure: who holds which blocks for which job, and what may land in them.

Every job belongs to one worker process (instance and incarnation); when that process is gone, all it held goes with it.
A transfer into a job's blocks is a landing; it ends before or with its job.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from mooncake_mesh.errors import InvalidRequest, NoFreeBlocks, SliceLost, TransferError
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.kv.block_pool import BlockPool, Duplicate, NoRoom, PoolEvent, Sealed
from mooncake_mesh.kv.eviction import EvictionKind, eviction_policy
from mooncake_mesh.kv.tenants import NO_QUOTAS, TenantQuotas
from mooncake_mesh.messenger.endings import Ended, Endings
from mooncake_mesh.messenger.landing import Landing, LandingState
from mooncake_mesh.messenger.sending import Outbound
from mooncake_mesh.messenger.store.slots import SlotTable
from mooncake_mesh.messenger.store.tiering import Target, joint_events, joint_keys, prefix_on_ssd
from mooncake_proto.ids import BlockId, BlockKey, Incarnation, InstanceId, JobId, TransferId
from mooncake_proto.transfer import Acquire, Acquired, CloseWrite, OpenWrite, PushBlocks, Slot

_WHOLE: Final = 1
"""Layers of a transfer that moves blocks whole."""


@dataclass(slots=True)
class _Job:
    instance_id: InstanceId
    incarnation: Incarnation
    blocks: list[BlockId]
    keys: list[BlockKey]
    tenant: str
    landing: Landing | None = None


class MessengerCore:
    """Jobs, landings and outbound transfers over one pool. Called from one thread; keeps no clock."""

    def __init__(
        self,
        *,
        n_blocks: int,
        block_bytes: int,
        eviction: EvictionKind = EvictionKind.LRU,
        quotas: TenantQuotas = NO_QUOTAS,
    ) -> None:
        self.pool = BlockPool(n_blocks, eviction=eviction_policy(eviction), quotas=quotas)
        self._quotas = quotas
        self.block_bytes = block_bytes
        self.slots: SlotTable | None = None  # the SSD tier, where there is one
        self._jobs: dict[JobId, _Job] = {}
        self._landings: dict[TransferId, Landing] = {}
        self._stage_writes: dict[tuple[Incarnation, JobId, int], list[BlockId]] = {}
        self._endings = Endings()
        self._outbound: dict[TransferId, Outbound] = {}

    # --- jobs ---------------------------------------------------------------------------------------------------------

    @property
    def n_jobs(self) -> int:
        return len(self._jobs)

    def missing_prefix(self, request: Acquire) -> list[BlockKey]:
        """Keys worth fetching from another node for *request*: those past what this arena holds of its prefix."""
        wanted = list(islice(split_keys(request.keys), min(request.fetch_blocks, request.max_cached_blocks)))
        missing = wanted[len(self.pool.match(wanted)) :]
        may_read = request.read_limit_blocks is None or request.read_limit_blocks >= len(wanted)
        if may_read and self.slots is not None and prefix_on_ssd(self.slots, missing) == len(missing):
            return []
        return missing

    def readable_prefix(self, request: Acquire) -> list[BlockKey]:
        """The prefix of *request* as far as it may come from this node's tiers."""
        return list(islice(split_keys(request.keys), _readable_blocks(request)))

    def cached_prefix(self, request: Acquire) -> list[BlockId]:
        """Blocks that *request* would find sealed now."""
        return self.pool.match(list(islice(split_keys(request.keys), min(request.max_cached_blocks, request.n_blocks))))

    def acquire(self, request: Acquire, now_s: float) -> Acquired | NoRoom:
        """Blocks for a job: the sealed prefix referenced, the rest reserved, the landing opened. All or nothing.

        Raises InvalidRequest for a job that exists, or that could never fit; NoRoom means not now.
        """
        self._check(request)
        if request.landing is not None and request.landing in self._landings:
            raise InvalidRequest(f"transfer {request.landing} lands in another job", param="landing")
        keys = list(split_keys(request.keys))
        cached = self.pool.match(keys[: min(request.max_cached_blocks, request.n_blocks)])
        holder = _holder(request.job_id)
        self.pool.hold(holder, cached)
        fresh = self.pool.reserve(holder, request.n_blocks - len(cached), tenant=request.tenant)
        if isinstance(fresh, NoRoom):
            self.pool.release(holder)
            return fresh
        job = self._enter(request, [*cached, *fresh])
        if request.landing is not None:
            last = min(request.landing_blocks, request.n_blocks)
            self._open(job, request.job_id, request.landing, range(len(cached), last), request.landing_layers, now_s)
        return Acquired(job_id=request.job_id, blocks=tuple(job.blocks), cached_blocks=len(cached))

    def take_over(self, request: Acquire, outbound: Outbound) -> Acquired | NoRoom:
        """Blocks for a job that a job of this arena sends its prompt: those of that one, which may write none of them
        any more, and fresh ones behind them. All or nothing.

        Raises as :meth:`acquire`, and SliceLost when the sender has not written all that the job wants.
        """
        self._check(request)
        prompt = range(min(request.landing_blocks, request.n_blocks))
        if not outbound.has_all(prompt):
            raise SliceLost(f"transfer {outbound.transfer_id}: not all slices were written")
        given = self._jobs[outbound.job_id].blocks[: request.n_blocks]
        more = request.n_blocks - len(given)
        if more > self.pool.available_to(request.tenant):
            return NoRoom(wanted_blocks=more, available_blocks=self.pool.available_to(request.tenant))
        holder = _holder(request.job_id)
        self.pool.give(_holder(outbound.job_id), holder, given)
        fresh = self.pool.reserve(holder, more, tenant=request.tenant)
        assert not isinstance(fresh, NoRoom), "there was room a moment ago"
        job = self._enter(request, [*given, *fresh])
        private = [logical for logical in prompt if self.pool.key(job.blocks[logical]) is None]
        self._store_once(request.job_id, job, self._seal_whole(request.job_id, job, private))
        return Acquired(job_id=request.job_id, blocks=tuple(job.blocks), cached_blocks=0)

    def _enter(self, request: Acquire, blocks: list[BlockId]) -> _Job:
        keys = list(split_keys(request.keys))
        job = _Job(request.instance_id, request.incarnation, blocks, keys, request.tenant)
        self._jobs[request.job_id] = job
        return job

    def _check(self, request: Acquire) -> None:
        if request.job_id in self._jobs:
            raise InvalidRequest(f"job {request.job_id} has its blocks already", param="job_id")
        if request.n_blocks > self.pool.n_blocks:
            raise InvalidRequest(f"{request.n_blocks} blocks exceed the arena's {self.pool.n_blocks}", param="n_blocks")
        quota = self._quotas.of(request.tenant)
        if quota is not None and request.n_blocks > quota:
            raise InvalidRequest(f"{request.n_blocks} blocks exceed the tenant's quota of {quota}", param="n_blocks")
        if request.landing is not None:
            self._check_layers(request.landing_layers, "landing_layers")

    def grow(self, job_id: JobId, wanted: int) -> list[BlockId]:
        """Up to *wanted* more blocks for a job; none when the pool has none or the job is gone."""
        job = self._jobs.get(job_id)
        if job is None:
            return []
        wanted = min(wanted, self.pool.available_to(job.tenant))
        got = self.pool.reserve(_holder(job_id), wanted, tenant=job.tenant)
        assert not isinstance(got, NoRoom), "asked for no more than there is"
        job.blocks += got
        return got

    def seal(self, job_id: JobId, first_block: int, keys: Sequence[BlockKey]) -> int:
        """Share whole blocks of a job; how many became findable (a twin under the same key leaves a block private).

        A job that is gone seals nothing: its release overtook the message.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return 0
        if first_block < 0 or first_block + len(keys) > len(job.blocks):
            raise InvalidRequest(f"job {job_id} has no blocks {first_block}..{first_block + len(keys) - 1}")
        pairs = zip(job.blocks[first_block:], keys, strict=False)
        return sum(isinstance(self.pool.seal(_holder(job_id), block, key), Sealed) for block, key in pairs)

    def open_write(self, request: OpenWrite) -> None:
        """Another process than the job's own writes these blocks until :meth:`close_write` or :meth:`writer_gone`.

        Raises SliceLost when the job has ended, InvalidRequest for blocks that it does not write.
        """
        job = self._jobs.get(request.job_id)
        if job is None:
            raise SliceLost(f"job {request.job_id} has ended")
        end = request.first_block + request.n_blocks
        blocks = job.blocks[request.first_block : end]
        key = (request.incarnation, request.job_id, request.first_block)
        is_writable = all(self.pool.may_write(block, self.pool.generation(block)) for block in blocks)
        if end > len(job.blocks) or not is_writable or key in self._stage_writes:
            raise InvalidRequest(f"job {request.job_id} has no blocks {request.first_block}..{end - 1} to write")
        for block in blocks:
            self.pool.begin_write(block)
        self._stage_writes[key] = blocks

    def close_write(self, request: CloseWrite) -> None:
        """A write is over; what its job has released meanwhile is free now. An unknown one is fine."""
        for block in self._stage_writes.pop((request.incarnation, request.job_id, request.first_block), ()):
            self.pool.end_write(block)

    def writer_gone(self, incarnation: Incarnation) -> None:
        """A process that may have written into other processes' jobs can do so no more."""
        for key in [key for key in self._stage_writes if key[0] == incarnation]:
            for block in self._stage_writes.pop(key):
                self.pool.end_write(block)

    def release(self, job_id: JobId, why: str) -> list[TransferId]:
        """End a job; the transfers (in or out) that ended with it. An unknown job is fine."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return []
        ended = [outbound.transfer_id for outbound in self._outbound.values() if outbound.job_id == job_id]
        for transfer_id in ended:
            del self._outbound[transfer_id]
        if job.landing is not None:
            job.landing.fail(why)
            del self._landings[job.landing.transfer_id]
            self._endings.ended(job.landing.transfer_id, job.landing.failure)
            ended.append(job.landing.transfer_id)
        self.pool.release(_holder(job_id))
        return ended

    def has_job(self, job_id: JobId) -> bool:
        return job_id in self._jobs

    def all_jobs(self) -> list[JobId]:
        return list(self._jobs)

    def jobs_of(self, instance_id: InstanceId, incarnation: Incarnation) -> list[JobId]:
        """Jobs of one worker process."""
        return [
            job_id
            for job_id, job in self._jobs.items()
            if job.instance_id == instance_id and job.incarnation == incarnation
        ]

    # --- both tiers ---------------------------------------------------------------------------------------------------

    def drain_events(self) -> list[PoolEvent]:
        """Keys that this node began or ceased to hold, in either tier."""
        return self.pool.drain_events() if self.slots is None else joint_events(self.pool, self.slots)

    def keys(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """All keys in the arena, and all others that this node holds."""
        return (self.pool.keys(), []) if self.slots is None else joint_keys(self.pool, self.slots)

    def promotion(self, request: Acquire, acquired: Acquired) -> Target:
        """Where to read what SSD holds of the prefix of a job that was just given its blocks."""
        keys = list(split_keys(request.keys))[acquired.cached_blocks : _readable_blocks(request)]
        blocks = [BlockId(block) for block in acquired.blocks[acquired.cached_blocks :]]
        return Target(holder=_holder(request.job_id), blocks=blocks, keys=keys)

    def open_promotion(
        self, job_id: JobId, keys: Sequence[BlockKey], tenant: str, owner: InstanceId, incarnation: Incarnation
    ) -> Target | None:
        """Reserve blocks for what SSD holds of the prefix *keys*; a job of its own, which its user ends.

        The part that is in the arena is held meanwhile. None without anything to read, or room for it.
        """
        if self.slots is None:
            return None
        cached = self.pool.match(keys)
        missing = list(keys[len(cached) :])
        n_blocks = prefix_on_ssd(self.slots, missing)
        if n_blocks == 0:
            return None
        self.pool.hold(_holder(job_id), cached)
        blocks = self.pool.reserve(_holder(job_id), n_blocks, tenant=tenant)
        if isinstance(blocks, NoRoom):
            self.pool.release(_holder(job_id))
            return None
        self._jobs[job_id] = _Job(owner, incarnation, [*cached, *blocks], list(keys), tenant)
        return Target(holder=_holder(job_id), blocks=blocks, keys=missing)

    # --- landings -----------------------------------------------------------------------------------------------------

    def landing(self, transfer_id: TransferId) -> Landing | None:
        return self._landings.get(transfer_id)

    def landing_or_end(self, transfer_id: TransferId) -> Landing | Ended | None:
        """The landing, or how it ended: its sender may come when there is nothing to send any more."""
        return self._landings.get(transfer_id) or self._endings.get(transfer_id)

    def open_fetch(self, transfer_id: TransferId, owner: Acquire, keys: Sequence[BlockKey], now_s: float) -> Landing:
        """Reserve blocks for a prefix that another node will push; a job of its own, named after the transfer.

        Whole blocks travel, so they count as one layer.

        Raises NoFreeBlocks: a fetch is an optimisation and waits for nobody.
        """
        job_id = JobId(transfer_id)
        blocks = self.pool.reserve(_holder(job_id), len(keys), tenant=owner.tenant)
        if isinstance(blocks, NoRoom):
            raise NoFreeBlocks(f"no room to fetch {len(keys)} blocks")
        job = _Job(owner.instance_id, owner.incarnation, blocks, list(keys), owner.tenant)
        self._jobs[job_id] = job
        return self._open(job, job_id, transfer_id, range(len(keys)), _WHOLE, now_s)

    def not_taken(self, transfer_id: TransferId, why: str) -> None:
        """Nobody waits any more for what a job of this arena sends."""
        self._endings.ended(transfer_id, why)

    def take_given_up(self, transfer_id: TransferId) -> str | None:
        """Why the sender of a transfer gave up before it was received, if it did. Forgotten then."""
        return self._endings.take_given_up(transfer_id)

    def give_up(self, transfer_id: TransferId, why: str) -> Landing | None:
        """The sender sends no more: fail the landing, or, where there is none yet, the one that is opened for it later.

        The two ends of a transfer are told of it by different ways, so its abort may come first.
        """
        landing = self._landings.get(transfer_id)
        if landing is not None:
            landing.fail(why)
            return landing
        self._endings.given_up(transfer_id, why)
        return None

    def settle(self, landing: Landing) -> None:
        """After writes into a landing ended: once it has landed, share its whole blocks. Again is fine.

        What another job has shared meanwhile under the same key is stored once: the job gets that block for its own.
        """
        if landing.state is not LandingState.LANDED or landing.transfer_id not in self._landings:
            return
        job = self._jobs[landing.job_id]
        mine = [slot for slot in landing.slots if self.pool.may_write(BlockId(slot.block), slot.generation)]
        twins = self._seal_whole(landing.job_id, job, [slot.logical for slot in mine])
        if not _is_fetch(landing):  # that one is about to end
            self._store_once(landing.job_id, job, twins)

    def _seal_whole(self, job_id: JobId, job: _Job, logicals: Iterable[int]) -> dict[BlockId, BlockId]:
        """Share those of a job's blocks that have a key; the twins of those whose key is taken."""
        outcomes = [
            self.pool.seal(_holder(job_id), job.blocks[logical], job.keys[logical])
            for logical in logicals
            if logical < len(job.keys)
        ]
        return {outcome.block: outcome.other for outcome in outcomes if isinstance(outcome, Duplicate)}

    def _store_once(self, job_id: JobId, job: _Job, twins: dict[BlockId, BlockId]) -> None:
        self.pool.exchange(_holder(job_id), twins)
        job.blocks = [twins.get(block, block) for block in job.blocks]

    def blocks_of(self, job_id: JobId) -> tuple[BlockId, ...]:
        """A job's blocks in logical order; none of one that is gone."""
        job = self._jobs.get(job_id)
        return () if job is None else tuple(job.blocks)

    def _open(
        self, job: _Job, job_id: JobId, transfer_id: TransferId, logicals: range, layers: int, now_s: float
    ) -> Landing:
        slots = [self._slot(job, logical) for logical in logicals]
        slice_bytes = self.block_bytes // layers
        landing = Landing(transfer_id, job_id, slots, layers=layers, slice_bytes=slice_bytes, now_s=now_s)
        given_up = self._endings.take_given_up(transfer_id)
        if given_up is not None:
            landing.fail(given_up)
        job.landing = landing
        self._landings[transfer_id] = landing
        return landing

    def _slot(self, job: _Job, logical: int) -> Slot:
        block = job.blocks[logical]
        return Slot(logical=logical, block=block, generation=self.pool.generation(block))

    # --- sending ------------------------------------------------------------------------------------------------------

    def outbound(self, transfer_id: TransferId) -> Outbound | None:
        return self._outbound.get(transfer_id)

    def start_send(self, transfer_id: TransferId, job_id: JobId, n_blocks: int, layers: int) -> Outbound:
        """Open the sending side for the first *n_blocks* blocks of a job.

        Raises SliceLost for an unknown job, InvalidRequest for layers that do not divide a block.
        """
        self._check_layers(layers, "layers")
        job = self._jobs.get(job_id)
        if job is None or transfer_id in self._outbound or n_blocks > len(job.blocks):
            raise SliceLost(f"job {job_id} cannot send {n_blocks} blocks as transfer {transfer_id}")
        return self._outbox(transfer_id, job_id, job.blocks[:n_blocks], layers)

    def start_push(self, request: PushBlocks, owner: InstanceId, incarnation: Incarnation) -> Outbound:
        """Hold and send what is here of a prefix that a peer asks for; a job of its own, as :meth:`open_fetch`."""
        job_id = JobId(f"push-{request.transfer_id}")
        if job_id in self._jobs:
            raise TransferError(f"transfer {request.transfer_id} is being pushed already")
        keys = list(split_keys(request.keys))
        blocks = self.pool.match(keys)
        self.pool.hold(_holder(job_id), blocks)
        self._jobs[job_id] = _Job(owner, incarnation, blocks, keys, request.tenant)
        return self._outbox(request.transfer_id, job_id, blocks, _WHOLE)

    def _check_layers(self, layers: int, param: str) -> None:
        if layers < 1 or self.block_bytes % layers:
            raise InvalidRequest(f"{layers} layers do not divide a block of {self.block_bytes} bytes", param=param)

    def _outbox(self, transfer_id: TransferId, job_id: JobId, blocks: Sequence[BlockId], layers: int) -> Outbound:
        outbound = Outbound(transfer_id, job_id, blocks, layers=layers, slice_bytes=self.block_bytes // layers)
        self._outbound[transfer_id] = outbound
        return outbound


def _holder(job_id: JobId) -> str:
    return f"job:{job_id}"


def _is_fetch(landing: Landing) -> bool:
    """Whether its job is one of its own, see open_fetch."""
    return str(landing.job_id) == str(landing.transfer_id)


def _readable_blocks(request: Acquire) -> int:
    limit = request.read_limit_blocks
    return request.max_cached_blocks if limit is None else min(limit, request.max_cached_blocks)
