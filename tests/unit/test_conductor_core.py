"""The conductor's soft state: who may join, whose blocks are known, where requests go, what it says of the mesh."""

from dataclasses import replace

import pytest

from mooncake_mesh.conductor.core import ConductorCore, Incompatible
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.event_stream import FeedRefused
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.mesh.peers import HealthChanged, Joined, PeerTable
from mooncake_mesh.policy.cost_model import LinearCost
from mooncake_mesh.policy.views import Objectives
from mooncake_proto.control import Health, Load, Member, ModelCard, Role
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId, NodeId
from mooncake_proto.kvcache import KvChange, KvEvent, KvEvents, KvEventsAck, KvSnapshot
from mooncake_proto.serving import Placement, Rejected, Schedule

CARD = ModelCard(name="m", fingerprint="f", dtype="float32", block_tokens=4, block_bytes=1000, max_context_tokens=4096)
ROOMY = Load(blocks_total=1000, blocks_free=1000)
KEYS = [BlockKey(f"k{i}".encode().ljust(16, b".")) for i in range(8)]
COST = LinearCost(
    prefill_base_s=0.0,
    prefill_token_s=0.01,
    cached_token_s=0.0,
    step_base_s=0.01,
    step_sequence_s=0.01,
    step_context_token_s=0.0,
    transfer_base_s=0.001,
    transfer_bytes_per_s=1e9,
)


def life(n: int) -> Incarnation:
    return Incarnation(f"life-{n}")


def member(role: Role, name: str, node: str, *, card: ModelCard | None = None, n: int = 1) -> Member:
    is_worker = role in (Role.PREFILL, Role.DECODE)
    return Member(
        role=role,
        instance_id=InstanceId(name),
        node_id=NodeId(node),
        incarnation=life(n),
        endpoint=f"ipc://{name}",
        model=(card or CARD) if is_worker else None,
    )


def core() -> ConductorCore:
    return ConductorCore(
        incarnation=Incarnation("conductor"),
        peers=PeerTable(suspect_after_s=2.0, dead_after_s=5.0),
        index=PrefixIndex(max_entries=1000),
        cost=COST,
        objectives=Objectives(),
        started_s=0.0,
    )


def joined(c: ConductorCore, *members: Member, now_s: float = 0.0) -> None:
    for one in members:
        assert not isinstance(c.register(one, Load(), now_s), Incompatible)
        load = ROOMY if one.role is Role.MESSENGER else Load()
        c.heartbeat(one.instance_id, one.incarnation, load, now_s)


def mesh(*, nodes: int = 1) -> ConductorCore:
    """On each node a messenger, a prefill and a decode instance; and a gateway."""
    c = core()
    joined(c, member(Role.GATEWAY, "g", "n0"))
    for i in range(nodes):
        joined(
            c,
            member(Role.MESSENGER, f"m{i}", f"n{i}"),
            member(Role.PREFILL, f"p{i}", f"n{i}"),
            member(Role.DECODE, f"d{i}", f"n{i}"),
        )
    return c


def request(n: int = 0, *, tokens: int = 40, keys: int = 0, avoid: tuple[str, ...] = (), model: str = "m") -> Schedule:
    return Schedule(
        job_id=JobId(f"r{n}.0"),
        model=model,
        prompt_tokens=tokens,
        max_new_tokens=16,
        keys=join_keys(KEYS[:keys]),
        avoid=tuple(map(InstanceId, avoid)),
    )


def placed(c: ConductorCore, schedule: Schedule, now_s: float = 0.0) -> Placement:
    result = c.schedule(schedule, now_s)
    assert isinstance(result, Placement)
    return result


def refused(c: ConductorCore, schedule: Schedule) -> tuple[str, bool]:
    result = c.schedule(schedule, 0.0)
    assert isinstance(result, Rejected)
    assert result.retry_after_s >= 1.0
    return result.reason, result.unavailable


def stored(node: str, n_keys: int, *, n: int = 1, first_seq: int = 1) -> KvEvents:
    return KvEvents(
        node_id=NodeId(node),
        incarnation=life(n),
        first_seq=first_seq,
        events=tuple(KvEvent(change=KvChange.STORED, key=key.hex()) for key in KEYS[:n_keys]),
    )


# --- joining ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "difference"),
    [
        (replace(CARD, name="x"), "name: d9 has x, d0 has m"),
        (replace(CARD, fingerprint="x"), "fingerprint: d9 has x, d0 has f"),
        (replace(CARD, dtype="bfloat16"), "dtype: d9 has bfloat16, d0 has float32"),
        (replace(CARD, block_tokens=8), "block_tokens: d9 has 8, d0 has 4"),
        (replace(CARD, block_bytes=2000), "block_bytes: d9 has 2000, d0 has 1000"),
    ],
)
def test_a_worker_with_another_model_is_kept_out_by_the_field_that_differs(card: ModelCard, difference: str) -> None:
    other = member(Role.DECODE, "d9", "n0", card=card)
    assert mesh().register(other, Load(), 0.0) == Incompatible(difference=difference)


