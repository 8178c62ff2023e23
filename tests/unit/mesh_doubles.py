"""Event loops to run tests of the mesh on, servers in this process, and peers that speak raw frames."""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import pytest
import uvloop
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from mooncake_mesh.errors import PeerUnreachable
from mooncake_mesh.mesh.endpoint import OnFrames
from mooncake_mesh.mesh.rpc import Caller, Handler, RpcServer
from mooncake_proto import codec
from mooncake_proto.envelope import Envelope

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

PATIENCE_S: Final = 10.0
ANY_PORT: Final = "tcp://127.0.0.1:0"


def _runner(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> Run[Any]:
    def run(work: Coroutine[Any, Any, T]) -> T:
        """Run *work*; what the loop's exception handler heard meanwhile fails the test."""
        problems: list[dict[str, Any]] = []
        # Captured: the console's pretty tracebacks cost more time than the tests.
        with capture_logs(), asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
            result = runner.run(asyncio.wait_for(work, 3 * PATIENCE_S))
            gc.collect()
        assert problems == []
        return result

    return run


on_both_loops = pytest.mark.parametrize(
    "run", [_runner(asyncio.new_event_loop), _runner(uvloop.new_event_loop)], ids=["asyncio", "uvloop"]
)
"""Services run on uvloop, SDK clients on whatever loop they have."""


async def until(look: Callable[[], object], what: str = "it") -> None:
    """Wait until *look* returns something true."""
    deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
    while not look():
        assert asyncio.get_running_loop().time() < deadline_s, f"waited in vain for {what}"
        await asyncio.sleep(0.001)


async def soon(waiting: Awaitable[T]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        return await waiting


@asynccontextmanager
async def serving(handlers: dict[type, Handler], bind: str = ANY_PORT) -> AsyncIterator[RpcServer]:
    async with asyncio.TaskGroup() as tasks:
        server = RpcServer(bind, handlers, tasks)
        try:
            yield server
        finally:
            await server.close()


async def reply_when_there_is_room(caller: Caller, body: object) -> None:
    """For sources without an end: ZeroMQ's threads may not have run for a while, and then the queue is full."""
    while True:
        try:
            return caller.reply(body)
        except PeerUnreachable:
            await asyncio.sleep(0.001)


class RawPeer:
    """A DEALER that sends whatever frames it is given."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._ids = itertools.count(1)

    async def __aenter__(self) -> "RawPeer":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    async def send(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    async def send_message(self, body: object, envelope: Envelope) -> None:
        await self.send(*codec.encode(body, envelope))

    async def receive(self) -> tuple[Envelope, Any]:
        return codec.decode(await soon(self._socket.recv_multipart()))


class ScriptedRouter:
    """In place of ``endpoint.router``: its messages are there when the test says so, and no socket is behind it."""

    endpoint: Final = "inproc://scripted"

    def __init__(self) -> None:
        self.sent: list[tuple[Envelope, Any]] = []
        self._on_frames: OnFrames = lambda _: None

    def __call__(self, _: str, on_frames: OnFrames, **__: object) -> "ScriptedRouter":
        self._on_frames = on_frames
        return self

    def deliver(self, body: object, envelope: Envelope, *, peer: bytes = b"peer") -> None:
        """Have the server read one message now."""
        self._on_frames([peer, *codec.encode(body, envelope)])

    def send_now(self, frames: Sequence[bytes]) -> None:
        self.sent.append(codec.decode(frames[1:]))

    def close(self) -> None:
        """Nothing is open."""
