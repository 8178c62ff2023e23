"""TCP between two nodes: blocking sockets on threads, payload straight from arena to arena.

Connection, sender → receiver, any number of frames::

    head     "MKV1" | transfer token (16 bytes) | number of slices (u16)
    slices   each: logical block (u32) | layer (u16) | n_layers (u16) | length (u32) | flags (u8) | XXH3-64 (u64)
    payload  the slices' bytes, in that order

and for each frame one byte back: ``\\x01`` written and verified, ``\\x00`` refused. The token is drawn by the receiver
for each transfer and travels over the control channel only: who does not know it can write nothing. A frame that breaks
the format ends its connection.

One thread per connection at both ends, because blocking ``sendmsg`` and ``recv_into`` release the GIL and copy nothing
in Python.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import structlog

from mooncake_mesh.errors import ChecksumMismatch, MeshError, TransferError
from mooncake_mesh.messenger.landing import Destination, SliceSpan
from mooncake_mesh.messenger.transports.api import SealedSlice, checksum

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

_MAGIC: Final = b"MKV1"
_HEAD: Final = struct.Struct("<4s16sH")
_ENTRY: Final = struct.Struct("<IHHIBQ")
_HAS_CHECKSUM: Final = 1
_WRITTEN: Final = b"\x01"
_REFUSED: Final = b"\x00"
MAX_SLICES: Final = 512
_IOV_MAX: Final = 512
_IO_TIMEOUT_S: Final = 30.0
_MAX_CONNECTIONS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """One slice as announced by a frame."""

    span: SliceSpan
    size_bytes: int
    checksum: int | None


class FrameRefused(TransferError):
    """The receiver did not take a frame."""

    code = "slice_lost"


# --- sending ----------------------------------------------------------------------------------------------------------


class TcpConnections:
    """Data connections to one receiver, each used for one frame at a time."""

    def __init__(self, host: str, port: int, n_connections: int) -> None:
        self._address = (host, port)
        self._free: asyncio.LifoQueue[socket.socket | None] = asyncio.LifoQueue()
        self._open: set[socket.socket] = set()
        for _ in range(n_connections):
            self._free.put_nowait(None)

    @asynccontextmanager
    async def take(self) -> AsyncIterator[socket.socket]:
        """One connection, opened when needed; closed again when the block raises."""
        connection = await self._free.get()
        try:
            if connection is None:
                connection = await asyncio.to_thread(_connect, self._address)
                self._open.add(connection)
            yield connection
        except BaseException:
            if connection is not None:
                self._open.discard(connection)
                _shut(connection)
                connection = None
            raise
        finally:
            self._free.put_nowait(connection)

    def close(self) -> None:
        for connection in self._open:
            _shut(connection)
        self._open.clear()


class TcpSendPath:
    """Sends slices of one transfer over a receiver's data connections."""

    name = "tcp"

    def __init__(self, connections: TcpConnections, token: bytes, arena: memoryview) -> None:
        self._connections = connections
        self._token = token
        self._arena = arena

    async def send(self, batch: Sequence[SealedSlice]) -> None:
        for start in range(0, len(batch), MAX_SLICES):
            part = batch[start : start + MAX_SLICES]
            async with self._connections.take() as connection:
                work = asyncio.get_running_loop().run_in_executor(None, self._exchange, connection, part)
                try:
                    await asyncio.shield(work)
                except asyncio.CancelledError:
                    _shut(connection)  # ends the blocking call; the arena may not be read after we return
                    await asyncio.wait([work])
                    raise

    def _exchange(self, connection: socket.socket, batch: Sequence[SealedSlice]) -> None:
        pieces = [item.piece for item in batch]
        head = _HEAD.pack(_MAGIC, self._token, len(batch)) + b"".join(_entry(item) for item in batch)
        views = [self._arena[piece.offset : piece.offset + piece.size_bytes] for piece in pieces]
        try:
            _send_all(connection, [memoryview(head), *views])
            answer = connection.recv(1)
        except OSError as error:
            raise TransferError(f"tcp: {error}") from error
        if answer != _WRITTEN:
            raise FrameRefused("tcp: the receiver refused the slices" if answer else "tcp: the connection was closed")


def _entry(item: SealedSlice) -> bytes:
    span = item.piece.span
    flags = 0 if item.checksum is None else _HAS_CHECKSUM
    return _ENTRY.pack(span.logical, span.layer, span.n_layers, item.piece.size_bytes, flags, item.checksum or 0)


def _connect(address: tuple[str, int]) -> socket.socket:
    try:
        connection = socket.create_connection(address, timeout=_IO_TIMEOUT_S)
    except OSError as error:
        raise TransferError(f"tcp: cannot connect to {address[0]}:{address[1]}: {error}") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _send_all(connection: socket.socket, views: list[memoryview]) -> None:
    index = 0
    while index < len(views):
        sent = connection.sendmsg(views[index : index + _IOV_MAX])
        while index < len(views) and sent >= len(views[index]):
            sent -= len(views[index])
            index += 1
        if sent:
            views[index] = views[index][sent:]


