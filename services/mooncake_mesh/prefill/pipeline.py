"""The head's side of a prefill instance with several stages: join them, send chunks through, notice what breaks.

Every chunk is announced to all further stages at once; its activations then go from stage to stage without the head.
When a stage is lost, or a chunk could not be passed on, the whole pipeline is: all its chunks fail, and the head joins
the stages anew, whoever they are by then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from mooncake_mesh.config import PrefillConfig
from mooncake_mesh.engine.api import Drawn, ModelSpec, PrefillChunk
from mooncake_mesh.errors import InternalError, MeshError, ModelError, MooncakeError, PeerUnreachable
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.policy.chunking import longest_chunk
from mooncake_mesh.prefill.activations import Outlet, SlotMemory
from mooncake_mesh.prefill.doors import Reach
from mooncake_mesh.prefill.stage_core import Flight, StagedPrompt
from mooncake_proto.ids import Incarnation, JobId, new_incarnation
from mooncake_proto.pipeline import DropJob, JoinPipeline, StageChunk, StageChunkDone, StageDoor, StageJoined

log = structlog.get_logger(__name__)

_JOIN_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 0.2
_SPARE_SLOTS: Final = 2
_BREAKING: Final = frozenset({"peer_unreachable", "call_timeout", "slice_lost", "transfer_error", "checksum_mismatch"})
"""What says of a chunk that the pipeline does not pass chunks on any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A chunk that all stages are done with. ``slowest_s`` is the longest time that a stage computed."""

    drawn: Drawn | None
    slowest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """One pipeline, from its joining to its loss. ``begun`` are the prompts of which it has had a chunk."""

    pipeline: Incarnation
    flight: Flight
    outlet: Outlet
    stages: tuple[StageJoined, ...]
    begun: set[JobId] = field(default_factory=set)


class Pipeline:
    """The further stages of one instance. *on_lost(error)* must stop all jobs that are not computed yet.

    *arena_owner* tells whose arena the head writes, which all stages must share.
    """

    def __init__(
        self,
        config: PrefillConfig,
        tasks: asyncio.TaskGroup,
        *,
        on_lost: Callable[[MooncakeError], None],
        arena_owner: Callable[[], Incarnation | None],
    ) -> None:
        self._tasks = tasks
        self._arena_owner = arena_owner
        self._on_lost = on_lost
        self._reach = Reach.of(config.pipeline)
        self._stages = config.pipeline.stages
        self._slots = self._stages + _SPARE_SLOTS
        self._slot_tokens = longest_chunk(config.chunk_tokens)
        self._clients = [
            RpcClient(endpoint, on_lost=lambda: self.lose(PeerUnreachable("a stage of the instance was lost")))
            for endpoint in config.pipeline.stage_endpoints
        ]
        self._memory = SlotMemory(1, 1)
        self._joined: _Joined | None = None
        self._changed = Bell()
        self._under_way: set[asyncio.Task[None]] = set()
        self._hidden_bytes = 0

    @property
    def is_joined(self) -> bool:
        return self._joined is not None

    async def run(self, spec: ModelSpec, changed: Callable[[], None]) -> None:
        """Keep the stages joined until cancelled. *changed* is called whenever they have become so, or are no more.

        Raises ModelError when the stages are not those of this head's model.
        """
        self._hidden_bytes = spec.hidden_bytes
        trouble = ""
        while True:
            try:
                self._joined = await self._join(spec)
            except MeshError as error:
                if error.code != trouble:
                    log.warning("stages_unavailable", code=error.code, error=str(error)[:200])
                trouble = error.code
                await asyncio.sleep(_RETRY_S)
                continue
            trouble = ""
            log.info("pipeline_joined", stages=self._stages, transport=self._joined.outlet.transport)
            changed()
            await self._changed.until(lambda: True if self._joined is None else None)
            changed()

    def close(self) -> None:
        self.lose(PeerUnreachable("the instance stops"))
        for client in self._clients:
            client.close()

    # --- joining ------------------------------------------------------------------------------------------------------

    async def _join(self, spec: ModelSpec) -> _Joined:
        """The last stage first: each is told where the next one takes activations. Raises MeshError, ModelError."""
        pipeline = new_incarnation()
        door: StageDoor | None = None
        stages: list[StageJoined] = []
        for stage in reversed(range(1, self._stages)):
            request = JoinPipeline(
                pipeline=pipeline,
                stage=stage,
                stages=self._stages,
                slots=self._slots,
                slot_tokens=self._slot_tokens,
                next_door=door,
            )
            joined = await self._clients[stage - 1].call(request, StageJoined, timeout_s=_JOIN_TIMEOUT_S)
            stages.insert(0, joined)
            door = joined.door
        check_stages(spec, stages)
        if any(stage.arena != self._arena_owner() for stage in stages):
            raise MeshError("the stages of an instance must be on one node, with one arena, and these are not yet")
        await self._former_over()
        assert door is not None, "an instance of one stage has no pipeline"
        self._memory = self._memory.fitting(self._slots, self._slot_tokens * spec.hidden_bytes)
        return _Joined(
            pipeline=pipeline,
            flight=Flight(self._slots),
            outlet=Outlet(door, self._memory, self._reach),
            stages=tuple(stages),
        )

    async def _former_over(self) -> None:
        """The chunks of the former pipeline have ended: its stages were lost or have joined this one."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    def lose(self, why: MooncakeError) -> None:
        """The pipeline passes nothing on any more, or has nothing to write to. It is joined anew."""
        joined, self._joined = self._joined, None
        if joined is None:
            return
        log.warning("pipeline_lost", error=str(why)[:200], chunks=joined.flight.n_open)
        joined.outlet.close()
        self._changed.ring()
        self._on_lost(why)

    # --- chunks -------------------------------------------------------------------------------------------------------

    async def place(self) -> int:
        """Wait for a free slot; the number of the chunk that may use it, which :meth:`start` must follow at once.

        Raises PeerUnreachable while a stage is missing.
        """

        def look() -> int | None:
            return self._now().flight.begin()

        return await self._changed.until(look)

    async def start(
        self,
        number: int,
        chunk: PrefillChunk,
        prompt: StagedPrompt,
        forward: Callable[[PrefillChunk], Awaitable[float]],
        *,
        timeout_s: float,
    ) -> "asyncio.Future[Passed]":
        """Announce *chunk* of *prompt* to the stages, compute it here by *forward* (returns its seconds), send it on.

        Returns when the head's part is computed; the future ends when the last stage is done, or raises MooncakeError.
        What *forward* raises passes through, after the stages were told to drop the job.
        """
        joined = self._now()
        n_tokens = len(chunk.tokens)
        loop = asyncio.get_running_loop()
        way = _Way(
            number=number,
            hidden_bytes=n_tokens * self._hidden_bytes,
            computed_s=loop.create_future(),
            passed=loop.create_future(),
        )
        is_first = prompt.job_id not in joined.begun
        joined.begun.add(prompt.job_id)
        told = _told(joined.pipeline, number, chunk, prompt)
        if is_first or chunk.sample is not None:
            told = replace(told, keys=prompt.keys)
        requests = [_with_sampling(told, chunk, stage) for stage in joined.stages]
        task = self._tasks.create_task(self._follow(joined, way, requests, timeout_s))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        hidden_out = self._memory.view(number, way.hidden_bytes)
        try:
            elapsed_s = await forward(replace(chunk, sample=None, hidden_out=hidden_out))
        except BaseException:
            self.drop(prompt.job_id)
            way.computed_s.set_result(None)
            way.passed.add_done_callback(_heard)
            raise
        way.computed_s.set_result(elapsed_s)
        return way.passed

    def drop(self, job_id: JobId) -> None:
        """Tell the stages that nobody wants the rest of a job; its chunks that are under way fail."""
        if self._joined is None:
            return
        for client in self._clients:
            try:
                client.post(DropJob(pipeline=self._joined.pipeline, job_id=job_id))
            except PeerUnreachable as error:
                log.info("drop_undeliverable", code=error.code)

    def end(self, job_id: JobId) -> None:
        """No chunk of this job will come any more."""
        if self._joined is not None:
            self._joined.begun.discard(job_id)

    def _now(self) -> _Joined:
        if self._joined is None:
            raise PeerUnreachable("a stage of this instance is missing")
        return self._joined

    async def _follow(self, joined: _Joined, way: "_Way", requests: Sequence[StageChunk], timeout_s: float) -> None:
        """See one chunk through all stages; its slot is free when this ends."""
        *answers, sent = await asyncio.gather(
            *(
                client.call(request, StageChunkDone, timeout_s=timeout_s)
                for client, request in zip(self._clients, requests, strict=True)
            ),
            self._send(joined, way),
            return_exceptions=True,
        )
        joined.flight.over(way.number)
        self._changed.ring()
        failure = _failure_of([*answers, sent])
        if failure is None:
            way.passed.set_result(_passed(way, [each for each in answers if isinstance(each, StageChunkDone)]))
            return
        was_computed = way.computed_s.result() is not None
        if was_computed and joined is self._joined and failure.code in _BREAKING:
            self.lose(failure)
        way.passed.set_exception(failure)

    async def _send(self, joined: _Joined, way: "_Way") -> None:
        if await way.computed_s is not None:
            await joined.outlet.send(way.number, way.hidden_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One chunk's way through the stages. ``computed_s`` is the head's part, None when it was given up."""

    number: int
    hidden_bytes: int
    computed_s: "asyncio.Future[float | None]"
    passed: "asyncio.Future[Passed]"


def _told(pipeline: Incarnation, number: int, chunk: PrefillChunk, prompt: StagedPrompt) -> StageChunk:
    """What every stage is told of a chunk."""
    return StageChunk(
        pipeline=pipeline,
        number=number,
        job_id=prompt.job_id,
        transfer_id=prompt.transfer_id,
        start=chunk.start,
        n_tokens=len(chunk.tokens),
        blocks=tuple(chunk.blocks),
        prompt_tokens=prompt.n_tokens,
    )


def _with_sampling(told: StageChunk, chunk: PrefillChunk, stage: StageJoined) -> StageChunk:
    """The last stage is told as well how to draw from the last chunk."""
    sample = chunk.sample
    if sample is None or stage.end_layer < stage.layers:
        return told
    return replace(
        told,
        sampling=sample.sampling,
        tokens=sample.history.astype("<i4").tobytes(),
        drawn_tokens=sample.position,
        banned=sample.banned,
    )


def _passed(way: _Way, answers: Sequence[StageChunkDone]) -> Passed:
    token = answers[-1].token
    return Passed(
        drawn=None if token is None else Drawn(token=token, logprob=answers[-1].logprob),
        slowest_s=max(way.computed_s.result() or 0.0, *(answer.compute_s for answer in answers)),
    )


def _heard(future: "asyncio.Future[Passed]") -> None:
    """Its failure is known by what the head's own part raised."""
    if not future.cancelled():
        future.exception()


def check_stages(spec: ModelSpec, stages: Sequence[StageJoined]) -> None:
    """Raises ModelError unless *stages*, behind a head of *spec*, are one model."""
    layout = spec.layout
    expected = spec.layers.end
    for stage in stages:
        if (stage.fingerprint, stage.dtype) != (spec.fingerprint, layout.dtype.value):
            raise ModelError(f"{stage.instance_id} has another model, or another dtype, than its head")
        if (stage.layers, stage.first_layer, stage.hidden_bytes) != (layout.layers, expected, spec.hidden_bytes):
            raise ModelError(
                f"{stage.instance_id} has layers {stage.first_layer}.., not {expected}..: see pipeline.split"
            )
        expected = stage.end_layer
    if expected != layout.layers:
        raise ModelError(f"the stages of this instance have {expected} of {layout.layers} layers")


def _failure_of(results: Sequence[object]) -> MooncakeError | None:
    """What went wrong first of all: the failure of a stage, rather than what others say who heard of it."""
    failures: list[MooncakeError] = []
    for result in results:
        if isinstance(result, MooncakeError):
            failures.append(result)
        elif isinstance(result, BaseException):
            log.error("chunk_failed", exc_info=result)
            failures.append(InternalError(f"a chunk failed: {type(result).__name__}"))
    return min(failures, key=lambda failure: failure.code in _BREAKING, default=None)
