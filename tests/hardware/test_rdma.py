"""RDMA on real verbs: ``scripts/rdma-vm python -m pytest tests/hardware``."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic

import pytest

from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.errors import MooncakeError, TransferError
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.messenger.transports.rdma.api import Notice, RdmaAccess
from mooncake_mesh.messenger.transports.rdma.batch import Piece
from mooncake_proto.rdma import ConnectQp, NicKey, QpConnected, RdmaMemory
from tests.hardware import rdma_reason

rdma_reason.skip_module()

from mooncake_mesh.messenger.transports.rdma.engine import RdmaEngine  # noqa: E402  needs pyverbs
from mooncake_mesh.messenger.transports.rdma.memory import LocalMemory  # noqa: E402
from tests.hardware.rdma_peer import running_peer  # noqa: E402

pytestmark = [pytest.mark.hardware, pytest.mark.timeout(300)]

MiB = 1 << 20
ENOUGH_S = 60.0


class End:
    """An engine, its memory and what reached it."""

    def __init__(
        self, name: str, size_bytes: int, access: RdmaAccess, config: RdmaConfig, ends: dict[str, "End"]
    ) -> None:
        self.buffer = bytearray(size_bytes)
        self.notices: asyncio.Queue[Notice] = asyncio.Queue()
        self.asked = 0
        self.engine = RdmaEngine(
            config, engine_id=name, connect=self.connect, access=access, on_notice=self.notices.put_nowait
        )
        self.local: LocalMemory = self.engine.register(memoryview(self.buffer), access)
        self.memory = self.local.describe(name, name)
        self._ends = ends

    async def connect(self, owner: RdmaMemory, request: ConnectQp) -> QpConnected:
        self.asked += 1
        return self._ends[owner.engine].engine.accept(request)


@asynccontextmanager
async def two_ends(
    size_bytes: int, *, access: RdmaAccess = RdmaAccess.READ_WRITE, config: RdmaConfig | None = None
) -> AsyncIterator[tuple[End, End]]:
    ends: dict[str, End] = {}
    async with AsyncExitStack() as stack:
        for name in ("here", "there"):
            ends[name] = End(name, size_bytes, access, config or RdmaConfig(), ends)
            stack.callback(ends[name].engine.close)
        async with asyncio.timeout(ENOUGH_S):
            yield ends["here"], ends["there"]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def whole(size_bytes: int) -> list[Piece]:
    return [Piece(local_offset=0, remote_offset=0, size_bytes=size_bytes)]


def noise(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@pytest.mark.parametrize("size_bytes", [1, 4096, MiB + 77, 64 * MiB])
def test_what_is_written_and_read_is_the_same_byte_for_byte(size_bytes: int) -> None:
    async def test() -> None:
        async with two_ends(size_bytes) as (here, there):
            data = noise(size_bytes, seed=1)
            here.buffer[:] = data
            await here.engine.write(here.local, there.memory, whole(size_bytes))
            assert there.buffer == data
            here.buffer[:] = bytes(size_bytes)
            await here.engine.read(here.local, there.memory, whole(size_bytes))
            assert here.buffer == data
            assert here.asked == 1  # the queue pair is kept

    run(test)


def test_pieces_go_where_they_belong_and_nothing_else_changes() -> None:
    async def test() -> None:
        async with two_ends(MiB) as (here, there):
            here.buffer[:] = noise(MiB, seed=2)
            there.buffer[:] = before = noise(MiB, seed=3)
            pieces = [
                Piece(local_offset=i * 7000, remote_offset=MiB - (i + 1) * 9000, size_bytes=5000) for i in range(50)
            ]
            await here.engine.write(here.local, there.memory, pieces)
            expected = bytearray(before)
            for piece in pieces:
                expected[piece.remote_offset : piece.remote_offset + 5000] = here.buffer[
                    piece.local_offset : piece.local_offset + 5000
                ]
            assert there.buffer == expected

    run(test)


def test_a_notice_comes_after_the_bytes() -> None:
    async def test() -> None:
        async with two_ends(4 * MiB) as (here, there):
            here.buffer[:] = data = noise(4 * MiB, seed=4)
            for number in (7, 0xFFFFFFFF, *range(40)):  # more than there are receive requests
                await here.engine.write(here.local, there.memory, whole(4096), notice=number)
                assert await there.notices.get() == Notice(engine="here", number=number)
            await here.engine.write(here.local, there.memory, whole(4 * MiB), notice=5)
            await there.notices.get()
            assert there.buffer == data

    run(test)


def test_transfers_side_by_side_do_not_mix() -> None:
    async def test() -> None:
        async with two_ends(8 * MiB, config=RdmaConfig(slice_bytes=64 << 10, window=3)) as (here, there):
            there.buffer[:] = noise(8 * MiB, seed=5)
            parts = [[Piece(local_offset=i * MiB, remote_offset=(7 - i) * MiB, size_bytes=MiB)] for i in range(8)]
            await asyncio.gather(*(here.engine.read(here.local, there.memory, part) for part in parts))
            for i in range(8):
                assert here.buffer[i * MiB : (i + 1) * MiB] == there.buffer[(7 - i) * MiB : (8 - i) * MiB]
            assert len(here.engine.endpoints) == 1

    run(test)


def test_a_queue_pair_forced_into_error_recovers_on_the_next_transfer() -> None:
    async def test() -> None:
        async with two_ends(MiB) as (here, there):
            there.buffer[:] = noise(MiB, seed=6)
            await here.engine.read(here.local, there.memory, whole(4096))
            (endpoint,) = here.engine.endpoints
            endpoint.pair.break_off()
            await here.engine.read(here.local, there.memory, whole(MiB))
            assert here.buffer == there.buffer
            assert here.asked == 2
            assert [other.pair.qp_num for other in here.engine.endpoints] != [endpoint.pair.qp_num]

    run(test)


def test_the_other_ends_queue_pair_may_go_at_any_time() -> None:
    async def test() -> None:
        async with two_ends(MiB) as (here, there):
            there.buffer[:] = noise(MiB, seed=7)
            await here.engine.read(here.local, there.memory, whole(4096))
            request = ConnectQp(
                engine="here",
                nic=here.engine.nics[0].name,
                peer_nic=there.engine.nics[0].name,
                end=here.engine.endpoints[0].pair.end,
            )
            there.engine.accept(request)  # replaces, and so closes, the end that `here` is connected to
            await here.engine.read(here.local, there.memory, whole(MiB))
            assert here.buffer == there.buffer

    run(test)


def test_a_wrong_key_is_refused_and_the_next_transfer_works() -> None:
    async def test() -> None:
        async with two_ends(MiB) as (here, there):
            there.buffer[:] = noise(MiB, seed=8)
            wrong = tuple(NicKey(nic=key.nic, rkey=key.rkey ^ 0x1234) for key in there.memory.preferred)
            memory = RdmaMemory(
                engine="there",
                endpoint="there",
                address=there.memory.address,
                size_bytes=MiB,
                preferred=wrong,
                secondary=(),
            )
            with pytest.raises(TransferError, match="remote"):
                await here.engine.read(here.local, memory, whole(MiB))
            assert here.asked == 1  # a refusal is final: no other attempt
            await here.engine.read(here.local, there.memory, whole(MiB))
            assert here.buffer == there.buffer

    run(test)


def test_memory_for_reading_cannot_be_written() -> None:
    async def test() -> None:
        async with two_ends(MiB, access=RdmaAccess.READ) as (here, there):
            here.buffer[:] = noise(MiB, seed=9)
            with pytest.raises(TransferError, match="remote"):
                await here.engine.write(here.local, there.memory, whole(MiB))
            assert there.buffer == bytes(MiB)
            await here.engine.read(here.local, there.memory, whole(MiB))
            assert here.buffer == bytes(MiB)

    run(test)


def test_outside_the_memory_nothing_is_sent() -> None:
    async def test() -> None:
        async with two_ends(4096) as (here, there):
            for piece in (
                Piece(local_offset=0, remote_offset=1, size_bytes=4096),
                Piece(local_offset=1, remote_offset=0, size_bytes=4096),
                Piece(local_offset=-1, remote_offset=0, size_bytes=1),
            ):
                with pytest.raises(TransferError, match="outside"):
                    await here.engine.read(here.local, there.memory, [piece])
            assert here.asked == 0

    run(test)


def test_a_cancelled_transfer_writes_nothing_more() -> None:
    async def test() -> None:
        async with two_ends(32 * MiB) as (here, there):
            there.buffer[:] = b"x" * (32 * MiB)
            await here.engine.read(here.local, there.memory, whole(1))
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(here.engine.read(here.local, there.memory, whole(32 * MiB)))
                await asyncio.sleep(0)
                assert not here.engine.endpoints[0].is_idle
                reading.cancel()
            here.buffer[:] = bytes(32 * MiB)
            await here.engine.read(here.local, there.memory, [Piece(local_offset=0, remote_offset=0, size_bytes=1)])
            assert here.buffer[1:] == bytes(32 * MiB - 1)

    run(test)


def test_more_paths_than_queue_pairs_may_be_kept() -> None:
    """Several engines at the other end, one queue pair here: each transfer evicts the last one's."""

    async def test() -> None:
        ends: dict[str, End] = {}
        async with AsyncExitStack() as stack:
            for name in ("here", "one", "two", "three"):
                ends[name] = End(name, 4096, RdmaAccess.READ, RdmaConfig(max_queue_pairs=1), ends)
                stack.callback(ends[name].engine.close)
            here = ends.pop("here")
            for name in ("one", "two", "three", "one"):
                ends[name].buffer[:] = noise(4096, seed=ord(name[0]))
                await here.engine.read(here.local, ends[name].memory, whole(4096))
                assert here.buffer == ends[name].buffer
                assert len(here.engine.endpoints) == 1
            assert here.asked == 4

    run(test)


