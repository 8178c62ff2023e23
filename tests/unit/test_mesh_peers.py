"""The lease table: a member's life as a list of events, with the time as a number."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mooncake_mesh.mesh.peers import HealthChanged, Joined, PeerEvent, PeerTable
from mooncake_proto.control import Health, Load, Member, Role
from mooncake_proto.ids import Incarnation, InstanceId, NodeId

DECODE = InstanceId("decode-0")


def member(incarnation: str, instance_id: InstanceId = DECODE) -> Member:
    return Member(
        role=Role.DECODE,
        instance_id=instance_id,
        node_id=NodeId("node-a"),
        incarnation=Incarnation(incarnation),
        endpoint="tcp://127.0.0.1:5000",
    )


FIRST, SECOND = member("first"), member("second")


@pytest.fixture
def table() -> PeerTable:
    return PeerTable(suspect_after_s=3.0, dead_after_s=6.0, forget_after_s=60.0)


def health_of(table: PeerTable) -> Health | None:
    lease = table.get(DECODE)
    return None if lease is None else lease.health


def test_a_member_joins_once_and_beats_in_silence(table: PeerTable) -> None:
    assert table.join(FIRST, Load(), 0.0) == [Joined(member=FIRST)]
    assert table.beat(DECODE, FIRST.incarnation, Load(queued_jobs=4), 2.0) == []
    assert table.expire(4.9) == []
    assert table.revision == 1
    [lease] = table
    assert (lease.member, lease.health, lease.load, lease.renewed_s) == (FIRST, Health.ALIVE, Load(queued_jobs=4), 2.0)


def test_a_keeper_that_slept_holds_it_against_nobody() -> None:
    """Stopped for ten seconds, it heard no beats; but who is silent all along dies, however slow its looks are."""
    table = PeerTable(suspect_after_s=3.0, dead_after_s=6.0, look_every_s=1.0)
    table.join(FIRST, Load(), 0.0)
    assert table.expire(0.5) == []
    assert table.expire(10.5) == []
    assert table.beat(DECODE, FIRST.incarnation, Load(), 10.6) == []
    events = [event for now_s in range(12, 30, 2) for event in table.expire(float(now_s))]
    assert events == [HealthChanged(member=FIRST, health=health) for health in (Health.SUSPECT, Health.DEAD)]


def test_a_beat_after_the_sleep_is_no_beat_from_the_future() -> None:
    table = PeerTable(suspect_after_s=3.0, dead_after_s=6.0, look_every_s=1.0)
    table.join(FIRST, Load(), 0.0)
    table.expire(0.5)
    table.beat(DECODE, FIRST.incarnation, Load(), 10.4)
    table.expire(10.5)
    [lease] = table
    assert lease.renewed_s == 10.5


@pytest.mark.parametrize(
    ("age_s", "health"),
    [(2.999, Health.ALIVE), (3.0, Health.SUSPECT), (5.999, Health.SUSPECT), (6.0, Health.DEAD), (59.9, Health.DEAD)],
)
def test_age_decides_health(table: PeerTable, age_s: float, health: Health) -> None:
    table.join(FIRST, Load(), 100.0)
    events = table.expire(100.0 + age_s)
    assert health_of(table) is health
    assert events == ([] if health is Health.ALIVE else [HealthChanged(member=FIRST, health=health)])
    assert table.expire(100.0 + age_s) == []


def test_a_suspect_that_beats_is_alive_again(table: PeerTable) -> None:
    table.join(FIRST, Load(), 0.0)
    table.expire(4.0)
    assert table.beat(DECODE, FIRST.incarnation, Load(), 4.5) == [HealthChanged(member=FIRST, health=Health.ALIVE)]
    assert table.expire(7.4) == []


def test_the_dead_do_not_beat_they_join(table: PeerTable) -> None:
    table.join(FIRST, Load(), 0.0)
    table.expire(6.0)
    assert table.beat(DECODE, FIRST.incarnation, Load(), 6.5) is None
    assert health_of(table) is Health.DEAD
    assert table.join(FIRST, Load(), 7.0) == [Joined(member=FIRST)]
    assert health_of(table) is Health.ALIVE


def test_the_long_dead_are_forgotten(table: PeerTable) -> None:
    table.join(FIRST, Load(), 0.0)
    table.expire(6.0)
    assert table.expire(60.0) == []
    assert list(table) == []
    assert table.revision == 3


def test_a_restarted_process_kills_its_older_self_at_once(table: PeerTable) -> None:
    table.join(FIRST, Load(), 0.0)
    table.beat(DECODE, FIRST.incarnation, Load(queued_jobs=9), 0.5)
    assert table.join(SECOND, Load(), 1.0) == [HealthChanged(member=FIRST, health=Health.DEAD), Joined(member=SECOND)]
    [lease] = table
    assert lease.load == Load(), "the load was the old process's"
    assert table.beat(DECODE, FIRST.incarnation, Load(), 1.5) is None
    assert table.leave(DECODE, FIRST.incarnation) == []
    assert health_of(table) is Health.ALIVE


def test_a_death_is_reported_once(table: PeerTable) -> None:
    table.join(FIRST, Load(), 0.0)
    assert table.expire(6.0) == [HealthChanged(member=FIRST, health=Health.DEAD)]
    assert table.join(SECOND, Load(), 7.0) == [Joined(member=SECOND)]
    assert table.expire(13.0) == [HealthChanged(member=SECOND, health=Health.DEAD)]
    assert table.leave(DECODE, SECOND.incarnation) == []
    assert list(table) == []


def test_who_joins_says_what_it_has_to_do(table: PeerTable) -> None:
    table.join(FIRST, Load(queued_jobs=1), 0.0)
    table.beat(DECODE, FIRST.incarnation, Load(queued_jobs=2), 0.5)
    assert table.join(FIRST, Load(queued_jobs=3), 1.0) == [Joined(member=FIRST)]
    [lease] = table
    assert lease.load == Load(queued_jobs=3)


def test_an_orderly_goodbye(table: PeerTable) -> None:
    table.join(FIRST, Load(), 0.0)
    assert table.leave(DECODE, FIRST.incarnation) == [HealthChanged(member=FIRST, health=Health.DEAD)]
    assert list(table) == []
    assert table.leave(DECODE, FIRST.incarnation) == []
    assert table.beat(DECODE, FIRST.incarnation, Load(), 1.0) is None


def test_leases_come_in_order_of_their_names(table: PeerTable) -> None:
    for name in ("c", "a", "b"):
        table.join(member("i", InstanceId(name)), Load(), 0.0)
    assert [lease.member.instance_id for lease in table] == ["a", "b", "c"]


@pytest.mark.parametrize("times", [(0.0, 1.0, 2.0), (2.0, 2.0, 3.0), (1.0, 3.0, 2.0), (-1.0, 1.0, 2.0)])
def test_times_must_grow(times: tuple[float, float, float]) -> None:
    suspect_after_s, dead_after_s, forget_after_s = times
    with pytest.raises(ValueError, match="must hold"):
        PeerTable(suspect_after_s=suspect_after_s, dead_after_s=dead_after_s, forget_after_s=forget_after_s)


INSTANCES = st.just(DECODE)  # one is enough: members do not touch each other, and its life gets all the steps
INCARNATIONS = st.sampled_from([Incarnation("1"), Incarnation("2")])


class Lives(RuleBasedStateMachine):
    """Somebody who only hears the events knows who is there, and hears of each death once."""

    @initialize()
    def start(self) -> None:
        self.table = PeerTable(suspect_after_s=3.0, dead_after_s=6.0, forget_after_s=12.0)
        self.now_s = 0.0
        self.heard: dict[InstanceId, tuple[Incarnation, Health]] = {}

    def hear(self, events: list[PeerEvent] | None) -> None:
        for event in events or []:
            key, incarnation = event.member.instance_id, event.member.incarnation
            match event:
                case Joined():
                    assert key not in self.heard or self.heard[key][0] == incarnation, "the older one never died"
                    self.heard[key] = (incarnation, Health.ALIVE)
                case HealthChanged(health=health):
                    assert self.heard[key][0] == incarnation
                    assert self.heard[key][1] is not health
                    self.heard[key] = (incarnation, health)
                    if health is Health.DEAD:
                        del self.heard[key]

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.hear(self.table.expire(self.now_s))

    @rule(key=INSTANCES, incarnation=INCARNATIONS)
    def join(self, key: InstanceId, incarnation: Incarnation) -> None:
        self.hear(self.table.join(member(incarnation, key), Load(), self.now_s))

    @rule(key=INSTANCES, incarnation=INCARNATIONS)
    def beat(self, key: InstanceId, incarnation: Incarnation) -> None:
        known = self.heard.get(key, (None, None))[0] == incarnation
        events = self.table.beat(key, incarnation, Load(), self.now_s)
        assert (events is not None) is known
        self.hear(events)

    @rule(key=INSTANCES, incarnation=INCARNATIONS)
    def leave(self, key: InstanceId, incarnation: Incarnation) -> None:
        self.hear(self.table.leave(key, incarnation))

    @invariant()
    def hearsay_is_the_table(self) -> None:
        if hasattr(self, "table"):
            there = {
                lease.member.instance_id: (lease.member.incarnation, lease.health)
                for lease in self.table
                if lease.health is not Health.DEAD
            }
            assert there == self.heard


TestLives = Lives.TestCase
