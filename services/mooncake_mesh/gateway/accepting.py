"""The HTTP server: takes connections in as fast as clients make them, and can tell whose client has left.

The event loop's own server takes in one waiting connection a turn. While hundreds of clients come and leave, a turn is
long, so that whoever comes next would wait for hundreds of turns behind connections at whose other end nobody is any
more. Here a turn takes in all of them, and a request can look at its connection before any work is done for it.
"""

import asyncio
import contextlib
import errno
import select
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mooncake_mesh.errors import MeshError
from mooncake_mesh.gateway.asgi import CLIENT_HAS_LEFT

log = structlog.get_logger(__name__)

_BACKLOG: Final = 1024
SEND_BUFFER_BYTES: Final = 128 << 10
"""Asked of the kernel for each connection, which takes twice as much. By itself it grows to megabytes of what a client
does not read; text needs little."""
_PER_TURN: Final = 256
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_S: Final = 0.5


async def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of *host*, all on one port. Raises MeshError."""
    listeners: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            port = port or (listeners[0].getsockname()[1] if listeners else 0)
            listeners.append(_listener(family, (address[0], port, *address[2:])))
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise MeshError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listeners


def _listener(family: int, address: tuple[str | int, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class Acceptor:
    """Serves the connections to *listeners* with protocols that *make* makes. Create inside a running loop.

    A process that has no descriptor left leaves connections waiting, and looks again after a while.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], make: Callable[[], asyncio.Protocol], tasks: asyncio.TaskGroup
    ) -> None:
        self._listeners = tuple(listeners)
        self._make = make
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._opening: set[asyncio.Task[None]] = set()
        for listener in self._listeners:
            self._watch(listener)

    def close(self) -> None:
        """Take in no more; those that wait are refused by the kernel."""
        for listener in self._listeners:
            pause = self._pauses.pop(listener, None)
            if pause is not None:
                pause.cancel()
            self._loop.remove_reader(listener)
            listener.close()

    async def wait_closed(self) -> None:
        """Until what was taken in has its protocol."""
        await asyncio.gather(*self._opening)

    def _watch(self, listener: socket.socket) -> None:
        self._pauses.pop(listener, None)
        self._loop.add_reader(listener, self._take_in, listener)

    def _take_in(self, listener: socket.socket) -> None:
        """Those that wait now, but let the others of this process have their turn as well."""
        for _ in range(_PER_TURN):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause(listener, error)
                return
            opening = self._tasks.create_task(self._open(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        log.error("cannot_accept", error=error.strerror)
        self._loop.remove_reader(listener)
        self._pauses[listener] = self._loop.call_later(_PAUSE_S, self._watch, listener)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError as error:  # it broke meanwhile
            log.debug("connection_broke", error=str(error))
            connection.close()


def has_left(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer has closed or reset the connection, even if what it sent before is not read yet."""
    if transport.is_closing():
        return True
    look = select.poll()
    look.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)  # errors are always told
    return bool(look.poll(0))


class _Connection(HttpToolsProtocol):
    """One client's connection, whose requests can look whether the client is still there (``client_has_left``)."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, CLIENT_HAS_LEFT: partial(has_left, transport)}


class HttpServer(uvicorn.Server):
    """uvicorn behind an :class:`Acceptor`, without its signal handlers: the process' own runtime decides when to stop.

    *listeners* are closed when it ends.
    """

    def __init__(self, config: uvicorn.Config, listeners: Sequence[socket.socket], tasks: asyncio.TaskGroup) -> None:
        super().__init__(config)
        self._listeners = listeners
        self._tasks = tasks

    @property
    def port(self) -> int:
        """That of the first listener."""
        port: int = self._listeners[0].getsockname()[1]
        return port

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        acceptor = Acceptor(self._listeners, self._connection, self._tasks)
        self.servers = [cast("asyncio.Server", acceptor)]  # closed and waited for, nothing else
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        return _Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
