"""Handing blocks over without moving a byte: the reader uses them in place, in the owner's memory.

What travels, over a Unix socket (SOCK_SEQPACKET) that both ends have already, is (offset, length, generation) of each
block; a batch of any size costs one message there and one back, when the reader is done. The owner keeps the blocks
until then. It may take one back at any time by advancing its generation in a table that both have mapped: the reader
looks before and after it uses a block, and drops what it made of one that was taken back.

::

    set-up   owner → reader   "MKH1" | bytes of memory | blocks | bytes of a block (u64), with the descriptors of memory
                              and table (SCM_RIGHTS)
    hand     owner → reader   batch (u32) | number of blocks (u32) | each: offset, length, generation (u64)
    release  reader → owner   batch (u32)
"""

import asyncio
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.errors import SliceLost, TransferError
from mooncake_mesh.messenger.transports.api import LinkLost

_MAGIC: Final = b"MKH1"
_SET_UP: Final = struct.Struct("<4sQQQ")
_HEAD: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<QQQ")
_RELEASE: Final = struct.Struct("<I")
_GENERATION_BYTES: Final = 8
MAX_BLOCKS: Final = 4096
_LARGEST: Final = _HEAD.size + MAX_BLOCKS * _ENTRY.size


class Generations:
    """A generation for each block, in a memory file that readers map too. Only the owner advances them."""

    def __init__(self, fd: int, n_blocks: int, *, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> None:
        self.fd = fd
        self.n_blocks = n_blocks
        self._map = mmap.mmap(fd, n_blocks * _GENERATION_BYTES, flags=mmap.MAP_SHARED, prot=protection)
        self._table = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, n_blocks: int) -> "Generations":
        fd = os.memfd_create("mooncake-generations", os.MFD_CLOEXEC)
        os.ftruncate(fd, n_blocks * _GENERATION_BYTES)
        return cls(fd, n_blocks)

    def of(self, blocks: Sequence[int]) -> list[int]:
        """Raises IndexError for what is no block."""
        table = self._table
        return [table[block] for block in blocks]

    def advance(self, block: int) -> None:
        """Take *block* back from whoever has it. Do so before its bytes change."""
        self._table[block] += 1

    def close(self) -> None:
        self._table.release()
        self._map.close()
        os.close(self.fd)


class HandOffOwner:
    """The end that has the memory. Create on the loop; :meth:`close` leaves *connection* to its owner."""

    def __init__(
        self, connection: socket.socket, memory_fd: int, size_bytes: int, block_bytes: int, generations: Generations
    ) -> None:
        self._connection = connection
        self._block_bytes = block_bytes
        self._generations = generations
        self._loop = asyncio.get_running_loop()
        self._next_batch = 0
        self._handed: dict[int, asyncio.Future[None]] = {}
        set_up = _SET_UP.pack(_MAGIC, size_bytes, generations.n_blocks, block_bytes)
        socket.send_fds(connection, [set_up], [memory_fd, generations.fd])
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read)

    def hand(self, blocks: Sequence[int]) -> asyncio.Future[None]:
        """Hand *blocks* over; the future is done when the reader has released them, or raises LinkLost.

        Raises TransferError when the reader is too slow to take more, or there are more than MAX_BLOCKS.
        """
        if not 0 < len(blocks) <= MAX_BLOCKS:
            raise TransferError(f"a batch has 1 to {MAX_BLOCKS} blocks, not {len(blocks)}")
        batch, size = self._next_batch, self._block_bytes
        fields = [
            field
            for block, generation in zip(blocks, self._generations.of(blocks), strict=True)
            for field in (block * size, size, generation)
        ]
        try:
            self._connection.send(_HEAD.pack(batch, len(blocks)) + struct.pack(f"<{len(fields)}Q", *fields))
        except OSError as error:
            raise TransferError(f"hand-off: {error}") from error
        self._next_batch = (batch + 1) & 0xFFFFFFFF
        released = self._handed[batch] = self._loop.create_future()
        return released

    def close(self) -> None:
        self._loop.remove_reader(self._connection)
        self._end("closed")

    def _read(self) -> None:
        try:
            data = self._connection.recv(_RELEASE.size)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(str(error))
            return
        if len(data) != _RELEASE.size:
            self._lost("the reader has gone")
            return
        (batch,) = _RELEASE.unpack(data)
        released = self._handed.pop(batch, None)
        if released is not None and not released.done():
            released.set_result(None)

    def _lost(self, why: str) -> None:
        self._loop.remove_reader(self._connection)
        self._end(why)

    def _end(self, why: str) -> None:
        for released in self._handed.values():
            if not released.done():
                released.set_exception(LinkLost(f"hand-off: {why}"))
                released.exception()  # who handed it over may not be interested
        self._handed.clear()


