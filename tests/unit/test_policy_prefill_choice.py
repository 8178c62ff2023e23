"""The five ways to choose a prefill instance, as tables: who holds what, how busy each is, who is chosen."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.config_scheduling import PlacementKind
from mooncake_mesh.policy.cost_model import LinearCost
from mooncake_mesh.policy.draws import draw
from mooncake_mesh.policy.prefill_choice import AS_GOOD, PREFILL_POLICIES, Estimates, PrefillChoice, sources
from mooncake_mesh.policy.queue_order import waiting_prompt
from mooncake_mesh.policy.views import ClusterView, InstanceView, QueuedPrompt, RequestShape
from mooncake_proto.ids import InstanceId, NodeId

COST = LinearCost(
    prefill_base_s=0.0,
    prefill_token_s=0.01,  # a block in 0.16 s
    cached_token_s=0.0,
    step_base_s=0.01,
    step_sequence_s=0.001,
    step_context_token_s=0.0,
    transfer_base_s=0.0,
    transfer_bytes_per_s=1e8,  # a block in 0.01 s
)


def view(name: str, *, busy_s: float = 0.0, jobs: int = 0, factor: float = 1.0) -> InstanceView:
    return InstanceView(
        instance_id=InstanceId(name),
        node_id=NodeId(f"n{name[1:]}"),
        blocks_total=10_000,
        blocks_available=10_000,
        busy_until_s=100.0 + busy_s,
        queue=(QueuedPrompt(tokens=1, prefill_s=0.0),) * jobs,
        factor=factor,
    )


def request(
    prompt_tokens: int = 161, number: int = 0, ssd: dict[str, int] | None = None, **prefix_blocks: int
) -> RequestShape:
    """*ssd*: from which block on a node has to read."""
    return RequestShape(
        prompt_tokens=prompt_tokens,
        max_new_tokens=32,
        block_tokens=16,
        block_bytes=1_000_000,
        prefix_blocks={NodeId(node): blocks for node, blocks in prefix_blocks.items()},
        ssd_starts={NodeId(node): start for node, start in (ssd or {}).items()},
        draw=number,
    )


def chosen(
    kind: PlacementKind,
    shape: RequestShape,
    pool: Sequence[InstanceView],
    *,
    threshold: float = 2.0,
    waits: dict[str, float] | None = None,
    disks: dict[str, float] | None = None,
    rates: dict[str, float] | None = None,
    cost: LinearCost = COST,
) -> PrefillChoice:
    """*disks*: how long each is taken; *rates*: bytes per second that were measured."""
    cluster = ClusterView(
        prefill=tuple(pool),
        decode=(),
        now_s=100.0,
        egress_wait_s={NodeId(node): wait_s for node, wait_s in (waits or {}).items()},
        disk_wait_s={NodeId(node): wait_s for node, wait_s in (disks or {}).items()},
        disk_bytes_per_s={NodeId(node): rate for node, rate in (rates or {}).items()},
    )
    return PREFILL_POLICIES[kind](shape, pool, cluster, Estimates(shape, cluster, cost), threshold)


def said(choice: PrefillChoice) -> tuple[str, int, str | None, int]:
    return (choice.instance.instance_id, choice.local_blocks, choice.fetch_node, choice.fetch_blocks)


# --- random, load balance, local --------------------------------------------------------------------------------------


def test_random_is_a_function_of_the_draw_and_uses_what_is_there() -> None:
    pool = [view("p1"), view("p0"), view("p2")]
    names = [chosen(PlacementKind.RANDOM, request(number=n), pool).instance.instance_id for n in range(4)]
    assert names == ["p0", "p1", "p2", "p0"]
    assert said(chosen(PlacementKind.RANDOM, request(number=1, n1=4, n0=9), pool)) == ("p1", 4, None, 0)


def test_draws_are_spread_and_repeat() -> None:
    numbers = [draw(7, n) for n in range(3_000)]
    assert numbers == [draw(7, n) for n in range(3_000)]
    assert numbers[:100] != [draw(8, n) for n in range(100)]
    counts = [sum(number % 3 == rest for number in numbers) for rest in range(3)]
    assert all(900 < count < 1_100 for count in counts)
    assert draw(0, 0) == 0xE220A8397B1DCDAF, "the published first value of SplitMix64 from 0"


def test_load_balance_counts_prompts_and_overlooks_prefixes_and_lengths() -> None:
    pool = [view("p0", jobs=2), view("p1", jobs=1, busy_s=50.0), view("p2", jobs=1)]
    assert said(chosen(PlacementKind.LOAD_BALANCE, request(n0=9, n1=3), pool)) == ("p1", 3, None, 0)


def test_local_weighs_its_own_prefix_against_the_queue_and_never_copies() -> None:
    assert said(chosen(PlacementKind.LOCAL, request(n1=10), [view("p0"), view("p1", busy_s=1.5)])) == (
        "p1",
        10,
        None,
        0,
    )
    assert said(chosen(PlacementKind.LOCAL, request(n1=10), [view("p0"), view("p1", busy_s=1.7)])) == ("p0", 0, None, 0)


# --- the papers' algorithm --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "best", "threshold", "copies"),
    [
        (5, 10, 2.0, False),  # equal to the threshold: recompute, the comparison is strict
        (4, 10, 2.0, True),
        (9, 10, 1.0, True),
        (10, 10, 1.0, False),
        (0, 1, 1e9, True),  # nothing here: beyond any threshold
        (0, 0, 1.0, False),  # nothing anywhere
    ],
)
def test_the_threshold_decides_between_copying_and_computing(
    local: int, best: int, threshold: float, copies: bool
) -> None:
    shape = request(n0=local, n9=best)
    choice = chosen(PlacementKind.KVCACHE_CENTRIC, shape, [view("p0")], threshold=threshold)
    assert said(choice) == ("p0", local, "n9" if copies else None, best if copies else 0)
    used = best if copies else local
    copied = best - local if copies else 0
    assert choice.ttft_s == pytest.approx(0.01 * (161 - 16 * used) + 0.01 * copied)


def test_a_copy_is_not_weighed_against_computing_by_time() -> None:
    slow = LinearCost(
        prefill_base_s=0.0,
        prefill_token_s=0.01,
        cached_token_s=0.0,
        step_base_s=0.01,
        step_sequence_s=0.0,
        step_context_token_s=0.0,
        transfer_base_s=0.0,
        transfer_bytes_per_s=1e6,
    )
    shape, pool = request(n9=10), [view("p0")]
    assert chosen(PlacementKind.KVCACHE_CENTRIC, shape, pool, cost=slow).ttft_s == pytest.approx(10.01)
    assert chosen(PlacementKind.ADAPTIVE, shape, pool, cost=slow).ttft_s == pytest.approx(1.61)


def test_the_holder_itself_copies_nothing_and_is_left_when_it_is_busy() -> None:
    shape = request(n1=10)
    idle = [view("p0"), view("p1")]
    assert said(chosen(PlacementKind.KVCACHE_CENTRIC, shape, idle)) == ("p1", 10, None, 0)
    busy = [view("p0"), view("p1", busy_s=0.2)]
    assert said(chosen(PlacementKind.KVCACHE_CENTRIC, shape, busy)) == ("p0", 0, "n1", 10), "a replica comes into being"


# --- sources ----------------------------------------------------------------------------------------------------------


def test_among_replicas_the_one_whose_link_is_free_first_sends() -> None:
    shape = request(n7=10, n8=10, n9=10, n6=4)
    pool = [view("p0")]
    for kind in (PlacementKind.KVCACHE_CENTRIC, PlacementKind.ADAPTIVE):
        assert chosen(kind, shape, pool).fetch_node == "n7"
        assert chosen(kind, shape, pool, waits={"n7": 0.5, "n8": 0.1, "n9": 0.1}).fetch_node == "n8"


def test_a_busy_link_is_part_of_the_estimate() -> None:
    shape = request(n9=10)
    choice = chosen(PlacementKind.KVCACHE_CENTRIC, shape, [view("p0")], waits={"n9": 5.0})
    assert choice.ttft_s == pytest.approx(5.0 + 0.1 + 0.01)


def test_adaptive_takes_a_shorter_prefix_from_an_idle_node_when_the_longest_one_is_busy() -> None:
    shape = request(n8=8, n9=10)
    assert said(chosen(PlacementKind.ADAPTIVE, shape, [view("p0")])) == ("p0", 0, "n9", 10)
    assert said(chosen(PlacementKind.ADAPTIVE, shape, [view("p0")], waits={"n9": 0.5})) == ("p0", 0, "n8", 8)
    waits = {"n8": 9.0, "n9": 9.0}
    assert said(chosen(PlacementKind.ADAPTIVE, shape, [view("p0")], waits=waits)) == ("p0", 0, None, 0)


def test_only_sources_that_are_longer_or_sooner_are_looked_at() -> None:
    shape = request(a=3, b=5, c=5, d=8, e=99)
    waits = {NodeId(node): wait_s for node, wait_s in {"a": 0.0, "b": 0.2, "c": 0.1, "d": 0.1, "e": 0.4}.items()}
    cluster = ClusterView(prefill=(), decode=(), egress_wait_s=waits)
    found = sources(cluster, Estimates(shape, cluster, COST))
    assert [(source.node, source.blocks) for source in found] == [("e", 10), ("d", 8), ("a", 3)]


# --- what has to be read first ----------------------------------------------------------------------------------------


def read(choice: PrefillChoice) -> tuple[str | None, int, int | None]:
    return (choice.read_node, choice.read_blocks, choice.read_limit_blocks)


@pytest.mark.parametrize("kind", list(PlacementKind))
def test_a_disk_is_read_where_that_is_quicker_than_computing(kind: PlacementKind) -> None:
    """A block is computed in 0.16 s, and read in 0.04 s or in 0.32 s."""
    shape = request(n0=10, ssd={"n0": 4})
    quick = chosen(kind, shape, [view("p0")], rates={"n0": 25e6})
    assert (quick.local_blocks, *read(quick)) == (10, "n0", 6, None)
    assert quick.ttft_s == pytest.approx(6 * 0.04 + 0.01)
    slow = chosen(kind, shape, [view("p0")], rates={"n0": 3.125e6})
    assert (slow.local_blocks, *read(slow)) == (4, None, 0, 4)
    assert slow.ttft_s == pytest.approx(0.01 + 6 * 0.16)


def test_a_disk_that_nobody_measured_is_priced_by_the_model() -> None:
    choice = chosen(PlacementKind.LOCAL, request(n0=10, ssd={"n0": 0}), [view("p0")])
    assert choice.ttft_s == pytest.approx(0.0005 + 10 * 0.001 + 0.01)


def test_reading_goes_on_while_the_request_waits_for_its_turn() -> None:
    shape = request(n0=10, ssd={"n0": 4})
    choice = chosen(PlacementKind.LOCAL, shape, [view("p0", busy_s=1.0)], rates={"n0": 12e6})
    assert choice.ttft_s == pytest.approx(1.0 + 0.01), "half a second of reading costs nothing"
    assert read(choice) == ("n0", 6, None)


def test_a_disk_with_much_to_read_is_left_alone() -> None:
    shape = request(n0=10, ssd={"n0": 4})
    rates = {"n0": 25e6}
    assert read(chosen(PlacementKind.LOCAL, shape, [view("p0")], rates=rates, disks={"n0": 0.5}))[0] == "n0"
    assert read(chosen(PlacementKind.LOCAL, shape, [view("p0")], rates=rates, disks={"n0": 5.0})) == (None, 0, 4)


def test_memory_of_another_node_is_preferred_to_a_slow_disk_of_ones_own() -> None:
    shape = request(n0=10, n9=10, ssd={"n0": 4})
    choice = chosen(PlacementKind.ADAPTIVE, shape, [view("p0")], rates={"n0": 25e6})
    assert said(choice) == ("p0", 4, "n9", 10)
    assert read(choice) == (None, 0, 4), "or the messenger would read instead of copying"
    assert choice.ttft_s == pytest.approx(6 * 0.01 + 0.01)
    assert said(chosen(PlacementKind.ADAPTIVE, shape, [view("p0")], rates={"n0": 1e9})) == ("p0", 10, None, 0)


def test_another_nodes_disk_is_read_before_it_is_copied_from() -> None:
    shape = request(n9=10, ssd={"n9": 4})
    choice = chosen(PlacementKind.ADAPTIVE, shape, [view("p0")], rates={"n9": 25e6})
    assert (said(choice), read(choice)) == (("p0", 0, "n9", 10), ("n9", 6, None))
    assert choice.ttft_s == pytest.approx(6 * 0.04 + 10 * 0.01 + 0.01)
    slow = chosen(PlacementKind.ADAPTIVE, shape, [view("p0")], rates={"n9": 1e6})
    assert (said(slow), read(slow)) == (("p0", 0, "n9", 4), (None, 0, None)), "only what is in its memory"


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(PlacementKind))
@pytest.mark.parametrize(("prompt_tokens", "usable"), [(160, 9), (161, 10), (16, 0), (1, 0)])
def test_one_prompt_token_is_always_computed(kind: PlacementKind, prompt_tokens: int, usable: int) -> None:
    choice = chosen(kind, request(prompt_tokens, n0=99, n9=99), [view("p0")])
    assert max(choice.local_blocks, choice.fetch_blocks) == usable
    assert choice.ttft_s > 0


@pytest.mark.parametrize("kind", list(PlacementKind))
def test_equal_instances_tie_on_their_id_in_any_order(kind: PlacementKind) -> None:
    names = {
        chosen(kind, request(n9=10), list(pool)).instance.instance_id
        for pool in permutations([view("p2"), view("p0"), view("p1")])
    }
    assert names == {"p0"}


@pytest.mark.parametrize("kind", [kind for kind in PlacementKind if kind is not PlacementKind.RANDOM])
def test_of_equal_instances_one_is_drawn(kind: PlacementKind) -> None:
    pool = [view("p0", busy_s=3.0, jobs=1), view("p1", busy_s=1e-4), view("p2")]
    names = {chosen(kind, request(number=n), pool).instance.instance_id for n in range(8)}
    assert names == {"p1", "p2"}, "a tenth of a millisecond decides nothing"


def test_an_equal_instance_that_would_have_to_copy_is_not_taken() -> None:
    quick = replace(COST, transfer_base_s=0.0, transfer_bytes_per_s=1e15)
    for number in range(8):
        choice = chosen(PlacementKind.ADAPTIVE, request(number=number, n0=8), [view("p0"), view("p1")], cost=quick)
        assert choice.instance.instance_id == "p0"


@pytest.mark.parametrize("kind", [PlacementKind.LOCAL, PlacementKind.KVCACHE_CENTRIC, PlacementKind.ADAPTIVE])
def test_a_slow_instance_is_left_to_others(kind: PlacementKind) -> None:
    assert chosen(kind, request(), [view("p0", factor=3.0), view("p1", busy_s=1.0)]).instance.instance_id == "p1"


busy = st.sampled_from([0.0, 0.3, 2.0])
pools = st.lists(busy, min_size=1, max_size=4).map(lambda waits: [view(f"p{i}", busy_s=s) for i, s in enumerate(waits)])
held = st.dictionaries(st.sampled_from(["n0", "n1", "n2", "n9"]), st.integers(0, 12), max_size=4)
links = st.dictionaries(st.sampled_from(["n0", "n1", "n9"]), st.sampled_from([0.05, 1.0]), max_size=3)


@given(pools, held, held, links, links, st.sampled_from([1.0, 1.5, 4.0]))
def test_no_threshold_and_no_other_policy_expects_a_sooner_first_token_than_adaptive(
    pool: list[InstanceView],
    prefix: dict[str, int],
    ssd: dict[str, int],
    waits: dict[str, float],
    disks: dict[str, float],
    threshold: float,
) -> None:
    shape, rates = request(ssd=ssd, **prefix), {"n0": 5e6, "n9": 1e8}

    def choice(kind: PlacementKind) -> PrefillChoice:
        return chosen(kind, shape, pool, waits=waits, disks=disks, rates=rates, threshold=threshold)

    best = choice(PlacementKind.ADAPTIVE).ttft_s
    assert all(best <= AS_GOOD * choice(kind).ttft_s + 1e-9 for kind in PlacementKind)


@pytest.mark.parametrize("cached_token_s", [0.0, 0.02])  # the second: what is cached takes longer than computing it
@given(pools, held)
def test_whoever_is_as_good_as_the_soonest_takes_part_in_the_draw(
    cached_token_s: float, pool: list[InstanceView], prefix: dict[str, Any]
) -> None:
    cost = replace(COST, cached_token_s=cached_token_s)

    def choice(number: int, *able: InstanceView) -> PrefillChoice:
        return chosen(PlacementKind.LOCAL, request(number=number, **prefix), able, cost=cost)

    alone = [choice(0, instance) for instance in pool]
    limit_s = AS_GOOD * min(one.ttft_s for one in alone)
    drawn = {choice(number, *pool).instance.instance_id for number in range(12)}  # of one, two, three or four
    assert drawn == {one.instance.instance_id for one in alone if one.ttft_s <= limit_s}


def test_a_prompt_pays_for_those_that_it_overtakes() -> None:
    """Two wait at p0 for 1 s each; p1 is busy for 2 s, and its prompt has begun. The prompt takes 1.61 s, 0.17 s where
    nine of its blocks are."""
    waits = (waiting_prompt(QueuedPrompt(tokens=1, prefill_s=1.0), 100.0, 30.0),) * 2
    p0, p1 = replace(view("p0", busy_s=2.0), queue=waits, is_ordered=True), view("p1", busy_s=2.0, jobs=1)
    choose = PREFILL_POLICIES[PlacementKind.LOCAL]

    def choice(shape: RequestShape, *able: InstanceView) -> PrefillChoice:
        cluster = ClusterView(prefill=able, decode=(), now_s=100.0)
        return choose(shape, able, cluster, Estimates(shape, cluster, COST), 2.0)

    cached = choice(request(n0=9), p0, p1)
    assert (cached.instance, cached.ttft_s, cached.delay_s) == (p0, pytest.approx(0.17), pytest.approx(0.34))
    longer = choice(request(n0=2), p0, p1)  # 1.29 s: it overtakes nobody
    assert (longer.ttft_s, longer.delay_s) == (pytest.approx(3.29), 0.0)
    idle = choice(request(prompt_tokens=81), replace(p0, queue=waits * 2, busy_until_s=104.0), p1)
    assert (idle.instance, idle.ttft_s) == (p1, pytest.approx(2.81)), "at p0 it is 0.81 s, and 3.24 s of others"
