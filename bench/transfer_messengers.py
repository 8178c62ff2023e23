"""Two real messengers and their pools: ``python -m bench.transfer_messengers TRANSPORT``.

This process plays the workers of both nodes. Ops: ``put`` moves blocks that node A holds into blocks reserved on node B
(as a prefill instance does), ``get`` lets node B fetch sealed blocks of node A (as a prefix hit elsewhere does); a call
ends when all bytes are in B's pool, verified and, for ``get``, findable there. ``singly`` puts the blocks of a call as
so many transfers at once. ``start`` is the life of a messenger from its process to a mapped arena of ``size_bytes``;
``map`` is the last part of it alone, for an arena that has been touched: registration and mapping.
"""

import asyncio
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
import uvloop

from bench.transfer_child import Answer, Question, give, read_question, ready, timed_async
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.mesh.arena import BorrowedArena, Holder, borrow_to_write
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_proto.control import Ok
from mooncake_proto.ids import BlockKey, InstanceId, JobId, TransferId, new_incarnation
from mooncake_proto.transfer import (
    Acquire,
    Acquired,
    ArenaInfo,
    Attach,
    FinishSend,
    Release,
    Seal,
    SendReport,
    SliceReady,
    StartSend,
)

_TIMEOUT_S: Final = 30.0
_START_BLOCK_BYTES: Final = 1 << 20
_ARENA_BYTES: Final = 256 << 20
_LEAST_BLOCKS: Final = 64
_MOST_BLOCKS: Final = 1024


