"""Which blocks leave, and when leaving stops."""

from mooncake_mesh.kv.block_pool import BlockPool
from mooncake_mesh.messenger.store.slots import SlotTable
from mooncake_mesh.messenger.store.tiering import GIVE_UP_AFTER, Leaving, Tiering, joint_events, prefix_on_ssd
from mooncake_proto.ids import BlockId
from mooncake_proto.kvcache import KvChange
from tests.unit.store_doubles import key


def _pool(n_blocks: int, *numbers: int) -> BlockPool:
    """A pool with one chain that nobody holds."""
    pool = BlockPool(n_blocks)
    blocks = pool.reserve("writer", len(numbers))
    assert isinstance(blocks, list)
    for block, number in zip(blocks, numbers, strict=True):
        pool.seal("writer", block, key(number))
    pool.release("writer")
    return pool


def _move(tiering: Tiering, leaving: list[Leaving]) -> None:
    for one in leaving:
        write = tiering.copied(one)
        assert write is not None
        tiering.written(one, write, checksum=0)


def test_nothing_leaves_up_to_the_high_watermark() -> None:
    assert Tiering(_pool(20, *range(18)), SlotTable(9)).excess() == 0
    assert Tiering(_pool(20, *range(19)), SlotTable(9)).excess() == 2, "down to 17"


def test_the_next_victims_leave_but_for_those_to_spare() -> None:
    pool = _pool(4, 0, 1, 2, 3)
    leaving = Tiering(pool, SlotTable(4)).leaving(2, spare={BlockId(3)})
    assert [one.key for one in leaving] == [key(2), key(1)], "of a chain, the leaf first"
    assert Tiering(pool, SlotTable(4)).leaving(0, spare={BlockId(3)}) == []


def test_a_block_that_is_wanted_meanwhile_stays_and_leaves_without_a_write_later() -> None:
    pool, slots = _pool(2, 0, 1), SlotTable(4)
    tiering = Tiering(pool, slots)
    leaving = tiering.leaving(1)
    pool.hold("job", pool.match([key(0), key(1)]))
    _move(tiering, leaving)
    assert pool.match([key(0), key(1)]) == [0, 1]
    assert slots.holds(key(1))
    pool.release("job")
    assert tiering.leaving(1) == [], "it was written before"
    assert pool.match([key(1)]) == []
    assert pool.free_blocks == 1


def test_a_block_that_is_evicted_while_it_is_written_is_safe() -> None:
    pool, slots = _pool(1, 0), SlotTable(1)
    tiering = Tiering(pool, slots)
    (one,) = tiering.leaving(1)
    write = tiering.copied(one)
    assert write is not None
    pool.reserve("job", 1)
    tiering.written(one, write, checksum=0)
    assert slots.holds(key(0))
    assert pool.blocks_of("job") == [0]
    assert [(event.change, event.key) for event in joint_events(pool, slots)] == [(KvChange.STORED, key(0))]


def test_what_is_saved_stays_and_leaves_without_a_write_later() -> None:
    pool, slots = _pool(4, 0, 1, 2), SlotTable(4)
    tiering = Tiering(pool, slots)
    blocks = pool.match([key(0), key(1)])
    reserved = pool.reserve("job", 1)
    assert isinstance(reserved, list)
    saving = tiering.saving([*blocks, *reserved])
    assert [one.key for one in saving] == [key(0), key(1)], "what is not sealed has nothing to save"
    _move(tiering, saving)
    assert (pool.match([key(0), key(1)]), tiering.saving(blocks)) == (blocks, [])
    assert [one.key for one in tiering.leaving(3)] == [key(2)], "the others are freed at once"
    assert pool.free_blocks == 2


def test_more_than_ssd_holds_is_not_written_again_and_again() -> None:
    pool, slots = _pool(2, 0, 1), SlotTable(1)
    tiering = Tiering(pool, slots)
    blocks = pool.match([key(0), key(1)])
    for one in tiering.saving(blocks):
        _move(tiering, [one])
    assert (slots.keys(), tiering.saving(blocks)) == ([key(1)], [])


def test_what_changes_hands_while_it_is_saved_is_not_written() -> None:
    pool, slots = _pool(1, 0), SlotTable(1)
    tiering = Tiering(pool, slots)
    (one,) = tiering.saving(pool.match([key(0)]))
    pool.reserve("job", 1)
    assert (tiering.copied(one), slots.held_blocks) == (None, 0)


def test_a_disk_that_only_fails_is_given_up() -> None:
    pool = _pool(GIVE_UP_AFTER + 1, *range(GIVE_UP_AFTER + 1))
    tiering = Tiering(pool, SlotTable(2 * GIVE_UP_AFTER))
    assert tiering.excess() > 0
    for one in tiering.leaving(GIVE_UP_AFTER):
        write = tiering.copied(one)
        assert write is not None
        tiering.write_failed(write)
    assert tiering.has_given_up
    assert tiering.excess() == 0
    assert tiering.saving(pool.match([key(0)])) == []
    assert pool.sealed_blocks == GIVE_UP_AFTER + 1, "the blocks stay where they are"


def test_a_prefix_on_ssd_ends_at_the_first_gap() -> None:
    pool, slots = _pool(3, 0, 1, 3), SlotTable(4)
    tiering = Tiering(pool, slots)
    _move(tiering, tiering.leaving(3))
    assert prefix_on_ssd(slots, [key(0), key(1), key(2), key(3)]) == 2
    assert prefix_on_ssd(slots, []) == 0
