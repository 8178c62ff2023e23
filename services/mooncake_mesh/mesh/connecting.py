"""The connecting side of ZeroMQ sockets: DEALER and SUB.

ZeroMQ alone would give a connection up for ever when the other end refuses its key, and try again without a pause when
it just hangs up. Here either is told to whoever waits, and tried again after a pause.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from mooncake_mesh.errors import KeyRefused, MeshError, PeerUnreachable
from mooncake_mesh.mesh.curve import MeshKeys, secure_connected
from mooncake_mesh.mesh.endpoint import Channel, OnFrames, Watch, new_socket, protocol_error

_HEARTBEAT_MS: Final = 1000
_HEARTBEAT_TIMEOUT_MS: Final = 4000
_REFUSED_PAUSE_S: Final = 0.5
_NOT_ALLOWED: Final = 400
_HANG_UPS: Final = 5
"""So often in a row a peer must hang up in the handshake to be believed: one that restarts may do it once or twice."""


class Link(enum.Enum):
    """State of a DEALER's connection."""

    UP = "up"
    DOWN = "down"


class Connection(Channel):
    """A socket that keeps connecting to *endpoint*; *on_link* hears how it fares.

    Where the two ends refuse each other's keys it says so (:meth:`send` raises KeyRefused at once) and tries again
    after a pause. Raises MeshError for an address ZeroMQ does not take.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        endpoint: str,
        on_frames: OnFrames,
        on_link: Callable[[Link], None] | None = None,
        keys: MeshKeys | None = None,
    ) -> None:
        self._address = endpoint
        self._on_link = on_link
        self._refusal = ""
        self._hang_ups = 0
        self._retry: asyncio.TimerHandle | None = None
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        events |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        events |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        watch = None
        try:
            self._has_keys = secure_connected(socket, endpoint, keys)
            watch = Watch(socket, events, self._on_event)
            _connect(socket, endpoint)
        except zmq.ZMQError as error:
            if watch is not None:
                watch.close()
            socket.close(linger=0)
            raise MeshError(f"cannot connect to {endpoint!r}: {error.strerror}") from error
        super().__init__(socket, on_frames, watch=watch)

    async def send(self, frames: Sequence[bytes], *, timeout_s: float) -> None:
        try:
            await super().send(frames, timeout_s=timeout_s)
        except PeerUnreachable as error:
            if not self._refusal:
                raise
            raise KeyRefused(f"{self._address}: {self._refusal}") from error

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        super().close()

    def _is_hopeless(self) -> bool:
        return self._closed or bool(self._refusal)

    def _on_event(self, event: int, value: int) -> None:
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refusal = ""
                self._hang_ups = 0
                self._tell(Link.UP)
            case zmq.EVENT_DISCONNECTED:
                self._tell(Link.DOWN)
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH if value == _NOT_ALLOWED:
                self._refused("our key is not on its allow-list")
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused(f"it cannot check our key (ZAP status {value})")
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refused(protocol_error(value))
            case _:
                self._hung_up()

    def _tell(self, link: Link) -> None:
        if self._on_link is not None:
            self._on_link(link)

    def _hung_up(self) -> None:
        """What a peer says of keys that do not fit may be lost with the connection, or never be said."""
        self._hang_ups += 1
        if self._hang_ups >= _HANG_UPS:
            why = "have another server key than server.key here" if self._has_keys else "be one that uses keys"
            self._refused(f"it hangs up during the handshake: it may {why}")

    def _refused(self, why: str) -> None:
        if self._closed or self._retry is not None:
            return
        self._hang_ups = 0
        self._refusal = why
        self._send_changed.set()
        self._socket.disconnect(self._address)
        self._retry = self._loop.call_later(_REFUSED_PAUSE_S, self._connect_again)

    def _connect_again(self) -> None:
        self._retry = None
        self._refusal = ""
        self._socket.connect(self._address)


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)
    socket.connect(endpoint)


class Dealer(Connection):
    """A DEALER that keeps connecting to *endpoint*; *on_link* hears how its connection fares.

    IMMEDIATE has a price: what a peer sent right before its connection went may be lost with it, unread. So an answer
    that counts is followed by a pause before its sender ends. *keys* are those of the process unless given.

    Nothing is sent but while the link is known to be up. ZeroMQ says that a connection went before it takes its queue
    away, and whoever has heard would wait in vain for an answer to what that queue still took.
    """

    def __init__(
        self,
        endpoint: str,
        on_frames: OnFrames,
        on_link: Callable[[Link], None],
        keys: MeshKeys | None = None,
    ) -> None:
        self._is_up = False
        socket = new_socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        super().__init__(socket, endpoint, on_frames, on_link, keys)

    def send_now(self, frames: Sequence[bytes]) -> None:
        if not self._is_up and not self._closed:
            raise PeerUnreachable("no live connection")
        super().send_now(frames)

    def _tell(self, link: Link) -> None:
        self._is_up = link is Link.UP
        if self._is_up:
            self._send_changed.set()
        super()._tell(link)


def subscriber(endpoint: str, on_frames: OnFrames) -> Channel:
    socket = new_socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    return Connection(socket, endpoint, on_frames)
