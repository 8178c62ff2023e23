"""A worker gives blocks back also to a messenger that is away for a while."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mooncake_mesh.errors import CallTimeout, MooncakeError, PeerUnreachable
from mooncake_mesh.worker import station
from mooncake_mesh.worker.station import Station
from mooncake_proto.control import Ok
from mooncake_proto.ids import JobId
from mooncake_proto.transfer import Release


class Messenger:
    def __init__(self, *answers: object) -> None:
        self.left = list(answers)
        self.told: list[object] = []

    async def call(self, body: object, _: type, *, timeout_s: float) -> object:
        self.told.append(body)
        answer = self.left.pop(0)
        if isinstance(answer, MooncakeError):
            raise answer
        return answer


def test_a_release_is_repeated_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped for ten seconds, the messenger still holds the blocks of a job whose worker lives on."""
    monkeypatch.setattr(station, "_RELEASE_PAUSE_S", 0.0)
    messenger = Messenger(PeerUnreachable("the connection was lost"), CallTimeout("no reply"), Ok())
    worker = cast(Any, SimpleNamespace(messenger=messenger, _is_closed=False))
    asyncio.run(Station.release(worker, JobId("j")))
    assert messenger.told == [Release(job_id=JobId("j"))] * 3


def test_a_process_that_ends_owes_no_release() -> None:
    worker = cast(Any, SimpleNamespace(messenger=Messenger(), _is_closed=True))
    asyncio.run(Station.release(worker, JobId("j")))
