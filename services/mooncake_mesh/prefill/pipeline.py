"""The head's side of a prefill instance with several stages: send chunks through, notice what breaks.

Every chunk is announced to all further stages at once; its activations then go from stage to stage without the head.
Stages on other nodes get the blocks and the cached prefix of a prompt first, and send the head their KV (far_kv.py).
When a stage is lost, or a chunk could not be passed on, the whole pipeline is: all its chunks fail, and the head joins
the stages anew, whoever they are by then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from mooncake_mesh.config import PrefillConfig
from mooncake_mesh.engine.api import ModelSpec, PrefillChunk
from mooncake_mesh.errors import MeshError, MooncakeError, PeerUnreachable
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.kv.layout import KvLayout
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.prefill.core import ChunkBlocks
from mooncake_mesh.prefill.joining import Joined, Joiner
from mooncake_mesh.prefill.pipeline_core import Passed, failure_of, is_breaking, passed, told, told_to
from mooncake_mesh.prefill.stage_core import StagedPrompt
from mooncake_proto.ids import BlockKey, Incarnation, JobId
from mooncake_proto.pipeline import DropJob, StageChunk, StageChunkDone

log = structlog.get_logger(__name__)

_RETRY_S: Final = 0.2


class Pipeline:
    """The further stages of one instance. *on_lost(error)* must stop all jobs that are not computed yet.

    *arena_owner* tells whose arena the head writes, which all stages on its node must share. *arena* is its memory,
    while there is one; *messenger* is its owner.
    """

    def __init__(
        self,
        config: PrefillConfig,
        tasks: asyncio.TaskGroup,
        *,
        on_lost: Callable[[MooncakeError], None],
        arena_owner: Callable[[], Incarnation | None],
        arena: Callable[[], memoryview | None],
        messenger: RpcClient,
    ) -> None:
        self._tasks = tasks
        self._on_lost = on_lost
        self._clients = [
            RpcClient(endpoint, on_lost=lambda: self.lose(PeerUnreachable("a stage of the instance was lost")))
            for endpoint in config.pipeline.stage_endpoints
        ]
        self._joiner = Joiner(config, tasks, self._clients, arena_owner=arena_owner, arena=arena, messenger=messenger)
        self._joined: Joined | None = None
        self._changed = Bell()
        self._under_way: set[asyncio.Task[None]] = set()
        self._hidden_bytes = 0
        self._layout: KvLayout

    @property
    def is_joined(self) -> bool:
        return self._joined is not None

    async def run(self, spec: ModelSpec, changed: Callable[[], None]) -> None:
        """Keep the stages joined until cancelled. *changed* is called whenever they have become so, or are no more.

        Raises ModelError when the stages are not those of this head's model.
        """
        self._hidden_bytes, self._layout = spec.hidden_bytes, spec.layout
        trouble = ""
        while True:
            try:
                self._joined = await self._joiner.join(spec, self._former_over)
            except MeshError as error:
                self._joiner.close_far()
                if error.code != trouble:
                    log.warning("stages_unavailable", code=error.code, error=str(error)[:200])
                trouble = error.code
                await asyncio.sleep(_RETRY_S)
                continue
            trouble = ""
            log.info("pipeline_joined", stages=len(self._clients) + 1, transport=self._joined.outlet.transport)
            changed()
            await self._changed.until(lambda: True if self._joined is None else None)
            changed()

    def close(self) -> None:
        self.lose(PeerUnreachable("the instance stops"))
        for client in self._clients:
            client.close()

    async def _former_over(self) -> None:
        """The chunks of the former pipeline have ended: its stages were lost or have joined the next one."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def let_go(self) -> None:
        """The arena is to be unmapped: returns when nothing comes into it any more."""
        self.lose(PeerUnreachable("the node's messenger is gone"))
        await self._joiner.let_go()

    def lose(self, why: MooncakeError) -> None:
        """The pipeline passes nothing on any more, or has nothing to write to. It is joined anew."""
        joined, self._joined = self._joined, None
        if joined is None:
            return
        log.warning("pipeline_lost", error=str(why)[:200], chunks=joined.flight.n_open)
        for job_id in joined.room.jobs:  # stages that are still there need not wait for what will not come
            self._tell_dropped(joined, job_id)
        joined.outlet.close()
        self._joiner.close_far()
        self._changed.ring()
        self._on_lost(why)

    # --- chunks -------------------------------------------------------------------------------------------------------

    async def place(self, prompt: StagedPrompt, n_blocks: int) -> int:
        """Wait for a free slot, and for room for a prompt of so many blocks; the number of the chunk that may use it,
        which :meth:`start` must follow at once. The prompt's :meth:`end` is owed from now on.

        Raises PeerUnreachable while a stage is missing, InvalidRequest for a prompt that has never room.
        """

        def look() -> int | None:
            joined = self._now()
            has_room = joined.room.enter(prompt.job_id, n_blocks, prefix)
            return joined.flight.begin() if has_room else None

        prefix = list(split_keys(prompt.keys))[: prompt.cached_blocks]
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
        is_first = joined.room.begin(prompt.job_id)
        way = _Way(
            number=number,
            job_id=prompt.job_id,
            hidden_bytes=n_tokens * self._hidden_bytes,
            prefix=self._prefix(joined, chunk, prompt) if is_first else (),
            computed_s=loop.create_future(),
            passed=loop.create_future(),
        )
        if joined.far is not None:
            blocks = ChunkBlocks.of(chunk.start, n_tokens, self._layout)
            joined.far.open(number, prompt.transfer_id, blocks, chunk.blocks)
        said = told(joined.pipeline, number, chunk, prompt, is_first=is_first)
        own_blocks = joined.room.blocks(prompt.job_id)
        requests = [told_to(stage, said, chunk, own_blocks) for stage in joined.stages]
        task = self._tasks.create_task(self._follow(joined, way, requests, timeout_s))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        hidden_out = joined.memory.view(number, way.hidden_bytes)
        try:
            elapsed_s = await forward(replace(chunk, sample=None, hidden_out=hidden_out))
        except BaseException:
            self._tell_dropped(joined, prompt.job_id)
            way.computed_s.set_result(None)
            way.passed.add_done_callback(_heard)
            raise
        way.computed_s.set_result(elapsed_s)
        return way.passed

    def drop(self, job_id: JobId) -> None:
        """Tell the stages that nobody wants the rest of a job; its chunks that are under way fail."""
        if self._joined is not None:
            self._tell_dropped(self._joined, job_id)

    def end(self, job_id: JobId, keys: Sequence[BlockKey]) -> None:
        """No chunk of this job will come any more. *keys* are those of its whole blocks, if all of it was computed."""
        if self._joined is not None:
            self._joined.room.end(job_id, keys)
            self._changed.ring()

    def _tell_dropped(self, joined: Joined, job_id: JobId) -> None:
        for client in self._clients:
            try:
                client.post(DropJob(pipeline=joined.pipeline, job_id=job_id))
            except PeerUnreachable as error:
                log.info("drop_undeliverable", code=error.code)

    def _prefix(self, joined: Joined, chunk: PrefillChunk, prompt: StagedPrompt) -> tuple[tuple[int, int], ...]:
        """What far stages lack of what was cached: blocks of the arena, and of theirs."""
        lacking = slice(joined.room.held_blocks(prompt.job_id), prompt.cached_blocks)
        own_blocks = joined.room.blocks(prompt.job_id)
        return tuple(zip(chunk.blocks[lacking], own_blocks[lacking], strict=False))

    def _now(self) -> Joined:
        if self._joined is None:
            raise PeerUnreachable("a stage of this instance is missing")
        return self._joined

    async def _follow(self, joined: Joined, way: "_Way", requests: Sequence[StageChunk], timeout_s: float) -> None:
        """See one chunk through all stages; its slot is free when this ends."""
        sent, *answers = await asyncio.gather(
            self._send(joined, way),
            *(
                client.call(request, StageChunkDone, timeout_s=timeout_s)
                for client, request in zip(self._clients, requests, strict=True)
            ),
            return_exceptions=True,
        )
        failure = self._failure(sent, answers)
        self._lose_if_broken(joined, way, failure)  # sooner than the end of what comes: that may stand still
        if joined.far is not None:
            missing = await joined.far.settle(way.number)
            failure = failure or missing
            self._lose_if_broken(joined, way, failure)
        joined.flight.over(way.number)
        joined.room.over(way.job_id)
        self._changed.ring()
        if failure is None:
            done = [answer for answer in answers if isinstance(answer, StageChunkDone)]
            way.passed.set_result(passed(way.computed_s.result() or 0.0, done))
            return
        way.passed.set_exception(failure)

    def _lose_if_broken(self, joined: Joined, way: "_Way", failure: MooncakeError | None) -> None:
        """What was given up here says nothing of the stages."""
        if failure is not None and is_breaking(failure) and not way.is_given_up and joined is self._joined:
            self.lose(failure)

    def _failure(self, sent: object, answers: Sequence[object]) -> MooncakeError | None:
        """What was not sent on no stage could compute, so that comes first."""
        for unexpected in (sent, *answers):
            if isinstance(unexpected, BaseException) and not isinstance(unexpected, MooncakeError):
                log.error("chunk_failed", exc_info=unexpected)
        return failure_of([sent]) or failure_of(answers)

    async def _send(self, joined: Joined, way: "_Way") -> None:
        """Stages have what was cached of the prompt before they can compute its first chunk."""
        try:
            if joined.far is not None and way.prefix:
                await joined.far.send_prefix(way.prefix, lambda: not way.is_given_up)
            if await way.computed_s is not None:
                await joined.outlet.send(way.number, way.hidden_bytes)
        except Exception:
            self._tell_dropped(joined, way.job_id)  # else they would wait for it
            await asyncio.wait([way.computed_s])
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One chunk's way through the stages. ``prefix``: blocks to copy to far stages before.

    ``computed_s`` is the head's part, None when it was given up.
    """

    number: int
    job_id: JobId
    hidden_bytes: int
    prefix: tuple[tuple[int, int], ...]
    computed_s: "asyncio.Future[float | None]"
    passed: "asyncio.Future[Passed]"

    @property
    def is_given_up(self) -> bool:
        return self.computed_s.done() and self.computed_s.result() is None


def _heard(future: "asyncio.Future[Passed]") -> None:
    """Its failure is known by what the head's own part raised."""
    if not future.cancelled():
        future.exception()
