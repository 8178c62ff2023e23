"""ZeroMQ sockets as this project uses them. One context per process; every option that matters is set here, explicitly.

====== ========= ==================================================================================================
socket who binds when it is full
====== ========= ==================================================================================================
ROUTER a server  the reader stops, the peers' send queues fill, their sends fail at once (``PeerUnreachable``)
DEALER –         send fails at once; messages are queued only on live connections (IMMEDIATE), so nothing
                 that was meant for a dead process reaches the next one on its address
PUB    conductor drops for the slow subscriber; states are sent whole, so the next one repairs it
SUB    –         as PUB
====== ========= ==================================================================================================

Only the connecting side sends heartbeats; the time to live in them tells the binding side when to give a silent peer
up. A bound socket with heartbeats of its own could be killed by any peer that fills its queue and leaves: libzmq 4.3
aborts the process when the timer of such a connection fires (``Assertion failed: !_io_error``).

Each socket has exactly one reader, the event loop's callback on the socket's descriptor. It never waits in ``recv``: a
timeout around a receive loses messages (the cancelled receive may have taken one), so whoever wants to wait with a
deadline waits on a future or a queue. The descriptor is edge-triggered: after every send the reader looks again.
The bounded queue in front of a reader is the socket's own (RCVHWM); a paused reader leaves messages there.
"""

import asyncio
import enum
import os
from collections.abc import Callable, Sequence
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from mooncake_mesh.errors import MeshError, PeerUnreachable

HWM_MESSAGES: Final = 4096
LINGER_MS: Final = 250
MAX_MESSAGE_BYTES: Final = 80 << 20
_HEARTBEAT_MS: Final = 1000
_HEARTBEAT_TIMEOUT_MS: Final = 4000
_READS_PER_TURN: Final = 64

# Plain numbers: pyzmq's own flags are enums, whose every operation costs as much as handing over a frame.
_NOW: Final = int(zmq.DONTWAIT)
_NOW_AND_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
_READABLE: Final = int(zmq.POLLIN)
_WRITABLE: Final = int(zmq.POLLOUT)

OnFrames = Callable[[list[bytes]], None]


class Link(enum.Enum):
    """State of a DEALER's connection."""

    UP = "up"
    DOWN = "down"


class SocketFile:
    """The file of a bound ipc socket, which ZeroMQ leaves behind. A tcp or abstract (``ipc://@``) one has none."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        scheme, _, path = socket.getsockopt_string(zmq.LAST_ENDPOINT).partition("://")
        self._path = path if scheme == "ipc" and not path.startswith("@") else ""
        self._inode = os.stat(self._path).st_ino if self._path else 0

    def remove(self) -> None:
        """Remove the file, unless the next process on this address has put its own there."""
        if self._path and os.path.exists(self._path) and os.stat(self._path).st_ino == self._inode:
            os.unlink(self._path)


class Channel:
    """A socket on the running event loop. *on_frames* gets every message, in order.

    It should not raise; where it does, the loop's exception handler hears of it and reading goes on.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_frames: OnFrames, file: SocketFile | None = None) -> None:
        self._socket = socket
        self._file = file
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._pump_scheduled = False
        self._closed = False
        self._send_changed = asyncio.Event()
        self._fd = socket.FD
        self._loop.add_reader(self._fd, self._pump)
        self._look_again()

    @property
    def endpoint(self) -> str:
        """The address really bound (port 0 resolved)."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send_now(self, frames: Sequence[bytes]) -> None:
        """Queue *frames* or raise PeerUnreachable; never waits."""
        if self._closed:
            raise PeerUnreachable("this end is closed")
        try:
            _send(self._socket, frames)
        except zmq.Again as error:
            raise PeerUnreachable("no live connection, or its queue is full") from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerUnreachable("the peer is gone") from error
        finally:
            self._look_again()

    async def send(self, frames: Sequence[bytes], *, timeout_s: float) -> None:
        """As :meth:`send_now`, but wait up to *timeout_s* for a connection or for room."""
        deadline_s = self._loop.time() + timeout_s
        while True:
            self._send_changed.clear()
            try:
                return self.send_now(frames)
            except PeerUnreachable:
                left_s = deadline_s - self._loop.time()
                if self._closed or left_s <= 0:
                    raise
                await self._wait_for_change(left_s)

    def close(self) -> None:
        """Close the socket; whoever waits in :meth:`send` fails at once."""
        if not self._closed:
            self._closed = True
            self._send_changed.set()
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=LINGER_MS)
            if self._file is not None:
                self._file.remove()

    async def _wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._send_changed.wait()
        except TimeoutError:
            return

    def _look_again(self) -> None:
        if not self._pump_scheduled and not self._closed:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Hand over what has come. Asking for the events takes note of it, and with it the descriptor's edge."""
        self._pump_scheduled = False
        for _ in range(_READS_PER_TURN):
            if self._closed:
                return
            events = int(self._socket.getsockopt(zmq.EVENTS))
            if events & _WRITABLE:
                self._send_changed.set()
            if not events & _READABLE:
                return
            self._take()
        self._look_again()

    def _take(self) -> None:
        """Hand over one message, unless its connection broke since it was seen."""
        try:
            frames = _receive(self._socket)
        except zmq.Again:
            return
        try:
            self._on_frames(frames)
        except BaseException:
            self._look_again()  # the edge is used up: nothing else would wake the reader for what is left
            raise