def test_a_longer_context_does_not_keep_a_worker_out_and_no_model_does() -> None:
    c = mesh()
    joined(c, member(Role.DECODE, "d9", "n0", card=replace(CARD, max_context_tokens=1)))
    bare = replace(member(Role.PREFILL, "p9", "n0"), model=None)
    assert isinstance(c.register(bare, Load(), 0.0), Incompatible)


def test_an_instance_may_come_back_with_another_model_when_it_is_alone_or_all_others_are_dead() -> None:
    c = core()
    joined(c, member(Role.MESSENGER, "m0", "n0"), member(Role.PREFILL, "p0", "n0"))
    other = replace(CARD, block_tokens=8)
    joined(c, member(Role.PREFILL, "p0", "n0", card=other, n=2))
    joined(c, member(Role.DECODE, "d0", "n0", card=other))
    c.expire(10.0)
    joined(c, member(Role.PREFILL, "q0", "n0"), member(Role.DECODE, "e0", "n0"), now_s=10.0)


def test_the_cards_of_the_dead_shape_no_request() -> None:
    c = core()
    old = replace(CARD, block_tokens=1)
    joined(c, member(Role.PREFILL, "a0", "n0", card=old))
    c.expire(10.0)
    joined(c, member(Role.MESSENGER, "m0", "n0"), now_s=10.0)
    joined(c, member(Role.PREFILL, "p0", "n0"), member(Role.DECODE, "d0", "n0"), now_s=10.0)
    assert isinstance(c.kv_events(stored("n0", 8)), KvEventsAck)
    assert placed(c, request(tokens=40, keys=8), 10.0).ttft_est_s == pytest.approx(0.01 * (40 - 8 * 4))


def test_a_new_life_of_a_worker_is_the_end_of_the_old_one() -> None:
    c = mesh()
    again = member(Role.DECODE, "d0", "n0", n=2)
    assert c.register(again, Load(), 1.0) == [
        HealthChanged(member=member(Role.DECODE, "d0", "n0"), health=Health.DEAD),
        Joined(member=again),
    ]
    assert c.heartbeat(InstanceId("d0"), life(1), Load(), 1.0) is None
    assert c.heartbeat(InstanceId("d0"), life(2), Load(), 1.0) == []
    assert placed(c, request()).decode.incarnation == life(2)


def test_a_stranger_has_to_register() -> None:
    assert core().heartbeat(InstanceId("d0"), life(1), Load(), 0.0) is None


def test_a_load_that_changes_who_takes_work_is_news() -> None:
    c = mesh()
    [event] = c.heartbeat(InstanceId("d0"), life(1), Load(draining=True), 1.0) or []
    assert isinstance(event, HealthChanged)
    assert event.member.instance_id == "d0"
    assert c.heartbeat(InstanceId("d0"), life(1), Load(draining=True, running_jobs=3), 1.1) == []


# --- placing ----------------------------------------------------------------------------------------------------------


def test_a_placement_names_processes_as_they_are_now() -> None:
    placement = placed(mesh(), request())
    assert (placement.prefill.instance_id, placement.decode.instance_id) == ("p0", "d0")
    assert (placement.prefill.endpoint, placement.prefill.incarnation) == ("ipc://p0", life(1))
    assert placement.decode.messenger_endpoint == "ipc://m0"
    assert (placement.fetch_from, placement.fetch_prefix_blocks, placement.local_prefix_blocks) == ("", 0, 0)


def test_requests_between_two_beats_spread() -> None:
    c = mesh(nodes=2)
    pairs = [placed(c, request(n), 1.0) for n in range(4)]
    for two in (pairs[:2], pairs[2:]):
        assert {p.prefill.instance_id for p in two} == {"p0", "p1"}
        assert {p.decode.instance_id for p in two} == {"d0", "d1"}


def test_a_beat_takes_over_the_count_of_what_was_placed_well_before_it() -> None:
    c = mesh(nodes=2)
    first = placed(c, request(0), 1.0).prefill.instance_id
    c.heartbeat(first, life(1), Load(), 1.05)
    assert placed(c, request(1), 1.05).prefill.instance_id != first, "its job may not be in that load yet"
    c.heartbeat(first, life(1), Load(), 1.2)
    assert placed(c, request(2), 1.2).prefill.instance_id == first


def test_a_beat_of_a_life_that_is_over_takes_over_nothing() -> None:
    c = mesh(nodes=2)
    joined(c, member(Role.PREFILL, "p0", "n0", n=2), member(Role.PREFILL, "p1", "n1", n=2))
    first = placed(c, request(0), 1.0).prefill.instance_id
    assert c.heartbeat(first, life(1), Load(), 1.3) is None
    assert placed(c, request(1), 1.3).prefill.instance_id != first


