"""Two real messengers and their pools: ``python -m bench.transfer_messengers TRANSPORT CHECKSUM``.

This process plays the workers of both nodes. Ops: ``put`` moves blocks that node A holds into blocks reserved on node B
(as a prefill instance does), ``get`` lets node B fetch sealed blocks of node A (as a prefix hit elsewhere does); a call
ends when all bytes are in B's pool, verified where CHECKSUM is not none and, for ``get``, findable there.
``ssd-get`` is ``get`` of blocks that A has on its SSD alone, read past the page cache. ``singly`` puts the blocks of a
call as so many transfers at once. ``start`` is the life of a messenger from its process to a mapped arena of
``size_bytes``; ``map`` is the last part of it alone, for an arena that has been touched: registration and mapping.
"""

import asyncio
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Final

import uvloop

from bench.transfer_child import Answer, Question, give, read_question, ready, timed_async
from bench.transfer_nodes import Node, fill, get, hold, put
from mooncake_proto.ids import BlockKey, JobId

_START_BLOCK_BYTES: Final = 1 << 20
_ARENA_BYTES: Final = 256 << 20
_LEAST_BLOCKS: Final = 64
_MOST_BLOCKS: Final = 1024
_SSD_ARENA_BYTES: Final = 128 << 20
_ON_SSD_BYTES: Final = 512 << 20
_FILLED_AT_ONCE: Final = 16


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
        uvloop.run(_Pools(Path(folder), sys.argv[1], sys.argv[2]).answer())


class _Pools:
    """Pairs of messengers, one for each size of block, made when first asked for."""

    def __init__(self, folder: Path, transport: str, checksum: str) -> None:
        self._folder = folder
        self._transport = transport
        self._flags = {"checksum": checksum}
        self._pairs: dict[int, tuple[Node, Node]] = {}
        self._ssd_pairs: dict[int, tuple[Node, Node, list[BlockKey]]] = {}

    async def answer(self) -> None:
        ready()
        try:
            while (question := await asyncio.to_thread(read_question)) is not None:
                give(await self._measure(question))
        finally:
            for node in itertools.chain(*self._pairs.values(), *(pair[:2] for pair in self._ssd_pairs.values())):
                node.close()

    async def _measure(self, question: Question) -> Answer:
        match question.op:
            case "start":
                return await _measure_start(question, self._folder)
            case "map":
                return await _measure_map(question, self._folder)
            case "ssd-get":
                return await _measure_gets(question, *await self._ssd_pair(question.size_bytes))
        a, b = await self._pair(question.size_bytes)
        match question.op:
            case "put":
                return await _measure_puts(question, a, b)
            case "get":
                return await _measure_gets(question, a, b, await fill(a, a.n_blocks))
            case _:
                return await _measure_many_at_once(question, a, b)

    async def _pair(self, block_bytes: int) -> tuple[Node, Node]:
        """B is smaller than A, so that a walk over A's blocks finds none of them in B."""
        if block_bytes not in self._pairs:
            blocks_a = min(max(_ARENA_BYTES // block_bytes, _LEAST_BLOCKS), _MOST_BLOCKS)
            a = self._node(f"a{block_bytes}", blocks_a * block_bytes)
            b = self._node(f"b{block_bytes}", blocks_a // 2 * block_bytes)
            self._pairs[block_bytes] = await _attached(a, b, block_bytes)
        return self._pairs[block_bytes]

    async def _ssd_pair(self, block_bytes: int) -> tuple[Node, Node, list[BlockKey]]:
        """A with four times as many blocks on SSD as in memory, oldest first: a walk over them finds none in memory."""
        if block_bytes not in self._ssd_pairs:
            ssd = {"ssd-dir": self._folder / f"ssd{block_bytes}", "ssd-bytes": _ON_SSD_BYTES + _SSD_ARENA_BYTES}
            a = self._node(f"ssd-a{block_bytes}", _SSD_ARENA_BYTES, ssd)
            b = self._node(f"ssd-b{block_bytes}", _SSD_ARENA_BYTES // 2)
            await _attached(a, b, block_bytes)
            keys: list[BlockKey] = []
            while len(keys) * block_bytes < _ON_SSD_BYTES + _SSD_ARENA_BYTES // 2:
                keys += await fill(a, _FILLED_AT_ONCE)
            self._ssd_pairs[block_bytes] = a, b, keys[: _ON_SSD_BYTES // block_bytes]
        return self._ssd_pairs[block_bytes]

    def _node(self, name: str, arena_bytes: int, more_flags: dict[str, object] | None = None) -> Node:
        return Node(name, self._folder, self._transport, arena_bytes, {**self._flags, **(more_flags or {})})


async def _attached(a: Node, b: Node, block_bytes: int) -> tuple[Node, Node]:
    for node in (a, b):
        await node.attach(block_bytes)
        node.content[:] = 7  # first writes into new memory pay page faults
    return a, b


async def _measure_start(question: Question, folder: Path) -> Answer:
    started: list[Node] = []

    async def close_last(_: int) -> None:
        while started:
            started.pop().close()

    async def work(call: int) -> None:
        started.append(Node(f"start{call}", folder, "auto", question.size_bytes))
        await started[-1].attach(_START_BLOCK_BYTES)

    try:
        return await timed_async(question, work, close_last)  # its end is no part of a start
    finally:
        await close_last(0)


async def _measure_map(question: Question, folder: Path) -> Answer:
    node = Node("map", folder, "auto", question.size_bytes)
    await node.attach(_START_BLOCK_BYTES)
    node.content[:] = 7

    async def work(_: int) -> None:
        assert node.arena is not None
        node.arena.close()
        await node.attach(_START_BLOCK_BYTES)
        node.content[:, ::4096].sum()  # every page is reached through the new mapping

    answer = await timed_async(question, work)
    node.close()
    return answer


async def _measure_puts(question: Question, a: Node, b: Node) -> Answer:
    """What a put moves was computed in place before: its blocks are reserved off the clock."""
    held: list[JobId] = []

    async def reserve(_: int) -> None:
        held.append(await hold(a, question.batch))

    async def work(_: int) -> None:
        await put(a, b, question.batch, held.pop())

    return await timed_async(question, work, reserve)


async def _measure_gets(question: Question, a: Node, b: Node, keys: list[BlockKey]) -> Answer:
    async def work(call: int) -> None:
        first = call % (len(keys) // question.batch) * question.batch
        await get(a, b, keys[first : first + question.batch])

    return await timed_async(question, work)


async def _measure_many_at_once(question: Question, a: Node, b: Node) -> Answer:
    async def work(_: int) -> None:
        await asyncio.gather(*[put(a, b, 1) for _ in range(question.batch)])

    return await timed_async(question, work)


if __name__ == "__main__":
    main()
