"""A worker's hold on its node's arena while messengers come and go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from mooncake_mesh.errors import Refused
from mooncake_mesh.mesh.arena import ArenaServer, Holder
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.mesh.node_arena import NodeArena
from mooncake_mesh.mesh.rpc import Caller, RpcClient
from mooncake_proto.ids import InstanceId, NodeId, new_incarnation
from mooncake_proto.transfer import ArenaInfo, Attach
from tests.unit.mesh_doubles import Run, on_both_loops, serving, soon, until

pytestmark = on_both_loops

ME = Holder(instance_id=InstanceId("decode0"), incarnation=new_incarnation())
BLOCK_BYTES = 4096


class Worker:
    """Keeps what it is given, and a diary."""

    def __init__(self) -> None:
        self.memory: memoryview | None = None
        self.diary: list[str] = []

    async def bind(self, memory: memoryview) -> None:
        self.memory = memory
        self.diary.append(f"bind {len(memory)}")

    async def unbind(self) -> None:
        if self.memory is not None:
            self.memory.release()
            self.memory = None
        self.diary.append("unbind")

    def lost(self) -> None:
        self.diary.append("lost")


@asynccontextmanager
async def messenger(folder: Path, *, refusals: int = 0) -> AsyncIterator[Arena]:
    """A scripted one that refuses the first *refusals* workers."""
    arena = Arena.create(8 * BLOCK_BYTES)
    server = ArenaServer(folder / "arena", arena, new_incarnation(), on_gone=lambda _: None)
    left = [refusals]

    def attach(attach: Attach, _: Caller) -> ArenaInfo:
        assert attach == Attach(instance_id=ME.instance_id, incarnation=ME.incarnation, block_bytes=BLOCK_BYTES)
        if left[0]:
            left[0] -= 1
            raise Refused("block_size", "other blocks here")
        return ArenaInfo(
            node_id=NodeId("node0"),
            incarnation=new_incarnation(),
            host_id="here",
            socket_path=str(folder / "arena"),
            block_bytes=BLOCK_BYTES,
            n_blocks=6,
        )

    async with asyncio.TaskGroup() as tasks, serving({Attach: attach}, f"ipc://{folder}/messenger"):
        task = tasks.create_task(server.run())
        try:
            yield arena
        finally:
            task.cancel()
    arena.close()


def test_attached_again_to_each_life_of_the_messenger(run: Run[None], tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = Worker()
        async with RpcClient(f"ipc://{tmp_path}/messenger") as client, asyncio.TaskGroup() as tasks:
            hold = NodeArena(client, ME, BLOCK_BYTES, bind=worker.bind, unbind=worker.unbind, on_lost=worker.lost)
            running = tasks.create_task(hold.run())
            for refusals in (1, 0):
                worker.diary.clear()
                async with messenger(tmp_path, refusals=refusals) as arena:
                    await soon(hold.attached.wait())
                    assert worker.memory is not None
                    worker.memory[:3] = b"abc"
                    assert bytes(arena.view[:3]) == b"abc"
                await until(lambda: not hold.attached.is_set())
                await until(lambda: worker.diary == [f"bind {6 * BLOCK_BYTES}", "lost", "unbind"])
            running.cancel()

    run(scenario())


def test_stopping_gives_the_memory_back(run: Run[None], tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = Worker()
        async with (
            messenger(tmp_path),
            RpcClient(f"ipc://{tmp_path}/messenger") as client,
            asyncio.TaskGroup() as tasks,
        ):
            hold = NodeArena(client, ME, BLOCK_BYTES, bind=worker.bind, unbind=worker.unbind, on_lost=worker.lost)
            running = tasks.create_task(hold.run())
            await soon(hold.attached.wait())
            running.cancel()
            await until(running.done)
        assert (worker.memory, worker.diary[1:]) == (None, ["lost", "unbind"])
        assert not hold.attached.is_set()

    run(scenario())
