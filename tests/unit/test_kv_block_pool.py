import pytest

from mooncake_mesh.errors import InvalidTransition, InvariantViolated
from mooncake_mesh.kv.block_pool import BlockPool, BlockState, Duplicate, NoRoom, PoolEvent, Renewal, Sealed
from mooncake_proto.ids import BlockId, BlockKey
from mooncake_proto.kvcache import KvChange


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def chain(pool: BlockPool, holder: str, *names: str) -> list[BlockId]:
    """Reserve and seal one block per name for *holder*."""
    blocks = pool.reserve(holder, len(names))
    assert isinstance(blocks, list)
    for block, name in zip(blocks, names, strict=True):
        assert pool.seal(holder, block, key(name)) == Sealed(block=block)
    return blocks


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_reserve_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    chain(pool, "old", "a")
    pool.release("old")
    pool.drain_events()
    assert pool.reserve("job", 5) == NoRoom(wanted_blocks=5, available_blocks=4)
    assert (pool.free_blocks, pool.evictable_blocks) == (3, 1)
    assert pool.drain_events() == []
    assert pool.blocks_of("job") == []
    assert pool.reserve("job", 0) == []
    with pytest.raises(ValueError, match="negative"):
        pool.reserve("job", -1)
    pool.check_invariants()


def test_free_blocks_are_taken_before_any_is_evicted() -> None:
    pool = BlockPool(3)
    chain(pool, "old", "a")
    pool.release("old")
    pool.reserve("job", 2)
    assert len(pool.match([key("a")])) == 1
    pool.reserve("job", 1)
    assert pool.match([key("a")]) == []


def test_match_stops_at_the_first_hole_and_changes_nothing() -> None:
    pool = BlockPool(4)
    a, b = chain(pool, "job", "a", "b")
    pool.release("job")
    assert pool.match([key("a"), key("x"), key("b")]) == [a]
    assert pool.match([key("x"), key("a")]) == []
    assert pool.match([]) == []
    for _ in range(3):
        assert pool.match([key("a")]) == [a]
    pool.reserve("next", 3)
    assert pool.match([key("a"), key("b")]) == [a], "matching must not have made the leaf older or younger"
    assert pool.state(b) is BlockState.RESERVED


def test_a_chain_is_evicted_leaf_first() -> None:
    pool = BlockPool(4)
    chain(pool, "job", "a", "b", "c", "d")
    pool.release("job")
    for left in (["a", "b", "c"], ["a", "b"], ["a"], []):
        pool.reserve("next", 1)
        assert [k for k in "abcd" if pool.match([key(k)])] == left


def test_a_chain_used_again_outlives_a_younger_one() -> None:
    pool = BlockPool(4)
    chain(pool, "one", "a", "b")
    pool.release("one")
    chain(pool, "two", "x", "y")
    pool.release("two")
    pool.hold("three", pool.match([key("a"), key("b")]))
    pool.release("three")
    pool.reserve("next", 2)
    assert len(pool.match([key("a"), key("b")])) == 2
    assert pool.match([key("x")]) == []


def test_a_shared_prefix_stays_until_its_last_holder_goes() -> None:
    pool = BlockPool(2)
    a, b = chain(pool, "one", "a", "b")
    pool.hold("two", [a])
    pool.release("one")
    assert pool.evictable_blocks == 1
    assert pool.reserve("next", 2) == NoRoom(wanted_blocks=2, available_blocks=1)
    pool.release("two")
    assert pool.reserve("next", 2) == [b, a]


def test_holding_twice_counts_once() -> None:
    pool = BlockPool(2)
    (a,) = chain(pool, "one", "a")
    pool.hold("one", [a])
    pool.hold("two", [a, a])
    assert pool.blocks_of("two") == [a]
    pool.release("two")
    pool.release("one")
    pool.release("one")
    assert pool.evictable_blocks == 1
    pool.check_invariants()


def test_duplicates_stay_private() -> None:
    pool = BlockPool(3)
    (a,) = chain(pool, "one", "a")
    blocks = pool.reserve("two", 1)
    assert isinstance(blocks, list)
    pool.drain_events()
    assert pool.seal("two", blocks[0], key("a")) == Duplicate(block=blocks[0], other=a)
    assert pool.drain_events() == []
    assert pool.state(blocks[0]) is BlockState.RESERVED
    pool.release("two")
    assert pool.free_blocks == 2
    assert pool.match([key("a")]) == [a]


def test_events_come_in_order_and_once() -> None:
    pool = BlockPool(1)
    chain(pool, "one", "a")
    pool.release("one")
    chain(pool, "two", "b")
    assert pool.drain_events() == [
        PoolEvent(change=KvChange.STORED, key=key("a")),
        PoolEvent(change=KvChange.REMOVED, key=key("a")),
        PoolEvent(change=KvChange.STORED, key=key("b")),
    ]
    assert pool.drain_events() == []
    assert pool.keys() == [key("b")]