def test_a_worker_that_starts_anew_has_none_of_the_work_of_its_old_life() -> None:
    c = mesh(nodes=2)
    first = placed(c, request(0), 1.0).prefill
    placed(c, request(1), 1.0)
    joined(c, member(Role.PREFILL, first.instance_id, first.node_id, n=2), now_s=1.0)
    assert placed(c, request(2), 1.0).prefill.instance_id == first.instance_id


def test_avoided_instances_are_taken_only_where_there_is_nobody_else() -> None:
    c = mesh(nodes=2)
    assert placed(c, request(0, avoid=("p0", "d0"))).prefill.instance_id == "p1"
    again = placed(c, request(1, avoid=("p0", "p1", "d1")))
    assert (again.prefill.instance_id, again.decode.instance_id) == ("p0", "d0")


def test_who_takes_no_work_is_not_chosen() -> None:
    c = mesh()
    assert refused(c, request(model="other")) == ("no_worker", True)
    c.heartbeat(InstanceId("d0"), life(1), Load(draining=True), 0.0)
    assert refused(c, request()) == ("decode_not_ready", True)
    c.goodbye(InstanceId("d0"), life(1))
    assert refused(c, request()) == ("no_decode_instance", True)
    joined(c, member(Role.DECODE, "d0", "n0"))
    c.heartbeat(InstanceId("m0"), life(1), Load(), 0.0)
    assert refused(c, request()) == ("prefill_not_ready", True), "its node's arena is not cut"
    c.goodbye(InstanceId("m0"), life(1))
    assert refused(c, request()) == ("prefill_not_ready", True)


def test_what_a_member_says_when_it_registers_counts_at_once() -> None:
    c = core()
    c.register(member(Role.MESSENGER, "m0", "n0"), ROOMY, 0.0)
    c.register(member(Role.PREFILL, "p0", "n0"), Load(draining=True), 0.0)
    c.register(member(Role.DECODE, "d0", "n0"), Load(), 0.0)
    assert refused(c, request()) == ("prefill_not_ready", True), "no beat has come yet"
    assert {str(m.member.instance_id) for m in c.cluster_state(0.0).members if m.takes_work} == {"d0"}
    c.heartbeat(InstanceId("p0"), life(1), Load(), 0.1)
    assert placed(c, request(1)).prefill.instance_id == "p0"
    busy = Load(queued_jobs=1, queued_prompts=((1_000, 0),))
    c.register(member(Role.PREFILL, "p1", "n0"), busy, 0.2)
    assert placed(c, request(2), now_s=5.0).prefill.instance_id == "p0", "what waits there counts"


@pytest.mark.parametrize("age_s", [3.0, 6.0])
def test_the_suspect_and_the_dead_get_nothing(age_s: float) -> None:
    c = mesh(nodes=2)
    for name, load in (("m1", ROOMY), ("p1", Load()), ("d1", Load())):
        c.heartbeat(InstanceId(name), life(1), load, age_s)
    c.expire(age_s)
    placement = placed(c, request(), age_s)
    assert (placement.prefill.instance_id, placement.decode.instance_id) == ("p1", "d1")


def test_totals_count_both_answers() -> None:
    c = mesh()
    placed(c, request())
    refused(c, request(model="other"))
    assert (c.placed_total, c.rejected_total) == (1, 1)


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_a_local_prefix_draws_the_request_and_a_remote_one_is_fetched_where_that_is_quicker() -> None:
    c = mesh(nodes=2)
    c.kv_events(stored("n1", 8))
    there = placed(c, request(0, keys=8))
    assert (there.prefill.instance_id, there.local_prefix_blocks, there.fetch_from) == ("p1", 8, "")
    c.heartbeat(InstanceId("p1"), life(1), Load(queued_jobs=1, queued_tokens=5000), 0.0)
    here = placed(c, request(1, keys=8), 0.0)
    assert (here.prefill.instance_id, here.local_prefix_blocks) == ("p0", 0)
    assert (here.fetch_from, here.fetch_prefix_blocks) == ("ipc://m1", 8)


def test_nothing_is_fetched_from_a_messenger_that_is_not_well() -> None:
    c = mesh(nodes=2)
    c.kv_events(stored("n1", 8))
    for name, load in (("m0", ROOMY), ("p0", Load()), ("d0", Load())):
        c.heartbeat(InstanceId(name), life(1), load, 3.0)
    c.expire(3.0)
    placement = placed(c, request(keys=8), 3.0)
    assert (placement.prefill.instance_id, placement.fetch_from, placement.fetch_prefix_blocks) == ("p0", "", 0)


