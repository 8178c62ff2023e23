"""A prompt on its way through the engine: chunk by chunk, here and in the further stages, sealed when all are done."""

import asyncio
from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import Final

import numpy as np
import structlog

from mooncake_mesh.engine.api import Drawn, Engine, PrefillChunk, SampleRequest, TokenArray
from mooncake_mesh.errors import InternalError, MooncakeError
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.policy.stopping import banned_tokens
from mooncake_mesh.prefill.announcing import Forwarded, LayerNews, StopRequested, forward, to_messenger
from mooncake_mesh.prefill.core import Chunk, ChunkBlocks, JobStage, PrefillCore, QueuedJob
from mooncake_mesh.prefill.pipeline import Pipeline
from mooncake_mesh.prefill.pipeline_core import Passed
from mooncake_mesh.prefill.stage_core import StagedPrompt
from mooncake_mesh.worker.station import Station
from mooncake_proto.ids import BlockKey, TransferId
from mooncake_proto.transfer import Seal

log = structlog.get_logger(__name__)

_GRACE_S: Final = 10.0
"""A stage that answers this much after a job's deadline is lost."""


class PromptComputer:
    """Computes one prompt after the other. ``turn`` is held by the one that has chunks for this process.

    Behind a head (*pipeline* is not None) the last chunks of one prompt are in later stages while the next one begins.
    """

    def __init__(self, station: Station, core: PrefillCore, engine: Engine, pipeline: Pipeline | None) -> None:
        self.turn = asyncio.Lock()
        self._station = station
        self._core = core
        self._engine = engine
        self._layout = engine.spec.layout
        self._pipeline = pipeline

    async def compute(self, entry: QueuedJob) -> Drawn:
        """Compute the prompt and draw a token. Needs the turn, and ends it when nothing is left to compute here.

        Raises StopRequested, MooncakeError or what the engine raises; no stage works on the job any more then.
        """
        passing: deque[tuple[Chunk, asyncio.Future[Passed]]] = deque()
        drawn: Drawn | None = None
        try:
            try:
                for chunk, work in self._begin(entry):
                    passing.append((chunk, await self._start(entry, work)))
                    while passing and passing[0][1].done():
                        drawn = self._passed(entry, *passing.popleft())
            finally:
                self.turn.release()
            while passing:
                async with self._station.waits.interruptible(entry.job.job_id):
                    await asyncio.wait([passing[0][1]])
                drawn = self._passed(entry, *passing.popleft())
        except Exception:
            await self._abandon(entry, [future for _, future in passing])
            raise
        finally:
            if self._pipeline is not None:
                self._pipeline.end(entry.job.job_id, list(split_keys(entry.job.keys)) if drawn is not None else [])
        if entry.filter is not None and entry.filter.failure is not None:
            raise entry.filter.failure
        if drawn is None:
            raise InternalError(f"job {entry.job.job_id}: the engine drew no token")
        return drawn

    def _begin(self, entry: QueuedJob) -> Iterator[tuple[Chunk, PrefillChunk]]:
        """The chunks of a job, which is computed from now on."""
        if entry.stop is not None:
            raise StopRequested
        entry.started_s = monotonic()
        self._core.move(entry, JobStage.COMPUTING)
        log.debug("prompt_begun", job_id=entry.job.job_id, cached_tokens=entry.cached_tokens)
        tokens = np.frombuffer(entry.job.tokens, dtype="<i4").astype(np.int32, copy=False)
        keys = list(split_keys(entry.job.keys))
        for chunk in self._core.chunks(entry):
            is_last = chunk.end == entry.prompt_tokens
            yield (
                chunk,
                PrefillChunk(
                    sequence=entry.job.job_id,
                    tokens=tokens[chunk.start : chunk.end],
                    start=chunk.start,
                    blocks=entry.blocks,
                    sample=self._sample(entry, tokens) if is_last else None,
                    keys=keys[: chunk.start // self._layout.block_tokens],
                ),
            )

    async def _start(self, entry: QueuedJob, work: PrefillChunk) -> "asyncio.Future[Passed]":
        """Compute a chunk here; the future ends when it is computed in all stages."""
        if self._pipeline is None:
            passed: asyncio.Future[Passed] = asyncio.get_running_loop().create_future()
            passed.set_result(await self._forward(entry, work))
            return passed
        prompt = StagedPrompt(
            job_id=entry.job.job_id,
            transfer_id=_transfer_of(entry),
            n_tokens=entry.prompt_tokens,
            cached_blocks=entry.cached_tokens // self._layout.block_tokens,
            keys=entry.job.keys,
        )
        async with self._station.waits.interruptible(entry.job.job_id):
            number = await self._pipeline.place(prompt, len(entry.blocks))

        async def compute_here(chunk: PrefillChunk) -> float:
            return (await self._forward(entry, chunk)).slowest_s

        timeout_s = max(0.0, entry.queued_s + entry.job.deadline_s - monotonic()) + _GRACE_S
        return await self._pipeline.start(number, work, prompt, compute_here, timeout_s=timeout_s)

    async def _forward(self, entry: QueuedJob, work: PrefillChunk) -> Passed:
        """One chunk on the engine thread."""

        def failed(error: MooncakeError) -> None:
            entry.stop = entry.stop or error

        blocks = ChunkBlocks.of(work.start, len(work.tokens), self._layout)
        news = LayerNews(
            to_messenger(self._station.messenger, _transfer_of(entry), blocks, failed),
            layers=self._engine.spec.layers,
            is_stopped=lambda: entry.stop is not None,
        )
        forwarded = await self._on_engine_thread(entry, work, news)
        if work.sample is not None:
            self._retire(entry)
        log.debug(
            "chunk_computed",
            job_id=entry.job.job_id,
            start=work.start,
            n_tokens=len(work.tokens),
            began_s=forwarded.began_s,
            compute_s=forwarded.compute_s,
            cpu_s=forwarded.cpu_s,
        )
        return Passed(drawn=forwarded.drawn, slowest_s=forwarded.compute_s)

    async def _on_engine_thread(self, entry: QueuedJob, work: PrefillChunk, news: LayerNews) -> Forwarded:
        """What the engine raises ends here: its traceback holds views of the arena, which could not be unmapped while
        somebody waits with that exception in hand, perhaps for other stages."""
        failure: Exception
        try:
            return await self._station.on_engine_thread(forward, self._engine, work, news)
        except (StopRequested, MooncakeError) as error:
            failure = error
        except Exception as error:  # the failure of one job is reported, and the next one is computed
            log.error("engine_failed", job_id=entry.job.job_id, exc_info=error)
            failure = InternalError(f"prefill failed: {type(error).__name__}")
        raise failure.with_traceback(None)

    def _retire(self, entry: QueuedJob) -> None:
        """The prompt is computed here; nobody waits for the engine to hear of it."""
        work = self._station.on_engine_thread(self._engine.retire, entry.job.job_id, list(split_keys(entry.job.keys)))
        work.add_done_callback(lambda done: done.result())

    def _passed(self, entry: QueuedJob, chunk: Chunk, future: "asyncio.Future[Passed]") -> Drawn | None:
        """A chunk is computed in all layers: share its whole blocks. Raises why it was not."""
        passed = future.result()
        self._core.chunk_passed(chunk, passed.slowest_s)
        self._seal(entry, chunk.start, chunk.end, list(split_keys(entry.job.keys)))
        return passed.drawn

    async def _abandon(self, entry: QueuedJob, passing: list["asyncio.Future[Passed]"]) -> None:
        """End the chunks of a failed job wherever they are; none writes into its blocks when this returns."""
        if self._pipeline is None:
            return
        self._pipeline.drop(entry.job.job_id)
        if passing:
            await asyncio.wait(passing)
            for future in passing:
                future.exception()  # known already, or a consequence

    def _sample(self, entry: QueuedJob, tokens: TokenArray) -> SampleRequest:
        job = entry.job
        return SampleRequest(
            sampling=job.sampling,
            position=job.drawn_tokens,
            history=tokens,
            banned=banned_tokens(job.drawn_tokens, job.stopping),
            filter=entry.filter,
        )

    def _seal(self, entry: QueuedJob, start: int, end: int, keys: list[BlockKey]) -> None:
        """Whole blocks of positions *start* .. *end* are computed in all layers: share them."""
        first = start // self._layout.block_tokens
        last = min(end // self._layout.block_tokens, len(keys))
        if last > first:
            self._station.messenger.post(
                Seal(job_id=entry.job.job_id, first_block=first, keys=b"".join(keys[first:last]))
            )


def _transfer_of(entry: QueuedJob) -> TransferId | None:
    """None where nothing is sent."""
    return entry.job.transfer_id if entry.job.decode is not None else None
