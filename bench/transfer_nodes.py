"""A messenger process and what workers do with it, for the benchmark and for tests."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np

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


class Node:
    """A messenger process and this process's hold on it."""

    def __init__(
        self, name: str, folder: Path, transport: str, arena_bytes: int, more_flags: Mapping[str, object] | None = None
    ) -> None:
        """*transport* is tcp+tls where TCP is to be encrypted. A flag that is True has no value."""
        self.name = name
        kind, _, tls = transport.partition("+")
        self.endpoint = f"ipc://{folder}/{name}.ipc"
        flags = {
            "instance-id": name,
            "node-id": name,
            "bind": self.endpoint,
            "conductor": f"ipc://{folder}/conductor.ipc",
            "run-dir": folder,
            "arena-bytes": arena_bytes,
            "transport": kind,
            **({"tcp-tls": True} if tls else {}),
            "pages": "small",  # as peers' pools are
            "log-level": "error",
            **(more_flags or {}),
        }
        given = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
        command = [sys.executable, "-m", "mooncake_mesh", "messenger", *given]
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


async def put(a: Node, b: Node, n_blocks: int, held: JobId | None = None) -> None:
    """Move *n_blocks* that a job of A holds (one is made for it otherwise) into fresh blocks of B, which may then
    be taken for others."""
    async with landed(a, b, n_blocks, held):
        pass


@asynccontextmanager
async def landed(a: Node, b: Node, n_blocks: int, held: JobId | None = None) -> AsyncIterator[None]:
    """As *put*, but B keeps the blocks until the end of the context."""
    transfer_id = TransferId(uuid4().hex)
    here = held or await hold(a, n_blocks)
    there = JobId(f"land-{transfer_id}")
    start = StartSend(
        job_id=here, transfer_id=transfer_id, target=b.endpoint, n_blocks=n_blocks, layers=1, deadline_s=_TIMEOUT_S
    )
    a.rpc.post(start)
    a.rpc.post(SliceReady(transfer_id=transfer_id, layer=0, n_layers=1, first_block=0, n_blocks=n_blocks))
    try:
        await asyncio.gather(
            b.acquire(there, n_blocks, landing=transfer_id, layers=1),
            a.rpc.call(FinishSend(transfer_id=transfer_id), SendReport, timeout_s=_TIMEOUT_S),
        )
        yield
    finally:
        b.rpc.post(Release(job_id=there))


async def hold(a: Node, n_blocks: int) -> JobId:
    """A job of A with blocks to send. Sending ends it."""
    job_id = JobId(uuid4().hex)
    await a.acquire(job_id, n_blocks)
    return job_id


async def fill(a: Node, n_blocks: int) -> list[BlockKey]:
    """Seal *n_blocks* of A under fresh keys, whatever is in them."""
    keys = [BlockKey(uuid4().bytes) for _ in range(n_blocks)]
    job_id = JobId(f"fill-{uuid4().hex}")
    await a.acquire(job_id, n_blocks)
    a.rpc.post(Seal(job_id=job_id, first_block=0, keys=join_keys(keys)))
    await a.release(job_id)
    return keys


async def get(a: Node, b: Node, keys: Sequence[BlockKey]) -> None:
    """Let B fetch sealed blocks of A, which it may drop at once. Raises RuntimeError when not all came."""
    job_id = JobId(f"get-{uuid4().hex}")
    got = await b.acquire(job_id, len(keys), keys=join_keys(keys), fetch_from=a.endpoint)
    if got.cached_blocks != len(keys):
        raise RuntimeError(f"{got.cached_blocks} of {len(keys)} blocks came")
    b.rpc.post(Release(job_id=job_id))
