"""The head's side of stages on other nodes: cached prefixes go to them, and the KV of their layers comes from them.

The head alone writes it, into blocks of its jobs, and tells its node's messenger. So decode's side of a transfer does
not know where a layer was computed, and the arena is written by processes of its own node only.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import structlog

from mooncake_mesh.engine.api import Engine, ModelSpec
from mooncake_mesh.errors import MooncakeError, PeerUnreachable, TransferError
from mooncake_mesh.kv.layers import LayerRange
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.messenger.landing import SliceSpan
from mooncake_mesh.messenger.sending import OutgoingSlice
from mooncake_mesh.prefill.activations import SlotMemory
from mooncake_mesh.prefill.announcing import to_messenger
from mooncake_mesh.prefill.core import ChunkBlocks
from mooncake_mesh.prefill.doors import Door, Reach, Way
from mooncake_mesh.prefill.far_core import KvLanding, SliceNames, slice_of
from mooncake_proto.ids import BlockId, TransferId
from mooncake_proto.pipeline import StageDoor

log = structlog.get_logger(__name__)

_PIECE_BYTES: Final = 4 << 20
"""Of a prefix so much is copied out of the arena and sent at a time."""
_LET_GO_S: Final = 10.0


class HeadPages:
    """Binds the *engine* of a head, and keeps the arena for what far stages send. See ArenaUser in station.py.

    *let_go* returns when nothing of the arena is written or read on the loop any more.
    """

    def __init__(self, engine: Engine, let_go: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.arena: memoryview | None = None
        self._engine = engine
        self._let_go = let_go
        self._loop = asyncio.get_running_loop()

    @property
    def spec(self) -> ModelSpec:
        return self._engine.spec

    def bind(self, arena: memoryview) -> None:
        self._engine.bind(arena)
        self.arena = arena

    def unbind(self) -> None:
        self.arena = None
        asyncio.run_coroutine_threadsafe(self._let_go(), self._loop).result(_LET_GO_S)
        self._engine.unbind()


class PrefixWay:
    """The way of cached prefixes to one far stage: its layers, out of the head's arena by way of *memory*."""

    def __init__(self, reach: Reach, spec: ModelSpec, door: StageDoor, layers: LayerRange, memory: SlotMemory) -> None:
        self._way = Way(door, memory.arena, reach)
        self._layout = spec.layout
        self._layers = layers
        self._memory = memory
        self._span_bytes = layers.count * spec.layout.slice_bytes
        self._one_at_a_time = asyncio.Lock()

    @staticmethod
    def slot_bytes(spec: ModelSpec, layers: LayerRange) -> int:
        """What the memory's one slot must have."""
        span_bytes = layers.count * spec.layout.slice_bytes
        return max(1, _PIECE_BYTES // span_bytes) * span_bytes

    async def send(
        self, arena: Callable[[], memoryview | None], pairs: Sequence[tuple[int, int]], is_wanted: Callable[[], bool]
    ) -> None:
        """Copy, of each pair, an arena block to a block of the stage. Raises TransferError, PeerUnreachable.

        Ends early when nobody wants it any more. The stage's blocks are not written when this ends.
        """
        async with self._one_at_a_time:
            for batch in self._batches(pairs):
                if not is_wanted():
                    return
                await self._way.send([self._copied(arena(), *pair, at) for at, pair in enumerate(batch)])

    def _batches(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
        at_a_time = self._memory.slot_bytes // self._span_bytes
        return (pairs[at : at + at_a_time] for at in range(0, len(pairs), at_a_time))

    def _copied(self, arena: memoryview | None, block: int, target: int, index: int) -> OutgoingSlice:
        """The arena's view is let go of at once: nobody else would wait for it."""
        if arena is None:
            raise PeerUnreachable("the node's messenger is gone")
        span = SliceSpan(logical=target, layer=self._layers.first, n_layers=self._layers.count)
        source, offset = slice_of(self._layout, span, block), index * self._span_bytes
        np.copyto(
            np.frombuffer(self._memory.arena.view, np.uint8, self._span_bytes, offset),
            np.frombuffer(arena, np.uint8, self._span_bytes, source.offset),
        )
        return OutgoingSlice(span=span, block=BlockId(index), offset=offset, size_bytes=self._span_bytes)

    def close(self) -> None:
        self._way.close()


@dataclass(slots=True, kw_only=True)
class _Sending:
    """What the messenger is told of a chunk; ``failure`` says that it was not."""

    transfer_id: TransferId | None
    blocks: ChunkBlocks
    failure: MooncakeError | None = None


class FarStages:
    """The far stages of one pipeline. *messenger* hears of what they have written."""

    def __init__(
        self,
        reach: Reach,
        name: str,
        spec: ModelSpec,
        ways: Sequence[PrefixWay],
        layers: Sequence[LayerRange],
        *,
        chunk_blocks: int,
        arena: Callable[[], memoryview | None],
        messenger: RpcClient,
    ) -> None:
        """Opens a door called *name*. Raises MeshError; PeerUnreachable without an arena."""
        view = arena()
        if view is None:
            raise PeerUnreachable("the node's messenger is gone")
        self._arena = arena
        self._ways = ways
        self._messenger = messenger
        self._quiet = Bell()
        self._sending: dict[int, _Sending] = {}
        self._landing = KvLanding(
            spec.layout, layers, SliceNames(chunk_blocks=chunk_blocks), landed=self._landed, quiet=self._quiet.ring
        )
        door = Door(reach, name, view, self._landing)
        self.address = door.address
        self._door: Door | None = door

    def open(
        self, number: int, transfer_id: TransferId | None, blocks: ChunkBlocks, prompt_blocks: Sequence[int]
    ) -> None:
        """A chunk begins, whose prompt has these arena blocks. Follow with :meth:`settle`."""
        own = prompt_blocks[blocks.first_block : blocks.first_block + blocks.n_blocks]
        self._sending[number] = _Sending(transfer_id=transfer_id, blocks=blocks)
        self._landing.open(number, own)

    async def send_prefix(self, pairs: Sequence[tuple[int, int]], is_wanted: Callable[[], bool]) -> None:
        """Have all far stages get what was cached of a prompt, as :meth:`PrefixWay.send`."""
        ends = [way.send(self._arena, pairs, is_wanted) for way in self._ways]
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if end is not None:
                raise end
        log.debug("prefix_sent_to_stages", blocks=len(pairs))

    async def settle(self, number: int) -> MooncakeError | None:
        """All stages are done with a chunk. Returns when its blocks are written no more; why it is not all there."""
        self._landing.shut(number)
        await self._quiet.until(lambda: True if self._landing.is_quiet(number) else None)
        is_complete = self._landing.close(number)
        failure = self._sending.pop(number).failure
        return failure or (None if is_complete else TransferError("the KV of a stage on another node has not come"))

    async def close(self) -> None:
        """Returns when nothing comes any more, and nothing has the arena."""
        for way in self._ways:
            way.close()
        door, self._door = self._door, None
        if door is not None:
            await door.close()

    def _landed(self, number: int, layers: range, indices: range) -> None:
        sending = self._sending[number]

        def failed(error: MooncakeError) -> None:
            sending.failure = sending.failure or error

        blocks = ChunkBlocks(first_block=sending.blocks.first_block + indices.start, n_blocks=len(indices))
        announce = to_messenger(self._messenger, sending.transfer_id, blocks, failed)
        if announce is not None:
            announce(layers)
