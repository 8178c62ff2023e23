"""A head and a stage on another node, over real links: prefixes there, KV back, and an arena that can be let go of."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from mooncake_mesh.config import PagesKind
from mooncake_mesh.engine.api import ModelSpec
from mooncake_mesh.engine.fake import FakeConfig, FakeEngine
from mooncake_mesh.errors import Aborted, MooncakeError, PeerUnreachable
from mooncake_mesh.kv.layers import LayerRange
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.mesh.crew import Crew
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.messenger.identity import identity_for
from mooncake_mesh.prefill.activations import SlotMemory
from mooncake_mesh.prefill.core import ChunkBlocks
from mooncake_mesh.prefill.doors import Reach
from mooncake_mesh.prefill.far_kv import FarStages, HeadPages, PrefixWay
from mooncake_mesh.prefill.far_stage import FarKv, FarMemory, StagePages, memory_blocks
from mooncake_mesh.prefill.stage_core import StageWork
from mooncake_proto.ids import Incarnation, JobId, TransferId
from mooncake_proto.pipeline import StageChunk, StageDoor
from mooncake_proto.transfer import SliceReady

LAYERS, BLOCK_TOKENS = 5, 8
LAYOUT = KvLayout(layers=LAYERS, kv_heads=2, head_dim=256, dtype=KvDtype.FLOAT32, block_tokens=BLOCK_TOKENS)
OWN = LayerRange(first=2, end=4, total=LAYERS)
SPEC = FakeEngine(FakeConfig(layout=LAYOUT, max_context_tokens=128), layers=OWN).spec
HEAD_SPEC = replace(SPEC, layers=LayerRange(first=0, end=2, total=LAYERS))
N_BLOCKS = 24
TRANSPORTS = ["shm", "tcp", "tcp+tls"]

Pages = npt.NDArray[np.uint8]


@dataclass
class Messenger:
    posted: list[SliceReady] = field(default_factory=list)
    is_gone: bool = False

    def post(self, body: SliceReady) -> None:
        if self.is_gone:
            raise PeerUnreachable("gone")
        self.posted.append(body)


def pages_of(arena: Arena) -> Pages:
    return np.frombuffer(arena.view, np.uint8).reshape(-1, LAYERS, LAYOUT.slice_bytes)


class Ends:
    """Both ends. ``head`` and ``stage`` are pages: blocks, layers, bytes."""

    def __init__(self, folder: Path, transport: str, tasks: asyncio.TaskGroup) -> None:
        identity = identity_for("test") if transport == "tcp+tls" else None
        reach = Reach(run_dir=folder, listen="127.0.0.1", host="127.0.0.1", identity=identity)
        self.arena = Arena.create(N_BLOCKS * LAYOUT.block_bytes, PagesKind.SMALL)
        self.own = Arena.create(memory_blocks(SPEC, 0) * LAYOUT.block_bytes, PagesKind.SMALL)
        self.view: memoryview | None = self.arena.view
        self.messenger = Messenger()
        self.memory = FarMemory(reach, "stage.prefix", SPEC, self.own, tasks)

        def seen(door: StageDoor) -> StageDoor:
            return door if transport == "shm" else replace(door, host_id="another machine")

        way = PrefixWay(
            reach, HEAD_SPEC, seen(self.memory.told.door), OWN, SlotMemory(1, PrefixWay.slot_bytes(HEAD_SPEC, OWN))
        )
        self.far = FarStages(
            reach,
            "head.kv",
            HEAD_SPEC,
            [way],
            [OWN],
            chunk_blocks=8,
            arena=lambda: self.view,
            messenger=cast(RpcClient, self.messenger),
        )
        self.kv: FarKv = self.memory.deliver(seen(self.far.address), 8)

    async def close(self) -> None:
        self.view = None
        await self.far.close()
        await self.memory.close()


def with_ends(tmp_path: Path, transport: str, scenario: Callable[[Ends], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            ends = Ends(tmp_path, transport, tasks)
            await scenario(ends)
            await ends.close()

    asyncio.run(run())


def work(number: int, start: int, n_tokens: int, blocks: tuple[int, ...]) -> StageWork:
    return StageWork(
        StageChunk(
            pipeline=Incarnation("p"),
            number=number,
            job_id=JobId("j"),
            transfer_id=TransferId("t"),
            start=start,
            n_tokens=n_tokens,
            blocks=blocks,
        )
    )


async def compute(ends: Ends, chunk: StageWork, *layers: range) -> MooncakeError | None:
    """Announce *layers* as the engine's thread would have it done; why they are not all at the head."""
    await ends.kv.open(chunk)
    announce = ends.kv.announce(chunk)
    assert announce is not None
    for some in layers:
        announce(some)
        await asyncio.sleep(0)
    return await ends.kv.close(chunk)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prefix_goes_to_the_stage_and_nothing_but_its_layers(tmp_path: Path, transport: str) -> None:
    async def scenario(ends: Ends) -> None:
        head, stage = pages_of(ends.arena), pages_of(ends.own)
        head[:] = np.random.default_rng(1).integers(1, 255, head.shape, np.uint8)
        await ends.far.send_prefix([(20, 0), (3, 5), (7, 1)], lambda: True)
        for block, target in ((20, 0), (3, 5), (7, 1)):
            np.testing.assert_array_equal(stage[target, 2:4], head[block, 2:4])
        assert not stage[:, (0, 1, 4)].any()
        assert not stage[2:5].any()

    with_ends(tmp_path, transport, scenario)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kv_of_a_chunk_comes_into_the_blocks_of_the_job(tmp_path: Path, transport: str) -> None:
    """The second chunk of a prompt, with a last block that is not full: blocks 2, 3 and 4 of six."""

    async def scenario(ends: Ends) -> None:
        head, stage = pages_of(ends.arena), pages_of(ends.own)
        stage[:] = np.random.default_rng(2).integers(1, 255, stage.shape, np.uint8)
        ends.far.open(9, TransferId("t"), ChunkBlocks(first_block=2, n_blocks=3), (11, 12, 5, 22, 6, 1))
        failure = await compute(ends, work(9, 16, 20, (0, 1, 7, 8, 9, 10)), range(2, 3), range(3, 4))
        assert failure is None
        assert await ends.far.settle(9) is None
        for block, source in ((5, 7), (22, 8), (6, 9)):
            np.testing.assert_array_equal(head[block, 2:4], stage[source, 2:4])
            head[block, 2:4] = 0
        assert not head.any()
        told = {
            (ready.layer + i, ready.first_block, ready.n_blocks)
            for ready in ends.messenger.posted
            for i in range(ready.n_layers)
        }
        assert told == {(2, 2, 3), (3, 2, 3)}

    with_ends(tmp_path, transport, scenario)


