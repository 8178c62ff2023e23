"""Takes the KV of preempted sequences out of the arena, and brings it back when there is room.

A sequence is away in four steps: its blocks are copied on the engine thread, behind the step that may be running; whole
ones are sealed, and all are released; it waits for its turn and for room; what is not in the pool any more is copied
back. Only the third step waits for others, and it ends with the sequence's patience or its stop.
"""

import asyncio
from collections.abc import Sequence
from time import monotonic

import structlog

from mooncake_mesh.decode.acquiring import return_request
from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.preemption import SwapBudget
from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.engine.api import Engine, ModelSpec
from mooncake_mesh.errors import InvalidRequest, NoFreeBlocks, PeerUnreachable
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.worker.station import Station
from mooncake_proto.transfer import Acquired, Seal

log = structlog.get_logger(__name__)


class ArenaBlocks:
    """An engine's arena as bytes of blocks: bound and unbound with it, and used on its thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._block_bytes = engine.spec.layout.block_bytes
        self._arena: memoryview | None = None

    @property
    def spec(self) -> ModelSpec:
        return self._engine.spec

    def bind(self, arena: memoryview) -> None:
        self._engine.bind(arena)
        self._arena = arena

    def unbind(self) -> None:
        self._arena = None
        self._engine.unbind()

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        """A copy of each block. Raises PeerUnreachable without an arena."""
        arena = self._bound()
        return [bytes(arena[block * self._block_bytes : (block + 1) * self._block_bytes]) for block in blocks]

    def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """As :meth:`read` gave them."""
        arena = self._bound()
        for block, content in zip(blocks, contents, strict=True):
            arena[block * self._block_bytes : (block + 1) * self._block_bytes] = content

    def _bound(self) -> memoryview:
        if self._arena is None:
            raise PeerUnreachable("the node's messenger is gone")
        return self._arena


class Swapping:
    """KV of preempted sequences in memory of this process: at most *budget* of it, each for *patience_s* at most.

    *changed* rings when a sequence has grown or left.
    """

    def __init__(
        self,
        station: Station,
        core: DecodeCore,
        blocks: ArenaBlocks,
        changed: Bell,
        *,
        budget: SwapBudget,
        patience_s: float,
    ) -> None:
        self._station = station
        self._core = core
        self._blocks = blocks
        self._layout = blocks.spec.layout
        self._changed = changed
        self._budget = budget
        self._patience_s = patience_s

    def begin(self, sequence: DecodeSequence) -> bool:
        """Preempt *sequence*, if it can go and there is memory for its KV: :meth:`out_and_back` is then due."""
        if not sequence.is_granted or not self._budget.take(self._kv_bytes(sequence)):
            return False
        self._core.preempt(sequence)
        return True

    async def out_and_back(self, sequence: DecodeSequence) -> None:
        """Returns when it may be decoded on. Raises its ``stop``, or another MooncakeError when it cannot come back."""
        try:
            contents = await self._out(sequence)
            blocks, cached_blocks = await self._room(sequence)
            _check(sequence)
            fresh = slice(cached_blocks, len(contents))
            await self._station.on_engine_thread(self._blocks.write, blocks[fresh], contents[fresh])
            _check(sequence)
        finally:
            sequence.is_coming_back = False
            self._budget.give_back(self._kv_bytes(sequence))
        self._core.back(sequence, blocks, cached_blocks, monotonic())
        log.info("job_back", job_id=sequence.job.job_id, blocks=len(blocks), cached_blocks=cached_blocks)

    async def _out(self, sequence: DecodeSequence) -> list[bytes]:
        held = sequence.blocks[: self._layout.blocks_for(sequence.position)]
        contents = await self._station.on_engine_thread(self._blocks.read, held)
        whole = self._core.whole_blocks(sequence)
        if whole is not None:
            seal = Seal(job_id=sequence.arena_job, first_block=whole.first_block, keys=b"".join(whole.keys))
            self._station.messenger.post(seal)
        await self._station.release(sequence.arena_job)
        sequence.blocks = []
        sequence.swaps += 1
        self._changed.ring()
        _check(sequence)
        return contents

    async def _room(self, sequence: DecodeSequence) -> tuple[Sequence[int], int]:
        """Its new blocks, and how many of them have its KV already."""
        async with self._station.waits.interruptible(sequence.job.job_id):
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._changed.until(lambda: True if self._core.next_back() is sequence else None)
                    sequence.is_coming_back = True
                    request = return_request(sequence, self._layout, self._station.me)
                    acquired = await self._station.messenger.call(request, Acquired, timeout_s=self._patience_s)
            except (TimeoutError, InvalidRequest) as error:  # the latter: it has outgrown the whole arena, or a quota
                raise NoFreeBlocks("preempted: the KVCache pool of the node is full") from error
        return acquired.blocks, acquired.cached_blocks

    def _kv_bytes(self, sequence: DecodeSequence) -> int:
        return self._layout.blocks_for(sequence.position) * self._layout.block_bytes


def _check(sequence: DecodeSequence) -> None:
    if sequence.stop is not None:
        raise sequence.stop
