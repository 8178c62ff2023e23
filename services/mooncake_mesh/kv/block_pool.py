"""The blocks of one arena: who may write which, who reads which, which prefix each holds.

Theory of operation. A block is FREE, RESERVED (one holder may write it), SEALED (immutable, found by its key, read by
any number of holders) or DRAINING (its holder let go while a transfer was still writing into it). A sealed block
without holders is *evictable*: it stays and answers matches until room is needed.

::

    FREE ──reserve──► RESERVED ──seal──► SEALED ──last reference goes──► SEALED, evictable
      ▲                │      │            ▲                                 │      │
      │◄───release─────┘      │            └──────────────hold───────────────┘      │
      │          release while written                                              │
      │                       ▼                                                     │
      │◄──last end_write── DRAINING                                                 │
      │◄────────────────────────evicted by reserve──────────────────────────────────┘

Two lives keep a block: its holder's and its writer's. Handing out a block while an old write may still land in it
gives the next owner wrong text without any error, so a released block with writes in flight drains first, and its
*generation* grows at once, which is what refuses a write of the old owner that comes late.

Who asks for blocks does so for a tenant, and a tenant may have a quota. At its quota it gets room only by giving up
its own coldest blocks: it pushes out nobody else's.

The pool is synchronous and has no clock: leases take the caller's. Each operation costs O(1) per block it names or
evicts. A refused operation leaves the pool as it was.
"""

from collections.abc import Mapping, Sequence

from mooncake_mesh.errors import InvalidTransition
from mooncake_mesh.kv.block_record import BlockRecord, BlockState
from mooncake_mesh.kv.eviction import LruEviction
from mooncake_mesh.kv.eviction_contract import BlockHistory, EvictionPolicy
from mooncake_mesh.kv.leases import LeaseTable
from mooncake_mesh.kv.pool_audit import audit
from mooncake_mesh.kv.pool_outcomes import Duplicate, NoRoom, PoolEvent, Renewal, Sealed
from mooncake_mesh.kv.tenants import NO_QUOTAS, TenantAccounts, TenantQuotas
from mooncake_mesh.kv.victims import Victims
from mooncake_proto.ids import BlockId, BlockKey
from mooncake_proto.kvcache import KvChange

__all__ = [
    "BlockPool",
    "BlockState",
    "Duplicate",
    "NoRoom",
    "PoolEvent",
    "Renewal",
    "Sealed",
]