def test_a_chunk_whose_kv_has_not_come_has_failed(tmp_path: Path) -> None:
    async def scenario(ends: Ends) -> None:
        ends.far.open(0, None, ChunkBlocks(first_block=0, n_blocks=1), (1,))
        assert await compute(ends, work(0, 0, 8, (0,)), range(2, 3)) is None
        failure = await ends.far.settle(0)
        assert failure is not None
        assert failure.code == "transfer_error"

    with_ends(tmp_path, "shm", scenario)


def test_a_chunk_that_could_not_be_announced_has_failed(tmp_path: Path) -> None:
    async def scenario(ends: Ends) -> None:
        ends.messenger.is_gone = True
        ends.far.open(0, TransferId("t"), ChunkBlocks(first_block=0, n_blocks=1), (1,))
        assert await compute(ends, work(0, 0, 8, (0,)), range(2, 4)) is None
        assert isinstance(await ends.far.settle(0), PeerUnreachable)

    with_ends(tmp_path, "shm", scenario)


def test_the_head_takes_nothing_of_a_chunk_that_is_over(tmp_path: Path) -> None:
    """The stage hears of it, and stops computing the chunk."""

    async def scenario(ends: Ends) -> None:
        pages_of(ends.own)[:] = 1
        late = work(0, 0, 8, (0,))
        failure = await compute(ends, late, range(2, 4))
        assert [failure and failure.code, late.stop] == ["slice_lost", failure]
        assert not pages_of(ends.arena).any()

    with_ends(tmp_path, "tcp", scenario)


