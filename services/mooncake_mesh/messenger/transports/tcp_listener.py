"""The receiving end of TCP: who may open a link, and lanes that receive (see frames.py for the bytes)."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from mooncake_mesh.errors import MeshError, SliceLost
from mooncake_mesh.messenger.transports import frames, link_auth
from mooncake_mesh.messenger.transports.api import Landings, TcpKind
from mooncake_mesh.messenger.transports.door import Door, Hear
from mooncake_mesh.messenger.transports.frames import Carriage, FrameError, Hello, Kind
from mooncake_mesh.messenger.transports.inbound import InboundLink
from mooncake_mesh.messenger.transports.inbound_frame import InboundFrame
from mooncake_mesh.messenger.transports.link_table import LinkTable
from mooncake_mesh.messenger.transports.streams import pieces_of, receive_group, shut, tune
from mooncake_mesh.messenger.transports.tls import AfterHandshake, Identity

log = structlog.get_logger(__name__)

_STALL_TIMEOUT_S: Final = 30.0
_SCRATCH_BYTES: Final = 64 << 10


class TcpListener:
    """Accepts links and lands their frames in *memory*. ``port`` is the one really bound. Create on the loop.

    Only who knows *secret* may open a link (link_auth.py). Who does not is logged, within bounds. With an *identity*
    all is encrypted (tls.py).
    """

    def __init__(
        self,
        host: str,
        port: int,
        memory: memoryview,
        landings: Landings,
        *,
        secret: bytes,
        identity: Identity | None = None,
    ) -> None:
        try:
            listener = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise MeshError(f"cannot listen on {host}:{port}: {error}") from error
        self.port: int = listener.getsockname()[1]
        self._secret = secret
        self._memory = memory
        self._landings = landings
        self._loop = asyncio.get_running_loop()
        self._links = LinkTable()
        if identity is None:
            self._door = Door(TcpKind.CLEAR.value, listener, self._links, self._meet)
        else:
            self._door = Door(TcpKind.TLS.value, listener, self._links, self._let_shake_hands, identity.accept)

    @property
    def n_connections(self) -> int:
        return self._door.n_connections

    async def close(self) -> None:
        """End all links. Returns when no thread writes to the memory any more."""
        await self._door.close()

    def _let_shake_hands(self, _: socket.socket) -> Hear:
        return AfterHandshake(self._meet)

    def _meet(self, connection: socket.socket) -> Hear:
        challenge = link_auth.Challenge(self._secret)
        connection.send(challenge.data)
        return partial(self._hear, challenge)

    def _hear(self, challenge: link_auth.Challenge, connection: socket.socket) -> Callable[[], None]:
        """A hello is small and comes whole, so half a one is not waited for."""
        hello, welcome = challenge.check(connection.recv(link_auth.HELLO_BYTES))
        if hello.kind is Kind.CONTROL:
            return partial(self._introduce, connection, hello, welcome)
        link = self._links.get(hello.sender)
        if link is None or link.hello.epoch != hello.epoch:
            raise FrameError("a lane of no link")
        return partial(self._welcome, connection, link, hello, welcome)

    def _introduce(self, connection: socket.socket, hello: Hello, welcome: bytes) -> None:
        def make(after: "asyncio.Future[None] | None") -> InboundLink:
            return InboundLink(hello, self._memory, self._landings, self._loop, Carriage.LANES, after)

        link = self._links.introduce(hello.sender, make)
        link.when_former_ended(lambda: self._welcome(connection, link, hello, welcome))

    def _welcome(self, connection: socket.socket, link: InboundLink, hello: Hello, welcome: bytes) -> None:
        try:
            tune(connection, timeout_s=_STALL_TIMEOUT_S)
            connection.send(welcome)
            if hello.kind is Kind.LANE:
                link.add_lane(hello.lane, TcpLane(connection))
            else:
                link.start(connection)
        except (OSError, FrameError) as error:
            log.info("tcp_greeting_failed", error=str(error))
            connection.close()
            link.die(str(error))


class TcpLane:
    """Receives payload on one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def fill(self, frame: InboundFrame, start: int, stop: int) -> None:
        """As :class:`Lane`."""
        trailer = bytearray(frames.TRAILER.size)
        groups = pieces_of(self._views(frame, start, stop))
        groups[-1].append(memoryview(trailer))
        for group in groups:
            receive_group(self._connection, group)
        number, is_whole = frames.TRAILER.unpack(trailer)
        if number != frame.head.frame:
            raise FrameError("a lane is out of step with its heads")
        if not is_whole:
            frame.error = frame.error or SliceLost("the sender gave the slices up")

    def shut(self) -> None:
        shut(self._connection)

    def close(self) -> None:
        self._connection.close()

    def _views(self, frame: InboundFrame, start: int, stop: int) -> list[memoryview]:
        """Where the bytes go; scratch memory for those that nobody wants."""
        views = []
        for piece, first, last in frame.parts(start, stop):
            if piece.target is not None:
                views.append(piece.target[first:last])
                continue
            whole, rest = divmod(last - first, len(self._scratch))
            views += [self._scratch] * whole + [self._scratch[:rest]] * (rest > 0)
        return views
