"""A further stage of a prefill instance: activations in, its layers' KV into the head's arena, activations out.

====== ============= ==============================================================
socket who           what flows
====== ============= ==============================================================
ROUTER the head      JoinPipeline, DeliverKv, StageChunk, DropJob
DEALER messenger     OpenWrite, SliceReady, CloseWrite (on the node of its head)
DEALER conductor     membership
door   stage before  activations (shared memory, TCP)
outlet stage after   activations
====== ============= ==============================================================

The job, its blocks and its transfer are the head's. On its node a stage writes them; on another it writes memory of its
own, and sends the head what it has written (far_stage.py).

Chunks are computed in order; while one is sent on and reported, the next one computes.
"""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Final

import numpy as np
import structlog

from mooncake_mesh.config import PrefillConfig
from mooncake_mesh.engine.api import Engine, PrefillChunk, SampleRequest, TokenFilter
from mooncake_mesh.errors import Aborted, Draining, InternalError, InvalidRequest, MooncakeError, PeerUnreachable
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.mesh.rpc import Caller, Handler
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_mesh.prefill.activations import Outlet, SlotMemory, open_door
from mooncake_mesh.prefill.announcing import Forwarded, LayerNews, StopRequested, forward
from mooncake_mesh.prefill.doors import Door, Reach
from mooncake_mesh.prefill.far_stage import FarMemory, StagePages, memory_blocks
from mooncake_mesh.prefill.stage_core import StageCore, StageWork, ends_prompt, prefix_keys
from mooncake_mesh.prefill.stage_kv import NodeKv, StageKv
from mooncake_mesh.worker.station import Station
from mooncake_proto.control import Load, Ok, Role
from mooncake_proto.ids import BlockKey, Incarnation, JobId
from mooncake_proto.pipeline import DeliverKv, DropJob, JoinPipeline, StageChunk, StageChunkDone, StageJoined

log = structlog.get_logger(__name__)

_NO_TOKENS: Final = np.zeros(0, np.int32)
_MEMORY: Final = 0.8


