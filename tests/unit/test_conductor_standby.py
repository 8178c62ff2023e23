"""Conductors as their processes make them, over real sockets and a stand-in of etcd."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mooncake_mesh.conductor import term
from mooncake_mesh.conductor.recording import about
from mooncake_mesh.conductor.service import ConductorService, run
from mooncake_mesh.config import ConductorConfig
from mooncake_mesh.config_etcd import EtcdConfig
from mooncake_mesh.errors import ConfigError, MooncakeError, RemoteFailure
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_proto.control import (
    Heartbeat,
    LeaderQuery,
    LeaderReport,
    Load,
    Member,
    Ping,
    Pong,
    Register,
    Registered,
    Role,
    StatusQuery,
    StatusReport,
)
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId
from mooncake_proto.serving import Placement, Rejected, Schedule
from tests.etcd_double import EtcdDouble
from tests.unit.mesh_doubles import ANY_PORT, until

LEASE_S = 2
GATEWAY = Member(
    role=Role.GATEWAY,
    instance_id=InstanceId("gateway0"),
    node_id=NodeId("n"),
    incarnation=Incarnation("i"),
    endpoint="ipc://g",
)
SCHEDULE = Schedule(job_id=JobId("j"), model="m", prompt_tokens=5, max_new_tokens=5, keys=b"")


@pytest.fixture
def etcd() -> Iterator[EtcdDouble]:
    with EtcdDouble() as double:
        yield double


class Process:
    """One conductor and a connection to it."""

    def __init__(self, service: ConductorService, tasks: asyncio.TaskGroup) -> None:
        self.lifecycle = Lifecycle()
        self.endpoint = service._server.endpoint
        self.running = tasks.create_task(service.run(self.lifecycle))
        self.client = RpcClient(self.endpoint)

    async def ask(self, body: object, expect: type) -> Any:
        return await self.client.call(body, expect, timeout_s=5.0)

    async def standing(self) -> LeaderReport:
        report: LeaderReport = await self.ask(LeaderQuery(), LeaderReport)
        return report

    async def refusal(self, body: object, expect: type = StatusReport) -> str:
        with pytest.raises(RemoteFailure) as caught:
            await self.ask(body, expect)
        assert (caught.value.code, caught.value.retryable) == ("not_leader", True)
        return str(caught.value)

    async def leads(self) -> bool:
        return (await self.standing()).leads

    async def leading(self) -> LeaderReport:
        """Its standing, once it leads."""
        async with asyncio.timeout(10.0):
            while not (standing := await self.standing()).leads:  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.01)
        return standing

    async def stop(self) -> None:
        self.lifecycle.stop("the test is over")
        await self.running
        self.client.close()


def configured(etcd: str, name: str = "a", *, lease_s: int = LEASE_S, record: Path | None = None) -> ConductorConfig:
    return ConductorConfig(
        instance_id=name,
        bind=ANY_PORT,
        publish=ANY_PORT,
        record=record,
        etcd=EtcdConfig(endpoints=etcd, lease_s=lease_s) if etcd else EtcdConfig(),
    )


@asynccontextmanager
async def running(*configs: ConductorConfig) -> AsyncIterator[list[Process]]:
    async with asyncio.TaskGroup() as tasks:
        processes = [Process(ConductorService(config, tasks), tasks) for config in configs]
        await until(lambda: all(process.lifecycle.is_ready for process in processes), "all to be ready")
        try:
            yield processes
        finally:
            for process in processes:
                await process.stop()


async def comes_true(look: Any) -> None:
    async with asyncio.timeout(10.0):
        while not await look():  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.01)


def test_the_only_conductor_asks_no_etcd_and_leads_from_the_first_message_on() -> None:
    async def scenario() -> None:
        async with running(configured("")) as (only,):
            assert await only.ask(StatusQuery(), StatusReport)
            standing = await only.standing()
            assert (standing.leads, standing.epoch) == (True, 0)
            registered = await only.ask(Register(member=GATEWAY, load=Load()), Registered)
            pong = await only.ask(Ping(), Pong)
            assert (registered.epoch, registered.conductor) == (0, pong.incarnation)

    asyncio.run(scenario())


def test_one_of_two_leads_and_its_end_is_the_others_beginning(etcd: EtcdDouble) -> None:
    async def scenario() -> None:
        configs = [configured(etcd.url, name, lease_s=600) for name in "ab"]
        async with running(*configs) as processes:
            leader, standby = await _sorted(processes)
            registered = await leader.ask(Register(member=GATEWAY, load=Load()), Registered)
            first = await leader.standing()
            assert registered.epoch == first.epoch > 0
            refusal = await standby.refusal(Register(member=GATEWAY, load=Load()), Registered)
            assert refusal == f"standby, the leader is {first.instance_id} at {leader.endpoint}"
            assert await standby.ask(Ping(), Pong), "it is well, though"

            await leader.stop()
            await comes_true(standby.leads)
            second = await standby.standing()
            assert second.epoch > first.epoch
            report = await standby.ask(StatusQuery(), StatusReport)
            assert report.cluster.conductor != registered.conductor
            assert report.cluster.members == (), "members come by themselves"

    asyncio.run(scenario())


async def _sorted(processes: list[Process]) -> tuple[Process, Process]:
    """The one that leads first, once one does and the other knows."""

    async def settled() -> bool:
        standings = [await process.standing() for process in processes]
        return sorted((each.leads, bool(each.leader)) for each in standings) == [(False, True), (True, False)]

    await comes_true(settled)
    a, b = processes
    return (a, b) if await a.leads() else (b, a)


def test_etcd_is_away_at_start_and_again_later(etcd: EtcdDouble) -> None:
    async def scenario() -> None:
        etcd.is_stalled = True
        async with running(configured(etcd.url)) as (process,):

            async def is_in_trouble() -> bool:
                return "no answer" in (await process.standing()).trouble

            await comes_true(is_in_trouble)
            assert "no leader is known (http://" in await process.refusal(StatusQuery())
            etcd.is_stalled = False
            first = await process.leading()
            etcd.is_stalled = True
            await comes_true(is_in_trouble)

            async def is_over() -> bool:
                return not await process.leads()

            await comes_true(is_over)
            await process.refusal(Heartbeat(instance_id=GATEWAY.instance_id, incarnation=Incarnation("i"), load=Load()))
            etcd.is_stalled = False
            assert (await process.leading()).epoch > first.epoch

    asyncio.run(scenario())


def test_a_seat_that_somebody_deletes_is_lost(etcd: EtcdDouble) -> None:
    async def scenario() -> None:
        async with running(configured(etcd.url)) as (process,):
            first = (await process.leading()).epoch
            etcd.delete_all()

            async def leads_anew() -> bool:
                standing = await process.standing()
                return standing.leads and standing.epoch > first

            await comes_true(leads_anew)

    asyncio.run(scenario())


@pytest.mark.parametrize("has_standby", [True, False])
def test_right_after_a_takeover_or_a_start_whoever_asks_is_to_ask_again(
    etcd: EtcdDouble, has_standby: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers register within a beat or two: until then "nobody is there" is no answer."""
    monkeypatch.setattr(term, "_SETTLED_S", 600.0)

    async def scenario() -> None:
        async with running(configured(etcd.url if has_standby else "", lease_s=600)) as (process,):
            await process.leading()
            assert "has just begun: no_worker" in await process.refusal(SCHEDULE, Placement)
            monkeypatch.setattr(term, "_SETTLED_S", 0.2)

            async def is_settled() -> bool:
                with suppress(MooncakeError):
                    return isinstance(await process.ask(SCHEDULE, Rejected), Rejected)
                return False

            await comes_true(is_settled)

    asyncio.run(scenario())


