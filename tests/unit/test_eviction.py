from collections.abc import Sequence

import pytest

from mooncake_mesh.kv.block_pool import BlockPool, Sealed
from mooncake_mesh.kv.eviction import EvictionKind, LruEviction, RankedEviction, eviction_policy
from mooncake_mesh.kv.eviction_contract import BlockHistory
from mooncake_proto.ids import BlockId, BlockKey


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def use(pool: BlockPool, chain: str) -> int:
    """One request for *chain*, a letter a block; how many leading blocks it found."""
    keys = [key(chain[: i + 1]) for i in range(len(chain))]
    cached = pool.match(keys)
    pool.hold("request", cached)
    fresh = pool.reserve("request", len(keys) - len(cached))
    assert isinstance(fresh, list)
    for block, name in zip(fresh, keys[len(cached) :], strict=True):
        assert isinstance(pool.seal("request", block, name), Sealed)
    pool.release("request")
    return len(cached)


def pool_of(kind: EvictionKind, n_blocks: int, chains: Sequence[str]) -> BlockPool:
    pool = BlockPool(n_blocks, eviction=eviction_policy(kind))
    for chain in chains:
        use(pool, chain)
    return pool


def held(pool: BlockPool) -> set[str]:
    return {bytes(name).decode().rstrip(".") for name in pool.keys()}  # noqa: SIM118  not a dict


def test_lru_gives_up_the_oldest_chain_from_its_leaf() -> None:
    assert held(pool_of(EvictionKind.LRU, 4, ["ab", "xy", "p"])) == {"a", "x", "xy", "p"}


def test_lfu_keeps_what_was_used_often_however_long_ago() -> None:
    chains = ["a", "a", "x", "y", "z"]
    assert held(pool_of(EvictionKind.LFU, 2, chains)) == {"a", "z"}
    assert held(pool_of(EvictionKind.LRU, 2, chains)) == {"y", "z"}


def test_lfu_takes_the_least_recent_of_those_used_equally_often() -> None:
    assert held(pool_of(EvictionKind.LFU, 3, ["a", "b", "c", "d"])) == {"b", "c", "d"}


def test_lfu_forgets_the_count_of_what_it_evicts() -> None:
    pool = pool_of(EvictionKind.LFU, 2, ["a", "a", "xy"])
    assert held(pool) == {"x", "xy"}, "a long request takes even what is used often"
    for chain in ("a", "b", "b", "c"):
        use(pool, chain)
    assert held(pool) == {"b", "c"}, "a counts from one again"


def test_lfu_counts_holders_that_overlap() -> None:
    pool = pool_of(EvictionKind.LFU, 2, ["a"])
    for holder in ("one", "two"):
        pool.hold(holder, pool.match([key("a")]))
    pool.release("one")
    pool.release("two")
    for _ in range(2):
        use(pool, "b")
    use(pool, "c")
    assert held(pool) == {"a", "c"}, "three uses against two"


def test_length_aware_takes_the_deepest_of_those_used_equally_often() -> None:
    chains = ["abc", "x", "y"]
    assert held(pool_of(EvictionKind.LENGTH_AWARE, 4, chains)) == {"a", "ab", "x", "y"}
    assert held(pool_of(EvictionKind.LENGTH_AWARE, 4, [*chains, "z"])) == {"a", "x", "y", "z"}
    often = ["abc", "abc", "x", "y"]
    assert held(pool_of(EvictionKind.LENGTH_AWARE, 4, often)) == {"a", "ab", "abc", "y"}


def test_depth_counts_from_the_root_also_where_the_root_was_found() -> None:
    pool = BlockPool(6, eviction=(policy := _Spy()))
    use(pool, "ab")
    use(pool, "abcd")
    assert policy.seen == [(1, 1), (1, 0), (1, 3), (1, 2), (2, 1), (2, 0)]


def test_a_holder_that_begins_in_the_middle_does_not_move_a_block_up() -> None:
    pool = BlockPool(4, eviction=(policy := _Spy()))
    use(pool, "abc")
    pool.hold("reader", pool.match([key("a"), key("ab"), key("abc")])[2:])
    pool.release("reader")
    assert policy.seen[-1] == (2, 2)


class _Spy(LruEviction):
    """Notes (uses, depth) of each insertion."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def insert(self, block: BlockId, history: BlockHistory) -> None:
        super().insert(block, history)
        self.seen.append((history.uses, history.depth))


def test_ranks_that_nobody_has_any_more_take_no_memory() -> None:
    policy = RankedEviction(lambda history: (history.uses,))
    policy.insert(BlockId(1), BlockHistory(uses=1))
    for uses in range(5_000):
        policy.insert(BlockId(0), BlockHistory(uses=uses))
        policy.remove(BlockId(0))
    assert len(policy._heap) < 50
    assert len(policy._lists) == 1
    assert policy.evict() == 1
    assert len(policy) == 0


@pytest.mark.parametrize("kind", EvictionKind)
def test_order_is_what_evict_does(kind: EvictionKind) -> None:
    policy = eviction_policy(kind)
    for i in range(20):
        policy.use([key(str(i))])
        policy.insert(BlockId(i), BlockHistory(key=key(str(i)), uses=1 + i % 3, depth=i * 7 % 5))
    policy.remove(BlockId(4))
    order = list(policy.order())
    assert order == list(policy.order()), "asking changes nothing"
    assert [policy.evict() for _ in range(19)] == order
