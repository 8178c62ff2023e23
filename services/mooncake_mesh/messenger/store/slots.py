"""Which slot of the block file holds which block, pure: the books of the SSD tier.

::

    PENDING ──verified──► HELD ──spoiled──► RETIRED
       │                  │ ▲                  ▲
      torn          evicted written         failed
       ▼                  ▼ │                  │
      FREE ◄──────────────┘ └─── WRITING ──────┘
       └─────────begin_write────────►

PENDING slots were found at start and are not trusted yet. RETIRED ones failed once and are not used again until the
messenger restarts. A slot that is being read is neither evicted nor written.
"""

import enum
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.errors import InvalidTransition, InvariantViolated
from mooncake_mesh.kv.block_pool import PoolEvent
from mooncake_mesh.messenger.store.records import SlotRecord
from mooncake_proto.ids import BlockKey
from mooncake_proto.kvcache import KvChange


class SlotState(enum.Enum):
    """See the diagram at the top of the module."""

    FREE = "free"
    PENDING = "pending"
    WRITING = "writing"
    HELD = "held"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotWrite:
    """The right to write the block under ``key`` into ``slot``; ends with written or failed."""

    slot: int
    key: BlockKey
    seq: int


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    record: SlotRecord | None = None
    readers: int = 0


class SlotTable:
    """All slots of one block file. Synchronous, no clock; each operation is O(1) per slot it names."""

    def __init__(self, n_slots: int) -> None:
        if n_slots < 1:
            raise ValueError(f"n_slots must be at least 1, got {n_slots}")
        self.n_slots = n_slots
        self._slots: dict[int, _Slot] = {}  # those that were ever used: a file may have millions
        self._next_unused = 0
        self._free: deque[int] = deque()
        self._held: dict[BlockKey, int] = {}
        self._writing: dict[BlockKey, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._events: list[PoolEvent] = []
        self._next_seq = 1
        self.retired_slots = 0

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def held_blocks(self) -> int:
        return len(self._held)

    def holds(self, key: BlockKey) -> bool:
        """Whether the block under *key* is whole here (being written does not count)."""
        return key in self._held

    def keys(self) -> list[BlockKey]:
        """All keys held, oldest first (a copy)."""
        return list(self._held)

    def state(self, slot: int) -> SlotState:
        return self._slots[slot].state if slot in self._slots else SlotState.FREE

    # --- what was there at start --------------------------------------------------------------------------------------

    def found(self, records: Iterable[SlotRecord]) -> None:
        """Slots that said at start what they hold, before anything is written.

        Each stays PENDING until :meth:`verified` or :meth:`torn`.
        """
        for record in records:
            if record.slot in self._slots:
                raise self._illegal(record.slot, "found")
            self._slots[record.slot] = _Slot(state=SlotState.PENDING, record=record)
            self._next_seq = max(self._next_seq, record.seq + 1)

    def verified(self, slot: int) -> None:
        """The bytes of a PENDING slot are what its record says; it counts as unused for longer than all others.

        A block that is here already, or on its way into another slot, needs no second one.
        """
        record = self._found_record(slot)
        if record.key in self._held or record.key in self._writing:
            self.torn(slot)
            return
        self._hold(slot, record)
        self._evictable.move_to_end(slot, last=False)

    def torn(self, slot: int) -> None:
        """A PENDING slot holds nothing of use."""
        self._found_record(slot)
        self._become_free(slot)

    # --- writing ------------------------------------------------------------------------------------------------------

    def begin_write(self, key: BlockKey) -> SlotWrite | None:
        """A slot for the block under *key*: a free one, or that of the block unused for longest.

        None when the block is here or on its way already, or when no slot can be had now.
        """
        if key in self._held or key in self._writing:
            return None
        number = self._take()
        if number is None:
            return None
        self._slots[number].state = SlotState.WRITING
        self._writing[key] = number
        self._next_seq += 1
        return SlotWrite(slot=number, key=key, seq=self._next_seq - 1)

    def written(self, write: SlotWrite, checksum: int) -> None:
        """Block and record are on the file."""
        self._end_write(write)
        self._hold(write.slot, SlotRecord(slot=write.slot, key=write.key, checksum=checksum, seq=write.seq))

    def failed(self, write: SlotWrite) -> None:
        """Writing failed: the slot is not used again."""
        self._end_write(write)
        self._retire(write.slot)

    # --- reading ------------------------------------------------------------------------------------------------------

    def begin_read(self, key: BlockKey) -> SlotRecord | None:
        """Pin the slot of *key* until :meth:`end_read`; None when it is not held."""
        number = self._held.get(key)
        if number is None:
            return None
        slot = self._slots[number]
        slot.readers += 1
        self._evictable.pop(number, None)
        assert slot.record is not None
        return slot.record

    def end_read(self, record: SlotRecord) -> None:
        """The slot was read (or not: the reader gave up). It counts as just used."""
        slot = self._slots[record.slot]
        if not slot.readers:
            raise self._illegal(record.slot, "read ended")
        slot.readers -= 1
        if slot.state is SlotState.HELD and not slot.readers:
            self._evictable[record.slot] = None

    def spoiled(self, record: SlotRecord) -> bool:
        """The slot cannot be read, or holds other bytes: its block is gone and the slot is not used again.

        Call before :meth:`end_read`. False when another reader said so before.
        """
        slot = self._slots[record.slot]
        if slot.state is not SlotState.HELD:
            return False
        self._forget(record.key)
        self._retire(record.slot)
        return True

    def touch(self, key: BlockKey) -> None:
        """The block under *key* counts as just used."""
        number = self._held.get(key)
        if number is not None and number in self._evictable:
            self._evictable.move_to_end(number)

    # --- events and checks --------------------------------------------------------------------------------------------

    def drain_events(self) -> list[PoolEvent]:
        """Keys that came and went since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        """Raise InvariantViolated if the books do not agree. O(slots); for tests."""
        counts = Counter(slot.state for slot in self._slots.values())
        _require(len(set(self._free)) == len(self._free) == counts[SlotState.FREE], "free list and states differ")
        _require(all(number < self.n_slots for number in self._slots), "a slot beyond the file")
        _require(len(self._held) == counts[SlotState.HELD], "key map and states differ")
        _require(len(self._writing) == counts[SlotState.WRITING], "writes and states differ")
        _require(self.retired_slots == counts[SlotState.RETIRED], "retired count and states differ")
        _require(not self._held.keys() & self._writing.keys(), "a block is held and written")
        for number, slot in self._slots.items():
            held = slot.state is SlotState.HELD
            _require((number in self._evictable) == (held and not slot.readers), f"slot {number}: evictable")
            _require(slot.state in _READABLE or not slot.readers, f"slot {number}: read")
            if held:
                _require(slot.record is not None and self._held.get(slot.record.key) == number, f"slot {number}: key")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _illegal(self, number: int, move: str) -> InvalidTransition:
        return InvalidTransition(f"slot {number}", old=self.state(number).value, new=move)

    def _expect(self, number: int, state: SlotState, move: str) -> _Slot:
        if self.state(number) is not state or number not in self._slots:
            raise self._illegal(number, move)
        return self._slots[number]

    def _take(self) -> int | None:
        """A FREE slot: one never used (neighbours are written at once), one that was freed, or an evicted one."""
        while self._next_unused in self._slots:
            self._next_unused += 1
        if self._next_unused < self.n_slots:
            self._slots[self._next_unused] = _Slot()
            return self._next_unused
        if not self._free:
            if not self._evictable:
                return None
            self._drop(self._evictable.popitem(last=False)[0])
        return self._free.popleft()

    def _found_record(self, number: int) -> SlotRecord:
        record = self._expect(number, SlotState.PENDING, "judged").record
        assert record is not None
        return record

    def _hold(self, number: int, record: SlotRecord) -> None:
        slot = self._slots[number]
        slot.state, slot.record = SlotState.HELD, record
        self._held[record.key] = number
        self._evictable[number] = None
        self._events.append(PoolEvent(change=KvChange.STORED, key=record.key))

    def _forget(self, key: BlockKey) -> None:
        del self._held[key]
        self._events.append(PoolEvent(change=KvChange.REMOVED, key=key))

    def _drop(self, number: int) -> None:
        record = self._slots[number].record
        assert record is not None
        self._forget(record.key)
        self._become_free(number)

    def _become_free(self, number: int) -> None:
        slot = self._slots[number]
        slot.state, slot.record = SlotState.FREE, None
        self._free.append(number)

    def _end_write(self, write: SlotWrite) -> None:
        self._expect(write.slot, SlotState.WRITING, "write ended")
        del self._writing[write.key]

    def _retire(self, number: int) -> None:
        slot = self._slots[number]
        slot.state, slot.record = SlotState.RETIRED, None
        self._evictable.pop(number, None)
        self.retired_slots += 1


_READABLE: Final = frozenset({SlotState.HELD, SlotState.RETIRED})


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantViolated(what)
