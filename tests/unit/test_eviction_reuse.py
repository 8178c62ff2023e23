import random
from collections.abc import Sequence
from math import log1p

import pytest

from mooncake_mesh.kv.block_pool import BlockPool
from mooncake_mesh.kv.eviction import EvictionKind, eviction_policy
from mooncake_mesh.kv.eviction_contract import BlockHistory
from mooncake_mesh.kv.eviction_rates import Circumstance, Kind, ReuseLaw, Watched, prior_tendency
from mooncake_mesh.kv.eviction_reuse import ReuseEviction
from mooncake_proto.ids import BlockId, BlockKey

ONE: Kind = (Circumstance.OPENING, 3)
OTHER: Kind = (Circumstance.CONTINUED, 2)


# --- the law ----------------------------------------------------------------------------------------------------------


def watched(law: ReuseLaw, kind: Kind, since: int, blocks: int) -> Watched:
    group = Watched(law.tally(kind), since)
    group.blocks = blocks
    law.watch(group)
    return group


def use(law: ReuseLaw, group: Watched, n: int, now: int) -> None:
    group.blocks -= n
    law.used(group, n, now)


def test_before_anything_was_seen_the_prior_speaks() -> None:
    law = ReuseLaw()
    for kind in (ONE, OTHER, (Circumstance.LAST, 0), (Circumstance.SHARED, 0)):
        assert law.tally(kind).tendency == pytest.approx(prior_tendency(kind))
    tendencies = [prior_tendency((Circumstance.CONTINUED, times)) for times in range(2, 17)]
    assert tendencies == sorted(tendencies), "the more often, the surer"
    assert prior_tendency((Circumstance.LAST, 0)) < prior_tendency(ONE) < tendencies[0]


