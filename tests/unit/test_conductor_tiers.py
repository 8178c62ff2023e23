"""What the conductor makes of the tiers: what it tells messengers to read, and how it counts a disk that is taken."""

from dataclasses import replace

from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_proto.control import Load
from mooncake_proto.ids import InstanceId, JobId, NodeId
from mooncake_proto.kvcache import KvChange, KvEvent, KvEvents, KvTier
from mooncake_proto.transfer import ReadAhead
from tests.unit.test_conductor_core import KEYS, ROOMY, life, mesh, placed, refused, request


def stored(c: ConductorCore, node: str, *tiers: KvTier, first_seq: int = 1) -> None:
    """The first keys are on *node*, each in its tier."""
    events = tuple(
        KvEvent(change=KvChange.STORED, key=key.hex(), tier=tier) for key, tier in zip(KEYS, tiers, strict=False)
    )
    c.kv_events(KvEvents(node_id=NodeId(node), incarnation=life(1), first_seq=first_seq, events=events))


def measured(c: ConductorCore, name: str, bytes_per_s: float, now_s: float = 0.0) -> None:
    c.heartbeat(InstanceId(name), life(1), replace(ROOMY, ssd_bytes_per_s=bytes_per_s), now_s)


def test_a_placement_has_the_disk_read_ahead() -> None:
    c = mesh()
    stored(c, "n0", KvTier.DRAM, KvTier.DRAM, KvTier.SSD, KvTier.SSD)
    placement = placed(c, replace(request(keys=6), tenant="acme"))
    assert (placement.local_prefix_blocks, placement.read_limit_blocks) == (4, None)
    (order,) = c.orders.take()
    assert order.endpoint == "ipc://m0"
    assert isinstance(order.message, ReadAhead)
    assert (order.message.job_id, order.message.keys) == (JobId("r0.0"), join_keys(KEYS[:4]))
    assert order.message.tenant == "acme"
    assert 5.0 < order.message.keep_s < 10.0
    assert c.orders.take() == []


def test_what_is_in_memory_or_not_placed_needs_no_reading() -> None:
    c = mesh()
    stored(c, "n0", KvTier.DRAM, KvTier.DRAM)
    placed(c, request(keys=6))
    stored(c, "n0", KvTier.SSD, KvTier.SSD, first_seq=3)
    refused(c, request(1, keys=6, tokens=1 << 20))
    assert c.orders.take() == []
    placed(c, request(2, keys=6))
    assert len(c.orders.take()) == 1, "the tier of a block that moved is another one now"


def test_a_disk_that_is_slower_than_computing_is_not_read() -> None:
    """A block is computed in 0.04 s, and read in 1 s."""
    c = mesh()
    stored(c, "n0", KvTier.DRAM, KvTier.SSD)
    measured(c, "m0", 1000.0)
    placement = placed(c, request(keys=2))
    assert (placement.local_prefix_blocks, placement.read_limit_blocks) == (1, 1)
    assert c.orders.take() == []
    measured(c, "m0", 1e6)
    assert placed(c, request(1, keys=2)).local_prefix_blocks == 2


def test_a_node_that_is_copied_from_reads_ahead_too() -> None:
    c = mesh(nodes=2)
    stored(c, "n1", *[KvTier.SSD] * 4)
    for instance in ("p1", "d1"):
        c.heartbeat(InstanceId(instance), life(1), Load(draining=True), 0.0)
    placement = placed(c, request(keys=6))
    assert (placement.prefill.instance_id, placement.fetch_from) == ("p0", "ipc://m1")
    (order,) = c.orders.take()
    assert isinstance(order.message, ReadAhead)
    assert (order.endpoint, order.message.keys) == ("ipc://m1", join_keys(KEYS[:4]))


def test_reads_that_were_placed_take_the_disk() -> None:
    """Two blocks are read in 0.05 s and computed in 0.08 s: the second request waits for the disk, or computes."""
    c = mesh()
    stored(c, "n0", KvTier.SSD, KvTier.SSD)
    measured(c, "m0", 40_000.0)
    answers = [placed(c, request(n, keys=2, tokens=9)) for n in range(3)]
    assert [answer.local_prefix_blocks for answer in answers] == [2, 0, 2]
    assert len(c.orders.take()) == 2


def test_orders_that_nobody_takes_are_bounded() -> None:
    c = mesh()
    stored(c, "n0", KvTier.SSD)
    for n in range(300):
        measured(c, "m0", 1e9, now_s=100.0 * n)
        placed(c, request(n, keys=1), now_s=100.0 * n)
    assert len(c.orders.take()) == 256


def test_a_messenger_that_is_gone_is_told_nothing() -> None:
    c = mesh(nodes=2)
    stored(c, "n1", KvTier.SSD, KvTier.SSD)
    for name, role_load in (("g", Load()), ("m0", ROOMY), ("p0", Load()), ("d0", Load())):
        c.heartbeat(InstanceId(name), life(1), role_load, 3.0)
    c.expire(3.0)  # m1 is suspect
    placed(c, request(keys=2), now_s=3.0)
    assert c.orders.take() == []