class Handed:
    """A batch that the reader has for now: blocks ``offsets`` .. ``+ block_bytes`` of the owner's memory, read-only."""

    def __init__(self, reader: "HandOffReader", batch: int, offsets: Sequence[int], generations: Sequence[int]) -> None:
        self.offsets = offsets
        self.block_bytes = reader.block_bytes
        self._reader = reader
        self._batch = batch
        self._generations = list(generations)

    def view(self, index: int) -> memoryview:
        """The bytes of one block. Let go of it before :meth:`release`."""
        start = self.offsets[index]
        return self._reader.memory[start : start + self.block_bytes]

    def check(self) -> None:
        """Raises SliceLost when the owner has taken a block back. Call it after using them: only then it says all."""
        if self._reader.generations_at(self.offsets) != self._generations:
            raise SliceLost("a block was taken back")

    def release(self) -> None:
        """Give the batch back. The owner may reuse its blocks from now on."""
        self._reader.release(self._batch)


class HandOffReader:
    """The end that uses the memory in place. *on_handed* gets each batch, on the loop; *on_gone* the end."""

    def __init__(
        self, connection: socket.socket, on_handed: Callable[[Handed], None], on_gone: Callable[[], None]
    ) -> None:
        """Waits for the owner's set-up, so create it on a thread or once the message is there. Raises LinkLost."""
        self._connection = connection
        self._on_handed = on_handed
        self._on_gone = on_gone
        self._loop: asyncio.AbstractEventLoop | None = None
        set_up = _receive_set_up(connection)
        whole_bytes = os.fstat(set_up.memory_fd).st_size  # of 2 MiB pages a part cannot be unmapped
        self._map = mmap.mmap(set_up.memory_fd, whole_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        os.close(set_up.memory_fd)
        self._generations = Generations(set_up.generations_fd, set_up.n_blocks, protection=mmap.PROT_READ)
        self.memory = memoryview(self._map)[: set_up.size_bytes]
        self.block_bytes = set_up.block_bytes

    def start(self) -> None:
        """Take batches from now on; on the loop."""
        self._loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        self._loop.add_reader(self._connection, self._read)

    def generations_at(self, offsets: Sequence[int]) -> list[int]:
        return self._generations.of([offset // self.block_bytes for offset in offsets])

    def release(self, batch: int) -> None:
        self._connection.send(_RELEASE.pack(batch))

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._connection)
            self._loop = None
        self.memory.release()
        self._map.close()
        self._generations.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(_LARGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not self._hand_on(data):
            if self._loop is not None:
                self._loop.remove_reader(self._connection)
                self._loop = None
            self._on_gone()

    def _hand_on(self, data: bytes) -> bool:
        """False at the end of the connection, and for what no owner would say."""
        n_blocks, rest = divmod(len(data) - _HEAD.size, _ENTRY.size)
        if n_blocks < 1 or rest:
            return False
        batch, announced = _HEAD.unpack_from(data)
        fields = struct.unpack_from(f"<{3 * n_blocks}Q", data, _HEAD.size)
        offsets, sizes, generations = fields[0::3], fields[1::3], fields[2::3]
        last = min(len(self.memory), self._generations.n_blocks * self.block_bytes) - self.block_bytes
        if announced != n_blocks or sizes.count(self.block_bytes) != n_blocks or max(offsets) > last:
            return False
        self._on_handed(Handed(self, batch, offsets, generations))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _SetUp:
    size_bytes: int
    n_blocks: int
    block_bytes: int
    memory_fd: int
    generations_fd: int


def _receive_set_up(connection: socket.socket) -> _SetUp:
    try:
        data, fds, _, _ = socket.recv_fds(connection, _SET_UP.size, 2, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise LinkLost(f"hand-off: {error}") from error
    if len(data) == _SET_UP.size and len(fds) == 2:
        magic, size_bytes, n_blocks, block_bytes = _SET_UP.unpack(data)
        if magic == _MAGIC and block_bytes and os.fstat(fds[0]).st_size >= size_bytes:
            return _SetUp(
                size_bytes=size_bytes,
                n_blocks=n_blocks,
                block_bytes=block_bytes,
                memory_fd=fds[0],
                generations_fd=fds[1],
            )
    for fd in fds:
        os.close(fd)
    raise LinkLost("hand-off: not an owner of this protocol")
