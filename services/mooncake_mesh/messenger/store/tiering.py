"""What moves between arena and SSD, pure: over the pool's books and the slots'.

Leaving (demotion), for a batch of the pool's next victims: nobody holds them, and the pool may give them to somebody
else at any moment. So they are copied to a staging buffer first, then their generations are compared, and only a copy
of a block that had not changed hands gets a slot and is written. From then on the pool may evict the block: the copy is
safe. When it is on the file, the block is freed, unless it is held again.

Saving: what somebody pays to have kept (kv/soft_pins.py) leaves last, so a killed messenger would take it along. Its
blocks are written as those above, and stay where they are.

Coming back (promotion): a job that was just given blocks has those read from SSD which continue its prefix, into its
own blocks. Each write is announced to the pool, so a job that ends meanwhile leaves no block behind that is still being
written. What was read whole is sealed, up to the first block that was not; the rest is computed.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from mooncake_mesh.kv.block_pool import BlockPool, PoolEvent
from mooncake_mesh.messenger.store.records import SlotRecord
from mooncake_mesh.messenger.store.slots import SlotTable, SlotWrite
from mooncake_proto.ids import BlockId, BlockKey
from mooncake_proto.kvcache import KvChange, KvTier

HIGH_PERCENT: Final = 90
EVICT_PERCENT: Final = 5
"""Above HIGH_PERCENT of the blocks in use, blocks leave until EVICT_PERCENT less are."""

GIVE_UP_AFTER: Final = 32
"""After that many failed writes without a good one nothing is written any more: each costs a slot."""


class Then(enum.Enum):
    """What becomes of a block in the arena once SSD has it."""

    LEAVES = "leaves"
    STAYS = "stays"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A block to copy out. The copy is worth something only while the pool says the same of it."""

    block: BlockId
    generation: int
    key: BlockKey
    then: Then = Then.LEAVES


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """Read ``record`` into ``block``, which belongs to a job as long as its generation is this one."""

    record: SlotRecord
    block: BlockId
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Blocks that *holder* has reserved, and the keys of the KV that may be read into them, in chain order."""

    holder: str
    blocks: list[BlockId]
    keys: list[BlockKey]


class Tiering:
    """Decisions only: whoever calls copies, writes and reads between the calls. All calls from the pool's thread."""

    def __init__(self, pool: BlockPool, slots: SlotTable) -> None:
        self._pool = pool
        self._slots = slots
        self._high = pool.n_blocks * HIGH_PERCENT // 100
        self._low = pool.n_blocks * (HIGH_PERCENT - EVICT_PERCENT) // 100
        self._failed_in_a_row = 0
        self._saved: dict[BlockId, int] = {}  # and its generation then
        self.spoiled_blocks = 0
        self.failed_writes = 0

    # --- leaving ------------------------------------------------------------------------------------------------------

    @property
    def has_given_up(self) -> bool:
        """Writing fails; nothing leaves any more, what is on SSD can still be read."""
        return self._failed_in_a_row >= GIVE_UP_AFTER

    def excess(self) -> int:
        """How many blocks should leave: none up to the high watermark, all above the low one beyond it."""
        used = self._pool.n_blocks - self._pool.free_blocks
        return used - self._low if used > self._high and not self.has_given_up else 0

    def leaving(self, n: int, *, spare: Collection[BlockId] = ()) -> list[Leaving]:
        """Blocks among the pool's next *n* victims, not counting those in *spare*, that must be copied.

        Those that SSD has already are freed here.
        """
        if n <= 0:
            return []
        out = []
        victims = (block for block in self._pool.coldest(n + len(spare)) if block not in spare)
        for block in islice(victims, n):
            key = self._pool.key(block)
            assert key is not None, "a victim is sealed"
            if self._slots.holds(key):
                self._slots.touch(key)
                self._pool.evict(block)
            else:
                out.append(Leaving(block=block, generation=self._pool.generation(block), key=key))
        return out

    def saving(self, blocks: Sequence[BlockId]) -> list[Leaving]:
        """Those of *blocks* that must be copied for SSD to have them too; they stay in the arena.

        None twice: where more is saved than SSD has slots, the same blocks would be written over each other for ever.
        """
        out = []
        for block in blocks:
            key = self._pool.key(block)
            if key is None or self.has_given_up:
                continue
            if self._slots.holds(key):
                self._slots.touch(key)
            elif self._saved.get(block) != self._pool.generation(block):
                out.append(Leaving(block=block, generation=self._pool.generation(block), key=key, then=Then.STAYS))
        return out

    def copied(self, leaving: Leaving) -> SlotWrite | None:
        """A slot for what was copied; None when the copy is worthless or there is no slot."""
        if self._pool.generation(leaving.block) != leaving.generation:
            return None
        return self._slots.begin_write(leaving.key)

    def written(self, leaving: Leaving, write: SlotWrite, checksum: int) -> None:
        """The copy is on the file: a block that leaves is freed, unless somebody holds it (or has got it meanwhile)."""
        self._slots.written(write, checksum)
        self._failed_in_a_row = 0
        if leaving.then is Then.STAYS:
            self._saved[leaving.block] = leaving.generation
        elif self._pool.generation(leaving.block) == leaving.generation:
            self._pool.evict(leaving.block)

    def write_failed(self, write: SlotWrite) -> None:
        self._slots.failed(write)
        self.failed_writes += 1
        self._failed_in_a_row += 1

    # --- coming back --------------------------------------------------------------------------------------------------

    def coming(self, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> list[Coming]:
        """What to read into *blocks*, reserved for a job, for the prefix *keys* as far as SSD holds it.

        Each of these must come back through :meth:`came`, whatever becomes of the reading.
        """
        out = []
        for block, key in zip(blocks, keys, strict=False):
            record = self._slots.begin_read(key)
            if record is None:
                break
            self._pool.begin_write(block)
            out.append(Coming(record=record, block=block, generation=self._pool.generation(block)))
        return out

    def came(self, holder: str, coming: Sequence[Coming], whole: Sequence[bool]) -> int:
        """The reads have ended; ``whole[i]``: block i holds verified bytes. How many blocks of *holder* now hold KV."""
        for one, is_whole in zip(coming, whole, strict=True):
            if not is_whole and self._slots.spoiled(one.record):
                self.spoiled_blocks += 1
            self._slots.end_read(one.record)
            self._pool.end_write(one.block)
        n_good = 0
        for one, is_whole in zip(coming, whole, strict=True):
            if not is_whole or not self._pool.may_write(one.block, one.generation):
                break
            self._pool.seal(holder, one.block, one.record.key)
            n_good += 1
        return n_good


def prefix_on_ssd(slots: SlotTable, keys: Sequence[BlockKey]) -> int:
    """How many of *keys*, from the first on, SSD holds."""
    return next((i for i, key in enumerate(keys) if not slots.holds(key)), len(keys))


def joint_events(pool: BlockPool, slots: SlotTable) -> list[PoolEvent]:
    """What the node as a whole began or ceased to hold since the last call: a key is held while either tier has it.

    Each key whose tiers changed is reported once, as it is now; a key may so be reported as stored twice.
    """
    touched = dict.fromkeys(event.key for event in (*pool.drain_events(), *slots.drain_events()))
    return [_event(pool, slots, key) for key in touched]


def _event(pool: BlockPool, slots: SlotTable, key: BlockKey) -> PoolEvent:
    if pool.match([key]):
        return PoolEvent(change=KvChange.STORED, key=key)
    if slots.holds(key):
        return PoolEvent(change=KvChange.STORED, key=key, tier=KvTier.SSD)
    return PoolEvent(change=KvChange.REMOVED, key=key)


def joint_keys(pool: BlockPool, slots: SlotTable) -> tuple[list[BlockKey], list[BlockKey]]:
    """Every key that the arena holds, and every other that SSD holds."""
    in_arena = pool.keys()
    known = set(in_arena)
    return in_arena, [key for key in slots.keys() if key not in known]  # noqa: SIM118  not a dict
