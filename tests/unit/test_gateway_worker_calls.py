"""Cancels and questions to workers that are away for a while."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mooncake_mesh.errors import CallTimeout, MooncakeError, PeerUnreachable, Refused
from mooncake_mesh.gateway import worker_calls
from mooncake_mesh.gateway.worker_calls import WorkerCalls
from mooncake_proto.control import Ok
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId
from mooncake_proto.job_query import JobStanding
from mooncake_proto.serving import WorkerRef

WORKER = WorkerRef(
    instance_id=InstanceId("d0"),
    incarnation=Incarnation("life"),
    endpoint="ipc://d0",
    node_id=NodeId("n0"),
    messenger_endpoint="ipc://m0",
)
JOB = JobId("req.0")


class Worker:
    """Answers the calls to it with *answers*, one after the other; errors are raised."""

    def __init__(self, *answers: object) -> None:
        self.left = list(answers)

    async def call(self, *_: Any, **__: Any) -> object:
        answer = self.left.pop(0)
        if isinstance(answer, MooncakeError):
            raise answer
        return answer


def calls(worker: Worker) -> WorkerCalls:
    return WorkerCalls(cast(Any, SimpleNamespace(get=lambda _: worker)))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "_CANCEL_PAUSE_S", 0.0)


def test_a_cancel_waits_for_a_worker_that_was_stopped() -> None:
    worker = Worker(PeerUnreachable("the connection was lost"), CallTimeout("no reply"), Ok())
    asyncio.run(calls(worker).cancel(WORKER, JOB, "placed again"))
    assert worker.left == []


def test_a_cancel_that_nobody_will_take_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Worker(Refused("no", "never"), Ok())
    asyncio.run(calls(refusing).cancel(WORKER, JOB, "placed again"))
    assert refusing.left == [Ok()]
    monkeypatch.setattr(worker_calls, "_CANCEL_FOR_S", -1.0)
    gone = Worker(PeerUnreachable("gone"), Ok())
    asyncio.run(calls(gone).cancel(WORKER, JOB, "placed again"))
    assert gone.left == [Ok()]


def test_nothing_is_told_after_the_close() -> None:
    worker = Worker(Ok())
    closed = calls(worker)
    closed.close()
    asyncio.run(closed.cancel(WORKER, JOB, "placed again"))
    assert worker.left == [Ok()]


@pytest.mark.parametrize(
    ("answer", "forgotten"),
    [
        (JobStanding(job_id=JOB, known=True), False),
        (JobStanding(job_id=JOB, known=False), True),
        (CallTimeout("no reply"), False),
    ],
)
def test_only_who_says_so_has_forgotten_a_job(answer: object, forgotten: bool) -> None:
    assert asyncio.run(calls(Worker(answer)).has_forgotten(WORKER, JOB)) is forgotten
