"""Registered for as long as it runs, whatever happens to the conductor."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import CapturingLogger

from mooncake_mesh.errors import Refused
from mooncake_mesh.mesh import membership as membership_module
from mooncake_mesh.mesh.conductors import Conductors
from mooncake_mesh.mesh.endpoint import Publisher
from mooncake_mesh.mesh.membership import Membership
from mooncake_mesh.mesh.rpc import Caller
from mooncake_proto import codec
from mooncake_proto.control import (
    ClusterState,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Load,
    Member,
    Register,
    Registered,
    Role,
)
from mooncake_proto.ids import Incarnation, InstanceId, NodeId
from tests.unit.mesh_doubles import ANY_PORT, PATIENCE_S, Run, on_both_loops, serving, soon, until

pytestmark = on_both_loops

ME = Member(
    role=Role.DECODE,
    instance_id=InstanceId("decode0"),
    node_id=NodeId("node0"),
    incarnation=Incarnation("me"),
    endpoint="ipc:///nowhere",
)


class Conductor:
    """A scripted one; ``life`` is its incarnation."""

    def __init__(self, life: str = "first", *, heartbeat_s: float = 0.01, publish: str = "tcp://127.0.0.1:9") -> None:
        self.life, self.heartbeat_s, self.publish = Incarnation(life), heartbeat_s, publish
        self.knows_me = True
        self.refusals = 0
        self.registered = 0
        self.beats: list[Load] = []
        self.first_loads: list[Load] = []
        self.goodbyes: list[Goodbye] = []

    def register(self, register: Register, _: Caller) -> Registered:
        assert register.member == ME
        if self.refusals:
            self.refusals -= 1
            raise Refused("incompatible_model", "another model is served here")
        self.registered += 1
        self.first_loads.append(register.load)
        self.knows_me = True
        return Registered(conductor=self.life, heartbeat_s=self.heartbeat_s, publish_endpoint=self.publish)

    def beat(self, beat: Heartbeat, _: Caller) -> HeartbeatAck:
        self.beats.append(beat.load)
        return HeartbeatAck(conductor=self.life, known=self.knows_me)

    def serve(self, bind: str = ANY_PORT):  # type: ignore[no-untyped-def]
        handlers = {
            Register: self.register,
            Heartbeat: self.beat,
            Goodbye: lambda goodbye, _: self.goodbyes.append(goodbye),
        }
        return serving(handlers, bind)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a member whose machine stands still for two seconds registers once more than it is counted here."""
    monkeypatch.setattr(membership_module, "_CALL_TIMEOUT_S", PATIENCE_S)


@asynccontextmanager
async def running(membership: Membership) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(membership.run())
        try:
            yield
        finally:
            task.cancel()


def test_registers_beats_and_says_goodbye(run: Run[None]) -> None:
    async def scenario() -> None:
        conductor = Conductor()
        loads = iter(range(1000))
        async with conductor.serve() as server, Conductors(server.endpoint) as client:
            membership = Membership(client, ME, lambda: Load(queued_jobs=next(loads)))
            async with running(membership):
                await soon(membership.registered.wait())
                await until(lambda: len(conductor.beats) >= 3)
                said = [*conductor.first_loads, *conductor.beats[:3]]
                assert [load.queued_jobs for load in said] == [0, 1, 2, 3], "its registration says it already"
                await membership.leave()
                await until(lambda: conductor.goodbyes)
            assert conductor.goodbyes == [Goodbye(instance_id=ME.instance_id, incarnation=ME.incarnation)]
            assert conductor.registered == 1

    run(scenario())


def test_news_do_not_wait_for_the_next_turn(run: Run[None]) -> None:
    async def scenario() -> None:
        conductor = Conductor(heartbeat_s=600.0)
        async with conductor.serve() as server, Conductors(server.endpoint) as client:
            membership = Membership(client, ME, Load)
            async with running(membership):
                await soon(membership.registered.wait())
                for beats in (1, 2):
                    membership.news()
                    await until(lambda beats=beats: len(conductor.beats) == beats)  # type: ignore[misc]

    run(scenario())


