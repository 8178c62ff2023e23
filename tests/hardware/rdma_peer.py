"""The other end for tests that need one in a process of its own: ``python -m tests.hardware.rdma_peer SOCKET SIZE``.

It registers SIZE bytes, says where they are in a line of JSON, and answers ConnectQp on the socket until it is killed.
"""

import asyncio
import dataclasses
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.errors import TransferError
from mooncake_mesh.mesh.rpc import RpcServer
from mooncake_mesh.messenger.transports.rdma.api import RdmaAccess
from mooncake_mesh.messenger.transports.rdma.engine import RdmaEngine
from mooncake_proto.rdma import ConnectQp, NicKey, QpConnected, RdmaMemory


async def main(bind: str, size_bytes: int) -> None:
    async def connect(*_: object) -> QpConnected:
        raise TransferError("the peer asks for nothing")

    engine = RdmaEngine(RdmaConfig(), engine_id=f"peer-{os.getpid()}", connect=connect, access=RdmaAccess.READ_WRITE)
    local = engine.register(memoryview(mmap.mmap(-1, size_bytes)), RdmaAccess.READ_WRITE)
    async with asyncio.TaskGroup() as tasks:
        RpcServer(bind, {ConnectQp: lambda request, _: engine.accept(request)}, tasks)
        sys.stdout.write(json.dumps(dataclasses.asdict(local.describe(engine.engine_id, bind))) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    process: "subprocess.Popen[str]"
    memory: RdmaMemory

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running_peer(folder: Path, size_bytes: int) -> Iterator[Peer]:
    command = [sys.executable, "-m", "tests.hardware.rdma_peer", f"ipc://{folder}/peer.ipc", str(size_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            described = json.loads(process.stdout.readline())
            preferred, secondary = (
                tuple(NicKey(**key) for key in described.pop(name)) for name in ("preferred", "secondary")
            )
            yield Peer(process=process, memory=RdmaMemory(**described, preferred=preferred, secondary=secondary))
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
