"""How a head joins its stages: each is told of the next one, and those on other nodes of the head's memory.

The head tries until all are there, each attempt with a new pipeline, so nothing of a former one is mistaken for this.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.config import PrefillConfig
from mooncake_mesh.engine.api import ModelSpec
from mooncake_mesh.errors import MeshError
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.policy.chunking import longest_chunk
from mooncake_mesh.prefill.activations import Outlet, SlotMemory
from mooncake_mesh.prefill.doors import Reach
from mooncake_mesh.prefill.far_core import PromptRoom
from mooncake_mesh.prefill.far_kv import FarStages, PrefixWay
from mooncake_mesh.prefill.pipeline_core import check_stages, layers_of, room_of
from mooncake_mesh.prefill.stage_core import Flight
from mooncake_proto.control import Ok
from mooncake_proto.ids import Incarnation, NodeId, new_incarnation
from mooncake_proto.pipeline import DeliverKv, JoinPipeline, StageJoined

_JOIN_TIMEOUT_S: Final = 10.0
_SPARE_SLOTS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One pipeline, from its joining to its loss. ``memory`` has the activations that go out, ``far`` are the stages on
    other nodes, if there are any."""

    pipeline: Incarnation
    flight: Flight
    room: PromptRoom
    memory: SlotMemory
    outlet: Outlet
    stages: tuple[StageJoined, ...]
    far: FarStages | None


class Joiner:
    """Joins the stages that *clients* lead to. For *arena_owner*, *arena* and *messenger* see Pipeline."""

    def __init__(
        self,
        config: PrefillConfig,
        tasks: asyncio.TaskGroup,
        clients: Sequence[RpcClient],
        *,
        arena_owner: Callable[[], Incarnation | None],
        arena: Callable[[], memoryview | None],
        messenger: RpcClient,
    ) -> None:
        self._tasks = tasks
        self._clients = clients
        self._node_id = NodeId(config.node_id)
        self._arena_owner = arena_owner
        self._arena = arena
        self._messenger = messenger
        self._reach = Reach.of(config.pipeline)
        self._door_name = f"{config.instance_id}.kv"
        self._stages = config.pipeline.stages
        self._slots = self._stages + _SPARE_SLOTS
        self._slot_tokens = longest_chunk(config.chunk_tokens)
        self._memory = SlotMemory(1, 1)
        self._prefix_memory = [SlotMemory(1, 1) for _ in clients]
        self._far: FarStages | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def join(self, spec: ModelSpec, former_over: Callable[[], Awaitable[None]]) -> Joined:
        """The last stage first: each is told where the next one takes activations. Raises MeshError, ModelError.

        Where it raises, :meth:`close_far` is owed.
        """
        pipeline, arena_owner = new_incarnation(), self._arena_owner()
        stages: list[StageJoined] = []
        for stage in reversed(range(1, self._stages)):
            request = JoinPipeline(
                pipeline=pipeline,
                stage=stage,
                stages=self._stages,
                slots=self._slots,
                slot_tokens=self._slot_tokens,
                next_door=stages[0].door if stages else None,
                node_id=self._node_id,
            )
            stages.insert(0, await self._clients[stage - 1].call(request, StageJoined, timeout_s=_JOIN_TIMEOUT_S))
        check_stages(spec, stages)
        await former_over()
        far = await self._join_far(pipeline, spec, stages)
        near = [stage for stage in stages if stage.memory is None]
        if arena_owner != self._arena_owner() or any(stage.arena != arena_owner for stage in near):
            raise MeshError("the stages of an instance on one node must have one arena, and these have not yet")
        self._memory = self._memory.fitting(self._slots, self._slot_tokens * spec.hidden_bytes)
        return Joined(
            pipeline=pipeline,
            flight=Flight(self._slots),
            room=PromptRoom(room_of(stages)),
            memory=self._memory,
            outlet=Outlet(stages[0].door, self._memory, self._reach),
            stages=tuple(stages),
            far=far,
        )

    async def _join_far(
        self, pipeline: Incarnation, spec: ModelSpec, stages: Sequence[StageJoined]
    ) -> FarStages | None:
        """Open the ways to and from the stages that are on other nodes. Raises MeshError."""
        await self.let_go()  # of a former pipeline
        ways = [self._prefix_way(index, spec, stage) for index, stage in enumerate(stages) if stage.memory is not None]
        if not ways:
            return None
        chunk_blocks = spec.layout.blocks_for(self._slot_tokens)
        far = self._far = FarStages(
            self._reach,
            self._door_name,
            spec,
            ways,
            [layers_of(stage) for stage in stages if stage.memory is not None],
            chunk_blocks=chunk_blocks,
            arena=self._arena,
            messenger=self._messenger,
        )
        request = DeliverKv(pipeline=pipeline, door=far.address, chunk_blocks=chunk_blocks)
        for client, stage in zip(self._clients, stages, strict=True):
            if stage.memory is not None:
                await client.call(request, Ok, timeout_s=_JOIN_TIMEOUT_S)
        return far

    def _prefix_way(self, index: int, spec: ModelSpec, stage: StageJoined) -> PrefixWay:
        assert stage.memory is not None, "a far stage"
        layers = layers_of(stage)
        memory = self._prefix_memory[index].fitting(1, PrefixWay.slot_bytes(spec, layers))
        self._prefix_memory[index] = memory
        return PrefixWay(self._reach, spec, stage.memory.door, layers, memory)

    def close_far(self) -> None:
        """Nothing goes to far stages or comes from them any more, soon."""
        far, self._far = self._far, None
        if far is not None:
            task = self._tasks.create_task(far.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def let_go(self) -> None:
        """As :meth:`close_far`; returns when nothing has the arena."""
        self.close_far()
        if self._closing:
            await asyncio.wait(self._closing)