def test_a_conductor_that_does_not_know_us_is_told_again(run: Run[None]) -> None:
    async def scenario() -> None:
        conductor = Conductor()
        published = 0

        async def publish() -> None:
            nonlocal published
            published += 1

        async with conductor.serve() as server, Conductors(server.endpoint) as client:
            membership = Membership(client, ME, Load, on_registered=publish)
            async with running(membership):
                await until(lambda: conductor.beats)
                conductor.knows_me = False
                await until(lambda: conductor.registered == 2)
                conductor.life = Incarnation("a restart that took the old one's members over")
                await until(lambda: conductor.registered == 3)
                await soon(membership.registered.wait())
                assert published == 3

    run(scenario())


def test_a_restarted_conductor_is_joined_and_heard_at_its_new_address(run: Run[None], tmp_path: object) -> None:
    async def scenario() -> None:
        address = f"ipc://{tmp_path}/conductor"
        heard: list[ClusterState] = []
        async with Conductors(address) as client:
            membership = Membership(client, ME, Load, on_cluster=heard.append)
            async with running(membership):
                for life in ("first", "second"):
                    publisher = Publisher(ANY_PORT)
                    conductor = Conductor(life, publish=publisher.endpoint)
                    state = ClusterState(conductor=conductor.life, revision=1, members=())

                    def hears(state: ClusterState = state, publisher: Publisher = publisher) -> bool:
                        publisher.publish([b"garbage"])
                        publisher.publish(codec.encode(state))
                        return state in heard

                    async with conductor.serve(address):
                        await until(lambda conductor=conductor: conductor.registered)  # type: ignore[misc]
                        await until(hears)
                    publisher.close()

    run(scenario())


def test_a_refused_member_tries_again(run: Run[None]) -> None:
    async def scenario() -> None:
        conductor = Conductor()
        conductor.refusals = 2
        async with conductor.serve() as server, Conductors(server.endpoint) as client:
            membership = Membership(client, ME, Load)
            async with running(membership):
                await soon(membership.registered.wait())
                assert (conductor.refusals, conductor.registered) == (0, 1)

    run(scenario())


def test_a_conductor_that_is_away_for_long_does_not_fill_the_log(
    run: Run[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = CapturingLogger()
    monkeypatch.setattr(membership_module, "log", told)
    monkeypatch.setattr(membership_module, "_RETRY_S", 0.0)

    async def scenario() -> None:
        conductor = Conductor()
        conductor.refusals = 40
        async with (
            conductor.serve() as server,
            Conductors(server.endpoint) as client,
            running(Membership(client, ME, Load)),
        ):
            await until(lambda: conductor.registered)

    run(scenario())
    said = [call for call in told.calls if call.args == ("conductor_unavailable",)]
    assert 1 <= len(said) <= 5


def test_who_has_left_does_not_come_back(run: Run[None]) -> None:
    """A beat that was under way is answered by a conductor that has just heard the goodbye."""

    async def scenario() -> None:
        heard: list[ClusterState] = []
        publisher = Publisher(ANY_PORT)
        conductor = Conductor(publish=publisher.endpoint)
        state = ClusterState(conductor=conductor.life, revision=1, members=())

        def hears() -> bool:
            publisher.publish(codec.encode(state))
            return state in heard

        async with conductor.serve() as server, Conductors(server.endpoint) as client:
            membership = Membership(client, ME, Load, on_cluster=heard.append)
            async with running(membership):
                await until(lambda: conductor.beats)
                conductor.knows_me = False
                await membership.leave()
                await until(lambda: conductor.goodbyes)
                await until(hears)  # its requests still run: deaths of their workers matter
                assert conductor.registered == 1
        publisher.close()

    run(scenario())


def test_leaving_does_not_wait_for_a_conductor_that_is_gone(run: Run[None], tmp_path: object) -> None:
    async def scenario() -> None:
        async with Conductors(f"ipc://{tmp_path}/nobody") as client:
            await soon(Membership(client, ME, Load).leave())

    run(scenario())