def _send(socket: "zmq.Socket[bytes]", frames: Sequence[bytes]) -> None:
    """All of *frames* or, with zmq.Again, none: only the first can be refused."""
    send = socket.send
    for frame in frames[:-1]:
        send(frame, _NOW_AND_MORE)
    send(frames[-1], _NOW)


def _receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """The message that is there; raises zmq.Again when there is none."""
    receive = socket.recv
    frames = []
    while True:
        frame = receive(_NOW, copy=False)
        frames.append(frame.bytes)
        if not frame.more:
            return frames


def _socket(kind: int) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HWM_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HWM_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


def _bound(socket: "zmq.Socket[bytes]", bind: str) -> "zmq.Socket[bytes]":
    try:
        socket.bind(bind)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise MeshError(f"cannot bind {bind}: {error.strerror}") from error
    return socket


def _connected(socket: "zmq.Socket[bytes]", endpoint: str) -> "zmq.Socket[bytes]":
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise MeshError(f"cannot connect to {endpoint!r}: {error.strerror}") from error
    return socket


def router(bind: str, on_frames: OnFrames) -> Channel:
    """A bound ROUTER that raises, instead of dropping, when a peer is gone. Raises MeshError when it cannot bind."""
    socket = _socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return Channel(_bound(socket, bind), on_frames, SocketFile(socket))


class Dealer(Channel):
    """A DEALER that keeps connecting to *endpoint*; *on_link* hears how its connection fares.

    IMMEDIATE has a price: what a peer sent right before its connection went may be lost with it, unread. So an answer
    that counts is followed by a pause before its sender ends. Raises MeshError for an address ZeroMQ does not take.
    """

    def __init__(self, endpoint: str, on_frames: OnFrames, on_link: Callable[[Link], None]) -> None:
        socket = _socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        self._on_link = on_link
        self._watch = Channel(
            socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED), self._on_event
        )
        try:
            super().__init__(_connected(socket, endpoint), on_frames)
        except MeshError:
            self._watch.close()
            raise

    def close(self) -> None:
        if not self._closed:
            # First of all: ZeroMQ's I/O thread waits, and all sockets with it, to tell a watcher that is gone.
            self._socket.disable_monitor()
            self._watch.close()
            super().close()

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        self._on_link(Link.DOWN if event == zmq.EVENT_DISCONNECTED else Link.UP)


class Publisher:
    """A bound PUB. Slow subscribers miss messages, and nobody waits for them."""

    def __init__(self, bind: str) -> None:
        self._socket = _bound(_socket(zmq.PUB), bind)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._file = SocketFile(self._socket)

    def publish(self, frames: Sequence[bytes]) -> None:
        _send(self._socket, frames)

    def close(self) -> None:
        self._socket.close(linger=LINGER_MS)
        self._file.remove()


def subscriber(endpoint: str, on_frames: OnFrames) -> Channel:
    socket = _socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    return Channel(_connected(socket, endpoint), on_frames)