def test_a_released_block_is_not_handed_out_while_a_write_may_land() -> None:
    pool = BlockPool(1)
    assert pool.reserve("aborted", 1) == [0]
    block = BlockId(0)
    granted = pool.generation(block)
    pool.begin_write(block)
    pool.begin_write(block)
    pool.release("aborted")
    assert pool.state(block) is BlockState.DRAINING
    assert not pool.may_write(block, granted), "the right to write ends at the release"
    with pytest.raises(InvalidTransition):
        pool.begin_write(block)
    pool.end_write(block)
    assert pool.reserve("next", 1) == NoRoom(wanted_blocks=1, available_blocks=0)
    pool.end_write(block)
    assert pool.reserve("next", 1) == [block]
    assert not pool.may_write(block, granted), "a write of the old owner that comes late is told from one of the new"
    assert pool.may_write(block, pool.generation(block))
    with pytest.raises(InvalidTransition):
        pool.end_write(block)
    pool.check_invariants()


def test_a_sealed_block_is_immutable() -> None:
    pool = BlockPool(2)
    (block,) = chain(pool, "job", "a")
    generation = pool.generation(block)
    assert not pool.may_write(block, generation)
    with pytest.raises(InvalidTransition):
        pool.begin_write(block)
    with pytest.raises(InvalidTransition):
        pool.seal("job", block, key("a"))
    pool.release("job")
    assert pool.generation(block) == generation, "readers may go on while it is merely evictable"
    pool.reserve("next", 2)
    assert pool.generation(block) > generation


def test_no_seal_under_a_write() -> None:
    pool = BlockPool(1)
    pool.reserve("job", 1)
    pool.begin_write(BlockId(0))
    with pytest.raises(InvalidTransition, match="1 writes in flight"):
        pool.seal("job", BlockId(0), key("a"))
    pool.end_write(BlockId(0))
    assert pool.seal("job", BlockId(0), key("a")) == Sealed(block=BlockId(0))


@pytest.mark.parametrize("block", [-1, 2, 10**9])
def test_foreign_block_numbers_are_refused(block: int) -> None:
    pool = BlockPool(2)
    pool.reserve("job", 2)
    foreign = BlockId(block)
    for move in (
        lambda: pool.hold("job", [foreign]),
        lambda: pool.seal("job", foreign, key("a")),
        lambda: pool.begin_write(foreign),
        lambda: pool.end_write(foreign),
        lambda: pool.generation(foreign),
        lambda: pool.may_write(foreign, 1),
    ):
        with pytest.raises(InvalidTransition, match=str(block)):
            move()
    pool.check_invariants()


def test_a_refused_hold_takes_no_block() -> None:
    pool = BlockPool(3)
    (a,) = chain(pool, "one", "a")
    pool.release("one")
    private = pool.reserve("two", 1)
    assert isinstance(private, list)
    with pytest.raises(InvalidTransition):
        pool.hold("three", [a, private[0]])
    assert pool.blocks_of("three") == []
    assert pool.evictable_blocks == 1
    pool.check_invariants()


def test_only_the_owner_seals() -> None:
    pool = BlockPool(2)
    pool.reserve("one", 1)
    with pytest.raises(InvalidTransition, match="sealed by two"):
        pool.seal("two", BlockId(0), key("a"))
    assert pool.drain_events() == []


def test_a_lease_that_nobody_renews_gives_everything_back() -> None:
    pool = BlockPool(4)
    chain(pool, "job", "a")
    pool.hold("send", pool.match([key("a")]), lease_until_s=10.0)
    pool.reserve("put", 2, lease_until_s=5.0)
    assert pool.expire(4.999) == []
    assert pool.expire(5.0) == ["put"]
    assert pool.free_blocks == 3
    assert pool.renew("put", 20.0) is Renewal.LAPSED
    assert pool.renew("send", 20.0) is Renewal.RENEWED
    assert pool.expire(19.0) == []
    assert pool.expire(20.0) == ["send"]
    assert pool.expire(1e9) == [], "a holder without lease stays until it is released"
    assert pool.blocks_of("job") != []
    pool.check_invariants()


def test_an_expired_put_with_a_write_in_flight_drains_first() -> None:
    pool = BlockPool(1)
    pool.reserve("put", 1, lease_until_s=1.0)
    pool.begin_write(BlockId(0))
    assert pool.expire(2.0) == ["put"]
    assert pool.free_blocks == 0
    pool.end_write(BlockId(0))
    assert pool.free_blocks == 1


def test_leases_of_holders_long_gone_take_no_memory() -> None:
    pool = BlockPool(1)
    for i in range(5_000):
        pool.reserve(f"job-{i}", 1, lease_until_s=1e9)
        pool.release(f"job-{i}")
    assert len(pool._leases._heap) < 200


def test_the_check_sees_wrong_books() -> None:
    pool = BlockPool(2)
    chain(pool, "job", "a")
    pool._blocks[0].references += 1
    with pytest.raises(InvariantViolated, match="references"):
        pool.check_invariants()
