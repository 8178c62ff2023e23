"""Copies of hot prefixes: how many are wanted, which link and which node, and what bounds them."""

from dataclasses import replace

import pytest

from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.mesh.peers import PeerTable
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.replication import MEMORY_S, Heat, HotPrefixes, Replica, replica
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, RequestShape
from mooncake_proto.control import Role
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, NodeId
from mooncake_proto.transfer import Replicate
from tests.unit.test_conductor_core import COST, joined, member, placed, request, stored

HOT = Heat(hits=50.0, work_s=0.9 * MEMORY_S)
"""Keeps 0.9 instances busy: wants to be on two nodes."""


def view(number: int, *, busy_s: float = 0.0, available: int = 1000) -> InstanceView:
    return InstanceView(
        instance_id=InstanceId(f"p{number}"),
        node_id=NodeId(f"n{number}"),
        blocks_total=1000,
        blocks_available=available,
        busy_until_s=100.0 + busy_s,
    )


def shape(**held: int) -> RequestShape:
    return RequestShape(
        prompt_tokens=161,
        max_new_tokens=8,
        block_tokens=16,
        block_bytes=1_000_000,
        prefix_blocks={NodeId(node): blocks for node, blocks in held.items()},
    )


def decided(
    heat: Heat,
    *pool: InstanceView,
    held: dict[str, int] | None = None,
    waits: dict[str, float] | None = None,
    resting: dict[str, float] | None = None,
    prefill: str = "p0",
) -> Replica | None:
    cluster = ClusterView(
        prefill=pool or (view(0), view(1), view(2)),
        decode=(),
        now_s=100.0,
        egress_wait_s={NodeId(node): wait_s for node, wait_s in (waits or {}).items()},
    )
    until_s = {NodeId(node): time_s for node, time_s in (resting or {}).items()}
    return replica(shape(**(held or {"n0": 8})), InstanceId(prefill), heat, cluster, COST, until_s)


def test_a_prefix_that_keeps_a_node_busy_gets_a_second_one() -> None:
    assert decided(HOT) == Replica(source=NodeId("n0"), target=NodeId("n1"), blocks=8)
    assert decided(Heat(hits=50.0, work_s=0.4 * MEMORY_S)) is None, "one node does that at half its time"
    assert decided(Heat(hits=2.0, work_s=9.0 * MEMORY_S)) is None, "two requests are no crowd"


def test_copies_that_there_are_or_will_be_count() -> None:
    assert decided(HOT, held={"n0": 8, "n2": 8}) is None
    assert decided(HOT, prefill="p1") is None, "p1 was placed on: it will have the prefix"
    assert decided(HOT, held={"n0": 8, "n2": 7}) == Replica(source=NodeId("n0"), target=NodeId("n1"), blocks=8)
    very_hot = replace(HOT, work_s=1.4 * MEMORY_S)
    assert decided(very_hot, held={"n0": 8, "n2": 8}) == Replica(source=NodeId("n0"), target=NodeId("n1"), blocks=8)
    assert decided(very_hot, held={"n0": 8, "n1": 8, "n2": 8}) is None, "everybody has it"


def test_congested_links_ask_for_one_more() -> None:
    """The copy takes 9 ms."""
    cool = Heat(hits=5.0, work_s=0.1)
    assert decided(cool, waits={"n0": 0.005}) is None
    assert decided(cool, waits={"n0": 0.05}) == Replica(source=NodeId("n0"), target=NodeId("n1"), blocks=8)
    assert decided(cool, waits={"n0": 0.05}, held={"n0": 8, "n9": 8}) is None, "n9 can send"


def test_the_idlest_node_with_room_takes_it_from_the_freest_link() -> None:
    pool = (view(0), view(1, busy_s=3.0), view(2, busy_s=1.0), view(3, available=31))
    assert decided(HOT, *pool, held={"n0": 8, "n9": 8}, waits={"n0": 0.5}) == Replica(
        source=NodeId("n9"), target=NodeId("n2"), blocks=8
    )
    assert decided(HOT, view(0), view(1, available=31)) is None, "a quarter of what is available is not enough"


def test_a_link_that_rests_sends_nothing() -> None:
    assert decided(HOT, resting={"n0": 100.5}) is None
    assert decided(HOT, resting={"n0": 100.0}) is not None


def test_what_nobody_holds_cannot_be_copied() -> None:
    assert decided(HOT, held={"n5": 0}) is None
    assert decided(HOT, held={"n0": 99}) == Replica(source=NodeId("n0"), target=NodeId("n1"), blocks=10), "what helps"


def test_heat_cools() -> None:
    hot = HotPrefixes()
    key = BlockKey(b"k" * 16)
    for _ in range(10):
        heat = hot.hit(key, 3.0, 100.0)
    assert (heat.hits, heat.work_s) == (pytest.approx(10.0), pytest.approx(30.0))
    assert heat.busy_nodes == pytest.approx(0.5)
    later = hot.hit(key, 0.0, 100.0 + 3 * MEMORY_S)
    assert later.hits == pytest.approx(1.0 + 10.0 / 20.09, rel=0.01)


def test_prefixes_that_are_not_hit_any_more_are_forgotten() -> None:
    hot = HotPrefixes()
    for number in range(10_000):
        hot.hit(BlockKey(number.to_bytes(16, "big")), 1.0, 0.0)
    assert len(hot._heats) == 4096
    assert hot.hit(BlockKey(bytes(16)), 1.0, 0.0).hits == 1.0


def test_the_conductor_orders_a_copy_of_what_is_hot_and_then_lets_the_link_rest() -> None:
    c = ConductorCore(
        incarnation=Incarnation("conductor"),
        peers=PeerTable(suspect_after_s=1e3, dead_after_s=2e3, forget_after_s=3e3),
        index=PrefixIndex(max_entries=1000),
        cost=COST,
        objectives=Objectives(),
        started_s=0.0,
        scheduling=Scheduling(replication_share=0.1),
    )
    joined(c, member(Role.GATEWAY, "g", "n0"))
    for i in range(3):
        members = [(Role.MESSENGER, "m"), (Role.PREFILL, "p"), (Role.DECODE, "d")]
        joined(c, *(member(role, f"{name}{i}", f"n{i}") for role, name in members))
    c.kv_events(stored("n0", 4))
    orders = []
    for n in range(45):
        answer = placed(c, request(n, keys=4, tokens=200), now_s=3.0 * n)
        assert answer.prefill.instance_id == "p0", "it is idle again each time"
        orders += c.orders.take()
    first = orders[0]
    assert (first.endpoint, first.message) == ("ipc://m1", Replicate(keys=request(keys=4).keys, source="ipc://m0"))
    assert len(orders) > 1, "the copy was never made, so it is asked for again, once the link has rested"
