"""The prefill process: jobs in, KV streamed out layer by layer, first tokens drawn.

====== ========== ==================================================================
socket who        what flows
====== ========== ==================================================================
ROUTER gateways   PrefillJob, CancelJob
DEALER gateways   FirstToken, JobFailed (to their stream ROUTER)
DEALER messenger  Acquire, StartSend, SliceReady, Seal, FinishSend, Release
DEALER decode     PrefillDone
DEALER conductor  membership
DEALER stages     JoinPipeline, DeliverKv, StageChunk, DropJob (where this is the head of several stages)
====== ========== ==================================================================

Three tasks overlap: one acquires blocks for the next job while the engine thread computes the current one, and each
computed job waits for its last slices in a task of its own. Behind a head further stages compute (see pipeline.py); the
next job begins when the head is through with this one's chunks, wherever the last of them are.
"""

import asyncio
from time import monotonic
from typing import Final

import structlog

from mooncake_mesh.config import PrefillConfig
from mooncake_mesh.config_scheduling import QueueOrderKind
from mooncake_mesh.engine.api import Drawn, Engine
from mooncake_mesh.errors import Aborted, InternalError, MooncakeError, PeerUnreachable, Rejected, TooLate
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.mesh.rpc import Caller, Handler
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_mesh.policy.queue_order import QueueRules
from mooncake_mesh.policy.stopping import finish_after
from mooncake_mesh.prefill.announcing import StopRequested
from mooncake_mesh.prefill.computing import PromptComputer
from mooncake_mesh.prefill.core import JobStage, PrefillCore, QueuedJob, QueueFull
from mooncake_mesh.prefill.far_kv import HeadPages
from mooncake_mesh.prefill.pipeline import Pipeline
from mooncake_mesh.prefill.stage import StageService
from mooncake_mesh.worker.home import WorkerHome
from mooncake_mesh.worker.station import Station
from mooncake_proto.control import Load, Ok, Ping, Pong, Role
from mooncake_proto.serving import CancelJob, FirstToken, PrefillDone, PrefillJob, WorkerRef
from mooncake_proto.transfer import Acquire, Acquired, FinishSend, SendReport, SliceReady, StartSend

log = structlog.get_logger(__name__)

_RULES: Final = {QueueOrderKind.FCFS: None, QueueOrderKind.SLACK: QueueRules()}
_RATE_MEMORY: Final = 0.8
_MIN_TIMEOUT_S: Final = 0.01


