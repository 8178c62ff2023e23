import tracemalloc

import pytest

from mooncake_mesh.kv.prefix_index import PrefixIndex
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
