"""The conductor as its process makes it, over a router whose messages come when the test says so."""

import asyncio
from dataclasses import replace

import pytest

from mooncake_mesh.conductor import service, term
from mooncake_mesh.conductor.making import conductor_core
from mooncake_mesh.conductor.service import ConductorService
from mooncake_mesh.config import ConductorConfig
from mooncake_mesh.errors import NotLeader
from mooncake_mesh.mesh import endpoint
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_proto.control import CancelCall, Failure, Health, Load, Member, Role
from mooncake_proto.envelope import Envelope
from mooncake_proto.ids import Incarnation, InstanceId, JobId, MessageId, NodeId
from mooncake_proto.serving import Schedule
from tests.unit.mesh_doubles import ANY_PORT, Run, ScriptedRouter, on_both_loops, until


def schedule(job_id: str) -> Schedule:
    return Schedule(job_id=JobId(job_id), model="m", prompt_tokens=5, max_new_tokens=5, keys=b"")


@on_both_loops
def test_what_is_cancelled_before_its_turn_is_not_placed(run: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    router = ScriptedRouter()
    monkeypatch.setattr(endpoint, "router", router)
    config = replace(ConductorConfig(), publish=ANY_PORT)
    core = conductor_core(config, Incarnation("c"), 0.0)
    monkeypatch.setattr(service, "conductor_core", lambda *_: core)
    monkeypatch.setattr(term, "_SETTLED_S", 600.0)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            lifecycle = Lifecycle()
            tasks.create_task(ConductorService(config, tasks).run(lifecycle))
            await until(lambda: lifecycle.is_ready, "the conductor")
            for name in ("left", "waits"):
                router.deliver(schedule(name), Envelope(id=MessageId(name)))
            router.deliver(CancelCall(target=MessageId("left")), Envelope())
            await until(lambda: router.sent, "the other answer")
            lifecycle.stop("the test is over")
        (envelope, answer), *others = router.sent
        assert (envelope.re, others) == ("waits", [])
        assert isinstance(answer, Failure)
        assert answer.code == NotLeader.code, "it has just begun"
        assert core.rejected_total == 1  # the mesh is empty: what was not asked for was not refused either

    run(scenario())


@pytest.mark.parametrize(("dead_after_s", "forgotten_after_s"), [(3.0, 60.0), (45.0, 90.0), (600.0, 1200.0)])
def test_a_dead_member_is_told_of_for_a_while_however_patient_the_conductor_is(
    dead_after_s: float, forgotten_after_s: float
) -> None:
    config = ConductorConfig(suspect_after_s=dead_after_s / 2, dead_after_s=dead_after_s)
    core = conductor_core(config, Incarnation("c"), 0.0)
    member = Member(
        role=Role.GATEWAY,
        instance_id=InstanceId("gateway0"),
        node_id=NodeId("n"),
        incarnation=Incarnation("i"),
        endpoint="ipc://g",
    )
    core.register(member, Load(), 0.0)
    healths: dict[Health, float] = {}
    now_s = 0.0
    while core.cluster_state(now_s).members:
        healths[core.cluster_state(now_s).members[0].health] = now_s
        now_s += 0.25
        core.expire(now_s)
    assert list(healths) == [Health.ALIVE, Health.SUSPECT, Health.DEAD]
    assert healths[Health.SUSPECT] < dead_after_s <= healths[Health.SUSPECT] + 0.25
    assert forgotten_after_s - 0.25 <= healths[Health.DEAD] <= forgotten_after_s
