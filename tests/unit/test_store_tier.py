"""The tier on a real folder: its task, its threads, and what a job that comes and goes meanwhile finds."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake_mesh.kv.block_pool import BlockPool, BlockState
from mooncake_mesh.messenger.store.folder import StoreFolder
from mooncake_mesh.messenger.store.records import PAGE_BYTES, Namespace
from mooncake_mesh.messenger.store.tier import SsdTier
from mooncake_mesh.messenger.store.tiering import Target
from mooncake_proto.ids import BlockId, BlockKey

BLOCK_BYTES = 3000
N_BLOCKS = 20
NAMESPACE = Namespace(block_bytes=BLOCK_BYTES, layout="test")


def _key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


class Node:
    """A pool, its arena, and the tier under test; one life of a messenger."""

    def __init__(self, path: Path, n_slots: int) -> None:
        self.pool = BlockPool(N_BLOCKS)
        self.arena = memoryview(bytearray(N_BLOCKS * BLOCK_BYTES))
        self.changed = asyncio.Event()
        self.running: asyncio.Task[None] | None = None
        folder = StoreFolder.lock(path)
        self.tier = SsdTier(self.pool, self.arena, folder, NAMESPACE, n_slots * PAGE_BYTES, changed=self._on_change)

    def _on_change(self) -> None:
        self.changed.set()
        self.tier.pool_changed()

    def put(self, first: int, n: int) -> None:
        """Blocks with content that anybody may use."""
        got = self.pool.reserve("writer", n)
        assert isinstance(got, list)
        for block, number in zip(got, range(first, first + n), strict=True):
            self.arena[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = self.content(number)
            self.pool.seal("writer", block, _key(number))
        self.pool.release("writer")
        self.tier.pool_changed()

    def reserve(self, holder: str, n: int) -> list[BlockId]:
        got = self.pool.reserve(holder, n)
        assert isinstance(got, list)
        return got

    def read(self, block: BlockId) -> bytes:
        return bytes(self.arena[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    @staticmethod
    def content(number: int) -> bytes:
        return bytes((number * 7 + i) & 0xFF for i in range(BLOCK_BYTES))

    async def until_saved(self, n: int) -> None:
        """Until SSD has the blocks of the first *n* numbers."""
        while not all(self.tier.slots.holds(_key(number)) for number in range(n)):
            self.changed.clear()
            await self.changed.wait()

    async def until_held(self, n: int) -> None:
        while self.tier.slots.held_blocks < n:
            self.changed.clear()
            await self.changed.wait()


@asynccontextmanager
async def _node(path: Path, n_slots: int = 64) -> AsyncIterator[Node]:
    node = Node(path, n_slots)
    running = node.running = asyncio.get_running_loop().create_task(node.tier.run())
    try:
        yield node
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        node.tier.close()


def _run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(bounded())


def test_above_the_watermark_blocks_leave_until_it_is_low(tmp_path: Path) -> None:
    async def test() -> None:
        async with _node(tmp_path) as node:
            node.put(0, 18)
            await node.until_held(0)
            assert node.pool.free_blocks == 2, "90 % are in use"
            node.put(18, 1)
            await node.until_held(2)
            while node.pool.free_blocks < 3:
                node.changed.clear()
                await node.changed.wait()
            node.pool.check_invariants()
            node.tier.slots.check_invariants()
            assert node.pool.match([_key(17)]) == [], "the leaf of the chain that was used first"

    _run(test())


def test_room_is_made_without_losing_a_block_and_they_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with _node(tmp_path) as node:
            node.put(0, 16)
            await _opened(node)
            await node.tier.make_room(20, spare=())
            blocks = node.reserve("job", 20)
            await node.until_held(20)
            target = Target(holder="job", blocks=blocks, keys=[_key(number) for number in (*range(17), 99, 18)])
            assert await node.tier.promote(target) == 17
            assert [node.read(block) for block in blocks[:17]] == [Node.content(number) for number in range(17)]
            assert {node.pool.state(block) for block in blocks[:17]} == {BlockState.SEALED}
            assert {node.pool.state(block) for block in blocks[17:]} == {BlockState.RESERVED}
            node.pool.release("job")
            node.pool.check_invariants()

    _run(test())


async def _opened(node: Node) -> None:
    """Wait until the folder is open: the first block leaves then."""
    node.put(16, 4)
    await node.until_held(1)


def test_what_is_saved_is_in_both_tiers_and_in_the_next_life(tmp_path: Path) -> None:
    async def save() -> None:
        async with _node(tmp_path) as node:
            node.put(0, 15)
            await _opened(node)
            blocks = node.pool.match([_key(number) for number in range(12)])
            assert len(blocks) == 12, "the end of the chain has left"
            node.tier.save(blocks[:10])
            await node.until_saved(10)
            assert node.pool.match([_key(number) for number in range(12)]) == blocks
            node.tier.save(blocks[:10])
            node.tier.save(blocks[10:])
            await node.until_saved(12)
            node.pool.check_invariants()
            node.tier.slots.check_invariants()

    async def find() -> None:
        async with _node(tmp_path) as node:
            await node.until_saved(12)

    _run(save())
    _run(find())


def test_a_job_that_ends_while_its_blocks_are_read_gives_them_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with _node(tmp_path) as node:
            node.put(0, 16)
            await _opened(node)
            await node.tier.make_room(20, spare=())
            await node.until_held(16)
            blocks = node.reserve("job", 4)
            target = Target(holder="job", blocks=blocks, keys=[_key(number) for number in range(4)])
            reading = asyncio.get_running_loop().create_task(node.tier.promote(target))
            await asyncio.sleep(0)
            reading.cancel()
            node.pool.release("job")
            assert {node.pool.state(block) for block in blocks} == {BlockState.DRAINING}, "a thread writes them"
            with pytest.raises(asyncio.CancelledError):
                await reading
            while node.pool.state(blocks[0]) is not BlockState.FREE:
                node.changed.clear()
                await node.changed.wait()
            node.pool.check_invariants()
            node.tier.slots.check_invariants()

    _run(test())


def test_the_next_life_finds_what_is_whole(tmp_path: Path) -> None:
    async def fill() -> None:
        async with _node(tmp_path) as node:
            node.put(0, 19)
            await node.until_held(2)

    async def find() -> None:
        async with _node(tmp_path) as node:
            await node.until_held(1)
            blocks = node.reserve("job", 2)
            target = Target(holder="job", blocks=blocks, keys=[_key(18), _key(17)])
            assert await node.tier.promote(target) == 1
            assert node.read(blocks[0]) == Node.content(18)
            assert node.tier.faults == 1

    _run(fill())
    data = bytearray((tmp_path / "blocks.dat").read_bytes())
    data[PAGE_BYTES + 10] ^= 1
    (tmp_path / "blocks.dat").write_bytes(data)
    _run(find())


def test_without_its_disk_the_tier_is_off_and_harmless(tmp_path: Path) -> None:
    async def test() -> None:
        async with _node(tmp_path, n_slots=1 << 40) as node:
            node.put(0, 20)
            assert node.running is not None
            await node.running
            assert node.tier.faults == 1
            await node.tier.make_room(5, spare=())
            target = Target(holder="job", blocks=node.reserve("job", 5), keys=[_key(0)])
            assert await node.tier.promote(target) == 0
            assert node.pool.sealed_blocks == 15

    _run(test())
