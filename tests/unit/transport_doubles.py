"""Ends of a TCP link for tests: a real pair in one process, a hand-made sender and receiver, and a relay that cuts."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mooncake_mesh.errors import TransferError
from mooncake_mesh.messenger.landing import Destination
from mooncake_mesh.messenger.transports import link_auth, tls
from mooncake_mesh.messenger.transports.api import Incoming
from mooncake_mesh.messenger.transports.frames import Hello, Kind
from mooncake_mesh.messenger.transports.paths import Connections, LinkPath
from mooncake_mesh.messenger.transports.streams import receive_exactly
from mooncake_mesh.messenger.transports.tcp import tcp_connections
from mooncake_mesh.messenger.transports.tcp_listener import TcpListener
from mooncake_mesh.messenger.transports.tls import Identity
from mooncake_mesh.messenger.transports.windows import Windows

HOST = "127.0.0.1"
_PATTERN = bytes(i * 31 % 251 for i in range(100_003))


class RecordingWindows(Windows):
    """Windows that note how each frame ended."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.begun = 0
        self.ends: list[TransferError | None] = []
        self.first_begun = asyncio.Event()
        self.ended = asyncio.Event()

    def begin(self, token: bytes, incoming: Sequence[Incoming]) -> list[Destination]:
        destinations = super().begin(token, incoming)
        self.begun += 1
        self.first_begun.set()
        return destinations

    def end(self, token: bytes, destinations: Sequence[Destination], error: TransferError | None) -> None:
        super().end(token, destinations, error)
        self.ends.append(error)
        self.ended.set()


@dataclass
class Pair:
    source: bytearray
    target: bytearray
    windows: RecordingWindows
    listener: TcpListener
    connections: Connections
    secret: bytes
    tcp: "Tcp"

    def path(self, token: bytes) -> LinkPath:
        return LinkPath(self.connections, token, memoryview(self.source))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tcp:
    """One kind of link over TCP: encrypted where there is an identity."""

    identity: Identity | None

    @property
    def fingerprint(self) -> bytes:
        return b"" if self.identity is None else self.identity.fingerprint

    def listener(self, port: int, target: bytearray, windows: Windows, secret: bytes) -> TcpListener:
        return TcpListener(HOST, port, memoryview(target), windows, secret=secret, identity=self.identity)

    def connections(self, port: int, secret: bytes, n_lanes: int) -> Connections:
        return tcp_connections(HOST, port, secret, n_lanes, fingerprint=self.fingerprint)

    def connect(self, port: int) -> socket.socket:
        """A connection that has said nothing yet but what TLS says. Blocks."""
        connection = socket.create_connection((HOST, port), timeout=10)
        return connection if self.identity is None else tls.connect(connection, self.fingerprint)

    def accept(self, listener: socket.socket) -> socket.socket:
        """As :meth:`connect`, from the other end."""
        connection, _ = listener.accept()
        connection.settimeout(10)
        if self.identity is None:
            return connection
        encrypted = self.identity.accept(connection)
        encrypted.do_handshake()
        return encrypted

    @asynccontextmanager
    async def pair(self, size_bytes: int, *, n_lanes: int = 2, via: "Relay | None" = None) -> AsyncIterator[Pair]:
        source = bytearray((_PATTERN * (size_bytes // len(_PATTERN) + 1))[:size_bytes])
        target = bytearray(size_bytes)
        windows = RecordingWindows(size_bytes)
        secret = link_auth.new_secret()
        listener = self.listener(0, target, windows, secret)
        if via is not None:
            via.port_behind = listener.port
        connections = self.connections(via.port if via is not None else listener.port, secret, n_lanes)
        try:
            yield Pair(source, target, windows, listener, connections, secret, self)
        finally:
            connections.close()
            await listener.close()


class HandMadeSender:
    """A sender that says what the test wants. Blocking: call it on a thread."""

    def __init__(self, pair: Pair, *, n_lanes: int = 1) -> None:
        self._tcp = pair.tcp
        self._port = pair.listener.port
        self._secret = pair.secret
        self._n_lanes = n_lanes
        self.control = self._open(Kind.CONTROL, 0)
        self.lanes = [self._open(Kind.LANE, lane) for lane in range(n_lanes)]

    def _open(self, kind: Kind, lane: int) -> socket.socket:
        connection = self._tcp.connect(self._port)
        hello = Hello(kind=kind, sender=b"s" * 16, epoch=1, lane=lane, n_lanes=self._n_lanes)
        challenge = receive_exactly(connection, link_auth.CHALLENGE_BYTES)
        answer = link_auth.answer(self._secret, challenge, hello)
        connection.sendall(answer.said)
        assert answer.is_welcome(receive_exactly(connection, link_auth.WELCOME_BYTES))
        return connection

    def close(self) -> None:
        for connection in (self.control, *self.lanes):
            connection.close()


class HandMadeReceiver:
    """A receiver that welcomes one link and then does what the test wants. Blocking: call it on a thread."""

    def __init__(self, tcp: Tcp) -> None:
        self._tcp = tcp
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self.secret = link_auth.new_secret()
        self.connections: list[socket.socket] = []

    def welcome(self, n_lanes: int) -> None:
        for _ in range(1 + n_lanes):
            connection = self._tcp.accept(self._listener)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            challenge = link_auth.Challenge(self.secret)
            connection.sendall(challenge.data)
            _, welcome = challenge.check(receive_exactly(connection, link_auth.HELLO_BYTES))
            connection.sendall(welcome)
            self.connections.append(connection)

    def close(self) -> None:
        for connection in (self._listener, *self.connections):
            connection.close()


class Relay:
    """Passes connections on to ``port_behind``; :meth:`cut_after` ends all of them after so many bytes on one, and
    :meth:`damage_after` changes a bit then.

    ``accepted`` counts them, ``seen`` is what passed on any, as it came.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self.port_behind = 0
        self.cuts = self.accepted = 0
        self.seen = bytearray()
        self._budget: int | None = None
        self._whole: int | None = None
        self._counting = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut_after(self, n_bytes: int) -> None:
        self._budget = n_bytes

    def damage_after(self, n_bytes: int) -> None:
        self._whole = n_bytes

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._end_all()
        for thread in self._threads:
            thread.join()
        for connection in (self._listener, *self._open):
            connection.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((HOST, self.port_behind))
            self._open += [near, far]
            self.accepted += 1
            self._start(self._pass_on, near, far)
            self._start(self._pass_on, far, near)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 14):
                self.seen += data
                target.sendall(self._perhaps_damaged(data))
                if self._is_to_be_cut(data):
                    self._end_all()
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _is_to_be_cut(self, data: bytes) -> bool:
        """Once: a thread for each direction counts here."""
        with self._counting:
            if self._budget is None:
                return False
            self._budget -= len(data)
            if self._budget >= 0:
                return False
            self._budget = None
            self.cuts += 1
            return True

    def _perhaps_damaged(self, data: bytes) -> bytes:
        with self._counting:
            if self._whole is None:
                return data
            self._whole -= len(data)
            if self._whole >= 0:
                return data
            self._whole = None
        return data[:-1] + bytes([data[-1] ^ 1])

    def _end_all(self) -> None:
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
