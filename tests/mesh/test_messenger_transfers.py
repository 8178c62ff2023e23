"""Blocks between two real messengers, over each transport, compared byte for byte."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from bench.transfer_nodes import Node, hold, landed, put
from mooncake_mesh.errors import RemoteFailure
from tests.mesh.ports import held_port
from tests.unit.transport_doubles import Relay

pytestmark = pytest.mark.mesh

BLOCK = 300_000
N_BLOCKS = 40


@pytest.fixture(autouse=True, scope="module")
def _context() -> Iterator[None]:
    """This process plays the workers: its own context goes with them."""
    yield
    zmq.Context.instance().term()


@pytest.mark.parametrize("transport", ["tcp", "tcp+tls", "shm"])
def test_blocks_arrive_whole(tmp_path: Path, transport: str) -> None:
    """One, a few, all blocks of an arena in one transfer, then many transfers at once."""

    async def run() -> None:
        async with _nodes(tmp_path, [("a", transport, {}), ("b", transport, {})]) as (a, b):
            a.content[:] = np.frombuffer(os.urandom(N_BLOCKS * BLOCK), np.uint8).reshape(N_BLOCKS, BLOCK)
            for n_blocks in (1, 3, N_BLOCKS):
                b.content[:] = 0
                await put(a, b, n_blocks)
                assert len(_arrived(a, b)) == n_blocks
            b.content[:] = 0
            jobs = [await hold(a, 1) for _ in range(N_BLOCKS)]
            async with AsyncExitStack() as kept:  # a block of B that one of them gave back could be another's too
                transfers = [landed(a, b, 1, job) for job in jobs]
                await asyncio.gather(*[kept.enter_async_context(transfer) for transfer in transfers])
                assert len(_arrived(a, b)) == N_BLOCKS

    asyncio.run(run())


@pytest.mark.parametrize("transport", ["tcp", "tcp+tls"])
def test_who_taps_the_network_sees_kv_only_where_it_is_not_encrypted(tmp_path: Path, transport: str) -> None:
    """Without TLS the tap finds the blocks, so it would find them with TLS too."""

    async def run(relay: Relay) -> None:
        reached = {"data-port": relay.port_behind, "advertise-data": f"127.0.0.1:{relay.port}"}
        async with _nodes(tmp_path, [("a", transport, {}), ("b", transport, reached)]) as (a, b):
            a.content[:] = np.frombuffer(os.urandom(N_BLOCKS * BLOCK), np.uint8).reshape(N_BLOCKS, BLOCK)
            await put(a, b, 10)
            arrived = _arrived(a, b)
        assert len(arrived) == 10
        assert len(relay.seen) > 10 * BLOCK
        tapped = [block for block in arrived if any(block[at : at + 64] in relay.seen for at in range(0, BLOCK, 9000))]
        assert len(tapped) == (10 if transport == "tcp" else 0)

    relay = Relay()
    try:
        with held_port() as holder:
            relay.port_behind = holder.getsockname()[1]
            asyncio.run(run(relay))
    finally:
        relay.close()


@pytest.mark.parametrize(("sends", "takes"), [("tcp", "tcp+tls"), ("tcp+tls", "tcp")])
def test_nodes_that_do_not_both_encrypt_say_so_and_nothing_else_is_disturbed(
    tmp_path: Path, sends: str, takes: str
) -> None:
    async def run() -> None:
        async with _nodes(tmp_path, [("a", sends, {}), ("b", takes, {}), ("c", takes, {})]) as (a, b, c):
            c.content[:] = np.frombuffer(os.urandom(N_BLOCKS * BLOCK), np.uint8).reshape(N_BLOCKS, BLOCK)
            b.content[:] = 0
            for _ in range(2):
                with pytest.raises(RemoteFailure, match=rf"a offers {re.escape(sends)}, b takes {re.escape(takes)}$"):
                    await put(a, b, 3)
                await put(c, b, 1)
            assert len(_arrived(c, b)) in (1, 2)
            await put(c, b, N_BLOCKS)  # so what failed holds no block of B

    asyncio.run(run())


@asynccontextmanager
async def _nodes(folder: Path, settings: Sequence[tuple[str, str, Mapping[str, object]]]) -> AsyncIterator[list[Node]]:
    nodes = [Node(name, folder, transport, N_BLOCKS * BLOCK, flags) for name, transport, flags in settings]
    try:
        for node in nodes:
            await node.attach(BLOCK)
        yield nodes
    finally:
        for node in nodes:
            node.close()


def _arrived(a: Node, b: Node) -> set[bytes]:
    """Contents of the blocks that B has now. Each is one of A's, whole."""
    found = {row.tobytes() for row in b.content if row.any()}
    assert found <= {row.tobytes() for row in a.content}
    return found
