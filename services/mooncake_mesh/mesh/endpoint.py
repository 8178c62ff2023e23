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

Where keys are in use (curve.py) tcp sockets are secured. The connecting side is in connecting.py.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakSet

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from mooncake_mesh.errors import MeshError, PeerUnreachable
from mooncake_mesh.mesh.curve import Audience, secure_bound
from mooncake_mesh.mesh.log_allowance import LogAllowance

log = structlog.get_logger(__name__)

HWM_MESSAGES: Final = 4096
LINGER_MS: Final = 250
MAX_MESSAGE_BYTES: Final = 80 << 20
_READS_PER_TURN: Final = 64

# Plain numbers: pyzmq's own flags are enums, whose every operation costs as much as handing over a frame.
_NOW: Final = int(zmq.DONTWAIT)
_NOW_AND_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
_READABLE: Final = int(zmq.POLLIN)
_WRITABLE: Final = int(zmq.POLLOUT)

OnFrames = Callable[[list[bytes]], None]


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

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_frames: OnFrames,
        file: SocketFile | None = None,
        watch: "Watch | None" = None,
    ) -> None:
        self._socket = socket
        self._file = file
        self._watch = watch
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._pump_scheduled = False
        self._closed = False
        self._send_changed = asyncio.Event()
        _OPEN.add(self)
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
                if self._is_hopeless() or left_s <= 0:
                    raise
                await self._wait_for_change(left_s)

    def close(self) -> None:
        """Close the socket; whoever waits in :meth:`send` fails at once."""
        if not self._closed:
            self._closed = True
            _OPEN.discard(self)
            self._send_changed.set()
            if self._watch is not None:
                self._watch.close()
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=LINGER_MS)
            if self._file is not None:
                self._file.remove()

    def _is_hopeless(self) -> bool:
        """Whether waiting cannot help."""
        return self._closed

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


_OPEN: Final = WeakSet[Channel]()


def close_all() -> None:
    """Close every channel of this process, for whoever ends without having closed its own.

    The event loop may not look at a socket that the context has closed: libuv ends the process, without a word of why.
    """
    for channel in sorted(_OPEN, key=lambda channel: channel._watch is None):  # a monitor after what it watches
        channel.close()


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


class Watch:
    """Hears how the connections of *socket* fare: *on_event* gets each of *events* and its value."""

    def __init__(self, socket: "zmq.Socket[bytes]", events: int, on_event: Callable[[int, int], None]) -> None:
        self._socket = socket
        self._on_event = on_event
        self._channel = Channel(socket.get_monitor_socket(events), self._read)

    def close(self) -> None:
        """Call before *socket* is closed: ZeroMQ's I/O thread would wait, and all sockets with it, to tell nobody."""
        self._socket.disable_monitor()
        self._channel.close()

    def _read(self, frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        self._on_event(message["event"], message["value"])


def new_socket(kind: int) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HWM_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HWM_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


def _bound(socket: "zmq.Socket[bytes]", bind: str, audience: Audience) -> bool:
    """Bind; whether keys guard the socket. Raises MeshError."""
    try:
        secured = secure_bound(socket, bind, audience)
        socket.bind(bind)
    except (ValueError, zmq.ZMQError) as error:
        socket.close(linger=0)
        raise MeshError(f"cannot bind {bind}: {getattr(error, 'strerror', None) or error}") from error
    return secured


def router(bind: str, on_frames: OnFrames, *, audience: Audience = Audience.MEMBERS) -> Channel:
    """A bound ROUTER that raises, instead of dropping, when a peer is gone. Raises MeshError when it cannot bind.

    Where keys are in use, only those of *audience* are let in.
    """
    socket = new_socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    watch = None
    if _bound(socket, bind, audience):
        watch = Watch(socket, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, _Refusals(bind).tell)
    return Channel(socket, on_frames, SocketFile(socket), watch)


class _Refusals:
    """Logs, within bounds, who came to a secured socket without keys or with those of another mesh."""

    def __init__(self, bind: str) -> None:
        self._bind = bind
        self._allowance = LogAllowance()

    def tell(self, _: int, reason: int) -> None:
        unsaid = self._allowance.take(asyncio.get_running_loop().time())
        if unsaid is not None:
            log.warning("handshake_refused", bind=self._bind, reason=protocol_error(reason), unsaid=unsaid)


def protocol_error(value: int) -> str:
    """What ZeroMQ's reason for a failed handshake says about the keys."""
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "only one of the two ends uses keys (CURVE)"
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "the keys of the two ends do not fit"
    return f"protocol error {value:#x} in the handshake"


class Publisher:
    """A bound PUB. Slow subscribers miss messages, and nobody waits for them."""

    def __init__(self, bind: str) -> None:
        self._socket = new_socket(zmq.PUB)
        _bound(self._socket, bind, Audience.MEMBERS)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._file = SocketFile(self._socket)

    def publish(self, frames: Sequence[bytes]) -> None:
        _send(self._socket, frames)

    def close(self) -> None:
        self._socket.close(linger=LINGER_MS)
        self._file.remove()