def _shut(connection: socket.socket) -> None:
    """Close for good, also under a thread that is blocked in it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # the peer was faster
        log.debug("already_shut", error=str(error))
    connection.close()


# --- receiving --------------------------------------------------------------------------------------------------------


class Landings(Protocol):
    """What the listener asks the messenger, on the event loop."""

    async def begin(self, token: bytes, incoming: Sequence[Incoming]) -> list[Destination]:
        """Places for the slices that are new. Raises TransferError for a token or a slice that has no place."""

    async def end(self, token: bytes, destinations: Sequence[Destination], error: TransferError | None) -> None:
        """The writes that *begin* allowed are over."""


class TcpListener:
    """Accepts data connections and lands their frames in *arena*. ``port`` is the one really bound."""

    def __init__(self, host: str, port: int, arena: memoryview, landings: Landings) -> None:
        try:
            self._listener = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise MeshError(f"cannot listen on {host}:{port}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._arena = arena
        self._landings = landings
        self._loop = asyncio.get_running_loop()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name="tcp-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all connections. Call from the loop; their threads end on their own."""
        _shut(self._listener)
        for connection in list(self._connections):
            _shut(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                log.debug("listener_closed", error=str(error))
                return
            if len(self._connections) >= _MAX_CONNECTIONS:
                log.warning("tcp_connection_refused", peer=str(peer), open=len(self._connections))
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(connection, peer), name="tcp-data", daemon=True)
            self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket, peer: object) -> None:
        try:
            while self._frame(connection):
                pass
        except (OSError, TransferError) as error:
            log.warning("tcp_connection_ended", peer=str(peer), error=str(error)[:200])
        finally:
            self._connections.pop(connection, None)
            connection.close()

    def _frame(self, connection: socket.socket) -> bool:
        """Land one frame; False at an orderly end. Raises TransferError for bytes that are no frame."""
        head = _read(connection, _HEAD.size)
        if head is None:
            return False
        magic, token, n_slices = _HEAD.unpack(head)
        if magic != _MAGIC or not 0 < n_slices <= MAX_SLICES:
            raise TransferError("not a data frame")
        entries = _read(connection, n_slices * _ENTRY.size)
        if entries is None:
            raise TransferError("frame cut short")
        incoming = [_incoming(fields) for fields in _ENTRY.iter_unpack(entries)]
        destinations = self._ask(self._landings.begin(token, incoming))
        error = self._receive(connection, incoming, destinations)
        self._ask(self._landings.end(token, destinations, error))
        connection.sendall(_REFUSED if error else _WRITTEN)
        return True

    def _receive(
        self, connection: socket.socket, incoming: Sequence[Incoming], destinations: Sequence[Destination]
    ) -> TransferError | None:
        """Payload into its places; what went wrong, if anything.

        Bytes of slices that are here already are passed over.
        """
        places = {place.span: place for place in destinations}
        damaged: TransferError | None = None
        try:
            for item in incoming:
                place = places.get(item.span)
                if place is None:
                    _skip(connection, item.size_bytes)
                    continue
                target = self._arena[place.offset : place.offset + place.size_bytes]
                _read_into(connection, target)
                if item.checksum is not None and checksum(target) != item.checksum:
                    damaged = ChecksumMismatch(f"{item.span} arrived damaged")
        except OSError as error:
            return TransferError(f"tcp: {error}")
        return damaged

    def _ask(self, question: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(_IO_TIMEOUT_S)


def _incoming(fields: tuple[int, int, int, int, int, int]) -> Incoming:
    logical, layer, n_layers, size_bytes, flags, digest = fields
    return Incoming(
        span=SliceSpan(logical=logical, layer=layer, n_layers=n_layers),
        size_bytes=size_bytes,
        checksum=digest if flags & _HAS_CHECKSUM else None,
    )


def _read(connection: socket.socket, size: int) -> bytes | None:
    """Exactly *size* bytes, or None when the peer closed before the first."""
    data = bytearray(size)
    view = memoryview(data)
    got = connection.recv_into(view)
    if got == 0:
        return None
    _read_into(connection, view[got:])
    return bytes(data)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        got = connection.recv_into(view)
        if got == 0:
            raise ConnectionResetError("the connection was closed in the middle of a frame")
        view = view[got:]


def _skip(connection: socket.socket, size: int) -> None:
    scratch = memoryview(bytearray(min(size, 1 << 16)))
    while size:
        got = connection.recv_into(scratch[: min(size, len(scratch))])
        if got == 0:
            raise ConnectionResetError("the connection was closed in the middle of a frame")
        size -= got
