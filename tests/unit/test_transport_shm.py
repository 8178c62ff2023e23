"""Shared memory as a link, over real sockets and memory files."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from mooncake_mesh.errors import ChecksumMismatch
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.messenger.transports import frames
from mooncake_mesh.messenger.transports.api import LinkLost, SealedSlice, SliceRefused
from mooncake_mesh.messenger.transports.frames import Carriage, Hello, Kind, Verdict
from mooncake_mesh.messenger.transports.paths import Connections, LinkPath
from mooncake_mesh.messenger.transports.shm_link import ShmListener, shm_connections
from mooncake_mesh.messenger.transports.streams import receive_exactly
from mooncake_mesh.messenger.transports.windows import slot_slice
from tests.unit.transport_doubles import RecordingWindows

MiB = 1 << 20


@dataclass
class Pair:
    source: memoryview
    target: bytearray
    windows: RecordingWindows
    listener: ShmListener
    connections: Connections

    def path(self, token: bytes) -> LinkPath:
        return LinkPath(self.connections, token, self.source)

    def slices(self, slot_bytes: int, n: int) -> list[SealedSlice]:
        return [slot_slice(self.source, i, i * slot_bytes, slot_bytes) for i in range(n)]


@asynccontextmanager
async def shm_pair(folder: Path, size_bytes: int) -> AsyncIterator[Pair]:
    arena = Arena.create(size_bytes)
    arena.view[:] = os.urandom(size_bytes)
    target = bytearray(size_bytes)
    windows = RecordingWindows(size_bytes)
    listener = ShmListener(folder / "kv", memoryview(target), windows)
    connections = shm_connections(listener.path, arena.fd)
    try:
        yield Pair(arena.view, target, windows, listener, connections)
    finally:
        connections.close()
        await listener.close()
        assert not listener.path.exists()


@pytest.mark.parametrize("slot_bytes", [1, 4096, frames.INLINE_BYTES + 1, 777_777, 5 * MiB])
def test_bytes_arrive_in_their_slots(tmp_path: Path, slot_bytes: int) -> None:
    async def run() -> None:
        async with shm_pair(tmp_path, 3 * slot_bytes) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=slot_bytes, n_slots=3)
            await pair.path(token).send(pair.slices(slot_bytes, 3))
            assert pair.target == pair.source

    asyncio.run(run())


def test_many_small_slices(tmp_path: Path) -> None:
    async def run() -> None:
        async with shm_pair(tmp_path, 300 * 2000) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=300, n_slots=2000)
            await pair.path(token).send(pair.slices(300, 2000))
            assert pair.target == pair.source

    asyncio.run(run())


def test_refusal_and_damage_leave_the_link_standing(tmp_path: Path) -> None:
    async def run() -> None:
        async with shm_pair(tmp_path, 3 * MiB) as pair:
            with pytest.raises(SliceRefused):
                await pair.path(b"?" * 16).send(pair.slices(MiB, 1))
            token = pair.windows.open(first_byte=0, slot_bytes=3 * MiB, n_slots=1)
            batch = pair.slices(3 * MiB, 1)
            pair.source[MiB] ^= 1
            with pytest.raises(ChecksumMismatch):
                await pair.path(token).send(batch)
            pair.source[MiB] ^= 1
            await pair.path(token).send(batch)
            assert pair.target == pair.source
            assert pair.listener.n_connections == 3  # the socket and two threads

    asyncio.run(run())


def test_a_cancelled_send_returns_when_the_receiver_reads_no_more(tmp_path: Path) -> None:
    async def run() -> None:
        async with shm_pair(tmp_path, 16 * MiB) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=16 * MiB, n_slots=1)
            batch = [slot_slice(pair.source, 0, 0, 16 * MiB, seal=False)]
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(pair.path(token).send(batch))
                await pair.windows.first_begun.wait()
                sending.cancel()
                await asyncio.wait([sending])
            await pair.windows.revoke(token)
            assert len(pair.windows.ends) == 1
            if pair.windows.ends == [None]:
                assert pair.target == pair.source

    asyncio.run(run())


@pytest.mark.parametrize("passes_fd", [True, False])
def test_a_stranger_is_shown_the_door(tmp_path: Path, passes_fd: bool) -> None:
    async def run() -> None:
        async with shm_pair(tmp_path, 1000) as pair:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(pair.listener.path))
                if passes_fd:
                    hello = Hello(kind=Kind.CONTROL, sender=b"s" * 16, epoch=1, lane=0, n_lanes=1)
                    socket.send_fds(stranger, [hello.pack()], [stranger.fileno()])
                else:
                    stranger.sendall(b"hello? " * 20)
                stranger.settimeout(10)
                with suppress(ConnectionResetError):
                    assert await asyncio.to_thread(stranger.recv, 1) == b""
            token = pair.windows.open(first_byte=0, slot_bytes=1000, n_slots=1)
            await pair.path(token).send(pair.slices(1000, 1))
            assert pair.target == pair.source

    asyncio.run(run())


def test_a_slice_outside_the_senders_memory_ends_the_link(tmp_path: Path) -> None:
    async def run() -> None:
        async with shm_pair(tmp_path, MiB) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=1)
            control = await asyncio.to_thread(_say_hello, pair.listener.path, MiB // 2)
            head = frames.HEAD.pack(7, token, 1, Carriage.MAPPED, MiB)
            control.sendall(head + frames.ENTRY.pack(0, 0, 1, MiB, 0, 0) + frames.OFFSET.pack(0))
            answer = await asyncio.to_thread(control.recv, 100)
            assert answer in (b"", frames.ACK.pack(7, Verdict.REFUSED))
            await pair.windows.revoke(token)
            assert [type(error) for error in pair.windows.ends] == [LinkLost]
            control.close()

    asyncio.run(run())


def _say_hello(path: Path, size_bytes: int) -> socket.socket:
    memory = Arena.create(size_bytes)
    control = socket.socket(socket.AF_UNIX)
    control.settimeout(10)
    control.connect(str(path))
    hello = Hello(kind=Kind.CONTROL, sender=b"s" * 16, epoch=1, lane=0, n_lanes=1)
    socket.send_fds(control, [hello.pack()], [memory.fd])
    assert receive_exactly(control, 1) == frames.WELCOME
    memory.close()
    return control


def test_writes_of_a_sender_that_has_let_go_do_not_count(tmp_path: Path) -> None:
    """The sender hangs up with a head on the way: whatever is copied then may be anything, and is not reported."""

    async def run() -> None:
        async with shm_pair(tmp_path, MiB) as pair:
            token = pair.windows.open(first_byte=0, slot_bytes=MiB, n_slots=1)
            control = await asyncio.to_thread(_say_hello, pair.listener.path, MiB)
            control.sendall(
                frames.HEAD.pack(0, token, 1, Carriage.MAPPED, MiB)
                + frames.ENTRY.pack(0, 0, 1, MiB, 0, 0)
                + frames.OFFSET.pack(0)
            )
            control.close()  # before the receiver's loop has run at all
            while not pair.windows.ends:
                await pair.windows.ended.wait()
            assert [type(error) for error in pair.windows.ends] == [LinkLost]

    asyncio.run(run())
