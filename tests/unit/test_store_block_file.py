"""What stands on the file after faults and crashes, and what the next start makes of it."""

import errno
from collections.abc import Callable

import pytest

from mooncake_mesh.messenger.store.block_file import Mismatch
from mooncake_mesh.messenger.store.records import (
    PAGE_BYTES,
    RECORD_BYTES,
    BadSuperblock,
    ForeignFile,
    Namespace,
    SlotRecord,
    pack_record,
    pack_superblock,
    record_offset,
    unpack_record,
    unpack_superblock,
)
from tests.unit.store_doubles import (
    NAMESPACE,
    Crash,
    FakeFile,
    block_file,
    content,
    empty_slot,
    fake_files,
    key,
    raises,
    slot_of,
)

N_SLOTS = 6
SLOT_BYTES = PAGE_BYTES


def test_blocks_come_back_and_neighbours_travel_together() -> None:
    blocks, table = fake_files(N_SLOTS)
    file = block_file(blocks, table, N_SLOTS)
    assert file.write([slot_of(4, 14), slot_of(1, 11), slot_of(2, 12)]) == [None, None, None]
    assert [(offset, size) for _, offset, size in blocks.calls] == [
        (1 * SLOT_BYTES, 2 * SLOT_BYTES),
        (4 * SLOT_BYTES, SLOT_BYTES),
    ]
    wanted = [empty_slot(slot_of(2, 12).record), empty_slot(slot_of(4, 14).record)]
    assert file.read(wanted) == [None, None]
    assert [bytes(slot.buffer[: NAMESPACE.block_bytes]) for slot in wanted] == [content(12), content(14)]


def test_short_transfers_are_continued() -> None:
    blocks, table = fake_files(N_SLOTS)
    file = block_file(blocks, table, N_SLOTS)
    blocks.fault = table.fault = lambda _operation, _offset, size: max(1, min(size, 1000))
    assert file.write([slot_of(0, 1), slot_of(1, 2)]) == [None, None]
    wanted = empty_slot(slot_of(1, 2).record)
    assert file.read([wanted]) == [None]
    assert [record.slot for record in file.records()] == [0, 1]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_one_bad_slot_of_a_run_costs_one(code: int) -> None:
    blocks, table = fake_files(N_SLOTS)
    file = block_file(blocks, table, N_SLOTS)

    def fault(operation: str, offset: int, size: int) -> int:
        if operation == "write" and offset <= SLOT_BYTES < offset + size:
            raise raises(code)
        return size

    blocks.fault = fault
    faults = file.write([slot_of(0, 1), slot_of(1, 2), slot_of(2, 3)])
    assert [fault if fault is None else fault.errno for fault in faults] == [None, code, None]
    assert {record.key for record in file.records()} == {key(1), key(3)}


def test_a_read_error_and_a_flipped_bit_are_outcomes_of_their_slots() -> None:
    blocks, table = fake_files(N_SLOTS)
    file = block_file(blocks, table, N_SLOTS)
    file.write([slot_of(0, 1), slot_of(1, 2), slot_of(2, 3)])
    blocks.data[SLOT_BYTES + 50] ^= 1

    def fault(operation: str, offset: int, size: int) -> int:
        if offset <= 2 * SLOT_BYTES < offset + size:
            raise raises(errno.EIO)
        return size

    blocks.fault = fault
    good, flipped, unreadable = file.read([empty_slot(record) for record in sorted(file.records(), key=_by_slot)])
    assert good is None
    assert flipped is Mismatch.CHECKSUM
    assert isinstance(unreadable, OSError)


def test_a_file_that_was_cut_off_is_a_fault() -> None:
    blocks, table = fake_files(N_SLOTS)
    file = block_file(blocks, table, N_SLOTS)
    file.write([slot_of(5, 1)])
    del blocks.data[5 * SLOT_BYTES + 10 :]
    (fault,) = file.read([empty_slot(file.records()[0])])
    assert isinstance(fault, OSError)