class PrefillService:
    """One prefill instance, or the head of one that has several stages. With a *home*, for one turn."""

    def __init__(self, config: PrefillConfig, tasks: asyncio.TaskGroup, home: WorkerHome | None = None) -> None:
        self._tasks = tasks
        self._core = PrefillCore(
            chunk_tokens=config.chunk_tokens,
            block_tokens=config.block_tokens,
            max_queued_jobs=config.max_queued_jobs,
            rules=_RULES[config.queue_order],
            stages=config.pipeline.stages,
        )
        self._station = Station(
            config,
            Role.PREFILL,
            tasks,
            load=self._load,
            on_stop=self._stop_all,
            on_gateway_lost=self._gateway_lost,
            has_job=lambda job_id: self._core.get(job_id) is not None,
            home=home,
        )
        self._submitted = Bell()
        self._over = Bell()
        self._acquired = Bell()
        self._tokens_per_s = 0.0
        self._node_id = config.node_id
        self._part = config.pipeline.part
        self._pipeline: Pipeline | None = None
        self._pages: HeadPages | None = None
        if self._part is not None:
            self._pipeline = Pipeline(
                config,
                tasks,
                on_lost=self._stop_uncomputed,
                arena_owner=lambda: self._station.arena_owner,
                arena=lambda: None if self._pages is None else self._pages.arena,
                messenger=self._station.messenger,
            )

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serve until *lifecycle* says stop; then finish what was accepted."""
        self._engine: Engine = await self._station.load_engine(self._part)
        self._layout = self._engine.spec.layout
        self._computer = PromptComputer(self._station, self._core, self._engine, self._pipeline)
        handlers: dict[type, Handler] = {PrefillJob: self._submit, CancelJob: self._cancel}
        background = [self._acquire_jobs(), self._compute_jobs()]
        if self._pipeline is not None:
            background.append(self._pipeline.run(self._engine.spec, self._station.news))
            self._pages = HeadPages(self._engine, self._pipeline.let_go)
        await self._station.run(self._pages or self._engine, lifecycle, handlers, background, self._idle)
        if self._pipeline is not None:
            self._pipeline.close()

    async def _idle(self) -> None:
        await self._over.until(lambda: None if self._core.running_jobs else True)

    def _load(self) -> Load:
        queued_jobs = self._core.queued_jobs
        return Load(
            queued_jobs=queued_jobs,
            queued_tokens=self._core.queued_tokens,
            running_jobs=self._core.running_jobs - queued_jobs,
            prefill_tokens_per_s=self._tokens_per_s,
            draining=self._station.is_draining or not self._is_whole,
            queued_prompts=self._core.queued_prompts(),
            queued_priorities=self._core.queued_priorities(),
            queued_waits_s=self._core.queued_waits_s(monotonic()),
            prefill_elapsed_s=self._core.elapsed_s(monotonic()),
            prefills=self._core.prefills,
            recent_prefills=self._core.recent_prefills(),
        )

    @property
    def _is_whole(self) -> bool:
        """Whether no stage is missing."""
        return self._pipeline is None or self._pipeline.is_joined

    # --- jobs in ------------------------------------------------------------------------------------------------------

    async def _submit(self, job: PrefillJob, _: Caller) -> Ok:
        self._station.check_placement(job.incarnation)
        if not self._is_whole:
            raise PeerUnreachable("a stage of this instance is missing")
        await self._station.peers.reach(job.stream_endpoint)
        self._station.early_cancels.check(job.job_id)
        entry = self._core.submit(job, monotonic())
        if isinstance(entry, QueueFull):
            raise Rejected("prefill_queue_full", unavailable=False, retry_after_s=1.0)
        self._station.grammars.begin(job.sampling.grammar)
        self._submitted.ring()
        within_s = None if job.turn is None else job.turn.first_token_within_s
        if within_s is not None:
            asyncio.get_running_loop().call_later(within_s, self._refuse_late)
        return Ok()

    def _refuse_late(self) -> None:
        """End the jobs that wait in vain, before they keep others waiting."""
        now_s = monotonic()
        for entry in self._core.late_jobs(now_s):
            left_s = sum(job.waiting.service_s for job in self._core.jobs())
            self._stop(entry, TooLate("ttft_objective_in_queue", retry_after_s=left_s))

    async def _cancel(self, request: CancelJob, _: Caller) -> Ok:
        """Answers when nothing of the job is left: at the next layer of a running forward, at once otherwise."""
        entry = self._core.get(request.job_id)
        if entry is None:
            self._station.early_cancels.add(request.job_id)
            return Ok()
        log.info("job_cancelled", job_id=request.job_id, stage=entry.stage.value, reason=request.reason)
        self._stop(entry, Aborted(request.reason or "cancelled"))
        await self._over.until(lambda: True if entry.is_over else None)
        return Ok()

    def _stop(self, entry: QueuedJob, why: MooncakeError) -> None:
        """Ask a job to end. Who works on it sees that; a job nobody works on, or that only waits, is ended here."""
        if entry.stop is not None:
            return
        entry.stop = why
        if entry.is_idle:
            self._tasks.create_task(self._give_up(entry, why))
            self._submitted.ring()  # another one may acquire its blocks
        else:
            self._station.waits.interrupt(entry.job.job_id)

    def _stop_all(self, why: MooncakeError) -> None:
        if self._pipeline is not None:
            self._pipeline.lose(why)
        for entry in self._core.jobs():
            self._stop(entry, why)

    def _stop_uncomputed(self, why: MooncakeError) -> None:
        """A stage is gone. What only has to be sent needs none."""
        for entry in self._core.jobs():
            if entry.stage is not JobStage.SENDING:
                self._stop(entry, why)

    def _gateway_lost(self, endpoint: str) -> None:
        for entry in self._core.jobs():
            if entry.job.stream_endpoint == endpoint:
                self._stop(entry, Aborted("the gateway is gone"))

    def _left_s(self, entry: QueuedJob) -> float:
        return max(_MIN_TIMEOUT_S, entry.queued_s + entry.job.deadline_s - monotonic())

    # --- the pipeline -------------------------------------------------------------------------------------------------

    async def _acquire_jobs(self) -> None:
        while True:
            self._refuse_late()
            entry = await self._submitted.until(self._core.next_to_acquire)
            try:
                async with self._station.waits.interruptible(entry.job.job_id):
                    await self._acquire(entry)
            except MooncakeError as error:
                await self._give_up(entry, entry.stop or error)
            else:
                if entry.stop is not None:  # its prefix could not be announced
                    await self._give_up(entry, entry.stop)
                self._acquired.ring()

    async def _acquire(self, entry: QueuedJob) -> None:
        job = entry.job
        n_blocks = self._layout.blocks_for(entry.prompt_tokens)
        is_decoded_here = job.decode is not None and job.decode.node_id == self._node_id
        request = Acquire(
            job_id=job.job_id,
            instance_id=self._station.me.instance_id,
            incarnation=self._station.me.incarnation,
            keys=job.keys,
            # who decodes it gets these blocks, and goes on behind the prompt
            n_blocks=self._layout.blocks_for(entry.prompt_tokens + 1) if is_decoded_here else n_blocks,
            max_cached_blocks=(entry.prompt_tokens - 1) // self._layout.block_tokens,
            fetch_from=job.fetch_from,
            fetch_blocks=job.fetch_prefix_blocks,
            tenant=job.tenant,
            read_limit_blocks=job.read_limit_blocks,
        )
        asked_s = monotonic()
        acquired = await self._station.messenger.call(request, Acquired, timeout_s=self._left_s(entry))
        entry.acquired_s = monotonic()
        entry.acquire_s = entry.acquired_s - asked_s
        self._core.acquired(entry, acquired.blocks, acquired.cached_blocks)
        if self._pipeline is None:
            entry.filter = await self._station.grammars.filter(job.sampling.grammar)
        if job.decode is not None:
            start = StartSend(
                job_id=job.job_id,
                transfer_id=job.transfer_id,
                target=job.decode.messenger_endpoint,
                n_blocks=n_blocks,
                layers=self._layout.layers,
                deadline_s=self._left_s(entry),
            )
            self._station.messenger.post(start)
            if self._pipeline is not None:  # the stages announce slices of it on connections of their own
                await self._station.messenger.call(Ping(), Pong, timeout_s=self._left_s(entry))
            if acquired.cached_blocks:
                self._announce(entry, 0, self._layout.layers, 0, acquired.cached_blocks)

    async def _compute_jobs(self) -> None:
        while True:
            await self._computer.turn.acquire()
            entry = await self._acquired.until(self._next_to_compute)
            self._submitted.ring()  # the next ones may acquire their blocks
            self._tasks.create_task(self._serve(entry))

    def _next_to_compute(self) -> QueuedJob | None:
        """Who has nothing to compute leaves the cores to others."""
        entry = self._core.next_to_compute()
        if entry is None and self._station.cores is not None:
            self._station.cores.rest()
        return entry

    async def _serve(self, entry: QueuedJob) -> None:
        failure = await self._attempt(entry)
        if failure is not None:
            await self._give_up(entry, failure)

    async def _attempt(self, entry: QueuedJob) -> MooncakeError | None:
        """Compute and deliver a job; why that failed, if it did."""
        try:
            await self._deliver(entry, await self._compute(entry))
        except StopRequested:
            return entry.stop or Aborted("stopped")
        except MooncakeError as error:
            return entry.stop or error
        except Exception as error:  # the failure of one job is reported, and the next one is computed
            log.error("engine_failed", job_id=entry.job.job_id, exc_info=error)
            return InternalError(f"prefill failed: {type(error).__name__}")
        return None

    async def _compute(self, entry: QueuedJob) -> Drawn:
        drawn = await self._computer.compute(entry)
        elapsed_s = monotonic() - entry.started_s
        self._core.computed(entry, elapsed_s)
        self._note_rate(entry.prompt_tokens - entry.cached_tokens, elapsed_s)
        return drawn

    def _announce(self, entry: QueuedJob, layer: int, n_layers: int, first_block: int, n_blocks: int) -> None:
        ready = SliceReady(
            transfer_id=entry.job.transfer_id,
            layer=layer,
            n_layers=n_layers,
            first_block=first_block,
            n_blocks=n_blocks,
        )
        try:
            self._station.messenger.post(ready)
        except PeerUnreachable as error:
            entry.stop = entry.stop or error

    def _note_rate(self, tokens: int, elapsed_s: float) -> None:
        rate = tokens / max(elapsed_s, 1e-6)
        self._tokens_per_s = (
            _RATE_MEMORY * self._tokens_per_s + (1 - _RATE_MEMORY) * rate if self._tokens_per_s else rate
        )

    # --- jobs out -----------------------------------------------------------------------------------------------------

    async def _deliver(self, entry: QueuedJob, drawn: Drawn) -> None:
        if entry.stop is not None:  # it came with the last layer, or that layer could not be announced
            raise StopRequested
        job = entry.job
        finish = finish_after(drawn.token, job.drawn_tokens, job.stopping)
        now_s = monotonic()
        first = FirstToken(
            job_id=job.job_id,
            position=job.drawn_tokens,
            token=drawn.token,
            cached_tokens=entry.cached_tokens,
            prefill_s=now_s - entry.started_s,
            queue_s=entry.started_s - entry.queued_s,
            acquire_s=entry.acquire_s,
            acquired_s=entry.acquired_s - entry.queued_s,
            logprob=drawn.logprob,
            finish=finish,
        )
        self._station.peers.get(job.stream_endpoint).post(first)
        if job.decode is None or finish is not None:
            await self._close(entry, JobStage.DONE)
            return
        self._core.move(entry, JobStage.SENDING)
        self._tasks.create_task(self._finish_send(entry, job.decode, drawn.token))

    async def _finish_send(self, entry: QueuedJob, decode: WorkerRef, token: int) -> None:
        """Tell the decode worker, wait for the last slices, then let the blocks go (they stay in the pool)."""
        if entry.stop is not None:
            await self._give_up(entry, entry.stop)
            return
        computed_s = monotonic()
        try:
            async with self._station.waits.interruptible(entry.job.job_id):
                done = PrefillDone(job_id=entry.job.job_id, token=token)
                await self._station.peers.get(decode.endpoint).call(done, Ok, timeout_s=self._left_s(entry))
                request = FinishSend(transfer_id=entry.job.transfer_id)
                report = await self._station.messenger.call(request, SendReport, timeout_s=self._left_s(entry))
            log.info(
                "prefill_sent",
                job_id=entry.job.job_id,
                transport=report.transport,
                sent_bytes=report.sent_bytes,
                overlapped_bytes=report.overlapped_bytes,
                skipped_blocks=report.skipped_blocks,
                elapsed_s=round(report.elapsed_s, 4),
                tail_s=round(monotonic() - computed_s, 4),  # what the transfer adds to the time of the prefill
            )
            self._end(entry, JobStage.DONE)
        except MooncakeError as error:
            await self._give_up(entry, entry.stop or error)

    async def _give_up(self, entry: QueuedJob, error: MooncakeError) -> None:
        """End a job without success; a cancelled one owes the gateway no word."""
        if isinstance(error, Aborted):
            await self._close(entry, JobStage.CANCELLED)
            return
        self._station.report_failure(entry.job.job_id, entry.job.stream_endpoint, error)
        await self._close(entry, JobStage.FAILED)

    async def _close(self, entry: QueuedJob, end: JobStage) -> None:
        """Release what the job holds, then close its books. Whoever comes second finds nothing to do."""
        await self._station.release(entry.job.job_id)
        self._end(entry, end)

    def _end(self, entry: QueuedJob, end: JobStage) -> None:
        if not entry.is_over:
            self._core.move(entry, end)
            self._over.ring()


async def run(config: PrefillConfig, lifecycle: Lifecycle) -> None:
    """Run a prefill instance, or one further stage of it, until *lifecycle* says stop."""
    async with asyncio.TaskGroup() as tasks:
        if config.pipeline.stage > 0:
            await StageService(config, tasks).run(lifecycle)
        else:
            await PrefillService(config, tasks).run(lifecycle)