def test_the_rate_falls_with_age() -> None:
    law = ReuseLaw()
    rates = [law.rate(law.tally(ONE), age) for age in (0, 10, 1_000, 100_000)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(prior_tendency(ONE) / law.scale)


def test_uses_raise_a_kind_and_only_that() -> None:
    law = ReuseLaw()
    before = law.tally(OTHER).tendency
    for now in range(0, 50_000, 100):
        use(law, watched(law, ONE, now, 20), 20, now + 100)
    assert law.tally(ONE).tendency > 1
    assert law.tally(OTHER).tendency == before


def test_waiting_in_vain_lowers_a_kind() -> None:
    law = ReuseLaw()
    for now in range(0, 100_000, 100):
        watched(law, ONE, now, 50)
        law.advance(now)
    assert law.tally(ONE).tendency < 0.1 * prior_tendency(ONE)


def test_a_block_is_exposed_once_for_each_stretch_of_age() -> None:
    law = ReuseLaw()
    tally = law.tally(ONE)
    group = watched(law, ONE, 1_000, 10)
    start = tally._exposure
    law.advance(1_000 + 300)
    law.advance(1_000 + 600)
    assert tally._exposure - start == pytest.approx(10 * log1p(512 / law.scale)), "up to the last checkpoint"
    scale = law.scale
    use(law, group, 4, 1_000 + 900)
    per_block = log1p(900 / scale)
    assert tally._exposure - start == pytest.approx(4 * per_block + 6 * log1p(512 / scale))


def test_what_is_left_of_a_group_is_watched_on_and_an_empty_group_is_let_go() -> None:
    law = ReuseLaw()
    group = watched(law, ONE, 0, 2)
    empty = watched(law, OTHER, 0, 1)
    empty.blocks = 0
    exposure = law.tally(OTHER)._exposure
    law.advance(1 << 30)
    assert group.exposed > 0
    assert law.tally(OTHER)._exposure == exposure
    assert not any(law._stages)


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_the_scale_follows_the_ages_at_which_blocks_are_used(factor: float) -> None:
    law = ReuseLaw()
    draw = random.Random(3)
    typical = 12_000 * factor
    for now in range(0, 400_000, 100):
        age = int(typical * draw.uniform(0.5, 1.5))
        use(law, Watched(law.tally(ONE), now - age), 3, now)
    assert law.scale == pytest.approx(typical / 2, rel=0.15)


def test_shared_blocks_do_not_pull_the_scale_down() -> None:
    law = ReuseLaw()
    before = law.scale
    for now in range(1_000):
        use(law, Watched(law.tally((Circumstance.SHARED, 0)), now - 1), 1, now)
    assert law.scale == before


def test_what_was_learned_long_ago_counts_for_less() -> None:
    law = ReuseLaw()
    for now in range(0, 200_000, 100):
        use(law, watched(law, ONE, now, 20), 20, now + 100)
    busy = law.tally(ONE).tendency
    for now in range(200_000, 1_000_000, 100):
        watched(law, ONE, now, 20)
        law.advance(now)
    assert law.tally(ONE).tendency < busy / 10


def test_learning_recovers_the_tendency_it_is_fed() -> None:
    """Ages drawn from the law itself: survival (1 + age / scale) ** -tendency."""
    law = ReuseLaw()
    law._median = 2_000.0
    draw = random.Random(5)
    true = 0.6
    due: list[tuple[int, Watched]] = []
    for now in range(0, 2_000_000, 500):
        law._median = 2_000.0
        law.advance(now)
        for at, group in due:
            if now - 500 < at <= now:
                use(law, group, 1, at)
        due = [(at, group) for at, group in due if at > now]
        group = watched(law, ONE, now, 1)
        age = int(1_000 * (draw.random() ** (-1 / true) - 1))
        if age < 100_000:
            due.append((now + age, group))
    law.tally(ONE)._uses -= 2_000 * prior_tendency(ONE)
    law.tally(ONE)._exposure -= 2_000
    assert law.tally(ONE).tendency == pytest.approx(true, rel=0.1)


# --- the policy -------------------------------------------------------------------------------------------------------


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def ask(pool: BlockPool, chain: Sequence[str]) -> int:
    """One request for the blocks named; how many leading ones it found."""
    keys = [key("/".join(chain[: i + 1])) for i in range(len(chain))]
    cached = pool.match(keys)
    pool.hold("request", cached)
    fresh = pool.reserve("request", len(keys) - len(cached))
    assert isinstance(fresh, list)
    for block, name in zip(fresh, keys[len(cached) :], strict=True):
        pool.seal("request", block, name)
    pool.release("request")
    return len(cached)


def pool_of(n_blocks: int, *, remembered: int = 1_000) -> tuple[BlockPool, ReuseEviction]:
    policy = ReuseEviction(remembered=remembered)
    return BlockPool(n_blocks, eviction=policy), policy


def victims(pool: BlockPool, policy: ReuseEviction) -> list[str]:
    names = {block: name for name in pool.keys() for block in pool.match([name])}  # noqa: SIM118  not a dict
    return [names[block].decode().rstrip(".") for block in policy.order()]


def test_the_last_block_of_each_chain_goes_before_any_other() -> None:
    pool, policy = pool_of(20)
    ask(pool, ["a", "b", "c"])
    ask(pool, ["x", "y", "z"])
    assert victims(pool, policy) == ["a/b/c", "x/y/z", "a/b", "a", "x/y", "x"]


def test_a_conversation_that_went_on_outlives_younger_first_prompts() -> None:
    pool, policy = pool_of(100)
    ask(pool, ["a", "b", "end1"])
    ask(pool, ["a", "b", "c", "end2"])
    ask(pool, ["a", "b", "c", "d", "end3"])
    ask(pool, ["x", "y", "end"])
    order = victims(pool, policy)
    assert order[-4:] == ["a/b/c/d", "a/b/c", "a/b", "a"]
    assert order.index("x") < order.index("a/b/c/d")


def test_the_tail_that_a_continuation_left_behind_goes_early() -> None:
    pool, policy = pool_of(100)
    ask(pool, ["a", "b", "c", "d", "e", "f", "end"])
    ask(pool, ["a", "b", "c", "d", "other", "way", "end"])
    ask(pool, ["x", "y"])
    order = victims(pool, policy)
    tail = ["a/b/c/d/e/f", "a/b/c/d/e"]
    assert max(order.index(name) for name in tail) < order.index("x")


def test_a_new_conversation_under_a_common_prefix_leaves_the_old_one_alone() -> None:
    pool, policy = pool_of(100)
    ask(pool, ["system", "a", "b", "c", "d", "e"])
    ask(pool, ["system", "x", "y"])
    ask(pool, ["p", "q"])
    order = victims(pool, policy)
    assert order.index("system/a/b/c/d") > order.index("p/q")


def test_a_prefix_of_many_chains_goes_last() -> None:
    pool, policy = pool_of(200)
    for i in range(40):
        ask(pool, ["system", f"user{i}", "question"])
    assert victims(pool, policy)[-1] == "system"


def test_a_conversation_is_recognised_after_its_blocks_have_left() -> None:
    pool, policy = pool_of(6)
    ask(pool, ["a", "b", "end"])
    for i in range(8):
        ask(pool, [f"x{i}", "y", "z"])
    assert ask(pool, ["a", "b", "c", "end"]) == 0, "everything had to make room"
    ask(pool, ["p", "q"])
    assert victims(pool, policy)[-3:] == ["a/b/c", "a/b", "a"]


def test_what_is_remembered_is_bounded() -> None:
    pool, policy = pool_of(8, remembered=50)
    for i in range(2_000):
        ask(pool, [f"a{i}", f"b{i}", f"c{i}"])
        if i % 3 == 0:
            ask(pool, [f"a{i}", f"b{i}", f"d{i}"])
    assert len(policy._known) <= 50 + 8 + 3
    assert len(policy._absent) <= 50 + 8 + 3
    assert sum(map(len, policy._law._stages)) < 300
    assert sum(len(runs) for runs in policy._runs.values()) <= 8


def test_blocks_freed_from_outside_are_remembered_within_the_bound() -> None:
    pool, policy = pool_of(8, remembered=10)
    for i in range(200):
        ask(pool, [f"a{i}", "b"])
        for block in list(policy.order()):
            pool.evict(block)
    assert len(policy) == 0
    assert len(policy._known) <= 10 + 4


def test_a_chain_longer_than_what_is_remembered_is_fine() -> None:
    pool, policy = pool_of(8, remembered=2)
    for _ in range(3):
        ask(pool, list("abcdefgh"))
        ask(pool, list("mnop"))
    pool.check_invariants()
    assert len(policy) == 8


def test_a_block_that_another_holder_keeps_is_inserted_when_that_one_goes() -> None:
    pool, policy = pool_of(8)
    ask(pool, ["a", "b"])
    pool.hold("reader", pool.match([key("a")]))
    ask(pool, ["a", "b", "c"])
    assert "a" not in victims(pool, policy)
    pool.release("reader")
    assert victims(pool, policy)[-1] == "a"


def test_nothing_used_is_nothing_learned() -> None:
    policy = ReuseEviction()
    policy.use([])
    assert len(policy) == 0
    assert list(policy.order()) == []


def test_the_order_is_the_same_in_every_run() -> None:
    orders = []
    for _ in range(2):
        draw = random.Random(11)
        pool, policy = pool_of(60)
        for _ in range(400):
            ask(pool, [draw.choice("abc") for _ in range(draw.randint(1, 7))])
        orders.append(list(policy.order()))
        assert [policy.evict() for _ in range(len(policy))] == orders[-1]
    assert orders[0] == orders[1]


def test_it_beats_recency_where_conversations_go_on_among_prompts_that_do_not() -> None:
    hits = {}
    for kind in (EvictionKind.LRU, EvictionKind.REUSE):
        draw = random.Random(2)
        pool = BlockPool(120, eviction=eviction_policy(kind))
        turns = dict.fromkeys(range(12), 3)
        hits[kind] = 0
        for i in range(3_000):
            if draw.random() < 0.15:
                who = draw.randrange(12)
                turns[who] = 3 if turns[who] > 8 else turns[who] + 1
                hits[kind] += ask(pool, [f"chat{who}", *map(str, range(turns[who])), f"end{i}"])
            else:
                hits[kind] += ask(pool, [f"once{i}", "p", "q"])
    assert hits[EvictionKind.REUSE] > 1.5 * hits[EvictionKind.LRU]


def test_history_names_the_block_that_is_inserted() -> None:
    policy = ReuseEviction()
    policy.use([key("a"), key("b")])
    policy.insert(BlockId(7), BlockHistory(key=key("b"), uses=1, depth=1))
    policy.insert(BlockId(3), BlockHistory(key=key("a"), uses=1))
    assert list(policy.order()) == [7, 3]
    policy.remove(BlockId(7))
    assert [policy.evict(), len(policy)] == [3, 0]