def test_an_erased_slot_is_not_found() -> None:
    blocks, table = fake_files(N_SLOTS)
    file = block_file(blocks, table, N_SLOTS)
    file.write([slot_of(0, 1), slot_of(1, 2)])
    assert file.erase(0) is None
    assert [record.key for record in file.records()] == [key(2)]


def test_a_torn_table_loses_its_tail_only() -> None:
    blocks, table = fake_files(N_SLOTS)
    file = block_file(blocks, table, N_SLOTS)
    file.write([slot_of(slot, slot + 1, seq=slot) for slot in range(N_SLOTS)])
    del table.data[record_offset(3) + 20 :]
    assert [record.slot for record in file.records()] == [2, 1, 0], "newest first"
    table.data.extend(b"\xff" * 500)
    assert [record.slot for record in file.records()] == [2, 1, 0]


def test_a_crash_anywhere_in_a_write_leaves_the_old_block_or_none_or_the_new_one() -> None:
    """Every byte count at which each of the three writes can have stopped, rewriting a slot that was in use."""
    seen = set()
    for step in range(3):
        for n_bytes in (0, 1, 40, RECORD_BYTES - 1, RECORD_BYTES, 99, SLOT_BYTES):
            blocks, table = fake_files(N_SLOTS)
            file = block_file(blocks, table, N_SLOTS)
            file.write([slot_of(0, 1, seq=1)])
            blocks.fault = table.fault = _crash_at(step, n_bytes)
            with pytest.raises(Crash):
                file.write([slot_of(0, 2, seq=2)])
            blocks.fault = table.fault = lambda _operation, _offset, size: size
            found = [empty_slot(record) for record in file.records()]
            faults = file.read(found)
            whole = [slot for slot, fault in zip(found, faults, strict=True) if fault is None]
            for slot in whole:
                number = {key(1): 1, key(2): 2}[slot.record.key]
                assert bytes(slot.buffer[: NAMESPACE.block_bytes]) == content(number), (step, n_bytes)
            seen.add(tuple(slot.record.key for slot in whole))
            assert faults == [None] * len(found), "without loss of power no torn block even looks whole"
    assert seen == {(key(1),), (), (key(2),)}


def _crash_at(step: int, n_bytes: int) -> Callable[[str, int, int], int]:
    left = step

    def fault(operation: str, offset: int, size: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash(min(n_bytes, size))
        return size

    return fault


def _by_slot(record: SlotRecord) -> int:
    return record.slot


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_record_counts_in_its_own_place_only() -> None:
    record = SlotRecord(slot=3, key=key(9), checksum=2**64 - 1, seq=7)
    data = pack_record(record, NAMESPACE)
    assert len(data) == RECORD_BYTES
    assert unpack_record(data, 3, NAMESPACE) == record
    assert unpack_record(data, 4, NAMESPACE) is None, "misplaced"
    assert unpack_record(data, 3, Namespace(block_bytes=100, layout="other")) is None
    assert unpack_record(data[:-1], 3, NAMESPACE) is None
    assert unpack_record(bytes(RECORD_BYTES), 3, NAMESPACE) is None
    for bit in range(RECORD_BYTES * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack_record(bytes(flipped), 3, NAMESPACE) is None


def test_the_superblock_says_whose_blocks_these_are() -> None:
    page = pack_superblock(NAMESPACE)
    assert len(page) == PAGE_BYTES
    assert unpack_superblock(page) == NAMESPACE
    assert unpack_superblock(b"") is None
    assert unpack_superblock(bytes(PAGE_BYTES)) is None
    with pytest.raises(ForeignFile, match="no slot table"):
        unpack_superblock(b"#!/bin/sh\n" + bytes(PAGE_BYTES))
    with pytest.raises(BadSuperblock):
        unpack_superblock(page[:100] + b"x" + page[101:])
    with pytest.raises(BadSuperblock):
        unpack_superblock(page[:2000])


def test_a_fake_file_is_as_long_as_its_bytes() -> None:
    file = FakeFile(bytearray(10))
    assert file.write_from([memoryview(b"abcdef"), memoryview(b"ghijkl")], 2) == 8
    assert file.data == b"\0\0abcdefgh"
