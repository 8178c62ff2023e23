"""Whose slot goes first, who may have which, and what outlives a reader."""

import pytest

from mooncake_mesh.errors import InvalidTransition
from mooncake_mesh.messenger.store.records import SlotRecord
from mooncake_mesh.messenger.store.slots import SlotState, SlotTable
from mooncake_proto.kvcache import KvChange
from tests.unit.store_doubles import key


def _fill(table: SlotTable, *numbers: int) -> None:
    for number in numbers:
        write = table.begin_write(key(number))
        assert write is not None
        table.written(write, checksum=number)


def test_the_block_unused_for_longest_makes_room() -> None:
    table = SlotTable(3)
    _fill(table, 1, 2, 3)
    table.touch(key(1))
    record = table.begin_read(key(2))
    assert record is not None
    table.end_read(record)
    _fill(table, 4)
    assert [table.holds(key(n)) for n in (1, 2, 3, 4)] == [True, True, False, True]
    _fill(table, 5)
    assert not table.holds(key(1))
    changes = [(event.change, event.key) for event in table.drain_events()]
    assert changes[-2:] == [(KvChange.REMOVED, key(1)), (KvChange.STORED, key(5))]
    table.check_invariants()


def test_a_slot_that_is_read_is_not_given_away() -> None:
    table = SlotTable(1)
    _fill(table, 1)
    record = table.begin_read(key(1))
    assert record is not None
    assert table.begin_write(key(2)) is None
    table.end_read(record)
    assert table.begin_write(key(2)) is not None
    assert not table.holds(key(1))


def test_one_write_of_a_key() -> None:
    table = SlotTable(3)
    write = table.begin_write(key(1))
    assert write is not None
    assert table.begin_write(key(1)) is None, "on its way"
    table.written(write, checksum=1)
    assert table.begin_write(key(1)) is None, "here"


def test_a_slot_that_failed_is_not_used_again() -> None:
    table = SlotTable(2)
    write = table.begin_write(key(1))
    assert write is not None
    table.failed(write)
    _fill(table, 2)
    record = table.begin_read(key(2))
    again = table.begin_read(key(2))
    assert record is not None
    assert again is not None
    assert table.spoiled(record)
    assert not table.holds(key(2))
    assert not table.spoiled(again), "another reader said so before"
    table.end_read(record)
    table.end_read(again)
    table.check_invariants()
    assert table.retired_slots == 2
    assert table.begin_write(key(3)) is None
    with pytest.raises(InvalidTransition):
        table.end_read(again)


def test_what_was_found_is_not_trusted_before_it_was_verified() -> None:
    table = SlotTable(3)
    table.found([SlotRecord(slot=1, key=key(1), checksum=1, seq=8), SlotRecord(slot=0, key=key(2), checksum=2, seq=4)])
    assert not table.holds(key(1))
    write = table.begin_write(key(1))
    assert write is not None
    assert (write.slot, write.seq) == (2, 9), "not the slot that is to be verified, and newer than all"
    assert table.begin_write(key(3)) is None, "nothing to give away yet"
    table.written(write, checksum=1)
    table.verified(1)
    assert table.state(1) is SlotState.FREE, "the same block was written again meanwhile"
    table.verified(0)
    assert table.holds(key(2))
    table.check_invariants()
    with pytest.raises(InvalidTransition):
        table.torn(0)


def test_old_blocks_go_before_new_ones() -> None:
    table = SlotTable(3)
    table.found([SlotRecord(slot=0, key=key(1), checksum=1, seq=2), SlotRecord(slot=1, key=key(2), checksum=2, seq=1)])
    _fill(table, 3)
    for slot in (0, 1):  # newest first
        table.verified(slot)
    _fill(table, 4, 5)
    assert [table.holds(key(n)) for n in (1, 2, 3, 4, 5)] == [False, False, True, True, True]


def test_a_found_block_that_is_being_written_again_is_not_held_twice() -> None:
    """It was computed anew before its turn to be verified came: two slots under one key would end as none."""
    table = SlotTable(3)
    table.found([SlotRecord(slot=0, key=key(1), checksum=1, seq=5)])
    write = table.begin_write(key(1))
    assert write is not None
    table.verified(0)
    table.check_invariants()
    table.written(write, checksum=1)
    table.check_invariants()
    _fill(table, 2, 3, 4)
    table.check_invariants()
    assert not table.holds(key(1)), "its turn to go came once"
