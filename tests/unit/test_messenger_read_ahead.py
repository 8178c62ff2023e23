"""Reading ahead of a job: what is read, in which order, how much at a time, and every way in which it ends."""

import asyncio
from collections.abc import Coroutine, Sequence
from time import monotonic
from typing import Any, cast

import pytest

from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.mesh.arena import Holder
from mooncake_mesh.messenger import read_ahead
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.read_ahead import AheadReader
from mooncake_mesh.messenger.ssd import NodeSsd
from mooncake_mesh.messenger.store.announced import (
    MAX_ANNOUNCED,
    AnnouncedPrefixes,
    AnnouncedState,
    Announcement,
    Unannounced,
)
from mooncake_mesh.messenger.store.slots import SlotTable
from mooncake_mesh.messenger.store.tiering import Target, Tiering
from mooncake_proto.ids import BlockId, BlockKey, Incarnation, InstanceId, JobId
from mooncake_proto.transfer import Acquire, Acquired, ReadAhead

ME = Holder(instance_id=InstanceId("m"), incarnation=Incarnation("i"))
KEYS = [BlockKey(bytes([i]) * 16) for i in range(40)]


def announced(book: AnnouncedPrefixes, name: str, n_keys: int = 1) -> Announcement | Unannounced:
    return book.announce(JobId(name), KEYS[:n_keys], tenant="", until_s=9.0)


# --- the book ---------------------------------------------------------------------------------------------------------


def test_announcements_are_read_in_the_order_they_came() -> None:
    book = AnnouncedPrefixes(100)
    one, two = announced(book, "one"), announced(book, "two")
    assert (book.next(), book.next(), book.next()) == (one, two, None)


def test_all_together_get_a_share_of_the_arena() -> None:
    book = AnnouncedPrefixes(20)
    announced(book, "one", 6)
    assert announced(book, "two", 5) is Unannounced.FULL
    assert isinstance(announced(book, "three", 4), Announcement)
    book.end(JobId("one"))
    assert isinstance(announced(book, "four", 6), Announcement)


def test_there_are_only_so_many() -> None:
    book = AnnouncedPrefixes(10_000)
    for i in range(MAX_ANNOUNCED):
        announced(book, f"{i}")
    assert announced(book, "more") is Unannounced.FULL
    assert announced(book, "0") is Unannounced.KNOWN
    assert len(book) == MAX_ANNOUNCED


def test_a_job_that_came_or_ended_before_its_announcement_is_not_read_for() -> None:
    book = AnnouncedPrefixes(100)
    assert not book.end(JobId("cancelled"))
    assert announced(book, "cancelled") is Unannounced.OVER


def test_what_was_not_begun_is_left_to_the_job() -> None:
    book = AnnouncedPrefixes(100)
    announced(book, "one")
    book.arrived(JobId("one"))
    assert book.next() is None


def test_an_announcement_ends_while_it_is_read() -> None:
    book = AnnouncedPrefixes(100)
    entry = announced(book, "one")
    assert isinstance(entry, Announcement)
    assert book.next() is entry
    assert book.end(JobId("one"))
    book.was_read(entry)
    assert entry.state is AnnouncedState.OVER


# --- the reader -------------------------------------------------------------------------------------------------------


class FakeSsd:
    """Holds KEYS. Reads when it is let, one permit for each piece."""

    def __init__(self, core: MessengerCore, n_held: int) -> None:
        self.core = core
        core.slots = SlotTable(100)
        for key in KEYS[:n_held]:
            write = core.slots.begin_write(key)
            assert write is not None
            core.slots.written(write, 0)
        self._tiering = Tiering(core.pool, core.slots)
        self.permits = asyncio.Semaphore(0)
        self.reads: list[int] = []

    def let(self, n_reads: int) -> None:
        for _ in range(n_reads):
            self.permits.release()

    async def make_room_for(self, n_blocks: int, spare: Sequence[BlockId]) -> None:
        """There is room, or the pool evicts."""

    async def read(self, target: Target) -> None:
        coming = self._tiering.coming(target.blocks, target.keys)
        await self.permits.acquire()
        self.reads.append(len(coming))
        self._tiering.came(target.holder, coming, [True] * len(coming))


