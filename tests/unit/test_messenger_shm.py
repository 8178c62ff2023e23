"""Other nodes' arenas: mapped once each, and never left while a copy still writes."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mooncake_mesh.mesh.arena import BorrowedArena, Holder
from mooncake_mesh.mesh.crew import Crew
from mooncake_mesh.messenger.landing import Destination, SliceSpan
from mooncake_mesh.messenger.transports import shm
from mooncake_proto.ids import BlockId, Incarnation, InstanceId, NodeId
from mooncake_proto.transfer import ArenaInfo

SOURCE = ArenaInfo(
    node_id=NodeId("n1"),
    incarnation=Incarnation("life-1"),
    host_id="host",
    socket_path="/run/m1.arena",
    block_bytes=64,
    n_blocks=4,
)
LARGE = shm.Copy(
    destination=Destination(
        span=SliceSpan(logical=0, layer=0, n_layers=1), block=BlockId(0), offset=0, size_bytes=1 << 20
    ),
    source_offset=0,
    checksum=None,
)
ME = Holder(instance_id=InstanceId("m0"), incarnation=Incarnation("life-0"))


class Borrowed:
    def __init__(self) -> None:
        self.owner = SOURCE.incarnation
        self.lost = asyncio.Event()
        self.in_use = 0
        self.is_closed = False
        self.arena = SimpleNamespace(view=memoryview(bytes(64)))

    def close(self) -> None:
        self.is_closed = True


def test_transfers_that_begin_at_once_share_one_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Borrowed] = []

    async def borrow(*_: object) -> Borrowed:
        borrowed = Borrowed()
        made.append(borrowed)
        await asyncio.sleep(0)
        return borrowed

    async def scenario() -> None:
        monkeypatch.setattr(shm, "borrow_to_read", borrow)
        sources = shm.SourceArenas(ME)
        first, second = await asyncio.gather(sources.map(SOURCE), sources.map(SOURCE))
        assert first is second is await sources.map(SOURCE)
        assert [one.is_closed for one in made if one is not cast(Any, first)] == [True] * (len(made) - 1)
        sources.close()
        assert all(one.is_closed for one in made)

    asyncio.run(scenario())


def test_a_copy_outlasts_any_number_of_cancellations(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, has_begun = threading.Event(), threading.Event()

    def copy_all(*_: object) -> None:
        has_begun.set()
        may_end.wait(10)

    async def scenario() -> None:
        monkeypatch.setattr(shm, "_copy_all", copy_all)
        source = Borrowed()
        crew = Crew(1, name="kv-work")
        async with asyncio.TaskGroup() as tasks:
            copying = tasks.create_task(
                shm.copy_in([LARGE], cast(BorrowedArena, source), memoryview(bytearray(64)), crew)
            )
            await asyncio.to_thread(has_begun.wait, 10)
            for _ in range(3):
                copying.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert not copying.done()
            assert source.in_use == 1
            may_end.set()
        assert copying.cancelled()
        assert source.in_use == 0
        crew.close()

    asyncio.run(scenario())