def test_a_peer_that_dies_ends_the_transfer(tmp_path: Path) -> None:
    """SIGKILL between two transfers: the second one fails for a reason, within the time of its attempts."""

    async def test() -> None:
        peers = Phonebook()

        async def connect(owner: RdmaMemory, request: ConnectQp) -> QpConnected:
            return await peers.get(owner.endpoint).call(request, QpConnected, timeout_s=2.0)

        engine = RdmaEngine(RdmaConfig(attempts=2), engine_id="here", connect=connect)
        buffer = bytearray(MiB)
        local = engine.register(memoryview(buffer))
        try:
            with running_peer(tmp_path, MiB) as peer:
                await engine.read(local, peer.memory, whole(MiB))
                peer.kill()
                began_s = monotonic()
                with pytest.raises(MooncakeError):
                    async with asyncio.timeout(ENOUGH_S):
                        await engine.read(local, peer.memory, whole(MiB))
                assert monotonic() - began_s < ENOUGH_S
                assert engine.endpoints == ()
        finally:
            peers.close()
            engine.close()

    run(test)


def test_descriptors_stay_flat() -> None:
    async def test() -> None:
        async with two_ends(4096) as (here, there):
            await here.engine.read(here.local, there.memory, whole(4096))
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(20):
                here.engine.endpoints[0].pair.break_off()
                await here.engine.read(here.local, there.memory, whole(4096))
            assert len(os.listdir("/proc/self/fd")) == before

    run(test)
