"""The conductor's process over a router whose messages come when the test says so."""

import asyncio
from dataclasses import replace

import pytest

from mooncake_mesh.conductor.making import conductor_core
from mooncake_mesh.conductor.service import ConductorService
from mooncake_mesh.config import ConductorConfig
from mooncake_mesh.mesh import rpc
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_proto.control import CancelCall
from mooncake_proto.envelope import Envelope
from mooncake_proto.ids import Incarnation, JobId, MessageId
from mooncake_proto.serving import Rejected, Schedule
from tests.unit.mesh_doubles import ANY_PORT, Run, ScriptedRouter, on_both_loops, until

pytestmark = on_both_loops


def schedule(job_id: str) -> Schedule:
    return Schedule(job_id=JobId(job_id), model="m", prompt_tokens=5, max_new_tokens=5, keys=b"")


def test_what_is_cancelled_before_its_turn_is_not_placed(run: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    router = ScriptedRouter()
    monkeypatch.setattr(rpc.sockets, "router", router)
    config = replace(ConductorConfig(), publish=ANY_PORT)
    core = conductor_core(config, Incarnation("c"), 0.0)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            lifecycle = Lifecycle()
            tasks.create_task(ConductorService(config, core, Incarnation("c"), tasks).run(lifecycle))
            await until(lambda: lifecycle.is_ready, "the conductor")
            for name in ("left", "waits"):
                router.deliver(schedule(name), Envelope(id=MessageId(name)))
            router.deliver(CancelCall(target=MessageId("left")), Envelope())
            await until(lambda: router.sent, "the other answer")
            lifecycle.stop("the test is over")
        (envelope, answer), *others = router.sent
        assert (envelope.re, others) == ("waits", [])
        assert isinstance(answer, Rejected)
        assert core.rejected_total == 1  # the mesh is empty: what was not asked for was not refused either

    run(scenario())
