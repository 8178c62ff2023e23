"""A stage on another node than its head: it computes on memory of its own, and what it writes there goes to the head.

The memory has room for one prompt of the longest context, unless it is told how much it may come to. Pages of layers
that the stage does not have are never touched, and so take none.
"""

import asyncio
from collections.abc import Sequence

from mooncake_mesh.config import PagesKind
from mooncake_mesh.engine.api import Engine, ModelSpec
from mooncake_mesh.errors import MooncakeError, PeerUnreachable, TransferError
from mooncake_mesh.kv.layout import KvLayout
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.messenger.landing import SliceSpan
from mooncake_mesh.messenger.sending import OutgoingSlice
from mooncake_mesh.prefill.announcing import Announce
from mooncake_mesh.prefill.core import ChunkBlocks
from mooncake_mesh.prefill.doors import Door, Reach, Way
from mooncake_mesh.prefill.far_core import PrefixPlaces, SliceNames, slice_of
from mooncake_mesh.prefill.stage_core import StageWork
from mooncake_proto.pipeline import StageChunk, StageDoor, StageMemory


def memory_blocks(spec: ModelSpec, kv_bytes: int) -> int:
    """Blocks of a far stage whose layers' KV may come to *kv_bytes*, one at least.

    For 0, as many as a prompt of the longest context has, and the one that its next token may need.
    """
    if kv_bytes:
        return max(1, kv_bytes // (spec.layers.count * spec.layout.slice_bytes))
    return spec.layout.blocks_for(spec.max_context_tokens) + 1


class StagePages:
    """What the *engine* of a stage computes on: its node's arena, or memory of its own. On the engine's thread.

    See ArenaUser in station.py.
    """

    def __init__(self, engine: Engine, n_blocks: int) -> None:
        """Its own memory has *n_blocks*."""
        self._engine = engine
        self._n_blocks = n_blocks
        self._node: memoryview | None = None
        self._own: Arena | None = None
        self._uses_own = False

    @property
    def spec(self) -> ModelSpec:
        return self._engine.spec

    def bind(self, arena: memoryview) -> None:
        self._node = arena
        if not self._uses_own:
            self._engine.bind(arena)

    def unbind(self) -> None:
        self._node = None
        if not self._uses_own:
            self._engine.unbind()

    def use_node(self) -> None:
        """Compute on the node's arena, which may come later."""
        if not self._uses_own:
            return
        self._uses_own = False
        if self._node is None:
            self._engine.unbind()
        else:
            self._engine.bind(self._node)

    def use_own(self) -> Arena:
        """Compute on memory that is kept from now on."""
        if self._own is None:
            self._own = Arena.create(self._n_blocks * self.spec.layout.block_bytes, PagesKind.SMALL)
        if not self._uses_own:
            self._uses_own = True
            self._engine.bind(self._own.view)
        return self._own


class FarKv:
    """StageKv (stage_kv.py) of a far stage: layers go to the head's door while later ones are computed."""

    def __init__(self, way: Way, layout: KvLayout, names: SliceNames, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks
        self._way = way
        self._layout = layout
        self._names = names
        self._deliveries: dict[int, _Delivery] = {}

    async def open(self, work: StageWork) -> None:
        """The blocks are the head's to give, and it has given them."""

    def announce(self, work: StageWork) -> Announce | None:
        delivery = self._deliveries[work.chunk.number] = _Delivery(self, work)
        return delivery.add

    async def close(self, work: StageWork) -> MooncakeError | None:
        delivery = self._deliveries.pop(work.chunk.number, None)
        return None if delivery is None else await delivery.end()

    async def send(self, chunk: StageChunk, layers: range) -> None:
        """Raises TransferError."""
        await self._way.send(self._slices(chunk, layers))

    def _slices(self, chunk: StageChunk, layers: range) -> Sequence[OutgoingSlice]:
        own = ChunkBlocks.of(chunk.start, chunk.n_tokens, self._layout)
        slices = []
        for index in range(own.n_blocks):
            logical = self._names.logical(chunk.number, index)
            span = SliceSpan(logical=logical, layer=layers.start, n_layers=len(layers))
            slices.append(slice_of(self._layout, span, chunk.blocks[own.first_block + index]))
        return slices


class _Delivery:
    """Layers of one chunk on their way: those that come while some are sent go together."""

    def __init__(self, kv: FarKv, work: StageWork) -> None:
        self._kv = kv
        self._work = work
        self._waiting: range | None = None
        self._sending: asyncio.Task[None] | None = None
        self._failure: TransferError | None = None

    def add(self, layers: range) -> None:
        first = layers.start if self._waiting is None else self._waiting.start
        self._waiting = range(first, layers.stop)
        if self._sending is None or self._sending.done():
            self._sending = self._kv.tasks.create_task(self._send())

    async def end(self) -> TransferError | None:
        """Nothing more is added. Returns when the memory is read no more; why not all of it has arrived."""
        if self._sending is not None:
            await self._sending
        return self._failure

    async def _send(self) -> None:
        while self._waiting is not None and self._work.stop is None:
            layers, self._waiting = self._waiting, None
            try:
                await self._kv.send(self._work.chunk, layers)
            except TransferError as error:
                self._failure = error
                self._work.stop = self._work.stop or error


class FarMemory:
    """The memory of a far stage in one pipeline: a door for cached prefixes, and the way of what it computes."""

    def __init__(self, reach: Reach, name: str, spec: ModelSpec, memory: Arena, tasks: asyncio.TaskGroup) -> None:
        """The door is called *name*. Raises MeshError."""
        self._tasks = tasks
        self._reach = reach
        self._layout = spec.layout
        self._memory = memory
        n_blocks = memory.size_bytes // spec.layout.block_bytes
        self._door = Door(reach, name, memory.view, PrefixPlaces(spec.layout, spec.layers, n_blocks))
        self._way: Way | None = None
        self.told = StageMemory(n_blocks=n_blocks, door=self._door.address)

    def deliver(self, door: StageDoor, chunk_blocks: int) -> FarKv:
        """From now on to this *door* of the head. Raises MeshError."""
        if self._way is not None:
            raise PeerUnreachable("the way of this pipeline's KV is known")
        self._way = Way(door, self._memory, self._reach)
        return FarKv(self._way, self._layout, SliceNames(chunk_blocks=chunk_blocks), self._tasks)

    async def close(self) -> None:
        if self._way is not None:
            self._way.close()
        await self._door.close()