@pytest.mark.parametrize("end", ["goodbye", "expire", "new life", "moved"])
def test_the_blocks_of_a_messenger_go_with_it(end: str) -> None:
    c = mesh(nodes=2)
    c.kv_events(stored("n1", 3))
    assert c.status(0.0).indexed_blocks == {"n0": 0, "n1": 3}
    if end == "goodbye":
        c.goodbye(InstanceId("m1"), life(1))
    elif end == "expire":
        for name, load in (("m0", ROOMY), ("p0", Load()), ("d0", Load())):
            c.heartbeat(InstanceId(name), life(1), load, 6.0)
        c.expire(6.0)
    elif end == "moved":
        joined(c, member(Role.MESSENGER, "m1", "n7", n=2))
        assert placed(c, request(avoid=("p0",))).prefill.instance_id == "p0", "p1 has no messenger any more"
    else:
        joined(c, member(Role.MESSENGER, "m1", "n1", n=2))
    assert c.status(0.0).indexed_blocks.get("n1", 0) == 0
    assert placed(c, request(keys=3)).local_prefix_blocks == 0


def test_the_late_goodbye_of_an_old_messenger_takes_nothing_from_its_successor() -> None:
    c = mesh()
    joined(c, member(Role.MESSENGER, "m0", "n0", n=2))
    c.kv_events(stored("n0", 3, n=2))
    assert c.goodbye(InstanceId("m0"), life(1)) == []
    assert c.status(0.0).indexed_blocks == {"n0": 3}


def test_registering_again_in_the_same_life_keeps_what_is_known() -> None:
    c = mesh()
    c.kv_events(stored("n0", 3))
    c.register(member(Role.MESSENGER, "m0", "n0"), Load(), 1.0)
    assert c.status(1.0).indexed_blocks == {"n0": 3}
    assert c.kv_events(stored("n0", 3)) == KvEventsAck(next_seq=4, resync=False)


def test_events_of_strangers_and_of_old_lives_are_refused() -> None:
    c = mesh()
    assert c.kv_events(stored("n9", 1)) is None
    snapshot = KvSnapshot(node_id=NodeId("n9"), incarnation=life(1), seq=0, keys=b"")
    assert c.kv_snapshot(snapshot) is None
    refusal = FeedRefused(expected=life(1), got=life(0))
    assert c.kv_events(stored("n0", 1, n=0)) == refusal
    assert c.kv_snapshot(replace(snapshot, node_id=NodeId("n0"), incarnation=life(0))) == refusal
    assert c.status(0.0).indexed_blocks == {"n0": 0}


def test_a_gap_asks_for_what_is_missing_and_a_snapshot_replaces_all() -> None:
    c = mesh()
    assert c.kv_events(stored("n0", 2, first_seq=5)) == KvEventsAck(next_seq=1, resync=True)
    snapshot = KvSnapshot(node_id=NodeId("n0"), incarnation=life(1), seq=6, keys=join_keys(KEYS[:4]))
    assert c.kv_snapshot(snapshot) == KvEventsAck(next_seq=7, resync=False)
    assert c.status(0.0).indexed_blocks == {"n0": 4}


# --- telling ----------------------------------------------------------------------------------------------------------


def test_a_whole_mesh_is_healthy() -> None:
    status = mesh().status(7.0)
    assert (status.healthy, status.reasons, status.uptime_s) == (True, (), 7.0)
    assert [state.member.instance_id for state in status.cluster.members if state.takes_work] == ["d0", "p0"]


def test_the_status_says_what_is_missing() -> None:
    c = core()
    assert c.status(0.0).reasons == (
        "no prefill instance that takes work",
        "no decode instance that takes work",
        "no gateway",
    )
    joined(c, member(Role.GATEWAY, "g", "n0"), member(Role.PREFILL, "p0", "n0"))
    assert c.status(0.0).reasons[0] == "no prefill instance that takes work", "it has no messenger yet"
    joined(c, member(Role.MESSENGER, "m0", "n0"))
    assert c.status(0.0).reasons == ("no decode instance that takes work",)


def test_the_status_names_members_that_are_not_well() -> None:
    c = mesh()
    for name, load in (("g", Load()), ("m0", ROOMY), ("p0", Load())):
        c.heartbeat(InstanceId(name), life(1), load, 3.0)
    c.expire(3.0)
    assert c.status(3.0).reasons == ("no decode instance that takes work", "d0 is suspect")
    before = c.revision
    c.expire(5.5)
    assert c.revision > before
    assert "d0 is dead" in c.status(5.5).reasons
    joined(c, member(Role.DECODE, "d0", "n0", n=2), now_s=5.5)
    for name, load in (("g", Load()), ("m0", ROOMY), ("p0", Load())):
        c.heartbeat(InstanceId(name), life(1), load, 5.5)
    assert c.status(5.5).healthy
