import random
import tracemalloc

import pytest

from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.kv.prefix_segments import LONG_BLOCKS, SEGMENT_BLOCKS, SegmentMemo
from mooncake_proto.ids import BlockKey, NodeId

A, B = NodeId("a"), NodeId("b")


def chain(n: int, first: int = 0) -> list[BlockKey]:
    return [BlockKey(i.to_bytes(16, "little")) for i in range(first, first + n)]


def test_each_node_gets_its_own_prefix() -> None:
    index = PrefixIndex(max_entries=100)
    keys = chain(5)
    index.replace(A, keys)
    index.replace(B, keys[:2])
    assert index.prefix_blocks(keys) == {A: 5, B: 2}
    assert index.prefix_blocks(keys[:1]) == {A: 1, B: 1}
    assert index.prefix_blocks([]) == {}
    assert index.prefix_blocks(chain(3, first=50)) == {}


def test_the_first_hole_ends_a_prefix() -> None:
    index = PrefixIndex(max_entries=100)
    keys = chain(5)
    index.replace(A, keys)
    index.replace(B, keys)
    index.apply_removed(A, keys[2])
    index.apply_removed(B, keys[0])
    assert index.prefix_blocks(keys) == {A: 2}


@pytest.mark.parametrize("blocks", [SEGMENT_BLOCKS, LONG_BLOCKS, LONG_BLOCKS + 40])
def test_a_prefix_that_is_asked_for_again_and_then_grows_is_seen_to_grow(blocks: int) -> None:
    """The keys that come were held by nobody."""
    index, keys = PrefixIndex(max_entries=1_000), chain(blocks)
    index.apply_all_stored(A, keys[:20])
    for _ in range(3):
        assert index.prefix_blocks(keys) == {A: 20}
    index.apply_stored(A, keys[20])
    assert index.prefix_blocks(keys) == {A: 21}
    index.apply_all_stored(A, keys[21:])
    assert index.prefix_blocks(keys) == {A: blocks}


def test_long_prefixes_are_exact_whatever_is_stored_and_evicted_in_between() -> None:
    draw = random.Random(1)
    index = PrefixIndex(max_entries=100_000)
    root = chain(300)
    chains = [root + chain(300, first=1_000 * n) for n in range(1, 4)]
    held: dict[NodeId, set[BlockKey]] = {NodeId(f"n{i}"): set() for i in range(5)}
    for node, mine in held.items():
        for keys in chains:
            mine.update(keys[: draw.randrange(len(keys) + 1)])
        index.replace(node, list(mine))
    for _ in range(600):
        keys = draw.choice(chains)[: draw.randrange(1, 601)]
        expected = {
            node: depth
            for node, mine in held.items()
            if (depth := next((i for i, key in enumerate(keys) if key not in mine), len(keys)))
        }
        assert index.prefix_blocks(keys) == expected
        node, key = draw.choice(list(held)), draw.choice(draw.choice(chains))
        if key in held[node]:
            held[node].remove(key)
            index.apply_removed(node, key)
        else:
            held[node].add(key)
            index.apply_stored(node, key)


def test_remembered_stretches_are_bounded_and_forgotten_ones_are_still_right() -> None:
    masks: dict[BlockKey, int] = {}
    memo = SegmentMemo(masks, max_segments=2)
    chains = [chain(SEGMENT_BLOCKS, first=1_000 * n) for n in range(4)]
    for n, keys in enumerate(chains):
        masks.update(dict.fromkeys(keys, n + 1))
    for _ in range(3):
        assert [memo.steps(keys, 0) for keys in chains] == [((0, n),) for n in (1, 2, 3, 4)]
    assert len(memo.known) <= 2
    masks[chains[3][5]] = 2
    memo.changed(chains[3][5])
    assert memo.steps(chains[3], 0) == ((0, 4), (5, 0))


def test_a_slot_that_is_used_again_starts_empty() -> None:
    index = PrefixIndex(max_entries=100)
    index.replace(A, chain(4))
    index.replace(B, chain(2))
    index.drop_node(A)
    index.drop_node(A)
    assert index.prefix_blocks(chain(4)) == {B: 2}
    index.apply_stored(NodeId("c"), chain(1)[0])
    assert index.prefix_blocks(chain(4)) == {B: 2, NodeId("c"): 1}
    assert index.blocks(A) == 0


def test_what_is_unknown_may_be_removed() -> None:
    index = PrefixIndex(max_entries=100)
    index.apply_removed(A, chain(1)[0])
    index.apply_stored(A, chain(1)[0])
    index.apply_removed(B, chain(1)[0])
    assert index.prefix_blocks(chain(1)) == {A: 1}


def test_unique_prefixes_without_end_stay_under_the_cap() -> None:
    index = PrefixIndex(max_entries=1_000)
    for key in chain(20_000):
        index.apply_stored(A, key)
        assert index.entries <= 1_000
    assert index.blocks(A) == index.n_keys == 1_000
    assert index.prefix_blocks(chain(1, first=19_000)) == {A: 1}
    assert index.prefix_blocks(chain(1, first=18_999)) == {}


def test_churn_leaves_nothing_behind() -> None:
    index = PrefixIndex(max_entries=10_000)
    keys = chain(2_000)

    def churn() -> None:
        for key in keys:
            index.apply_stored(A, key)
        for key in keys:
            index.apply_removed(A, key)

    churn()
    tracemalloc.start()
    try:
        for _ in range(3):
            churn()
        settled = tracemalloc.get_traced_memory()[0]
        for _ in range(6):
            churn()
        assert tracemalloc.get_traced_memory()[0] < settled + 200_000
    finally:
        tracemalloc.stop()
    assert index.entries == index.n_keys == 0


def test_the_cap_counts_pairs_not_keys() -> None:
    index = PrefixIndex(max_entries=4)
    first, second = chain(2)
    for node in "wxy":
        index.apply_stored(NodeId(node), first)
    index.apply_stored(NodeId("w"), second)
    index.apply_stored(NodeId("x"), second)
    assert index.prefix_blocks([first]) == {}
    assert index.entries == 2
    with pytest.raises(ValueError, match="max_entries"):
        PrefixIndex(max_entries=0)


def test_a_thousand_nodes_that_drop_out_one_by_one() -> None:
    index = PrefixIndex(max_entries=10**6)
    keys = chain(1_000)
    names = [NodeId(f"n{i:04}") for i in range(1_000)]
    for i, name in enumerate(names):
        for key in keys[: i + 1] if i % 100 == 0 else keys[i : i + 1]:
            index.apply_stored(name, key)
    expected = {name: i + 1 for i, name in enumerate(names) if i % 100 == 0}
    assert index.prefix_blocks(keys) == expected
