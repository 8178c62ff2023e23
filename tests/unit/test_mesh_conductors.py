"""Members find who leads among several conductors, and never go back to an earlier one while a later one answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from mooncake_mesh.errors import CallTimeout, NotLeader, PeerUnreachable, Refused, RemoteFailure
from mooncake_mesh.mesh import conductors as conductors_module
from mooncake_mesh.mesh.conductors import Conductors, is_without_conductor, standing
from mooncake_mesh.mesh.rpc import Caller
from mooncake_proto.control import Failure, LeaderQuery, LeaderReport, Ok, Ping
from mooncake_proto.ids import InstanceId
from tests.unit.mesh_doubles import PATIENCE_S, Run, on_both_loops, serving, soon, until


class Conductor:
    """A scripted one; it leads where it has an ``epoch``."""

    def __init__(self, name: str, epoch: int | None = None) -> None:
        self.name, self.epoch, self.asked, self.is_silent = name, epoch, 0, False
        self.waiting = 0

    def standing(self) -> LeaderReport:
        name, leads = InstanceId(self.name), self.epoch is not None
        return LeaderReport(instance_id=name, leads=leads, epoch=self.epoch or 0, leader="", trouble="")

    async def answer(self, _: LeaderQuery, __: Caller) -> LeaderReport:
        self.asked += 1
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        return self.standing()

    async def never(self, _: Ping, __: Caller) -> Ok:
        self.waiting += 1
        await asyncio.get_running_loop().create_future()
        return Ok()


@asynccontextmanager
async def meeting(*conductors: Conductor) -> AsyncIterator[Conductors]:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(serving({LeaderQuery: each.answer, Ping: each.never}))
            for each in conductors
        ]
        yield await stack.enter_async_context(Conductors(", ".join(server.endpoint for server in servers)))


def index(conductors: Conductors) -> int:
    return conductors._clients.index(conductors.leader)


@pytest.fixture(autouse=True)
def _time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that stands still for a while: who answers here is to be heard."""
    monkeypatch.setattr(conductors_module, "_LOOK_S", PATIENCE_S)


@on_both_loops
def test_the_only_one_leads_without_being_asked(run: Run[None]) -> None:
    async def scenario() -> None:
        only = Conductor("a")
        async with meeting(only) as conductors:
            await conductors.follow()
            assert (only.asked, conductors.epoch, conductors.are_several) == (0, 0, False)
            assert conductors.connect_timeout_s is None

    run(scenario())


@on_both_loops
def test_who_leads_is_followed_from_one_to_the_other(run: Run[None]) -> None:
    async def scenario() -> None:
        a, b = Conductor("a"), Conductor("b", epoch=4)
        async with meeting(a, b) as conductors:
            await soon(conductors.follow())
            assert (index(conductors), conductors.epoch) == (1, 4)
            a.epoch, b.epoch = 6, None
            await soon(conductors.follow())
            assert (index(conductors), conductors.epoch) == (0, 6)

    run(scenario())


@on_both_loops
def test_one_that_leads_need_not_wait_for_one_that_is_silent(run: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductors_module, "_LOOK_S", 600.0)

    async def scenario() -> None:
        a, b = Conductor("a"), Conductor("b", epoch=4)
        a.is_silent = True
        async with meeting(a, b) as conductors:
            await soon(conductors.follow())
            assert index(conductors) == 1

    run(scenario())


@on_both_loops
def test_of_two_that_say_so_the_later_term_counts(run: Run[None]) -> None:
    async def scenario() -> None:
        a, b = Conductor("a", epoch=4), Conductor("b")
        async with meeting(a, b) as conductors:
            await soon(conductors.follow())
            b.epoch = 9
            conductors.registered(9)  # somebody told us of its term; a has not noticed that its own is over
            await soon(conductors.follow())
            assert (index(conductors), conductors.epoch) == (1, 9)

    run(scenario())


@on_both_loops
def test_an_earlier_term_counts_when_no_later_one_is_left(run: Run[None]) -> None:
    """etcd may have lost its data, and then counts from the beginning."""

    async def scenario() -> None:
        a, b = Conductor("a", epoch=400), Conductor("b")
        async with meeting(a, b) as conductors:
            await soon(conductors.follow())
            a.epoch, b.epoch = None, 2
            await soon(conductors.follow())
            assert (index(conductors), conductors.epoch) == (1, 2)

    run(scenario())


@on_both_loops
def test_what_waits_for_the_one_before_fails_when_another_leads(run: Run[None]) -> None:
    async def scenario() -> None:
        a, b = Conductor("a", epoch=4), Conductor("b")
        async with meeting(a, b) as conductors, asyncio.TaskGroup() as tasks:
            await soon(conductors.follow())
            call = tasks.create_task(_fails(conductors))
            await until(lambda: a.waiting, "the call")
            a.epoch, b.epoch = None, 5
            await soon(conductors.follow())
            assert "another conductor leads" in str(await soon(call))

    run(scenario())


async def _fails(conductors: Conductors) -> PeerUnreachable:
    with pytest.raises(PeerUnreachable) as caught:
        await conductors.leader.call(Ping(), Ok, timeout_s=60.0)
    return caught.value


@on_both_loops
def test_nobody_leads(run: Run[None]) -> None:
    async def scenario() -> None:
        async with meeting(Conductor("a"), Conductor("b")) as conductors:
            with pytest.raises(NotLeader, match=r"standby, no leader is known; .*standby, no leader is known"):
                await conductors.follow()
            reports = await conductors.reports()
            assert [report.instance_id for _, report in reports if isinstance(report, LeaderReport)] == ["a", "b"]

    run(scenario())


@on_both_loops
def test_one_that_knows_of_no_others_is_refused_among_several(run: Run[None]) -> None:
    async def scenario() -> None:
        async with meeting(Conductor("a", epoch=0), Conductor("b", epoch=0)) as conductors:
            with pytest.raises(Refused, match="each needs etcd") as caught:
                await conductors.follow()
            assert caught.value.code == "no_etcd"

    run(scenario())


def test_what_a_conductor_says_of_itself() -> None:
    def said(*, leads: bool = False, epoch: int = 0, leader: str = "", trouble: str = "") -> str:
        name = InstanceId("a")
        return standing(LeaderReport(instance_id=name, leads=leads, epoch=epoch, leader=leader, trouble=trouble))

    assert said(leads=True) == "leads alone"
    assert said(leads=True, epoch=3) == "leads, epoch 3"
    assert said(leader="b at tcp://b:1") == "standby, the leader is b at tcp://b:1"
    assert said(trouble="etcd: refused") == "standby, no leader is known (etcd: refused)"


def test_which_failures_mean_that_there_is_no_conductor() -> None:
    assert is_without_conductor(PeerUnreachable("gone"))
    assert is_without_conductor(CallTimeout("late"))
    assert is_without_conductor(RemoteFailure(Failure(code="not_leader", message="a standby")))
    assert not is_without_conductor(RemoteFailure(Failure(code="incompatible_member", message="another model")))