class StageService:
    """One stage above 0."""

    def __init__(self, config: PrefillConfig, tasks: asyncio.TaskGroup) -> None:
        self._config = config
        self._tasks = tasks
        self._core = StageCore()
        self._reach = Reach.of(config.pipeline)
        self._station = Station(
            config,
            Role.STAGE,
            tasks,
            load=self._load,
            on_stop=self._stop_all,
            on_gateway_lost=lambda _: None,
        )
        self._changed = Bell()
        self._joining = asyncio.Lock()
        self._answers: dict[int, asyncio.Future[StageChunkDone]] = {}
        self._kv: StageKv | None = None
        self._far: FarMemory | None = None
        self._door: Door | None = None
        self._outlet: Outlet | None = None
        self._inside = SlotMemory(1, 1)
        self._outside = SlotMemory(1, 1)
        self._compute_s = 0.0

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serve until *lifecycle* says stop; then finish the chunks that are here."""
        self._engine: Engine = await self._station.load_engine(self._config.pipeline.part)
        n_blocks = memory_blocks(self._engine.spec, self._config.pipeline.kv_bytes)
        self._pages = StagePages(self._engine, n_blocks)
        handlers: dict[type, Handler] = {
            JoinPipeline: self._join,
            DeliverKv: self._deliver,
            StageChunk: self._chunk,
            DropJob: self._drop,
        }
        await self._station.run(self._pages, lifecycle, handlers, [self._compute_chunks()], self._idle)
        await self._close_ways()

    async def _idle(self) -> None:
        await self._changed.until(lambda: True if self._core.is_idle else None)

    def _load(self) -> Load:
        return Load(
            running_jobs=self._core.running_jobs,
            queued_tokens=self._core.waiting_tokens,
            step_s=self._compute_s,
            prefills=self._core.chunks,
            draining=self._station.is_draining,
        )

    def _stop_all(self, why: MooncakeError) -> None:
        """The arena is gone, or the pipeline: the head finds out by its next chunk, and joins the stages again."""
        self._core.leave(why)
        self._changed.ring()

    # --- the pipeline -------------------------------------------------------------------------------------------------

    async def _join(self, request: JoinPipeline, _: Caller) -> StageJoined:
        """Leave the former pipeline, if there was one, and open the ways of a new one."""
        mine = self._config.pipeline
        if (request.stage, request.stages) != (mine.stage, mine.stages):
            raise InvalidRequest(f"this is stage {mine.stage} of {mine.stages}", param="stage")
        async with self._joining:
            self._stop_all(PeerUnreachable("the pipeline was joined anew"))
            await self._idle()
            await self._close_ways()
            arena = self._station.arena_owner
            is_far = request.node_id not in (None, self._config.node_id)
            if (arena is None and not is_far) or self._station.is_draining:
                raise Draining("this stage takes no chunks now")
            await self._use_memory(is_far)
            self._core.join(request.pipeline)
            door = self._open_ways(request)
        spec = self._engine.spec
        log.info("pipeline_joined", pipeline=request.pipeline, transport=self._outlet and self._outlet.transport)
        return StageJoined(
            instance_id=self._station.me.instance_id,
            incarnation=self._station.me.incarnation,
            arena=arena or Incarnation(""),
            fingerprint=spec.fingerprint,
            dtype=spec.layout.dtype.value,
            first_layer=spec.layers.first,
            end_layer=spec.layers.end,
            layers=spec.layers.total,
            hidden_bytes=spec.hidden_bytes,
            door=door.address,
            memory=None if self._far is None else self._far.told,
        )

    async def _use_memory(self, is_far: bool) -> None:
        """The node's arena, or on another node than the head's its own. Raises MeshError."""
        spec = self._engine.spec
        if not is_far:
            await self._station.on_engine_thread(self._pages.use_node)
            self._kv = NodeKv(self._station.messenger, self._station.me, spec.layout)
            return
        memory = await self._station.on_engine_thread(self._pages.use_own)
        self._far = FarMemory(self._reach, f"{self._config.instance_id}.prefix", spec, memory, self._tasks)

    def _deliver(self, request: DeliverKv, _: Caller) -> Ok:
        if self._far is None or not self._core.is_in(request.pipeline):
            raise PeerUnreachable("this stage is not in that pipeline any more")
        self._kv = self._far.deliver(request.door, request.chunk_blocks)
        return Ok()

    def _open_ways(self, request: JoinPipeline) -> Door:
        config, pipeline = self._config, request.pipeline
        slot_bytes = request.slot_tokens * self._engine.spec.hidden_bytes

        def arrived(number: int, size_bytes: int) -> None:
            self._core.arrived(pipeline, number, size_bytes)
            self._changed.ring()

        self._inside = self._inside.fitting(request.slots, slot_bytes)
        self._door = open_door(self._reach, f"{config.instance_id}.door", self._inside, arrived)
        if request.next_door is not None:
            self._outside = self._outside.fitting(request.slots, slot_bytes)
            self._outlet = Outlet(request.next_door, self._outside, self._reach)
        return self._door

    async def _close_ways(self) -> None:
        self._kv = None
        far, self._far = self._far, None
        if far is not None:
            await far.close()
        outlet, self._outlet = self._outlet, None
        if outlet is not None:
            outlet.close()
        door, self._door = self._door, None
        if door is not None:
            await door.close()

    # --- chunks -------------------------------------------------------------------------------------------------------

    async def _chunk(self, request: StageChunk, _: Caller) -> StageChunkDone:
        """Answers when the chunk is computed, announced and sent on, or why it was not."""
        work = self._core.offer(request)
        answer: asyncio.Future[StageChunkDone] = asyncio.get_running_loop().create_future()
        self._answers[request.number] = answer
        self._changed.ring()
        try:
            return await answer
        except asyncio.CancelledError:  # nobody waits for it any more
            work.stop = work.stop or Aborted("the head gave the chunk up")
            self._changed.ring()
            raise

    def _drop(self, request: DropJob, _: Caller) -> None:
        self._core.drop(request.job_id, Aborted("the job was dropped"))
        self._changed.ring()
        self._retire(request.job_id, ())

    async def _compute_chunks(self) -> None:
        while True:
            since_s = monotonic()
            work = await self._changed.until(self._core.next)
            answer = self._answers.pop(work.chunk.number)
            try:
                kv = self._way_of(work)
                done = await self._computed(work, kv, monotonic() - since_s)
            except MooncakeError as error:
                self._end(work, answer, error)
            else:
                self._tasks.create_task(self._finish(work, kv, answer, done))

    def _way_of(self, work: StageWork) -> StageKv:
        """Where the KV of a chunk goes. Raises MooncakeError for one that is not to be computed."""
        if work.stop is not None:
            raise work.stop
        if self._kv is None:
            raise PeerUnreachable("this stage has not been told where its KV goes")
        return self._kv

    async def _computed(self, work: StageWork, kv: StageKv, waited_s: float) -> StageChunkDone:
        """Raises MooncakeError: the chunk was stopped, may not be written any more, or the engine failed."""
        await kv.open(work)
        forwarded = await self._forward(work, kv)
        if ends_prompt(work.chunk):
            self._retire(work.chunk.job_id, list(split_keys(work.chunk.keys)))
        compute_s, drawn = forwarded.compute_s, forwarded.drawn
        self._compute_s = _MEMORY * self._compute_s + (1 - _MEMORY) * compute_s if self._compute_s else compute_s
        log.debug(
            "chunk_computed",
            job_id=work.chunk.job_id,
            number=work.chunk.number,
            start=work.chunk.start,
            n_tokens=work.chunk.n_tokens,
            known_blocks=len(prefix_keys(work.chunk, self._engine.spec.layout.block_tokens)),
            began_s=forwarded.began_s,
            compute_s=compute_s,
            cpu_s=forwarded.cpu_s,
        )
        return StageChunkDone(
            number=work.chunk.number,
            compute_s=compute_s,
            waited_s=waited_s,
            token=None if drawn is None else drawn.token,
            logprob=None if drawn is None else drawn.logprob,
        )

    async def _forward(self, work: StageWork, kv: StageKv) -> Forwarded:
        """What the engine raises ends here: its traceback holds views of the arena (see PrefillService)."""
        failure: MooncakeError
        try:
            sampling = work.chunk.sampling
            rule = None if sampling is None else await self._station.grammars.filter(sampling.grammar)
            forwarded = await self._station.on_engine_thread(
                forward, self._engine, self._engine_chunk(work, rule), self._news(work, kv)
            )
            if rule is None or rule.failure is None:
                return forwarded
            failure = rule.failure
        except StopRequested:
            failure = work.stop or PeerUnreachable("stopped")
        except MooncakeError as error:
            failure = error
        except Exception as error:  # the failure of one job is reported, and the next chunk is computed
            log.error("engine_failed", job_id=work.chunk.job_id, exc_info=error)
            failure = InternalError(f"prefill failed: {type(error).__name__}")
        await kv.close(work)
        raise failure.with_traceback(None)

    def _engine_chunk(self, work: StageWork, rule: TokenFilter | None) -> PrefillChunk:
        chunk, number = work.chunk, work.chunk.number
        hidden_bytes = chunk.n_tokens * self._engine.spec.hidden_bytes
        if self._core.size_bytes(work) != hidden_bytes:
            raise InternalError(f"chunk {number} came with {self._core.size_bytes(work)} bytes, not {hidden_bytes}")
        sample = None
        if chunk.sampling is not None:
            sample = SampleRequest(
                sampling=chunk.sampling,
                position=chunk.drawn_tokens,
                history=np.frombuffer(chunk.tokens, dtype="<i4").astype(np.int32, copy=False),
                banned=chunk.banned,
                filter=rule,
            )
        return PrefillChunk(
            sequence=chunk.job_id,
            tokens=_NO_TOKENS,
            start=chunk.start,
            blocks=chunk.blocks,
            sample=sample,
            keys=prefix_keys(chunk, self._engine.spec.layout.block_tokens),
            hidden_in=self._inside.view(number, hidden_bytes),
            hidden_out=None if self._outlet is None else self._outside.view(number, hidden_bytes),
        )

    def _retire(self, job_id: JobId, keys: Sequence[BlockKey]) -> None:
        """No chunk of this job is computed here any more; nobody waits for the engine to hear of it."""
        log.debug("sequence_retired", job_id=job_id, blocks=len(keys))
        work = self._station.on_engine_thread(self._engine.retire, job_id, keys)
        work.add_done_callback(lambda done: done.result())

    def _news(self, work: StageWork, kv: StageKv) -> LayerNews:
        return LayerNews(kv.announce(work), layers=self._engine.spec.layers, is_stopped=lambda: work.stop is not None)

    async def _finish(
        self, work: StageWork, kv: StageKv, answer: "asyncio.Future[StageChunkDone]", done: StageChunkDone
    ) -> None:
        """Send on, close the chunk (and so make sure that all slices are announced), report."""
        failure: MooncakeError | None = None
        try:
            if self._outlet is not None:
                await self._outlet.send(work.chunk.number, work.chunk.n_tokens * self._engine.spec.hidden_bytes)
        except MooncakeError as error:
            failure = error
        unwritten = await kv.close(work)
        failure = failure or unwritten or work.stop  # a slice that could not be announced
        if failure is not None:
            self._end(work, answer, failure)
            return
        self._core.done(work)
        self._changed.ring()
        if not answer.done():
            answer.set_result(done)

    def _end(self, work: StageWork, answer: "asyncio.Future[StageChunkDone]", why: MooncakeError) -> None:
        work.stop = work.stop or why
        self._retire(work.chunk.job_id, ())
        self._core.done(work)
        self._changed.ring()
        if not answer.done():
            answer.set_exception(why)
