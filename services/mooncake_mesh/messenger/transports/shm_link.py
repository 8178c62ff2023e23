"""Shared memory as a link: the receiver maps the sender's memory and copies what heads announce (see frames.py).

The sender's memory is a memory file; its descriptor travels with the hello over a Unix socket (SCM_RIGHTS), to
processes of the same user only. The receiver maps it read-only. Copies run on two threads and release the GIL
(``np.copyto``; assigning to a memoryview would hold it).
"""

import asyncio
import mmap
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import structlog

from mooncake_mesh.errors import MeshError
from mooncake_mesh.messenger.transports import frames
from mooncake_mesh.messenger.transports.api import Landings, LinkLost
from mooncake_mesh.messenger.transports.door import Door, Hear
from mooncake_mesh.messenger.transports.frames import Carriage, FrameError, Hello, Kind
from mooncake_mesh.messenger.transports.inbound import InboundLink
from mooncake_mesh.messenger.transports.inbound_frame import InboundFrame
from mooncake_mesh.messenger.transports.link_table import LinkTable
from mooncake_mesh.messenger.transports.paths import Connections, Sockets
from mooncake_mesh.messenger.transports.streams import receive_exactly

log = structlog.get_logger(__name__)

_CONNECT_TIMEOUT_S: Final = 5.0
_COPY_THREADS: Final = 2


def shm_connections(path: Path, memory_fd: int) -> Connections:
    """Connections to the ShmListener at *path*, for slices of the memory file *memory_fd*."""
    sender = secrets.token_bytes(16)
    return Connections("shm", os.fspath(path), partial(_open, path, sender, memory_fd))


def _open(path: Path, sender: bytes, memory_fd: int, epoch: int) -> Sockets:
    hello = Hello(kind=Kind.CONTROL, sender=sender, epoch=epoch, lane=0, n_lanes=_COPY_THREADS)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        connection.connect(os.fspath(path))
        socket.send_fds(connection, [hello.pack()], [memory_fd])
        if receive_exactly(connection, 1) != frames.WELCOME:
            raise ConnectionRefusedError("the receiver answered what no receiver would")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection, []


class ShmListener:
    """Accepts senders of this host and lands their slices in *memory*. Create on the loop; *path* must be free."""

    def __init__(self, path: Path, memory: memoryview, landings: Landings) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(path))
        except OSError as error:
            listener.close()
            raise MeshError(f"cannot listen on {path}: {error}") from error
        os.chmod(path, 0o600)
        listener.listen(64)
        self.path = path
        self._memory = memory
        self._landings = landings
        self._loop = asyncio.get_running_loop()
        self._links = LinkTable()
        self._door = Door("shm", listener, self._links, self._meet)

    @property
    def n_connections(self) -> int:
        return self._door.n_connections

    async def close(self) -> None:
        """End all links and remove the socket. Returns when no thread writes to the memory any more."""
        self.path.unlink(missing_ok=True)
        await self._door.close()

    def _meet(self, connection: socket.socket) -> Hear:
        if _peer_uid(connection) != os.getuid():
            raise FrameError("of another user")
        return self._hear

    def _hear(self, connection: socket.socket) -> Callable[[], None]:
        data, fds, _, _ = socket.recv_fds(connection, frames.HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(data) < frames.HELLO.size or len(fds) != 1:
                raise FrameError("closed, or cut short, before the hello and its descriptor")
            hello = frames.unpack_hello(data)
            return partial(self._introduce, connection, hello, _map_read_only(fds[0]))
        finally:
            for fd in fds:
                os.close(fd)

    def _introduce(self, connection: socket.socket, hello: Hello, source: mmap.mmap) -> None:
        def make(after: "asyncio.Future[None] | None") -> InboundLink:
            return InboundLink(hello, self._memory, self._landings, self._loop, Carriage.MAPPED, after)

        link = self._links.introduce(hello.sender, make)
        link.when_former_ended(lambda: self._welcome(connection, link, source))

    def _welcome(self, connection: socket.socket, link: InboundLink, source: mmap.mmap) -> None:
        try:
            link.start(connection)
            for index in range(link.hello.n_lanes):
                link.add_lane(index, MappedLane(source, connection))
            connection.send(frames.WELCOME)
        except (OSError, FrameError) as error:
            log.info("shm_greeting_failed", error=str(error))
            link.die(str(error))


class MappedLane:
    """Copies out of the sender's memory. ``control`` tells whether the sender still stands by what was copied."""

    def __init__(self, source: mmap.mmap, control: socket.socket) -> None:
        self._source = np.frombuffer(source, np.uint8)
        self._hung_up = select.poll()
        self._hung_up.register(control, select.POLLRDHUP)

    def fill(self, frame: InboundFrame, start: int, stop: int) -> None:
        """As :class:`Lane`."""
        for piece, first, last in frame.parts(start, stop):
            if piece.source_offset + piece.incoming.size_bytes > len(self._source):
                raise FrameError("a slice outside the sender's memory")
            if piece.target is not None:
                target = np.frombuffer(piece.target, np.uint8)
                np.copyto(target[first:last], self._source[piece.source_offset + first : piece.source_offset + last])
        if self._hung_up.poll(0):  # after the copy: memory of a sender that has let go may have changed meanwhile
            frame.error = frame.error or LinkLost("the sender has let go")

    def shut(self) -> None:
        """A copy never blocks."""

    def close(self) -> None:
        """The mapping goes with the last lane that has it."""


def _map_read_only(fd: int) -> mmap.mmap:
    """All of the memory file. Raises OSError, or ValueError for an empty one."""
    return mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
