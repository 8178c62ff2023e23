"""A conductor that has just begun does not know everybody yet; the gateway does."""

from dataclasses import replace

from mooncake_mesh.gateway.known_members import KnownMembers
from mooncake_proto.control import ClusterState, Health, Load, Member, MemberState, Role
from mooncake_proto.ids import Incarnation, InstanceId, NodeId


def member(name: str, health: Health = Health.ALIVE) -> MemberState:
    one = Member(
        role=Role.DECODE,
        instance_id=InstanceId(name),
        node_id=NodeId("n"),
        incarnation=Incarnation("i"),
        endpoint=f"ipc://{name}",
    )
    return MemberState(member=one, health=health, load=Load(), takes_work=True, last_beat_s=0.0)


def state(conductor: str, *members: MemberState) -> ClusterState:
    return ClusterState(conductor=Incarnation(conductor), revision=1, members=members)


def names(known: KnownMembers, now_s: float) -> list[str]:
    return [each.member.instance_id for each in known.members(now_s)]


def test_nothing_is_known_before_anything_is_heard() -> None:
    assert KnownMembers().members(1.0) == ()


def test_one_conductor_is_believed_in_all_it_says() -> None:
    known = KnownMembers()
    known.heard(state("c", member("a"), member("b")), 1.0)
    known.heard(state("c", member("b")), 1.1)
    assert names(known, 1.1) == ["b"], "it has heard a say goodbye"


def test_the_next_one_is_given_time_to_hear_of_all() -> None:
    known = KnownMembers()
    known.heard(state("c", member("a"), member("b"), member("gone", Health.DEAD)), 1.0)
    known.heard(state("d"), 10.0)
    assert names(known, 10.0) == ["a", "b"]
    draining = replace(member("b"), takes_work=False)
    known.heard(state("d", draining), 10.5)
    assert known.members(10.5) == (draining, member("a")), "what it says itself counts"
    assert names(known, 11.9) == ["b", "a"]
    assert names(known, 12.0) == ["b"], "who has not come is not there"


def test_two_changes_in_a_row() -> None:
    known = KnownMembers()
    known.heard(state("c", member("a")), 1.0)
    known.heard(state("d", member("b")), 10.0)
    known.heard(state("e"), 11.0)
    assert sorted(names(known, 11.0)) == ["a", "b"]
    assert names(known, 13.0) == []