def test_a_stopped_chunk_sends_no_more(tmp_path: Path) -> None:
    async def scenario(ends: Ends) -> None:
        stopped = work(0, 0, 8, (0,))
        ends.far.open(0, None, ChunkBlocks(first_block=0, n_blocks=1), (1,))
        stopped.stop = Aborted("dropped")
        assert await compute(ends, stopped, range(2, 4)) is None
        assert await ends.far.settle(0) is not None

    with_ends(tmp_path, "shm", scenario)


def test_a_prefix_that_nobody_wants_is_not_sent_and_without_an_arena_there_is_none(tmp_path: Path) -> None:
    async def scenario(ends: Ends) -> None:
        pages_of(ends.arena)[:] = 1
        await ends.far.send_prefix([(1, 1)], lambda: False)
        assert not pages_of(ends.own).any()
        ends.view = None
        with pytest.raises(PeerUnreachable):
            await ends.far.send_prefix([(1, 1)], lambda: True)

    with_ends(tmp_path, "shm", scenario)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_arena_is_free_once_the_head_has_let_go(tmp_path: Path, transport: str) -> None:
    """As the node's messenger dies: unmapping it raises while anybody has a view of it."""

    async def scenario(ends: Ends) -> None:
        engine = FakeEngine(FakeConfig(layout=LAYOUT), layers=HEAD_SPEC.layers)
        pages = HeadPages(engine, ends.close)
        crew = Crew(1, name="engine")
        await crew.run(lambda: pages.bind(ends.arena.view[: N_BLOCKS * LAYOUT.block_bytes]))
        ends.far.open(0, None, ChunkBlocks(first_block=0, n_blocks=3), (1, 2, 3))
        await compute(ends, work(0, 0, 24, (0, 1, 2)), range(2, 4))
        await crew.run(pages.unbind)
        assert pages.arena is None
        assert await ends.far.settle(0) is None
        crew.close()
        ends.arena.close()

    with_ends(tmp_path, transport, scenario)


@pytest.mark.parametrize(("kv_bytes", "n_blocks"), [(0, 17), (100 * 2 * LAYOUT.slice_bytes + 1, 100), (1, 1)])
def test_memory_is_counted_by_the_layers_that_a_stage_has(kv_bytes: int, n_blocks: int) -> None:
    assert memory_blocks(SPEC, kv_bytes) == n_blocks


class Bound:
    """An engine that only knows what it was bound to."""

    def __init__(self) -> None:
        self.spec: ModelSpec = SPEC
        self.bound: list[memoryview | None] = []

    def bind(self, arena: memoryview) -> None:
        self.bound.append(arena)

    def unbind(self) -> None:
        self.bound.append(None)


def test_a_stage_computes_on_its_own_memory_while_it_is_on_another_node() -> None:
    engine, node = Bound(), memoryview(bytearray(16))
    pages = StagePages(cast(FakeEngine, engine), 17)
    pages.bind(node)
    own = pages.use_own()
    assert own.size_bytes == 17 * LAYOUT.block_bytes
    pages.unbind()  # the messenger of its node is not needed
    pages.use_node()
    pages.bind(node)
    assert pages.use_own() is own
    pages.bind(node)
    pages.use_node()
    assert engine.bound == [node, own.view, None, node, own.view, node]