class Node:
    def __init__(self, tasks: asyncio.TaskGroup, *, n_blocks: int = 40, n_held: int = 10) -> None:
        self.core = MessengerCore(n_blocks=n_blocks, block_bytes=8)
        self.ssd = FakeSsd(self.core, n_held)
        self.reader = AheadReader(self.core, cast(NodeSsd, self.ssd), tasks, me=ME, end_job=self._end_job)

    def _end_job(self, job_id: JobId, why: str) -> None:
        self.core.release(job_id, why)
        self.reader.end(job_id)

    def announce(self, name: str, n_keys: int, keep_s: float = 30.0) -> None:
        self.reader.announce(ReadAhead(job_id=JobId(name), keys=join_keys(KEYS[:n_keys]), keep_s=keep_s))

    def in_arena(self) -> int:
        return len(self.core.pool.match(KEYS))

    def crowd(self) -> int:
        """A job takes all it can get but one block; how many of KEYS are still here."""
        got = self.core.pool.reserve("crowd", self.core.pool.available_blocks - 1)
        assert isinstance(got, list)
        self.core.pool.release("crowd")
        return self.in_arena()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_PIECE_BYTES", 4 * 8)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20.0))


def test_a_prefix_is_read_in_pieces_and_waits_for_its_job() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            node = Node(tasks)
            node.announce("job", 10)
            await node.settle()
            assert node.in_arena() == 0, "nothing was read yet"
            for n_here in (4, 8, 10):
                node.ssd.let(1)
                await node.settle()
                assert node.in_arena() == n_here
            assert node.ssd.reads == [4, 4, 2]
            assert node.core.n_jobs == 0, "the job holds nothing until it comes"
            assert node.crowd() >= 1, "what is pinned goes last"
            node.core.pool.check_invariants()

    run(main())


def test_nothing_is_read_that_is_here_or_nowhere() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            node = Node(tasks, n_held=3)
            node.ssd.let(1)
            node.announce("job", 9)
            await node.settle()
            assert node.ssd.reads == [3], "as far as SSD has it"
            node.announce("next", 3)
            await node.settle()
            assert node.ssd.reads == [3]

    run(main())


def test_a_job_joins_the_read_that_is_under_way() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            node = Node(tasks)
            node.announce("job", 8)
            await node.settle()
            joined = tasks.create_task(node.reader.join(KEYS[:9], JobId("job")))
            other = tasks.create_task(node.reader.join(KEYS[20:], None))
            node.ssd.let(1)
            await node.settle()
            assert not joined.done()
            assert other.done(), "whose prefix is another one waits for nobody"
            node.ssd.let(1)
            await node.settle()
            assert joined.done(), "what is missing now nobody reads"
            request = Acquire(
                job_id=JobId("job"),
                instance_id=ME.instance_id,
                incarnation=ME.incarnation,
                keys=join_keys(KEYS[:9]),
                n_blocks=10,
                max_cached_blocks=9,
            )
            got = node.core.acquire(request, 0.0)
            assert isinstance(got, Acquired)
            assert got.cached_blocks == 8
            assert node.core.promotion(request, got).keys == KEYS[8:9]

    run(main())


def test_a_cancelled_job_stops_the_read_and_unpins() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            node = Node(tasks)
            node.announce("job", 10)
            await node.settle()
            node.ssd.let(1)
            await node.settle()
            node.reader.end(JobId("job"))
            node.ssd.let(5)
            await node.settle()
            assert node.ssd.reads == [4, 4], "the piece that was under way is the last"
            assert node.core.n_jobs == 0
            got = node.core.pool.reserve("crowd", 40 - 8)
            assert isinstance(got, list)
            assert len(node.core.pool.coldest(40)) == 8, "nothing is pinned"

    run(main())


def test_an_announcement_whose_job_never_comes_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    later_s = 0.0

    async def main() -> None:
        nonlocal later_s
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: monotonic() + later_s)
        async with asyncio.TaskGroup() as tasks:
            node = Node(tasks)
            node.ssd.let(3)
            node.announce("job", 4, keep_s=10.0)
            await node.settle()
            assert node.in_arena() == 4
            assert node.core.pool.coldest(40) == []
            later_s = 10.0
            await node.settle()
            assert len(node.core.pool.coldest(40)) == 4

    run(main())


def test_blocks_in_use_are_not_taken_for_it() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            node = Node(tasks, n_blocks=20)
            assert isinstance(node.core.pool.reserve("running", 18), list)
            node.ssd.let(9)
            node.announce("job", 10)
            await node.settle()
            assert node.ssd.reads == []
            assert node.core.n_jobs == 0
            node.core.pool.release("running")
            node.reader.end(JobId("job"))
            node.announce("later", 10)
            await node.settle()
            assert node.in_arena() == 10

    run(main())
