"""Two conductors and etcd: whichever leads may die, sleep or stop, and what runs never notices."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest

from mooncake_proto import codec
from mooncake_proto.control import (
    LeaderQuery,
    LeaderReport,
    Ping,
    Role,
    StatusQuery,
    StatusReport,
    SwitchRole,
    WorkerRole,
)
from mooncake_proto.envelope import Envelope
from mooncake_proto.ids import Incarnation, InstanceId, MessageId
from tests.etcd_double import NO_ETCD, EtcdDouble, real_etcd
from tests.mesh import clients
from tests.mesh.clients import NoAnswer, Stream
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

CONDUCTORS = ("conductor", "conductor1")
LEASE_S = 6
"""So that a leader that stands still for some seconds goes on; a request waits 15 s for another one."""
ANSWER_S = 5
TOKENS = 500
MOST_WAITING = 16
SLOW = {"decode": ["--fake-decode-s-base=0.02"]}


class MeshOfTwo(Mesh):
    """One of the two conductors leads."""

    def __init__(self, etcd: str, lease_s: int = LEASE_S, **more: Sequence[str]) -> None:
        flags = {"conductor": [f"--etcd-endpoints={etcd}", f"--etcd-lease-s={lease_s}"], **SLOW, **more}
        super().__init__(flags=flags, conductors=CONDUCTORS)

    @property
    def conductor(self) -> str:
        """Endpoint of the one that leads, as soon as one does."""
        return self.endpoint(self.wait_leader())

    def standing(self, name: str) -> LeaderReport | None:
        """What a conductor says of itself; None while it says nothing, which one that is well may for seconds."""
        until_s = time.monotonic() + ANSWER_S
        while self.is_running(name):
            try:
                return clients.ask(self.endpoint(name), LeaderQuery(), LeaderReport, timeout_s=0.3)
            except NoAnswer:
                if self.is_paused(name) or time.monotonic() > until_s:
                    break
        return None

    def leaders(self) -> list[str]:
        standings = [(name, self.standing(name)) for name in CONDUCTORS]
        return [name for name, standing in standings if standing is not None and standing.leads]

    def leader(self) -> str | None:
        leaders = self.leaders()
        assert len(leaders) <= 1, leaders
        return leaders[0] if leaders else None

    def wait_leader(self, name: str | None = None, *, timeout_s: float = 30.0) -> str:
        def look() -> str | None:
            leader = self.leader()
            return leader if name is None or leader == name else None

        return self.wait(look, timeout_s=timeout_s, what=f"{name or 'a conductor'} to lead")


@pytest.fixture(scope="module", params=["stand-in", "etcd"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshOfTwo]:
    if request.param == "stand-in":
        with EtcdDouble() as double, MeshOfTwo(double.url) as mesh:
            yield mesh
    elif shutil.which("etcd") is None:
        pytest.skip(NO_ETCD)
    else:
        with real_etcd(tmp_path_factory.mktemp("etcd")) as url, MeshOfTwo(url) as mesh:
            yield mesh


@pytest.fixture
def mesh(shared: MeshOfTwo) -> MeshOfTwo:
    """Whole again after whatever the last test did."""
    return mended(shared)


def mended(mesh: MeshOfTwo) -> MeshOfTwo:
    mesh.start_missing()
    mesh.wait_leader()
    mesh.wait_healthy()
    mesh.wait_idle()
    return mesh


def _index_is_true(mesh: MeshOfTwo) -> bool | None:
    report = mesh.status()
    messengers = [state for state in report.cluster.members if state.member.role is Role.MESSENGER]
    held = {state.member.node_id: state.load.blocks_cached for state in messengers}
    return True if len(held) == 2 and held == report.indexed_blocks else None


def other(name: str) -> str:
    return CONDUCTORS[1 - CONDUCTORS.index(name)]


def test_one_leads_and_the_other_says_so(mesh: MeshOfTwo) -> None:
    leader = mesh.wait_leader()
    named = f"{leader} at {mesh.endpoint(leader)}"
    standby = LeaderReport(instance_id=InstanceId(other(leader)), leads=False, epoch=0, leader=named, trouble="")
    mesh.wait(lambda: mesh.standing(other(leader)) == standby or None, what="the other to know it")
    refusal = clients.refused(mesh.endpoint(other(leader)), StatusQuery())
    assert (refusal.code, refusal.retryable) == ("not_leader", True)
    assert refusal.message == f"standby, the leader is {named}"


def test_the_leader_is_killed(mesh: MeshOfTwo) -> None:
    prompt = "blocks that outlive the conductor which heard of them " * 3
    clients.complete(mesh.http, prompt, 2)
    known = mesh.wait(lambda: mesh.status().indexed_blocks["node0"] or None, what="node0 to tell its blocks")
    leader = mesh.wait_leader()
    before = mesh.standing(leader)
    with Stream(mesh.http, "the leader dies", TOKENS) as first, Stream(mesh.http, "another one", TOKENS) as second:
        first.wait_chunks(5)
        second.wait_chunks(5)
        mesh.kill(leader)
        killed_s = time.monotonic()
        # Asked while nobody leads, it waits.
        assert clients.complete(mesh.http, "a new one", 5) == clients.expected_text("a new one", 5)
        took_s = time.monotonic() - killed_s
        assert first.result() == clients.expected_text("the leader dies", TOKENS)
        assert second.result() == clients.expected_text("another one", TOKENS)
    print(f"takeover: the next request was answered {took_s:.2f} s after a kill, lease {LEASE_S} s")  # noqa: T201
    after = mesh.standing(mesh.wait_leader(other(leader)))
    assert before is not None
    assert after is not None
    assert after.epoch > before.epoch
    mesh.wait(lambda: _index_is_true(mesh), what="the index to be as the messengers' arenas")
    assert mesh.status().indexed_blocks["node0"] >= known
    answer = clients.post(mesh.http, "/v1/completions", clients.completion_fields(prompt, 2)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100

    mesh.start(leader)
    mesh.wait_log(leader, "standby")
    assert mesh.leaders() == [other(leader)]
    assert mesh.find_log(leader, "leading") is None


def test_nobody_is_refused_while_one_conductor_follows_another(mesh: MeshOfTwo) -> None:
    """Requests come all the time: to the old one, into the gap, and to one that knows nobody yet."""
    leader = mesh.wait_leader()
    with ExitStack() as stack:
        streams: list[tuple[str, Stream]] = []

        def ask() -> None:
            """One more, unless so many wait that an overload would be refused."""
            if sum(not stream.is_over for _, stream in streams) >= MOST_WAITING:
                return
            prompt = f"request {len(streams)}"
            streams.append((prompt, stack.enter_context(Stream(mesh.http, prompt, 2))))

        n_members = len(mesh.status().cluster.members)
        mesh.kill(leader)
        while mesh.leader() is None or len(mesh.status().cluster.members) < n_members:
            ask()
        ask()
        for prompt, stream in streams:
            assert stream.result() == clients.expected_text(prompt, 2)


def test_a_leader_that_sleeps_longer_than_its_lease(mesh: MeshOfTwo) -> None:
    leader = mesh.wait_leader()
    with Stream(mesh.http, "the leader sleeps", TOKENS) as stream:
        stream.wait_chunks(5)
        mesh.stop(leader)
        assert clients.complete(mesh.http, "a new one", 5) == clients.expected_text("a new one", 5)
        mesh.wait_leader(other(leader))
        mesh.cont(leader)
        # The very first thing that it is asked, it has to know already.
        assert mesh.leaders() == [other(leader)]
        mesh.wait_log(leader, "leading_no_more")
        mesh.wait_log(leader, "standby")
        assert mesh.leaders() == [other(leader)]
        assert stream.result() == clients.expected_text("the leader sleeps", TOKENS)
    mesh.wait_healthy()


def test_a_leader_that_stops_in_an_orderly_way_is_followed_at_once() -> None:
    """It gives its seat back, so nobody waits for the end of its lease, which is longer than this test."""
    with EtcdDouble() as etcd, MeshOfTwo(etcd.url, lease_s=600) as mesh:
        leader = mesh.wait_leader()
        mesh.terminate(leader)
        mesh.wait_leader(other(leader))
        assert mesh.exit_code(leader) == 0
        assert clients.complete(mesh.http, "a new one", 5) == clients.expected_text("a new one", 5)


def test_the_standby_is_killed(mesh: MeshOfTwo) -> None:
    leader = mesh.wait_leader()
    mesh.kill(other(leader))
    assert clients.complete(mesh.http, "nobody misses it", 5) == clients.expected_text("nobody misses it", 5)
    assert mesh.leaders() == [leader]


def test_two_conductors_without_etcd_get_no_member() -> None:
    """Both would lead, each of half the mesh."""
    mesh = Mesh(conductors=CONDUCTORS)
    with ExitStack() as at_end:
        at_end.callback(mesh.end_by_force)
        for name in (*CONDUCTORS, "messenger0"):
            mesh.start(name)
        refusal = mesh.wait_log("messenger0", "conductor_unavailable", code="no_etcd")
        assert "each needs etcd (conductor.etcd.endpoints)" in refusal["error"]
        for name in CONDUCTORS:
            assert clients.ask(mesh.endpoint(name), StatusQuery(), StatusReport).cluster.members == ()
        mesh.close()


def test_an_order_of_an_earlier_leader_is_not_heeded() -> None:
    """It may have been sent before, and come after, the end of its term."""
    with EtcdDouble() as etcd, MeshOfTwo(etcd.url, lease_s=600, prefill=["--switchable"]) as mesh:
        leader = mesh.standing(mesh.wait_leader())
        assert leader is not None
        order = SwitchRole(
            instance_id=InstanceId("prefill0"),
            incarnation=Incarnation(mesh.incarnation("prefill0")),
            role=WorkerRole.DECODE,
            prefill_demand=0.0,
            decode_demand=1.0,
            prefill=1,
            decode=1,
            epoch=leader.epoch - 1,
        )
        with clients.dealer(mesh.endpoint("prefill0")) as plug:
            for message, envelope in ((order, Envelope()), (Ping(), Envelope(id=MessageId("1")))):
                plug.send_multipart(codec.encode(message, envelope))
            clients.receive(plug, timeout_s=15.0)  # it has read both
            assert mesh.find_log("prefill0", "role_switch_begun") is None
            plug.send_multipart(codec.encode(replace(order, epoch=leader.epoch), Envelope()))
            mesh.wait_log("prefill0", "role_switch_begun", to="decode")


def test_etcd_is_away_and_comes_back() -> None:
    with EtcdDouble() as etcd, MeshOfTwo(etcd.url) as mesh:
        leader = mesh.wait_leader()
        with Stream(mesh.http, "nobody leads", TOKENS) as stream:
            stream.wait_chunks(5)
            etcd.is_stalled = True
            mesh.wait_log(leader, "leading_no_more")
            assert mesh.find_log(leader, "etcd_unreachable") is not None
            assert mesh.leaders() == []
            with Stream(mesh.http, "waits for a leader", 5) as waiting:
                mesh.wait_log("gateway0", "conductor_unreachable")
                etcd.is_stalled = False
                assert waiting.result() == clients.expected_text("waits for a leader", 5)
            assert stream.result() == clients.expected_text("nobody leads", TOKENS)
        assert mesh.find_log("decode0", "jobs_dropped") is None
