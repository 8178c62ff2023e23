"""The status table and JSON of a report, and the exit codes."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from mooncake_mesh.cli import status
from mooncake_mesh.config_commands import StatusConfig
from mooncake_mesh.errors import CallTimeout, PeerUnreachable
from mooncake_mesh.mesh import conductors
from mooncake_proto.control import (
    ClassReport,
    ClusterState,
    Health,
    Latency,
    LeaderQuery,
    LeaderReport,
    Load,
    Member,
    MemberState,
    Role,
    StatusQuery,
    StatusReport,
)
from mooncake_proto.ids import Incarnation, InstanceId, NodeId


def _member(role: Role, name: str, load: Load | None = None, health: Health = Health.ALIVE) -> MemberState:
    member = Member(
        role=role,
        instance_id=InstanceId(name),
        node_id=NodeId("node0"),
        incarnation=Incarnation("i"),
        endpoint="ipc:///tmp/x",
    )
    return MemberState(member=member, health=health, takes_work=False, load=load or Load(), last_beat_s=0.1)


def _report(*members: MemberState, healthy: bool = True) -> StatusReport:
    return StatusReport(
        cluster=ClusterState(conductor=Incarnation("c"), revision=1, members=members),
        healthy=healthy,
        reasons=() if healthy else ("no decode instance", "no gateway"),
        indexed_blocks={"node0": 12},
        placed_total=5,
        rejected_total=1,
        uptime_s=61.0,
    )


def _shown(report: StatusReport) -> list[list[str]]:
    out = io.StringIO()
    status.show(report, Console(file=out, width=160))
    return [line.split() for line in out.getvalue().splitlines()]


def test_table() -> None:
    pool = Load(blocks_total=100, blocks_free=60, blocks_cached=30, ssd_blocks=7, ssd_slots=50, transports="shm,tcp")
    pool = replace(pool, pages="hugetlb")
    lines = _shown(
        _report(
            _member(Role.MESSENGER, "messenger0", pool),
            _member(Role.PREFILL, "prefill1", Load(queued_jobs=3, running_jobs=1), Health.SUSPECT),
            _member(Role.PREFILL, "prefill0", Load(draining=True)),
            _member(Role.GATEWAY, "gateway0", Load(running_jobs=2)),
        )
    )
    assert lines[1:] == [
        ["gateway", "gateway0", "node0", "alive", "0", "2", "-", "-", "-", "-", "-", "-"],
        ["prefill", "prefill0", "node0", "drained,", "serving", "KV", "0", "0", "-", "-", "-", "-", "-", "-"],
        ["prefill", "prefill1", "node0", "suspect", "3", "1", "-", "-", "-", "-", "-", "-"],
        ["messenger", "messenger0", "node0", "alive", "-", "-", "60", "30", "100", "7/50", "shm,tcp", "hugetlb"],
        ["healthy:", "up", "61", "s,", "5", "placed,", "1", "rejected"],
    ]


def test_blocks_of_tenants_are_shown_where_there_are_tenants() -> None:
    one = _member(Role.MESSENGER, "messenger0", Load(blocks_total=100, tenants={"acme": 40, "": 3}))
    assert ["blocks", "of", "tenants", "on", "node0:", "acme", "40,", "(none)", "3"] in _shown(_report(one))
    none = _member(Role.MESSENGER, "messenger0", Load(blocks_total=100, tenants={"": 3}))
    assert not any("tenants" in line for line in _shown(_report(none)))


def test_unhealthy_mesh_says_why() -> None:
    assert " ".join(_shown(_report(healthy=False))[-1]).startswith(
        "not healthy: no decode instance; no gateway (up 61 s"
    )


def test_json_has_everything() -> None:
    report = json.loads(status.as_json(_report(_member(Role.DECODE, "decode0"))))
    assert report["healthy"] is True
    assert report["indexed_blocks"] == {"node0": 12}
    member = report["cluster"]["members"][0]
    assert (member["member"]["role"], member["health"], member["load"]["queued_jobs"]) == ("decode", "alive", 0)


class ScriptedRpc:
    """Stands in for the client of the conductor."""

    answer: StatusReport | Exception

    leader = "ipc:///tmp/a.ipc"

    def __init__(self, endpoint: str, keys: object = None) -> None:
        self.endpoint = endpoint

    def close(self) -> None:
        pass

    def fail_open_calls(self, why: str) -> None:
        pass

    async def call(self, body: object, expect: type, *, timeout_s: float) -> StatusReport | LeaderReport:
        if isinstance(body, LeaderQuery):
            return self._standing()
        assert self.endpoint not in ("ipc:///tmp/b.ipc", "ipc:///tmp/gone.ipc"), "only the leader knows"
        assert isinstance(body, StatusQuery)
        assert expect is StatusReport
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def _standing(self) -> LeaderReport:
        if self.endpoint.endswith("gone.ipc"):
            raise PeerUnreachable("no live connection")
        leads = self.endpoint == self.leader
        leader = "" if leads else f"a at {self.leader}"
        return LeaderReport(instance_id=InstanceId("x"), leads=leads, epoch=7 * leads, leader=leader, trouble="")


@pytest.mark.parametrize(
    ("answer", "code"),
    [(_report(), 0), (_report(healthy=False), 1), (CallTimeout("no reply in 3 s"), 2)],
)
def test_exit_code(
    answer: StatusReport | Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conductors, "RpcClient", ScriptedRpc)
    monkeypatch.setattr(ScriptedRpc, "answer", answer, raising=False)
    assert status.run(StatusConfig(conductor="ipc:///tmp/c.ipc")) == code
    captured = capsys.readouterr()
    if code == status.UNREACHABLE:
        assert captured.out == ""
        assert "no answer from the conductor at ipc:///tmp/c.ipc: no reply in 3 s" in captured.err


def test_json_output_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(conductors, "RpcClient", ScriptedRpc)
    monkeypatch.setattr(ScriptedRpc, "answer", _report(healthy=False), raising=False)
    assert status.run(StatusConfig(json=True)) == status.NOT_HEALTHY
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["reasons"] == ["no decode instance", "no gateway"]


def test_of_several_conductors_it_says_who_leads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conductors, "RpcClient", ScriptedRpc)
    monkeypatch.setattr(ScriptedRpc, "answer", _report(), raising=False)
    several = "ipc:///tmp/gone.ipc, ipc:///tmp/a.ipc, ipc:///tmp/b.ipc"
    assert status.run(StatusConfig(conductor=several)) == status.HEALTHY
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "conductor at ipc:///tmp/gone.ipc: no answer (no live connection)",
        "conductor at ipc:///tmp/a.ipc: leads, epoch 7",
        "conductor at ipc:///tmp/b.ipc: standby, the leader is a at ipc:///tmp/a.ipc",
    ]


def test_without_a_leader_there_is_no_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conductors, "RpcClient", ScriptedRpc)
    assert status.run(StatusConfig(conductor="ipc:///tmp/gone.ipc,ipc:///tmp/b.ipc")) == status.UNREACHABLE
    told = capsys.readouterr()
    assert told.out == ""
    assert "ipc:///tmp/b.ipc: standby" in told.err
    assert "ipc:///tmp/gone.ipc: no live connection" in told.err


def test_classes_show_their_goodput_and_which_objective_is_missed() -> None:
    one = ClassReport(
        name="standard",
        requests=11,
        finished=8,
        refused=2,
        failed=0,
        cancelled=1,
        good=7,
        good_per_s=0.5,
        tokens=900,
        good_tokens=500,
        wasted_tokens=40,
        ttft=Latency(p50_s=0.5, p90_s=2.5, p99_s=3.0, objective_s=2.0),
        tbt=Latency(p50_s=0.05, p90_s=0.1, p99_s=0.2, objective_s=None),
        refusals={"ttft_objective": 2},
    )
    lines = _shown(replace(_report(), classes=(one,)))
    told = ["standard", "10", "2", "0", "7", "(70%)", "0.50", "0.500", "s", "2.500", "s", ">", "2"]
    assert [*told, "0.050", "s", "0.100", "s", "40"] in lines
    assert json.loads(status.as_json(replace(_report(), classes=(one,))))["classes"][0]["good"] == 7
