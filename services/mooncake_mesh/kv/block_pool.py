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

The pool is synchronous and has no clock: leases take the caller's. Each operation costs O(1) per block it names or
evicts. A refused operation leaves the pool as it was.
"""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from mooncake_mesh.errors import InvalidTransition, InvariantViolated
from mooncake_mesh.kv.eviction import LruEviction
from mooncake_mesh.kv.eviction_contract import BlockHistory, EvictionPolicy
from mooncake_mesh.kv.leases import LeaseTable
from mooncake_proto.ids import BlockId, BlockKey
from mooncake_proto.kvcache import KvChange


class BlockState(enum.Enum):
    """See the diagram at the top of the module."""

    FREE = "free"
    RESERVED = "reserved"
    SEALED = "sealed"
    DRAINING = "draining"


_MOVES: Final = frozenset(
    {
        (BlockState.FREE, BlockState.RESERVED),
        (BlockState.RESERVED, BlockState.SEALED),
        (BlockState.RESERVED, BlockState.DRAINING),
        (BlockState.RESERVED, BlockState.FREE),
        (BlockState.DRAINING, BlockState.FREE),
        (BlockState.SEALED, BlockState.FREE),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """A key that the pool began or ceased to hold."""

    change: KvChange
    key: BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """Nothing was reserved: ``wanted_blocks`` exceed what is free or evictable."""

    wanted_blocks: int
    available_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """The block is shared now; the holder that sealed it keeps its reference."""

    block: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """``other`` carries this key already; the block stays private to its holder."""

    block: BlockId
    other: BlockId


class Renewal(enum.Enum):
    """LAPSED: the holder has nothing any more, because it was released or its lease had ended."""

    RENEWED = "renewed"
    LAPSED = "lapsed"


@dataclass(slots=True)
class _Block:
    state: BlockState = BlockState.FREE
    generation: int = 0
    references: int = 0
    writers: int = 0
    key: BlockKey | None = None
    history: BlockHistory = field(default_factory=BlockHistory)


class BlockPool:
    """All blocks of one arena. One process owns the pool and calls it from one thread.

    A *holder* is any string that its user keeps unique (a job, a transfer); it exists from its first block to its
    release.
    """

    def __init__(self, n_blocks: int, *, eviction: EvictionPolicy | None = None) -> None:
        """Pool of *n_blocks* free blocks. *eviction* must be empty; LRU by default."""
        if n_blocks < 1:
            raise ValueError(f"n_blocks must be at least 1, got {n_blocks}")
        self._blocks = [_Block() for _ in range(n_blocks)]
        self._free = [BlockId(i) for i in reversed(range(n_blocks))]
        self._sealed: dict[BlockKey, BlockId] = {}
        self._held: dict[str, dict[BlockId, None]] = {}
        self._evictable: EvictionPolicy = LruEviction() if eviction is None else eviction
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
        return len(self._evictable)

    @property
    def available_blocks(self) -> int:
        """Most blocks that one ``reserve`` can get now."""
        return len(self._free) + len(self._evictable)

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
        """The next *n* victims of ``reserve``, or all there are, in order. Changes nothing; O(evictable)."""
        return self._evictable.order()[: max(n, 0)]

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
                record = self._blocks[block]
                if record.references == 0:
                    self._evictable.remove(block)
                record.references += 1
                record.history.uses += 1
                mine[block] = None
        self._keep(holder, mine, lease_until_s)

    def reserve(self, holder: str, n: int, *, lease_until_s: float | None = None) -> list[BlockId] | NoRoom:
        """Give *holder* *n* blocks to write, free ones first, then by eviction; all of them or none."""
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        if n > self.available_blocks:
            return NoRoom(wanted_blocks=n, available_blocks=self.available_blocks)
        mine = self._held.get(holder, {})
        got = []
        for _ in range(n):
            if not self._free:
                self._evict_one()
            block = self._free.pop()
            self._move(block, BlockState.RESERVED)
            self._blocks[block].generation += 1
            self._blocks[block].references = 1
            mine[block] = None
            got.append(block)
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

    def release(self, holder: str) -> None:
        """Drop everything *holder* has. Releasing an unknown holder, or twice, is fine.

        The last block is given up first: blocks are held in chain order, so under LRU a chain goes leaf by leaf and
        what remains of it can still be matched.
        """
        self._leases.end(holder)
        mine = self._held.pop(holder, {})
        self._evictable.use([key for block in mine if (key := self._blocks[block].key) is not None])
        for depth, block in zip(reversed(range(len(mine))), reversed(mine), strict=True):
            record = self._blocks[block]
            record.references -= 1
            if record.state is BlockState.SEALED:
                record.history.depth = max(record.history.depth, depth)
                if record.references == 0:
                    self._evictable.insert(block, record.history)
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
        self._evictable.remove(block)
        self._unseal(block)
        return True

    # --- leases -------------------------------------------------------------------------------------------------------

    def renew(self, holder: str, until_s: float) -> Renewal:
        """Move the end of the lease of *holder* to *until_s*, also of one that had no lease."""
        if holder not in self._held:
            return Renewal.LAPSED
        self._leases.grant(holder, until_s)
        return Renewal.RENEWED

    def expire(self, now_s: float) -> list[str]:
        """Release every holder whose lease is over (``now_s >= until_s``); returns them in order of expiry."""
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
            self._move(block, BlockState.FREE)
            self._free.append(block)

    # --- events and checks --------------------------------------------------------------------------------------------

    def drain_events(self) -> list[PoolEvent]:
        """What was stored and removed since the last call, in order. The owner drains after every turn of its loop."""
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        """Raise InvariantViolated if the books do not agree. O(pool); for tests."""
        counts = Counter(record.state for record in self._blocks)
        references = Counter(block for mine in self._held.values() for block in mine)
        evictable = set(self._evictable.order())
        free = set(self._free)
        _require(len(free) == len(self._free) == counts[BlockState.FREE], "free list and states differ")
        _require(len(self._sealed) == counts[BlockState.SEALED], "key map and states differ")
        _require(len(evictable) == len(self._evictable), "a block is evictable twice")
        _require(all(self._held.values()), "a holder without blocks")
        _require(all(holder in self._held for holder in self._leases.holders()), "a lease without a holder")
        for block, record in enumerate(self._blocks):
            name = f"block {block} ({record.state.value})"
            state, is_sealed = record.state, record.state is BlockState.SEALED
            _require(record.references == references[BlockId(block)], f"{name}: references")
            _require((block in free) == (state is BlockState.FREE), f"{name}: free list")
            _require((block in evictable) == (is_sealed and not record.references), f"{name}: evictable")
            _require((record.key is not None) == is_sealed, f"{name}: key")
            _require(record.key is None or self._sealed.get(record.key) == block, f"{name}: key map")
            _require(state is not BlockState.RESERVED or record.references == 1, f"{name}: one owner")
            _require(state in _UNOWNED or record.references > 0 or is_sealed, f"{name}: owner")
            _require(state not in _UNOWNED or record.references == 0, f"{name}: owned")
            _require(state is not BlockState.DRAINING or record.writers > 0, f"{name}: nothing drains")
            _require(state in _WRITABLE or record.writers == 0, f"{name}: written")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _get(self, block: BlockId) -> _Block:
        if not 0 <= block < len(self._blocks):  # a list would take -1 for the last block
            raise InvalidTransition(f"block {block}", old="no block of this pool", new="used")
        return self._blocks[block]

    def _illegal(self, block: BlockId, move: str) -> InvalidTransition:
        return InvalidTransition(f"block {block}", old=self._blocks[block].state.value, new=move)

    def _move(self, block: BlockId, new: BlockState) -> None:
        record = self._blocks[block]
        if (record.state, new) not in _MOVES:
            raise self._illegal(block, new.value)
        record.state = new

    def _keep(self, holder: str, mine: dict[BlockId, None], lease_until_s: float | None) -> None:
        if not mine:
            return
        self._held[holder] = mine
        if lease_until_s is not None:
            self._leases.grant(holder, lease_until_s)

    def _become_free(self, block: BlockId) -> None:
        self._move(block, BlockState.FREE)
        self._blocks[block].generation += 1
        self._free.append(block)

    def _evict_one(self) -> None:
        self._unseal(self._evictable.evict())

    def _unseal(self, block: BlockId) -> None:
        """Free a block that was sealed and is no candidate for eviction any more."""
        record = self._blocks[block]
        assert record.key is not None
        del self._sealed[record.key]
        self._events.append(PoolEvent(change=KvChange.REMOVED, key=record.key))
        record.key = None
        self._become_free(block)


_UNOWNED: Final = frozenset({BlockState.FREE, BlockState.DRAINING})
_WRITABLE: Final = frozenset({BlockState.RESERVED, BlockState.DRAINING})


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantViolated(what)
