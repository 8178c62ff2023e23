"""Blocks between two real messengers, over each transport, compared byte for byte."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from bench.transfer_nodes import Node, hold, put

pytestmark = pytest.mark.mesh

BLOCK = 300_000
N_BLOCKS = 40


@pytest.fixture(autouse=True, scope="module")
def _context() -> Iterator[None]:
    """This process plays the workers: its own context goes with them."""
    yield
    zmq.Context.instance().term()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_blocks_arrive_whole(tmp_path: Path, transport: str) -> None:
    """One, a few, all blocks of an arena in one transfer, then many transfers at once."""

    async def run() -> None:
        nodes = [Node(name, tmp_path, transport, N_BLOCKS * BLOCK) for name in ("a", "b")]
        try:
            for node in nodes:
                await node.attach(BLOCK)
            a, b = nodes
            a.content[:] = np.frombuffer(os.urandom(N_BLOCKS * BLOCK), np.uint8).reshape(N_BLOCKS, BLOCK)
            for n_blocks in (1, 3, N_BLOCKS):
                b.content[:] = 0
                await put(a, b, n_blocks)
                assert len(_arrived(a, b)) == n_blocks
            b.content[:] = 0
            jobs = [await hold(a, 1) for _ in range(N_BLOCKS)]
            await asyncio.gather(*[put(a, b, 1, job) for job in jobs])
            assert len(_arrived(a, b)) == N_BLOCKS
        finally:
            for node in nodes:
                node.close()

    asyncio.run(run())


def _arrived(a: Node, b: Node) -> set[bytes]:
    """Contents of the blocks that B has now. Each is one of A's, whole."""
    found = {row.tobytes() for row in b.content if row.any()}
    assert found <= {row.tobytes() for row in a.content}
    return found