class BlockPool:
    """All blocks of one arena. One process owns the pool and calls it from one thread.

    A *holder* is any string that its user keeps unique (a job, a transfer); it exists from its first block to its
    release.
    """

    def __init__(
        self, n_blocks: int, *, eviction: EvictionPolicy | None = None, quotas: TenantQuotas = NO_QUOTAS
    ) -> None:
        """Pool of *n_blocks* free blocks. *eviction* must be empty; LRU by default."""
        if n_blocks < 1:
            raise ValueError(f"n_blocks must be at least 1, got {n_blocks}")
        self._blocks = [BlockRecord() for _ in range(n_blocks)]
        self._free = [BlockId(i) for i in reversed(range(n_blocks))]
        self._sealed: dict[BlockKey, BlockId] = {}
        self._held: dict[str, dict[BlockId, None]] = {}
        self._victims = Victims(LruEviction() if eviction is None else eviction)
        self._tenants = TenantAccounts(quotas)
        self._leases = LeaseTable()
        self._events: list[PoolEvent] = []

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def n_blocks(self) -> int:
        return len(self._blocks)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def sealed_blocks(self) -> int:
        """Blocks that carry a key, referenced or not."""
        return len(self._sealed)

    @property
    def evictable_blocks(self) -> int:
        return len(self._victims)

    @property
    def available_blocks(self) -> int:
        """Most blocks that one ``reserve`` can get now, for a tenant without quota."""
        return len(self._free) + len(self._victims)

    def available_to(self, tenant: str) -> int:
        """Most blocks that one ``reserve`` for *tenant* can get now."""
        room = self._tenants.room(tenant)
        if room is None:
            return self.available_blocks
        return min(self.available_blocks, room + self._victims.of(tenant))

    def tenant_usage(self) -> dict[str, int]:
        """Blocks that are not free, by the tenant they were reserved for."""
        return self._tenants.usage()

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Blocks under the longest sealed prefix of *keys*. Changes nothing, not even recency: ``hold`` them next."""
        found = []
        for key in keys:
            block = self._sealed.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def blocks_of(self, holder: str) -> list[BlockId]:
        """What *holder* has, in the order it got it; empty for an unknown holder."""
        return list(self._held.get(holder, ()))

    def state(self, block: BlockId) -> BlockState:
        return self._get(block).state

    def generation(self, block: BlockId) -> int:
        """Grows when a holder gets the block and when it loses it; readers compare it before and after a copy."""
        return self._get(block).generation

    def may_write(self, block: BlockId, generation: int) -> bool:
        """Whether a right to write that was given at *generation* still stands: same owner, not sealed yet."""
        record = self._get(block)
        return record.state is BlockState.RESERVED and record.generation == generation

    def keys(self) -> list[BlockKey]:
        """All sealed keys, oldest first (a copy). Together with an empty event list this is a consistent snapshot."""
        return list(self._sealed)

    def key(self, block: BlockId) -> BlockKey | None:
        """The key that *block* is sealed under, if it is."""
        return self._get(block).key

    def coldest(self, n: int) -> list[BlockId]:
        """The next *n* victims of ``reserve``, or all there are, in order, but no soft-pinned ones. O(n)."""
        return self._victims.coldest(max(n, 0))

    # --- holding ------------------------------------------------------------------------------------------------------

    def hold(self, holder: str, blocks: Sequence[BlockId], *, lease_until_s: float | None = None) -> None:
        """Reference sealed *blocks* for *holder*, in chain order; those it has already are left as they are.

        ``lease_until_s`` gives the holder a lease (see :meth:`expire`), None leaves its lease as it is.
        """
        mine = self._held.get(holder, {})
        for block in blocks:
            if self._get(block).state is not BlockState.SEALED:
                raise self._illegal(block, f"held by {holder}")
        for block in blocks:
            if block not in mine:
                self._refer(block)
                mine[block] = None
        self._keep(holder, mine, lease_until_s)

    def reserve(
        self, holder: str, n: int, *, tenant: str = "", lease_until_s: float | None = None
    ) -> list[BlockId] | NoRoom:
        """Give *holder* *n* blocks to write, free ones first, then by eviction; all of them or none.

        For what exceeds the quota of *tenant* its own blocks are evicted first.
        """
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        available = self.available_to(tenant)
        if n > available:
            return NoRoom(wanted_blocks=n, available_blocks=available)
        room = self._tenants.room(tenant)
        for _ in range(0 if room is None else n - room):
            self._unseal(self._victims.take_of(tenant))
        mine = self._held.get(holder, {})
        got = []
        for _ in range(n):
            if not self._free:
                self._unseal(self._victims.take())
            block = self._free.pop()
            self._move(block, BlockState.RESERVED)
            record = self._blocks[block]
            record.generation += 1
            record.references = 1
            record.tenant = tenant
            mine[block] = None
            got.append(block)
        self._tenants.charge(tenant, n)
        self._keep(holder, mine, lease_until_s)
        return got

    def seal(self, holder: str, block: BlockId, key: BlockKey) -> Sealed | Duplicate:
        """Share a whole block that *holder* has written, under *key*. No write may be in flight."""
        record = self._get(block)
        if record.state is not BlockState.RESERVED or block not in self._held.get(holder, ()):
            raise self._illegal(block, f"sealed by {holder}")
        if record.writers:
            raise self._illegal(block, f"sealed by {holder} with {record.writers} writes in flight")
        other = self._sealed.get(key)
        if other is not None:
            return Duplicate(block=block, other=other)
        self._move(block, BlockState.SEALED)
        record.key = key
        record.history = BlockHistory(key=key, uses=1)
        self._sealed[key] = block
        self._events.append(PoolEvent(change=KvChange.STORED, key=key))
        return Sealed(block=block)

    def exchange(self, holder: str, twins: Mapping[BlockId, BlockId]) -> None:
        """Give each key of *twins*, which *holder* has reserved and nobody writes, back for a reference to its value, a
        sealed block with the same content, which takes its place in the holder's chain."""
        mine = self._held.get(holder, {})
        for own, twin in twins.items():
            if own not in mine or not self._get(own).is_quiet:
                raise self._illegal(own, f"exchanged by {holder}")
            if twin in mine or self._get(twin).state is not BlockState.SEALED:
                raise self._illegal(twin, f"taken by {holder} for a twin")
        if not twins:
            return
        self._held[holder] = {twins.get(block, block): None for block in mine}
        for own, twin in twins.items():
            self._refer(twin)
            self._blocks[own].references = 0
            self._become_free(own)

    def give(self, giver: str, taker: str, blocks: Sequence[BlockId]) -> None:
        """Let *taker*, who has none of them, have *blocks* of *giver*, in this order: references to those that are
        sealed, and those that *giver* has reserved and nobody writes for its own."""
        given, mine = self._held.get(giver, {}), self._held.get(taker, {})
        for block in blocks:
            if block in mine or block not in given or not (self._blocks[block].key or self._blocks[block].is_quiet):
                raise self._illegal(block, f"given to {taker}")
        for block in blocks:
            if self._blocks[block].is_quiet:
                del given[block]
                self._blocks[block].generation += 1  # the giver's right to write it ends
            else:
                self._refer(block)
            mine[block] = None
        self._keep(taker, mine, None)
        if not given:
            self.release(giver)

    def release(self, holder: str) -> None:
        """Drop everything *holder* has. Releasing an unknown holder, or twice, is fine.

        The last block is given up first: blocks are held in chain order, so under LRU a chain goes leaf by leaf and
        what remains of it can still be matched.
        """
        self._leases.end(holder)
        mine = self._held.pop(holder, {})
        has_quotas = self._tenants.has_quotas
        self._victims.use([key for block in mine if (key := self._blocks[block].key) is not None])
        for depth, block in zip(reversed(range(len(mine))), reversed(mine), strict=True):
            record = self._blocks[block]
            record.references -= 1
            if record.state is BlockState.SEALED:
                record.history.depth = max(record.history.depth, depth)
                if record.references == 0:
                    is_limited = has_quotas and self._tenants.is_limited(record.tenant)
                    self._victims.insert(block, record.history, record.tenant if is_limited else None)
            elif record.writers:
                record.generation += 1
                self._move(block, BlockState.DRAINING)
            else:
                self._become_free(block)

    def evict(self, block: BlockId) -> bool:
        """Free *block* if it is evictable; whether it was."""
        record = self._get(block)
        if record.state is not BlockState.SEALED or record.references:
            return False
        self._victims.remove(block)
        self._unseal(block)
        return True

    # --- soft pins ----------------------------------------------------------------------------------------------------

    def pin(self, pinner: str, blocks: Sequence[BlockId], until_s: float) -> None:
        """Evict sealed *blocks* after all others until *until_s*; *pinner*'s earlier pins last as long from now on.

        A hard pin is :meth:`hold` with a lease: such a block is not evicted at all.
        """
        for block in blocks:
            if self._get(block).state is not BlockState.SEALED:
                raise self._illegal(block, f"pinned by {pinner}")
        records = ((block, self._blocks[block]) for block in blocks)
        candidates = [(block, record.history) for block, record in records if not record.references]
        self._victims.pin(pinner, blocks, candidates, until_s)

    def unpin(self, pinner: str) -> None:
        """End the pins of *pinner*. An unknown one is fine."""
        self._victims.unpin(pinner)

    # --- leases -------------------------------------------------------------------------------------------------------

    def renew(self, holder: str, until_s: float) -> Renewal:
        """Move the end of the lease of *holder* to *until_s*, also of one that had no lease."""
        if holder not in self._held:
            return Renewal.LAPSED
        self._leases.grant(holder, until_s)
        return Renewal.RENEWED

    def expire(self, now_s: float) -> list[str]:
        """Release every holder whose lease is over (``now_s >= until_s``); returns them in order of expiry.

        Soft pins whose time is over end too.
        """
        self._victims.expire(now_s)
        lapsed = self._leases.expired(now_s)
        for holder in lapsed:
            self.release(holder)
        return lapsed

    # --- writers ------------------------------------------------------------------------------------------------------

    def begin_write(self, block: BlockId) -> None:
        """A transfer starts to write into a reserved *block*; writes may overlap. Ask :meth:`may_write` first."""
        record = self._get(block)
        if record.state is not BlockState.RESERVED:
            raise self._illegal(block, "written")
        record.writers += 1

    def end_write(self, block: BlockId) -> None:
        """One write of *block* has ended, whatever came of it. The last one frees a block that its holder gave up."""
        record = self._get(block)
        if not record.writers:
            raise self._illegal(block, "write ended")
        record.writers -= 1
        if record.state is BlockState.DRAINING and not record.writers:
            self._put_back(block)

    # --- events and checks --------------------------------------------------------------------------------------------

    def drain_events(self) -> list[PoolEvent]:
        """What was stored and removed since the last call, in order. The owner drains after every turn of its loop."""
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        """Raise InvariantViolated if the books do not agree. O(pool); for tests."""
        audit(
            self._blocks,
            free=self._free,
            sealed=self._sealed,
            held=self._held,
            leased=self._leases.holders(),
            victims=list(self._victims.order()),
            tenants=self._tenants.usage(),
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _get(self, block: BlockId) -> BlockRecord:
        if not 0 <= block < len(self._blocks):  # a list would take -1 for the last block
            raise InvalidTransition(f"block {block}", old="no block of this pool", new="used")
        return self._blocks[block]

    def _refer(self, block: BlockId) -> None:
        """One more holder of a sealed block."""
        record = self._blocks[block]
        if record.references == 0:
            self._victims.remove(block)
        record.references += 1
        record.history.uses += 1

    def _illegal(self, block: BlockId, move: str) -> InvalidTransition:
        return InvalidTransition(f"block {block}", old=self._blocks[block].state.value, new=move)

    def _move(self, block: BlockId, new: BlockState) -> None:
        record = self._blocks[block]
        if new not in record.state.may_become:
            raise self._illegal(block, new.value)
        record.state = new

    def _keep(self, holder: str, mine: dict[BlockId, None], lease_until_s: float | None) -> None:
        if not mine:
            return
        self._held[holder] = mine
        if lease_until_s is not None:
            self._leases.grant(holder, lease_until_s)

    def _become_free(self, block: BlockId) -> None:
        self._blocks[block].generation += 1
        self._put_back(block)

    def _put_back(self, block: BlockId) -> None:
        self._move(block, BlockState.FREE)
        self._tenants.discharge(self._blocks[block].tenant)
        self._free.append(block)

    def _unseal(self, block: BlockId) -> None:
        """Free a block that was sealed and is no candidate for eviction any more."""
        record = self._blocks[block]
        assert record.key is not None
        del self._sealed[record.key]
        self._events.append(PoolEvent(change=KvChange.REMOVED, key=record.key))
        record.key = None
        self._victims.forget(block)
        self._become_free(block)
