"""The arena: one node's block memory, shared by the processes of that node.

It is an anonymous memory file (memfd_create): it has no name in /dev/shm and lives exactly as long as somebody has it
open, so no crash can leave it behind. Its owner, the messenger, hands the descriptor to whoever connects to its Unix
socket (SCM_RIGHTS). The connection then stays open for the life of the process: the kernel closes it when the process
dies, however it dies, and that is the proof, needed before a dead writer's blocks may be given to somebody else, that
it can write no more. A process that is merely stalled keeps its connection and so its blocks.
"""

import asyncio
import gc
import mmap
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from mooncake_mesh.config import CommitKind, PagesKind
from mooncake_mesh.errors import MeshError, PeerUnreachable
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_proto.ids import Incarnation, InstanceId

log = structlog.get_logger(__name__)

_HELLO: Final = struct.Struct("<64s16s")
_WELCOME: Final = struct.Struct("<16sQ12s8s")
_CONNECT_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 1024
MAX_SOCKET_PATH_BYTES: Final = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has the arena mapped."""

    instance_id: InstanceId
    incarnation: Incarnation


class ArenaServer:
    """Hands out the arena on a Unix socket and reports the death of each holder."""

    def __init__(self, path: Path, arena: Arena, owner: Incarnation, *, on_gone: Callable[[Holder], None]) -> None:
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise MeshError(f"socket path {path} exceeds {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter run_dir")
        self.path = path
        self._arena = arena
        self._owner = owner
        self._on_gone = on_gone

    async def run(self) -> None:
        """Serve until cancelled; then the socket file is removed, unless the next owner has put its own there."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
            listener.bind(os.fspath(self.path))
            os.chmod(self.path, 0o600)
            inode = self.path.stat().st_ino
            listener.listen(_BACKLOG)
            try:
                async with asyncio.TaskGroup() as tasks:
                    while True:
                        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                        tasks.create_task(self._serve(connection))
            finally:
                if self.path.exists() and self.path.stat().st_ino == inode:
                    self.path.unlink()

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one process. It is reported gone when the kernel closed its end, not when we stop serving it."""
        with connection:
            holder = await self._welcome(connection)
            if holder is not None:
                await _until_closed(connection)
                self._on_gone(holder)

    async def _welcome(self, connection: socket.socket) -> Holder | None:
        """Hand the arena over. None when the process was refused or did not take it."""
        loop = asyncio.get_running_loop()
        try:
            connection.setblocking(False)
            if _peer_uid(connection) != os.getuid():
                log.warning("arena_refused", reason="another user")
                return None
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                hello = await loop.sock_recv(connection, _HELLO.size)
            if len(hello) != _HELLO.size:
                log.warning("arena_refused", reason="bad hello")
                return None
            socket.send_fds(connection, [_welcome(self._arena, self._owner)], [self._arena.fd])
        except (OSError, TimeoutError) as error:
            log.info("arena_refused", reason=str(error) or "no hello")
            return None
        return _holder(hello)


def _welcome(arena: Arena, owner: Incarnation) -> bytes:
    return _WELCOME.pack(owner.encode(), arena.size_bytes, arena.pages.value.encode(), arena.commit.value.encode())


async def _until_closed(connection: socket.socket) -> None:
    """Wait for the end of the other process' hold. Bytes from it mean nothing: it is alive."""
    try:
        while await asyncio.get_running_loop().sock_recv(connection, _HELLO.size):
            continue
    except OSError as error:
        log.info("arena_connection_ended", error=str(error))


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def _holder(hello: bytes) -> Holder:
    instance, incarnation = _HELLO.unpack(hello)
    return Holder(
        instance_id=InstanceId(instance.rstrip(b"\0").decode(errors="replace")),
        incarnation=Incarnation(incarnation.decode(errors="replace")),
    )


class BorrowedArena:
    """Somebody else's arena, mapped here. ``lost`` is set when its owner is gone (the memory stays readable).

    ``in_use`` counts the copies that read it; it must be 0 at :meth:`close`.
    """

    def __init__(self, arena: Arena, connection: socket.socket, owner: Incarnation) -> None:
        self._connection = connection
        self.arena = arena
        self.owner = owner
        self.in_use = 0
        self.lost = asyncio.Event()
        asyncio.get_running_loop().add_reader(connection, self._on_readable)

    def _on_readable(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection)
        self.lost.set()

    def close(self) -> None:
        """Unmap and tell the owner. Raises BufferError while slices of the view are in use."""
        try:
            self.arena.close()
        except BufferError:
            # An error that an engine raised may be in a cycle with the frames it came through, and their slices.
            gc.collect()
            self.arena.close()
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()


async def borrow_to_write(path: str, me: Holder) -> BorrowedArena:
    """Map the arena of one's own node. Raises PeerUnreachable."""
    return await _borrow(path, me, mmap.PROT_READ | mmap.PROT_WRITE)


async def borrow_to_read(path: str, me: Holder) -> BorrowedArena:
    """Map another node's arena; the mapping cannot be written through. Raises PeerUnreachable."""
    return await _borrow(path, me, mmap.PROT_READ)


async def _borrow(path: str, me: Holder, protection: int) -> BorrowedArena:
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, path)
            await loop.sock_sendall(connection, _HELLO.pack(me.instance_id.encode()[:64], me.incarnation.encode()))
            data, fd = await _receive_fd(connection)
            if len(data) != _WELCOME.size or fd is None:
                raise PeerUnreachable(f"arena socket {path}: refused")
    except (OSError, TimeoutError) as error:
        connection.close()
        raise PeerUnreachable(f"arena socket {path}: {error or 'no answer'}") from error
    except BaseException:
        connection.close()
        raise
    owner, size_bytes, pages, commit = _WELCOME.unpack(data)
    arena = Arena(
        fd,
        size_bytes,
        pages=PagesKind(pages.rstrip(b"\0").decode()),
        commit=CommitKind(commit.rstrip(b"\0").decode()),
        protection=protection,
    )
    return BorrowedArena(arena, connection, Incarnation(owner.decode()))


async def _receive_fd(connection: socket.socket) -> tuple[bytes, int | None]:
    """Wait until *connection* is readable, then take the message and its descriptor in one system call.

    The descriptor is not inherited by programs that this process starts: they would keep the arena alive.
    """
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    data, fds, _, _ = socket.recv_fds(connection, _WELCOME.size, 1)
    for fd in fds:
        os.set_inheritable(fd, False)  # recv_fds drops the flag that would do it
    return data, fds[0] if fds else None
