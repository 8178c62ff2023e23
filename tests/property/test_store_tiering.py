"""Pool, slots and file against one truth: what is read under a key is what was put under it, whatever happens between.

Copies, writes and reads are steps of their own, so that blocks change hands in the middle of each. The file fails,
moves too little, flips bits; the process crashes in the middle of a write and starts again.
"""

import errno
from collections.abc import Sequence
from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_mesh.kv.block_pool import BlockPool, NoRoom
from mooncake_mesh.messenger.store.block_file import BlockFile, SlotBytes, block_checksum
from mooncake_mesh.messenger.store.records import SlotRecord
from mooncake_mesh.messenger.store.slots import SlotTable, SlotWrite
from mooncake_mesh.messenger.store.tiering import Coming, Leaving, Tiering, joint_events, joint_keys
from mooncake_proto.ids import BlockId, BlockKey
from mooncake_proto.kvcache import KvChange, KvTier
from tests.unit.store_doubles import NAMESPACE, Crash, content, empty_slot, fake_files, key, raises

N_BLOCKS = 8
N_SLOTS = 6
N_KEYS = 5
NUMBER_OF = {key(number): number for number in range(N_KEYS)}
JOBS = ["job-a", "job-b"]

jobs = st.sampled_from(JOBS)
numbers = st.integers(0, N_KEYS - 1)
faults = st.sampled_from(["none", "none", "none", "none", "short", "EIO", "ENOSPC", "flip"])


class TieringMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.table = fake_files(N_SLOTS)
        self.index: dict[BlockKey, KvTier] = {}

    @initialize()
    def start(self) -> None:
        """A new process: an empty arena, and what the file still says."""
        self.pool = BlockPool(N_BLOCKS)
        self.slots = SlotTable(N_SLOTS)
        self.tiering = Tiering(self.pool, self.slots)
        self.file = BlockFile(self.blocks, self.table, NAMESPACE, N_SLOTS)
        self.arena: dict[BlockId, bytes] = {}
        self.leaving: list[tuple[Leaving, bytes]] = []
        self.placed: list[tuple[Leaving, SlotWrite, SlotBytes]] = []
        self.coming: dict[str, tuple[Sequence[Coming], list[bool] | None]] = {}
        self.granted: dict[str, list[BlockId]] = {}
        self.index.clear()
        self._set_fault("none")
        self.pending = self.file.records()
        self.slots.found(self.pending)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    @rule(job=jobs, number=numbers)
    def put(self, job: str, number: int) -> None:
        """A job computes a block and shares it."""
        if job in self.coming:
            return
        got = self.pool.reserve(job, 1)
        if isinstance(got, NoRoom):
            return
        self.arena[got[0]] = content(number)
        self.pool.seal(job, got[0], key(number))

    @rule(first=numbers, n=st.integers(2, 5))
    def compute(self, first: int, n: int) -> None:
        """A whole job: a chain is shared and given up, so that it may leave."""
        for number in range(first, min(first + n, N_KEYS)):
            if not self.pool.match([key(number)]):
                self.put("job-d", number)
        self.pool.release("job-d")

    @rule(n=st.integers(1, N_BLOCKS))
    def churn(self, n: int) -> None:
        """A job that takes what it can get, writes over it and ends: everything that could be evicted was."""
        got = self.pool.reserve("job-e", min(n, self.pool.available_blocks))
        assert not isinstance(got, NoRoom)
        for block in got:
            self.arena[block] = b"?" * NAMESPACE.block_bytes
        self.pool.release("job-e")

    @rule(job=jobs, number=numbers)
    def hold(self, job: str, number: int) -> None:
        self.pool.hold(job, self.pool.match([key(number)]))

    @rule(job=jobs)
    def release(self, job: str) -> None:
        self.pool.release(job)

    # --- leaving ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pool.evictable_blocks and not self.leaving and not self.placed)
    @rule(n=st.integers(1, 4))
    def choose(self, n: int) -> None:
        self.leaving = [(one, b"") for one in self.tiering.leaving(n)]

    @precondition(lambda self: self.leaving)
    @rule()
    def copy(self) -> None:
        """At any moment after the choice: the bytes that are in the block now."""
        self.leaving = [(one, self.arena[one.block]) for one, _ in self.leaving]

    @precondition(lambda self: self.leaving and all(copied for _, copied in self.leaving))
    @rule()
    def place(self) -> None:
        for one, copied in self.leaving:
            write = self.tiering.copied(one)
            if write is None:
                continue
            buffer = empty_slot(SlotRecord(slot=0, key=key(0), checksum=0, seq=0)).buffer
            buffer[: NAMESPACE.block_bytes] = copied
            record = SlotRecord(
                slot=write.slot, key=write.key, checksum=block_checksum(memoryview(copied)), seq=write.seq
            )
            self.placed.append((one, write, SlotBytes(record=record, buffer=buffer)))
        self.leaving = []

    @precondition(lambda self: self.placed)
    @rule(fault=faults)
    def write(self, fault: str) -> None:
        self._set_fault(fault)
        outcomes = self.file.write([slot for _, _, slot in self.placed])
        self._set_fault("none")
        for (one, write, slot), outcome in zip(self.placed, outcomes, strict=True):
            if outcome is None:
                assert bytes(slot.buffer[: NAMESPACE.block_bytes]) == content(NUMBER_OF[write.key])
                self.tiering.written(one, write, slot.record.checksum)
            else:
                self.tiering.write_failed(write)
        self.placed = []

    @precondition(lambda self: self.pool.evictable_blocks)
    @rule(n=st.integers(1, 5))
    def leave(self, n: int) -> None:
        """All of it at once, with what may have been under way before."""
        self.finish_leaving()
        self.choose(n)
        self.finish_leaving()

    @precondition(lambda self: self.pool.evictable_blocks)
    @rule(n=st.integers(1, 5), churned=st.integers(1, N_BLOCKS), copied_before=st.booleans())
    def leave_while_blocks_change_hands(self, n: int, churned: int, copied_before: bool) -> None:
        self.finish_leaving()
        self.choose(n)
        if copied_before:
            self.copy()
        self.churn(churned)
        if not copied_before:
            self.copy()
        self.place()

    def finish_leaving(self) -> None:
        self.copy()
        self.place()
        self.write("none")

    # --- coming back --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.slots.held_blocks)
    @rule(job=jobs, pick=numbers, n=st.integers(1, 3))
    def begin_promotion(self, job: str, pick: int, n: int) -> None:
        """For a chain that starts with a block on SSD; what follows may be there too."""
        if job in self.coming or not self.slots.held_blocks:
            return
        first = NUMBER_OF[self.slots.keys()[pick % self.slots.held_blocks]]
        blocks = self.pool.reserve(job, n)
        if isinstance(blocks, NoRoom):
            return
        for block in blocks:
            self.arena[block] = b"!" * NAMESPACE.block_bytes
        wanted = [key(number) for number in range(first, min(first + n, N_KEYS))]
        coming = self.tiering.coming(blocks, wanted)
        assert [one.record.key for one in coming] == wanted[: max(1, len(coming))]
        self.coming[job] = (coming, None)

    @precondition(lambda self: self.coming)
    @rule(job=jobs, fault=faults)
    def read(self, job: str, fault: str) -> None:
        """The thread's work: it may come after the job has ended, and must not hurt whoever comes next."""
        if job not in self.coming:
            return
        coming, whole = self.coming[job]
        if whole is not None:
            return
        self._set_fault(fault)
        slots = [empty_slot(one.record) for one in coming]
        outcomes = self.file.read(slots)
        self._set_fault("none")
        for one, slot, outcome in zip(coming, slots, outcomes, strict=True):
            if outcome is None:
                self.arena[one.block] = bytes(slot.buffer[: NAMESPACE.block_bytes])
        self.coming[job] = (coming, [outcome is None for outcome in outcomes])

    @precondition(lambda self: self.slots.held_blocks)
    @rule(job=jobs, pick=numbers, n=st.integers(1, 3))
    def come_back(self, job: str, pick: int, n: int) -> None:
        """All of it at once; what was held stays held."""
        self.begin_promotion(job, pick, n)
        self.read(job, "none")
        self.end_promotion(job)

    @precondition(lambda self: self.slots.held_blocks)
    @rule(job=jobs, pick=numbers, n=st.integers(1, 3), churned=st.integers(1, N_BLOCKS))
    def end_while_reading(self, job: str, pick: int, n: int, churned: int) -> None:
        """The job ends and others take what they can get before the last byte is read."""
        self.begin_promotion(job, pick, n)
        self.release(job)
        self.churn(churned)
        self.compute(pick, n)
        self.read(job, "none")
        self.end_promotion(job)

    @precondition(lambda self: self.coming)
    @rule(job=jobs)
    def end_promotion(self, job: str) -> None:
        coming, whole = self.coming.get(job, ((), None))
        if whole is None:
            return
        del self.coming[job]
        n_good = self.tiering.came(job, coming, whole)
        for one in coming[:n_good]:
            assert self.arena[one.block] == content(NUMBER_OF[one.record.key]), "the job uses these bytes"
        for one, is_whole in zip(coming, whole, strict=True):
            if not is_whole:
                self.file.erase(one.record.slot)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    @rule(disaster=st.sampled_from(["flip", "tear", "crash"]), slot=st.integers(0, N_SLOTS - 1), n=st.integers(0, 9000))
    def disaster(self, disaster: str, slot: int, n: int) -> None:
        if disaster == "flip":
            self.flip(slot, n % NAMESPACE.block_bytes)
        elif disaster == "tear":
            self.tear_table(n % 400)
        else:
            self.crash_in_a_write(slot, n)

    def flip(self, slot: int, byte: int) -> None:
        self.blocks.data[slot * self.file.slot_bytes + byte] ^= 0x10

    def tear_table(self, n: int) -> None:
        """The end of the table is lost, as after a loss of power."""
        size = len(self.table.data)
        self.table.data[size - n :] = bytes(n)

    def crash_in_a_write(self, step: int, n_bytes: int) -> None:
        calls = 0

        def fault(_operation: str, _offset: int, size: int) -> int:
            nonlocal calls
            calls += 1
            if calls > step:
                raise Crash(min(n_bytes, size))
            return size

        self.blocks.fault = self.table.fault = fault
        with suppress(Crash):
            self.file.write([slot for _, _, slot in self.placed])
        self.start()

    @precondition(lambda self: self.pending)
    @rule(n=st.integers(1, N_SLOTS))
    def adopt(self, n: int) -> None:
        batch, self.pending = self.pending[:n], self.pending[n:]
        slots = [empty_slot(record) for record in batch]
        for slot, outcome in zip(slots, self.file.read(slots), strict=True):
            if outcome is None:
                assert bytes(slot.buffer[: NAMESPACE.block_bytes]) == content(NUMBER_OF[slot.record.key])
                self.slots.verified(slot.record.slot)
            else:
                self.slots.torn(slot.record.slot)

    @precondition(lambda self: self.slots.held_blocks)
    @rule(n=st.integers(1, N_SLOTS))
    def adopt_while_it_leaves_again(self, n: int) -> None:
        """What is found at the next start is computed anew, and on its way to another slot when its turn comes."""
        self.start()
        if not self.pending:
            return
        self.compute(NUMBER_OF[self.pending[0].key], 1)
        self.choose(N_BLOCKS)
        self.copy()
        self.place()
        self.adopt(n)

    def _set_fault(self, name: str) -> None:
        def fault(operation: str, offset: int, size: int) -> int:
            if name in ("EIO", "ENOSPC"):
                raise raises(getattr(errno, name))
            if name == "flip" and operation == "read" and size:
                self.blocks.data[offset] ^= 1
            return max(1, size // 3) if name == "short" else size

        self.blocks.fault = fault
        self.table.fault = lambda _operation, _offset, size: size

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants()
            self.slots.check_invariants()

    @invariant()
    def shared_blocks_hold_their_content(self) -> None:
        if not hasattr(self, "pool"):
            return
        sealed = self.pool.keys()
        for held in sealed:
            (block,) = self.pool.match([held])
            assert self.arena[block] == content(NUMBER_OF[held])

    @invariant()
    def events_rebuild_what_the_node_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        for event in joint_events(self.pool, self.slots):
            self.index.pop(event.key, None)
            if event.change is KvChange.STORED:
                self.index[event.key] = event.tier
        in_arena, on_ssd = joint_keys(self.pool, self.slots)
        assert self.index == dict.fromkeys(on_ssd, KvTier.SSD) | dict.fromkeys(in_arena, KvTier.DRAM)
        assert len(self.index) == len(in_arena) + len(on_ssd)

    def teardown(self) -> None:
        """Once everything that was begun has ended, nothing is held."""
        if not hasattr(self, "pool"):
            return
        self.finish_leaving()
        for job in JOBS:
            self.read(job, "none")
            self.end_promotion(job)
            self.pool.release(job)
        self.books_agree()
        assert self.pool.available_blocks == N_BLOCKS


TestTieringMachine = TieringMachine.TestCase
TestTieringMachine.settings = settings(deadline=None, stateful_step_count=50)