def test_each_term_has_a_recording_of_its_own(etcd: EtcdDouble, tmp_path: Path) -> None:
    def recordings() -> list[Path]:
        return list(tmp_path.iterdir())

    async def scenario() -> None:
        async with running(configured(etcd.url, record=tmp_path / "events")) as (process,):
            first = (await process.leading()).epoch
            etcd.delete_all()
            await until(lambda: len(recordings()) > 1, "another term")
            assert f"events.{first}" in [path.name for path in recordings()]

    asyncio.run(scenario())
    assert len({about(path)["incarnation"] for path in recordings()}) == len(recordings())


def test_what_no_term_could_begin_with_is_found_out_at_the_start(etcd: EtcdDouble, tmp_path: Path) -> None:
    config = ConductorConfig(
        bind=ANY_PORT,
        publish=ANY_PORT,
        cost_profile=tmp_path / "none.json",
        etcd=EtcdConfig(endpoints=etcd.url),
    )
    with pytest.raises(ConfigError, match=r"conductor\.cost_profile"):
        asyncio.run(run(config, Lifecycle()))
    assert etcd.calls == []


def test_a_standby_that_stops_leaves_the_seat_alone(etcd: EtcdDouble) -> None:
    async def scenario() -> None:
        async with running(configured(etcd.url, "a", lease_s=600)) as (leader,):
            await comes_true(leader.leads)
            async with running(configured(etcd.url, "b", lease_s=600)) as (standby,):
                await until(lambda: etcd.calls.count("/v3/kv/range") > 3, "it to look")
                assert not await standby.leads()
            assert await leader.leads()
        assert etcd.calls.count("/v3/lease/revoke") == 1, "the leader, at its end"

    asyncio.run(scenario())
