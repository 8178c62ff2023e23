"""Where senders come in: a listening socket, and those who connected and have not said hello yet.

A stranger costs a descriptor and nothing else: no memory is set aside for it, it is dismissed when it says nothing for
a while, and there may be only so many of them and of links together.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

import structlog

from mooncake_mesh.messenger.transports.frames import FrameError
from mooncake_mesh.messenger.transports.link_table import LinkTable

log = structlog.get_logger(__name__)

MAX_CONNECTIONS: Final = 256
_HELLO_TIMEOUT_S: Final = 10.0

Hear = Callable[[socket.socket], Callable[[], None]]
"""Reads a hello from a connection that has something to say; returns what to do with the connection, no stranger any
more. Raises BlockingIOError to be called again, and OSError, ValueError or FrameError to have it dismissed."""


class Door:
    """Accepts on *listener*, which is the door's from now on, and has every hello heard. Create on the loop.

    The transport *name* is for the log. *admits* may turn a connection away before it has said anything.
    """

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        links: LinkTable,
        hear: Hear,
        *,
        admits: Callable[[socket.socket], bool] = lambda _: True,
    ) -> None:
        listener.setblocking(False)
        self._log = log.bind(transport=name)
        self._listener = listener
        self._links = links
        self._hear = hear
        self._admits = admits
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._loop.add_reader(listener, self._accept)

    @property
    def n_connections(self) -> int:
        """Strangers and links together."""
        return len(self._strangers) + self._links.n_connections

    async def close(self) -> None:
        """Let nobody in any more and end all links. Returns when no thread of theirs is at work."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for stranger in list(self._strangers):
            self._dismiss(stranger, "closing")
        await self._links.close()

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError as error:
            self._log.info("accept_failed", error=str(error))
            return
        if self.n_connections >= MAX_CONNECTIONS or not self._admits(connection):
            self._log.warning("connection_refused", peer=str(peer), open=self.n_connections)
            connection.close()
            return
        connection.setblocking(False)
        self._strangers[connection] = self._loop.call_later(_HELLO_TIMEOUT_S, self._dismiss, connection, "no hello")
        self._loop.add_reader(connection, self._has_spoken, connection)

    def _has_spoken(self, connection: socket.socket) -> None:
        try:
            proceed = self._hear(connection)
        except BlockingIOError:
            return
        except (OSError, ValueError, FrameError) as error:
            self._dismiss(connection, str(error))
            return
        self._strangers.pop(connection).cancel()
        self._loop.remove_reader(connection)
        proceed()

    def _dismiss(self, connection: socket.socket, why: str) -> None:
        self._strangers.pop(connection).cancel()
        self._loop.remove_reader(connection)
        connection.close()
        self._log.info("stranger_dismissed", reason=why)
