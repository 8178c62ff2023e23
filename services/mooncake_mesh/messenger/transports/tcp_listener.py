"""The receiving end of TCP: who may open a link, and which links there are (see frames.py for the bytes).

The link of a sender that connects again is taken down, and all its writes are over, before the new one is welcomed:
what is sent again finds its places free.
"""

import asyncio
import socket
from typing import Final

import structlog

from mooncake_mesh.errors import MeshError
from mooncake_mesh.messenger.transports import frames
from mooncake_mesh.messenger.transports.api import Landings
from mooncake_mesh.messenger.transports.frames import FrameError, Hello, Kind
from mooncake_mesh.messenger.transports.streams import tune
from mooncake_mesh.messenger.transports.tcp_arrivals import InboundLink

log = structlog.get_logger(__name__)

_MAX_CONNECTIONS: Final = 256
_HELLO_TIMEOUT_S: Final = 10.0
_STALL_TIMEOUT_S: Final = 30.0


class TcpListener:
    """Accepts links and lands their frames in *memory*. ``port`` is the one really bound. Create on the loop."""

    def __init__(self, host: str, port: int, memory: memoryview, landings: Landings) -> None:
        try:
            self._listener = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise MeshError(f"cannot listen on {host}:{port}: {error}") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._memory = memory
        self._landings = landings
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._links: dict[bytes, InboundLink] = {}
        self._ending: set[InboundLink] = set()
        self._loop.add_reader(self._listener, self._accept)

    @property
    def n_connections(self) -> int:
        return len(self._strangers) + sum(link.n_connections for link in (*self._links.values(), *self._ending))

    async def close(self) -> None:
        """End all links. Returns when no thread writes to the memory any more."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for stranger in list(self._strangers):
            self._dismiss(stranger, "closing")
        for link in self._links.values():
            link.die("the listener was closed")
        ending = [link.ended for link in (*self._links.values(), *self._ending)]
        if ending:
            await asyncio.wait(ending)

    # --- strangers ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError as error:
            log.info("accept_failed", error=str(error))
            return
        if self.n_connections >= _MAX_CONNECTIONS:
            log.warning("tcp_connection_refused", peer=str(peer), open=self.n_connections)
            connection.close()
            return
        connection.setblocking(False)
        timer = self._loop.call_later(_HELLO_TIMEOUT_S, self._dismiss, connection, "no hello")
        self._strangers[connection] = timer
        self._loop.add_reader(connection, self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        """A stranger said something. A hello is small and comes whole, so half a one is not waited for."""
        try:
            data = connection.recv(frames.HELLO.size)
            if len(data) < frames.HELLO.size:
                raise FrameError("closed or cut short before the hello")
            hello = frames.unpack_hello(data)
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
            self._welcome(connection, link, hello)
        else:
            self._introduce(connection, hello)

    def _introduce(self, connection: socket.socket, hello: Hello) -> None:
        """A new link, welcomed once the sender's former one has ended."""
        former = self._links.pop(hello.sender, None)
        after = former.ended if former is not None else None
        link = self._links[hello.sender] = InboundLink(hello, self._memory, self._landings, self._loop, after)
        link.ended.add_done_callback(lambda _: self._forget(hello.sender, link))
        if former is None:
            self._welcome(connection, link, hello)
            return
        former.die("the sender opened another link")
        self._ending.add(former)
        former.ended.add_done_callback(lambda _: self._welcome(connection, link, hello))

    def _welcome(self, connection: socket.socket, link: InboundLink, hello: Hello) -> None:
        try:
            tune(connection, timeout_s=_STALL_TIMEOUT_S)
            connection.send(frames.WELCOME)
            if hello.kind is Kind.LANE:
                link.add_lane(hello.lane, connection)
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
        log.info("tcp_stranger_dismissed", reason=why)

    def _forget(self, sender: bytes, link: InboundLink) -> None:
        self._ending.discard(link)
        if self._links.get(sender) is link:
            del self._links[sender]
