"""The driver of request cores, over a conductor that answers nonsense: one request's trouble stays that request's."""

import asyncio
from typing import Any, cast

import pytest

from mooncake_mesh.errors import MooncakeError, NotLeader, PeerUnreachable, Rejected, RemoteFailure, failure_of
from mooncake_mesh.gateway import core
from mooncake_mesh.gateway.api import TokenRequest
from mooncake_mesh.gateway.mesh import MeshClient
from mooncake_mesh.mesh.conductors import Conductors
from mooncake_proto.control import ClusterState, Health, Load, Member, MemberState, ModelCard, Role
from mooncake_proto.errors import WireError
from mooncake_proto.ids import Incarnation, InstanceId, NodeId, RequestId
from mooncake_proto.serving import Sampling, Schedule, Stopping

CARD = ModelCard(name="m", fingerprint="f", dtype="float32", block_tokens=2, block_bytes=64, max_context_tokens=64)
REQUEST = TokenRequest(
    request_id=RequestId("req"),
    model="m",
    prompt=(1, 2, 3),
    sampling=Sampling(),
    stopping=Stopping(max_new_tokens=4),
    deadline_s=60.0,
)


class RaisingConductor:
    def __init__(self, error: MooncakeError) -> None:
        self.error = error

    @property
    def leader(self) -> "RaisingConductor":
        return self

    connect_timeout_s = None

    async def call(self, *_: Any, **__: Any) -> None:
        raise self.error


def cluster() -> ClusterState:
    member = Member(
        role=Role.PREFILL,
        instance_id=InstanceId("p0"),
        node_id=NodeId("n0"),
        incarnation=Incarnation("i"),
        endpoint="ipc://p0",
        model=CARD,
    )
    state = MemberState(member=member, health=Health.ALIVE, load=Load(), last_beat_s=0.0, takes_work=True)
    return ClusterState(conductor=Incarnation("c"), revision=1, members=(state,))


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (WireError("answered Pong to Schedule"), WireError),
        (PeerUnreachable("no conductor"), Rejected),
        (RemoteFailure(failure_of(NotLeader("the leader is another"))), Rejected),
    ],
)
def test_trouble_with_the_conductor_ends_the_request_and_not_the_gateway(
    trouble: MooncakeError, expected: type[MooncakeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_CONDUCTOR_PATIENCE_S", 0.1)

    async def scenario() -> None:
        conductor = RaisingConductor(trouble)
        async with asyncio.TaskGroup() as tasks:
            mesh = MeshClient(cast(Conductors, conductor), tasks, max_replacements=1)
            mesh.heard(cluster())
            for _ in range(2):
                with pytest.raises(expected):
                    await anext(mesh.generate(REQUEST))
            mesh.close()

    asyncio.run(scenario())


class SilentConductor:
    """Knows of every call that is made and given up."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.given_up: list[object] = []

    @property
    def leader(self) -> "SilentConductor":
        return self

    connect_timeout_s = None

    async def call(self, body: object, *_: Any, **__: Any) -> None:
        self.asked.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.given_up.append(body)
            raise


def test_who_leaves_before_a_placement_stops_asking_for_one() -> None:
    async def scenario() -> None:
        conductor = SilentConductor()
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            mesh = MeshClient(cast(Conductors, conductor), tasks, max_replacements=1)
            mesh.heard(cluster())
            caller = tasks.create_task(anext(mesh.generate(REQUEST)))
            await conductor.asked.wait()
            caller.cancel()
        mesh.close()
        assert [body.job_id for body in conductor.given_up if isinstance(body, Schedule)] == ["req.0"]

    asyncio.run(scenario())
