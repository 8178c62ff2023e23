"""Where senders come in: a listening socket, and those who connected and have not said hello yet.

A stranger costs a descriptor and nothing else: no memory is set aside for it, it is dismissed when it says nothing for
a while, and there may be only so many of them and of links together. Whoever waited longest makes room for the next,
so that strangers who say nothing keep no sender out.
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from mooncake_mesh.mesh.log_allowance import LogAllowance
from mooncake_mesh.messenger.transports.frames import FrameError
from mooncake_mesh.messenger.transports.link_table import LinkTable

log = structlog.get_logger(__name__)

_MAX_CONNECTIONS: Final = 256
_HELLO_TIMEOUT_S: Final = 10.0

Hear = Callable[[socket.socket], Callable[[], None]]
"""Reads a hello from a connection that has something to say; returns what to do with the connection, no stranger any
more. Raises BlockingIOError to be called again, and OSError, ValueError or FrameError to have it dismissed."""

Meet = Callable[[socket.socket], Hear]
"""Gets each connection first; returns how to hear its hello. Raises OSError or FrameError to have it dismissed."""

Dress = Callable[[socket.socket], socket.socket]
"""Makes of each connection, which does not block, the one that is met and heard. Raises OSError, and closes it then."""


class Door:
    """Accepts on *listener*, which is the door's from now on. Create on the loop.

    The transport *name* is for the log, which says of no more than a few strangers that they were dismissed.
    """

    def __init__(
        self, name: str, listener: socket.socket, links: LinkTable, meet: Meet, dress: Dress = lambda naked: naked
    ) -> None:
        listener.setblocking(False)
        self._name = name
        self._listener = listener
        self._links = links
        self._meet = meet
        self._dress = dress
        self._allowance = LogAllowance()
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
            accepted, peer = self._listener.accept()
            accepted.setblocking(False)
            connection = self._dress(accepted)
        except OSError as error:
            log.info("accept_failed", transport=self._name, error=str(error))
            return
        if self.n_connections >= _MAX_CONNECTIONS and self._strangers:
            self._dismiss(next(iter(self._strangers)), "waited longest, and there is no room")
        if self.n_connections >= _MAX_CONNECTIONS:
            log.warning("connection_refused", transport=self._name, peer=str(peer), open=self.n_connections)
            connection.close()
            return
        self._strangers[connection] = self._loop.call_later(_HELLO_TIMEOUT_S, self._dismiss, connection, "no hello")
        try:
            hear = self._meet(connection)
        except (OSError, FrameError) as error:
            self._dismiss(connection, str(error))
            return
        self._loop.add_reader(connection, partial(self._has_spoken, connection, hear))

    def _has_spoken(self, connection: socket.socket, hear: Hear) -> None:
        try:
            proceed = hear(connection)
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
        unsaid = self._allowance.take(self._loop.time())
        if unsaid is not None:
            log.warning("stranger_dismissed", transport=self._name, reason=why, unsaid=unsaid)