class Node:
    """A messenger process and this process's hold on it."""

    def __init__(self, name: str, folder: Path, transport: str, arena_bytes: int) -> None:
        self.name = name
        self.endpoint = f"ipc://{folder}/{name}.ipc"
        flags = {
            "instance-id": name,
            "node-id": name,
            "bind": self.endpoint,
            "conductor": f"ipc://{folder}/conductor.ipc",
            "run-dir": folder,
            "arena-bytes": arena_bytes,
            "transport": transport,
            "log-level": "error",
        }
        command = [sys.executable, "-m", "mooncake_mesh", "messenger", *[f"--{k}={v}" for k, v in flags.items()]]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.rpc = RpcClient(self.endpoint)
        self.arena: BorrowedArena | None = None
        self._me = Holder(instance_id=InstanceId(f"worker-{name}"), incarnation=new_incarnation())

    async def attach(self, block_bytes: int) -> None:
        """Say how large blocks are, and map the arena."""
        attach = Attach(instance_id=self._me.instance_id, incarnation=self._me.incarnation, block_bytes=block_bytes)
        info = await self.rpc.call(attach, ArenaInfo, timeout_s=_TIMEOUT_S)
        self.n_blocks, self.block_bytes = info.n_blocks, info.block_bytes
        self.arena = await borrow_to_write(info.socket_path, self._me)

    @property
    def content(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """The arena's blocks, one a row."""
        assert self.arena is not None, "attach first"
        size = self.n_blocks * self.block_bytes
        return np.frombuffer(self.arena.arena.view[:size], np.uint8).reshape(self.n_blocks, self.block_bytes)

    def acquire(
        self,
        job_id: JobId,
        n_blocks: int,
        *,
        keys: bytes = b"",
        fetch_from: str = "",
        landing: TransferId | None = None,
        layers: int = 0,
    ) -> Awaitable[Acquired]:
        n_keys = len(keys) // 16
        request = Acquire(
            job_id=job_id,
            instance_id=self._me.instance_id,
            incarnation=self._me.incarnation,
            keys=keys,
            n_blocks=n_blocks,
            max_cached_blocks=n_keys,
            fetch_from=fetch_from,
            fetch_blocks=n_keys if fetch_from else 0,
            landing=landing,
            landing_blocks=n_blocks if landing else 0,
            landing_layers=layers,
        )
        return self.rpc.call(request, Acquired, timeout_s=_TIMEOUT_S)

    async def release(self, job_id: JobId) -> None:
        await self.rpc.call(Release(job_id=job_id), Ok, timeout_s=_TIMEOUT_S)

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        self.rpc.close()
        self.process.terminate()
        self.process.wait()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
        uvloop.run(_answer(Path(folder), sys.argv[1]))


async def _answer(folder: Path, transport: str) -> None:
    nodes: dict[int, tuple[Node, Node]] = {}
    ready()
    try:
        while (question := await asyncio.to_thread(read_question)) is not None:
            size = question.size_bytes
            if question.op in ("start", "map"):
                give(await (_measure_start if question.op == "start" else _measure_map)(question, folder))
                continue
            if size not in nodes:
                nodes[size] = await _start_pair(folder, transport, size)
            give(await _measure(question, *nodes[size]))
    finally:
        for node in itertools.chain(*nodes.values()):
            node.close()


async def _measure_start(question: Question, folder: Path) -> Answer:
    async def work(call: int) -> None:
        node = Node(f"start{call}", folder, "auto", question.size_bytes)
        await node.attach(_START_BLOCK_BYTES)
        node.close()

    return await timed_async(question, work)


async def _measure_map(question: Question, folder: Path) -> Answer:
    node = Node("map", folder, "auto", question.size_bytes)
    await node.attach(_START_BLOCK_BYTES)
    node.content[:] = 7

    async def work(_: int) -> None:
        assert node.arena is not None
        node.arena.close()
        await node.attach(_START_BLOCK_BYTES)
        node.content[:, ::4096].sum()  # every page is reached through the new mapping

    answer = await timed_async(question, work)
    node.close()
    return answer


async def _start_pair(folder: Path, transport: str, block_bytes: int) -> tuple[Node, Node]:
    """B is smaller than A, so that a walk over A's blocks finds none of them in B."""
    blocks_a = min(max(_ARENA_BYTES // block_bytes, _LEAST_BLOCKS), _MOST_BLOCKS)
    a = Node(f"a{block_bytes}", folder, transport, blocks_a * block_bytes)
    b = Node(f"b{block_bytes}", folder, transport, blocks_a // 2 * block_bytes)
    await a.attach(block_bytes)
    await b.attach(block_bytes)
    for node in (a, b):
        node.content[:] = 7  # first writes into new memory pay page faults
    return a, b


async def _measure(question: Question, a: Node, b: Node) -> Answer:
    if question.op == "put":
        return await _measure_puts(question, a, b)
    if question.op == "singly":

        async def many_at_once(_: int) -> None:
            await asyncio.gather(*[put(a, b, 1) for _ in range(question.batch)])

        return await timed_async(question, many_at_once)
    keys = await fill(a, a.n_blocks)

    async def walk(call: int) -> None:
        first = call % (len(keys) // question.batch) * question.batch
        await get(a, b, keys[first : first + question.batch])

    return await timed_async(question, walk)


async def _measure_puts(question: Question, a: Node, b: Node) -> Answer:
    """What a put moves was computed in place before: its blocks are reserved off the clock."""
    held: list[JobId] = []

    async def reserve(_: int) -> None:
        held.append(await hold(a, question.batch))

    async def work(_: int) -> None:
        await put(a, b, question.batch, held.pop())

    return await timed_async(question, work, reserve)


async def put(a: Node, b: Node, n_blocks: int, held: JobId | None = None) -> None:
    """Move *n_blocks* that a job of A holds (one is made for it otherwise) into fresh blocks of B."""
    transfer_id = TransferId(uuid4().hex)
    here = held or await hold(a, n_blocks)
    there = JobId(f"land-{transfer_id}")
    start = StartSend(
        job_id=here, transfer_id=transfer_id, target=b.endpoint, n_blocks=n_blocks, layers=1, deadline_s=_TIMEOUT_S
    )
    a.rpc.post(start)
    a.rpc.post(SliceReady(transfer_id=transfer_id, layer=0, n_layers=1, first_block=0, n_blocks=n_blocks))
    await asyncio.gather(
        b.acquire(there, n_blocks, landing=transfer_id, layers=1),
        a.rpc.call(FinishSend(transfer_id=transfer_id), SendReport, timeout_s=_TIMEOUT_S),
    )
    b.rpc.post(Release(job_id=there))


async def hold(a: Node, n_blocks: int) -> JobId:
    """A job of A with blocks to send. Sending ends it."""
    job_id = JobId(uuid4().hex)
    await a.acquire(job_id, n_blocks)
    return job_id


async def fill(a: Node, n_blocks: int) -> list[BlockKey]:
    """Seal *n_blocks* of A under fresh keys."""
    keys = [BlockKey(uuid4().bytes) for _ in range(n_blocks)]
    job_id = JobId(f"fill-{uuid4().hex}")
    await a.acquire(job_id, n_blocks)
    a.rpc.post(Seal(job_id=job_id, first_block=0, keys=join_keys(keys)))
    await a.release(job_id)
    return keys


async def get(a: Node, b: Node, keys: list[BlockKey]) -> None:
    """Have B fetch sealed blocks of A. Raises RuntimeError unless all come."""
    job_id = JobId(f"get-{uuid4().hex}")
    got = await b.acquire(job_id, len(keys), keys=join_keys(keys), fetch_from=a.endpoint)
    if got.cached_blocks != len(keys):
        raise RuntimeError(f"{got.cached_blocks} of {len(keys)} blocks came")
    b.rpc.post(Release(job_id=job_id))


if __name__ == "__main__":
    main()
