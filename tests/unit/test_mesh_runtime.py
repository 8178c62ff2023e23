"""The life of a process, with its signals, in this one."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import uvloop
import zmq

from mooncake_mesh.errors import MeshError
from mooncake_mesh.mesh import runtime
from mooncake_mesh.mesh.rpc import RpcClient, RpcServer
from mooncake_mesh.mesh.runtime import Lifecycle


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_service_to_stop(number: signal.Signals) -> None:
    seen: list[object] = []

    async def service(lifecycle: Lifecycle) -> None:
        lifecycle.ready(http="http://127.0.0.1:1")
        seen.append(lifecycle.is_ready)
        os.kill(os.getpid(), number)
        await lifecycle.stopping.wait()
        lifecycle.stop("again")
        seen.append(lifecycle.stopping.is_set())

    assert runtime.main(service) == 0
    assert seen == [True, True]


def test_sockets_that_were_left_open_do_not_keep_the_process() -> None:
    async def service(_: Lifecycle) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect("tcp://127.0.0.1:9")
        left.append(socket)

    left: list[zmq.Socket[bytes]] = []
    assert runtime.main(service) == 0
    assert left[0].closed


def test_an_error_passes_through() -> None:
    async def service(_: Lifecycle) -> None:
        raise ValueError("told to whoever started this")

    with pytest.raises(ValueError, match="told to"):
        runtime.main(service)


def test_an_error_passes_through_also_where_sockets_are_open(tmp_path: Path) -> None:
    """libuv would end the process if it looked at their descriptors once the context has closed them."""

    async def service(_: Lifecycle) -> None:
        async with asyncio.TaskGroup() as tasks:
            server = RpcServer(f"ipc://{tmp_path}/here", {}, tasks)
            opened.extend([RpcClient(server.endpoint), RpcClient(f"ipc://{tmp_path}/nobody")])
            await asyncio.sleep(0)
            raise MeshError("there is no port left")

    opened: list[RpcClient] = []
    with pytest.raises(ExceptionGroup) as failure:
        runtime.main(service)
    assert failure.group_contains(MeshError, match="no port left")
    assert list(tmp_path.iterdir()) == []


def test_services_run_on_uvloop() -> None:
    loops: list[type] = []

    async def service(_: Lifecycle) -> None:
        loops.append(type(asyncio.get_running_loop()))

    runtime.main(service)
    assert loops == [uvloop.Loop]
