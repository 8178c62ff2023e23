"""The receiving end of TCP: who may open a link, and lanes that receive (see frames.py for the bytes)."""

import asyncio
import socket
from typing import Final

import structlog

from mooncake_mesh.errors import MeshError, SliceLost
from mooncake_mesh.mesh.log_allowance import LogAllowance
from mooncake_mesh.messenger.transports import frames, link_auth
from mooncake_mesh.messenger.transports.api import Landings
from mooncake_mesh.messenger.transports.frames import Carriage, FrameError, Hello, Kind
from mooncake_mesh.messenger.transports.inbound import InboundFrame, InboundLink
from mooncake_mesh.messenger.transports.link_table import LinkTable
from mooncake_mesh.messenger.transports.streams import pieces_of, receive_group, shut, tune

log = structlog.get_logger(__name__)

_MAX_CONNECTIONS: Final = 256
_HELLO_TIMEOUT_S: Final = 10.0
_STALL_TIMEOUT_S: Final = 30.0
_SCRATCH_BYTES: Final = 64 << 10


class TcpListener:
    """Accepts links and lands their frames in *memory*. ``port`` is the one really bound. Create on the loop.

    Only who knows *secret* may open a link (link_auth.py). Who does not is logged, within bounds.
    """

    def __init__(self, host: str, port: int, memory: memoryview, landings: Landings, *, secret: bytes) -> None:
        try:
            self._listener = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise MeshError(f"cannot listen on {host}:{port}: {error}") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._secret = secret
        self._allowance = LogAllowance()
        self._memory = memory
        self._landings = landings
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._links = LinkTable()
        self._loop.add_reader(self._listener, self._accept)

    @property
    def n_connections(self) -> int:
        return len(self._strangers) + self._links.n_connections

    async def close(self) -> None:
        """End all links. Returns when no thread writes to the memory any more."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for stranger in list(self._strangers):
            self._dismiss(stranger, "closing")
        await self._links.close()

    # --- strangers ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError as error:
            log.info("accept_failed", error=str(error))
            return
        if self.n_connections >= _MAX_CONNECTIONS and self._strangers:
            self._dismiss(next(iter(self._strangers)), "waited longest, and there is no room")
        if self.n_connections >= _MAX_CONNECTIONS:
            log.warning("tcp_connection_refused", peer=str(peer), open=self.n_connections)
            connection.close()
            return
        connection.setblocking(False)
        timer = self._loop.call_later(_HELLO_TIMEOUT_S, self._dismiss, connection, "no hello")
        self._strangers[connection] = timer
        challenge = link_auth.Challenge(self._secret)
        self._loop.add_reader(connection, self._greet, connection, challenge)
        try:
            connection.send(challenge.data)
        except OSError as error:
            self._dismiss(connection, str(error))

    def _greet(self, connection: socket.socket, challenge: link_auth.Challenge) -> None:
        """A stranger said something. A hello is small and comes whole, so half a one is not waited for."""
        try:
            hello, welcome = challenge.check(connection.recv(link_auth.HELLO_BYTES))
            link = self._links.get(hello.sender)
            if hello.kind is Kind.LANE and (link is None or link.hello.epoch != hello.epoch):
                raise FrameError("a lane of no link")
            self._strangers.pop(connection).cancel()
            self._loop.remove_reader(connection)
        except BlockingIOError:
            return
        except (OSError, FrameError) as error:
            self._dismiss(connection, str(error))
            return
        if hello.kind is Kind.LANE and link is not None:
            self._welcome(connection, link, hello, welcome)
        else:
            self._introduce(connection, hello, welcome)

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

    def _dismiss(self, connection: socket.socket, why: str) -> None:
        self._strangers.pop(connection).cancel()
        self._loop.remove_reader(connection)
        connection.close()
        unsaid = self._allowance.take(self._loop.time())
        if unsaid is not None:
            log.warning("tcp_stranger_dismissed", reason=why, unsaid=unsaid)


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
