"""Blocks handed over in place, between the two ends of a socket pair."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from mooncake_mesh.errors import SliceLost, TransferError
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.messenger.transports.api import LinkLost
from mooncake_mesh.messenger.transports.handoff import MAX_BLOCKS, Generations, Handed, HandOffOwner, HandOffReader

BLOCK = 1000
N_BLOCKS = 5000


@dataclass
class Ends:
    arena: Arena
    generations: Generations
    owner: HandOffOwner
    reader: HandOffReader
    owner_socket: socket.socket
    reader_socket: socket.socket
    handed: asyncio.Queue[Handed | None]

    def content(self, block: int) -> bytes:
        return bytes(self.arena.view[block * BLOCK : (block + 1) * BLOCK])


@contextmanager
def both_ends() -> Iterator[Ends]:
    arena = Arena.create(BLOCK * N_BLOCKS)
    arena.view[: 100 * BLOCK] = os.urandom(100 * BLOCK)
    generations = Generations.create(N_BLOCKS)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handed: asyncio.Queue[Handed | None] = asyncio.Queue()
    owner = HandOffOwner(near, arena.fd, arena.size_bytes, BLOCK, generations)
    reader = HandOffReader(far, handed.put_nowait, lambda: handed.put_nowait(None))
    reader.start()
    try:
        yield Ends(arena, generations, owner, reader, near, far, handed)
    finally:
        owner.close()
        reader.close()
        near.close()
        far.close()
        generations.close()
        arena.close()


@pytest.mark.parametrize("blocks", [[3], [9, 1, 4], [*range(100)], [*range(MAX_BLOCKS)]])
def test_the_reader_sees_the_owners_bytes_in_place(blocks: list[int]) -> None:
    async def run() -> None:
        with both_ends() as ends:
            released = ends.owner.hand(blocks)
            handed = await ends.handed.get()
            assert handed is not None
            assert [bytes(handed.view(i)) for i in range(len(blocks))] == [ends.content(block) for block in blocks]
            with pytest.raises(TypeError):
                handed.view(0)[0] = 1
            handed.check()
            assert not released.done()
            handed.release()
            await released

    asyncio.run(run())


def test_a_block_taken_back_is_noticed() -> None:
    async def run() -> None:
        with both_ends() as ends:
            ends.owner.hand([1, 2])
            handed = await ends.handed.get()
            assert handed is not None
            ends.generations.advance(2)
            with pytest.raises(SliceLost):
                handed.check()
            ends.owner.hand([1, 2])
            again = await ends.handed.get()
            assert again is not None
            again.check()

    asyncio.run(run())


@pytest.mark.parametrize("n", [0, MAX_BLOCKS + 1])
def test_a_batch_has_its_limits(n: int) -> None:
    async def run() -> None:
        with both_ends() as ends, pytest.raises(TransferError):
            ends.owner.hand([0] * n)

    asyncio.run(run())


def test_a_reader_that_goes_gives_all_back() -> None:
    async def run() -> None:
        with both_ends() as ends:
            released = ends.owner.hand([1])
            ends.reader_socket.shutdown(socket.SHUT_RDWR)
            with pytest.raises(LinkLost):
                await released

    asyncio.run(run())


def test_a_reader_that_takes_nothing_is_an_error() -> None:
    async def run() -> None:
        with both_ends() as ends:
            loop = asyncio.get_running_loop()
            loop.remove_reader(ends.reader_socket)
            for _ in range(10_000):
                try:
                    ends.owner.hand([*range(MAX_BLOCKS)])
                except TransferError:
                    return
            pytest.fail("ten thousand batches found room in a socket")

    asyncio.run(run())


@pytest.mark.parametrize(
    "nonsense",
    [b"?", b"\0" * 33, (1).to_bytes(8, "little") + (BLOCK * N_BLOCKS).to_bytes(8, "little") * 3, b"\0" * 32],
)
def test_nonsense_ends_the_hand_off(nonsense: bytes) -> None:
    async def run() -> None:
        with both_ends() as ends:
            ends.owner_socket.send(nonsense)
            assert await ends.handed.get() is None

    asyncio.run(run())


def test_a_stranger_is_not_believed() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        near.send(b"MKH1 but no descriptors")
        with pytest.raises(LinkLost):
            HandOffReader(far, lambda _: None, lambda: None)
