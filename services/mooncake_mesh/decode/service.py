"""The decode process: KV arrives, sequences join the running batch, tokens go out.

====== ========== =================================================================
socket who        what flows
====== ========== =================================================================
ROUTER gateways   DecodeJob, CancelJob
ROUTER prefill    PrefillDone
DEALER gateways   DecodeGranted, TokenBatch (one per step and gateway), JobFailed; FirstToken of prompts computed here
DEALER messenger  Acquire with a landing, or of one that comes back; Grow, Seal, Release
DEALER conductor  membership
====== ========== =================================================================

Each job waits for its KV in a task of its own. One task steps the batch: while the engine thread computes a step, the
tokens of the step before are sent, blocks are sealed and growth is asked for. Before each step it computes a chunk of a
prompt that was placed here as a whole, where there is one (see inline_prompts.py). Where it shares its cores with those
who compute prompts, a step may wait for sequences that are on their way (see forming.py).
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from time import monotonic
from typing import Final

import structlog

from mooncake_mesh.config import DecodeConfig
from mooncake_mesh.decode.acquiring import blocks_request
from mooncake_mesh.decode.contexts import SequenceContexts
from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.inline_prompts import InlinePrompts, PromptEnd, first_token
from mooncake_mesh.decode.preemption import SwapBudget
from mooncake_mesh.decode.room import Room
from mooncake_mesh.decode.sequences import DecodeSequence, NewToken, QueueFull, SequenceStage
from mooncake_mesh.decode.slots import DecodeSlots
from mooncake_mesh.decode.step_clock import StepClock
from mooncake_mesh.decode.swapping import ArenaBlocks, Swapping
from mooncake_mesh.engine.api import Drawn, Engine
from mooncake_mesh.errors import (
    Aborted,
    DecodeRefused,
    InternalError,
    InvalidRequest,
    MooncakeError,
    PeerUnreachable,
    Rejected,
)
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.mesh.rpc import Caller, Handler
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_mesh.worker.home import WorkerHome
from mooncake_mesh.worker.station import Station
from mooncake_proto.control import Load, Ok, Role
from mooncake_proto.ids import JobId
from mooncake_proto.serving import (
    CancelJob,
    DecodeGranted,
    DecodeJob,
    FirstToken,
    PrefillDone,
    TokenBatch,
    TokenEntry,
)
from mooncake_proto.shapes import TOKEN_BYTES
from mooncake_proto.transfer import Acquired, Seal

log = structlog.get_logger(__name__)

_MIN_TIMEOUT_S: Final = 0.01


class DecodeService:
    """One decode instance. With a *home*, for one turn."""

    def __init__(self, config: DecodeConfig, tasks: asyncio.TaskGroup, home: WorkerHome | None = None) -> None:
        self._tasks = tasks
        self._config = config
        self._core = DecodeCore(
            block_tokens=config.block_tokens,
            max_batch=config.max_batch,
            max_jobs=config.max_batch + config.max_waiting_jobs,
        )
        self._station = Station(
            config,
            Role.DECODE,
            tasks,
            load=self._load,
            on_stop=self._stop_all,
            on_gateway_lost=self._gateway_lost,
            has_job=lambda job_id: self._core.get(job_id) is not None,
            home=home,
        )
        self._changed, self._over = Bell(), Bell()
        self._stepping: frozenset[JobId] = frozenset()
        self._slots = DecodeSlots()

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serve until *lifecycle* says stop; then finish what was accepted."""
        self._engine: Engine = await self._station.load_engine()
        self._layout = self._engine.spec.layout
        self._prompts = InlinePrompts(self._station, self._engine)
        self._contexts = SequenceContexts(self._station, self._engine)
        self._clock = StepClock(self._core, self._prompts, self._station.cores, self._changed, self._config.forming_s)
        blocks = ArenaBlocks(self._engine)
        self._room = self._make_room(blocks)
        handlers: dict[type, Handler] = {
            DecodeJob: self._submit,
            PrefillDone: self._prefill_done,
            CancelJob: self._cancel,
        }
        await self._station.run(blocks, lifecycle, handlers, [self._step_forever()], self._idle)

    def _make_room(self, blocks: ArenaBlocks) -> Room:
        swapping = Swapping(
            self._station,
            self._core,
            blocks,
            self._changed,
            budget=SwapBudget(most_bytes=self._config.swap.most_bytes),
            patience_s=self._config.swap.patience_s,
        )
        messenger, stop, give_up = self._station.messenger, self._stop, self._give_up
        return Room(messenger, self._tasks, self._core, swapping, self._changed, stop=stop, give_up=give_up)

    async def _idle(self) -> None:
        await self._over.until(lambda: None if self._core.n_jobs else True)

    def _load(self) -> Load:
        return Load(
            queued_jobs=self._core.n_waiting,
            queued_tokens=self._core.waiting_tokens,
            running_jobs=self._core.n_jobs - self._core.n_waiting,
            running_tokens=self._core.running_tokens,
            step_s=self._clock.step_s,
            draining=self._station.is_draining,
            sequences=self._core.progress(),
            decoded_tokens=self._core.decoded_tokens,
            steps=self._core.steps,
            max_batch=self._core.max_batch,
            recent_steps=self._core.recent_steps(),
            queued_prompts=self._prompts.waiting(),
            preemptions=self._core.preemptions,
            swapped_jobs=self._core.n_swapped,
        )

    # --- jobs in ------------------------------------------------------------------------------------------------------

    async def _submit(self, job: DecodeJob, _: Caller) -> Ok:
        self._station.check_placement(job.incarnation)
        self._check(job)
        await self._station.peers.reach(job.stream_endpoint)
        self._station.early_cancels.check(job.job_id)
        sequence = self._core.submit(job, monotonic())
        if isinstance(sequence, QueueFull):
            raise Rejected("decode_queue_full", unavailable=False, retry_after_s=1.0)
        self._station.grammars.begin(job.sampling.grammar)
        self._tasks.create_task(self._receive(sequence))
        if job.first_token_within_s is not None:  # whoever is not granted by then is refused, steps or no steps
            asyncio.get_running_loop().call_later(job.first_token_within_s, self._open_gates)
        return Ok()

    def _check(self, job: DecodeJob) -> None:
        length = len(job.tokens) // TOKEN_BYTES + job.stopping.max_new_tokens - job.drawn_tokens
        longest = self._engine.spec.max_context_tokens
        if length > longest:
            raise InvalidRequest(f"{length} tokens exceed the context of {longest}", param="stopping.max_new_tokens")

    def _prefill_done(self, done: PrefillDone, _: Caller) -> Ok:
        self._core.first_token(done.job_id, done.token, monotonic())
        self._open_gates()
        self._changed.ring()
        return Ok()

    def _open_gates(self) -> None:
        """Tell the gateways of jobs that may begin now, and end those that have no place."""
        verdicts = self._core.open_gates(monotonic())
        for sequence in verdicts.shown:
            self._post(sequence.job.stream_endpoint, DecodeGranted(job_id=sequence.job.job_id))
        for sequence, refused in verdicts.refused:
            self._stop(sequence, DecodeRefused(refused.reason, retry_after_s=refused.retry_after_s))

    async def _receive(self, sequence: DecodeSequence) -> None:
        """Reserve the blocks, wait for the KV, then let the sequence into the batch, or its prompt be computed."""
        try:
            acquired = await self._acquire(sequence)
            sequence.filter = await self._station.grammars.filter(sequence.job.sampling.grammar)
        except MooncakeError as error:
            await self._give_up(sequence, sequence.stop or error)
            return
        if sequence.stop is not None:
            await self._give_up(sequence, sequence.stop)
            return
        if sequence.job.inline_prefill is not None:
            self._prompts.add(sequence, acquired.blocks, acquired.cached_blocks)
            self._changed.ring()
            return
        if (failure := await self._contexts.load(sequence, acquired)) is not None:
            await self._give_up(sequence, failure)
            return
        self._core.landed(sequence, acquired.blocks)
        self._open_gates()
        self._changed.ring()

    async def _acquire(self, sequence: DecodeSequence) -> Acquired:
        """Blocks with the prompt's KV in them, as far as it is not computed here, and room for the first token."""
        if sequence.stop is not None:  # it came before this task's first turn
            raise sequence.stop
        request = blocks_request(sequence, self._layout, self._station.me)
        async with self._station.waits.interruptible(sequence.job.job_id):
            return await self._station.messenger.call(request, Acquired, timeout_s=self._left_s(sequence))

    # --- stopping -----------------------------------------------------------------------------------------------------

    async def _cancel(self, request: CancelJob, _: Caller) -> Ok:
        """Answers when nothing of the job is left, at the latest after the step that is running."""
        sequence = self._core.get(request.job_id)
        if sequence is None:
            self._station.early_cancels.add(request.job_id)
            return Ok()
        log.info("job_cancelled", job_id=request.job_id, stage=sequence.stage.value, reason=request.reason)
        self._stop(sequence, Aborted(request.reason or "cancelled"))
        await self._over.until(lambda: None if self._core.get(request.job_id) is sequence else True)
        return Ok()

    def _stop(self, sequence: DecodeSequence, why: MooncakeError) -> None:
        """End a sequence: at once when nobody works on it, else by who does."""
        if sequence.stop is not None or sequence.is_over:
            return
        sequence.stop = why
        if sequence.stage is SequenceStage.SWAPPED or not (sequence.is_landed or self._prompts.drop(sequence)):
            self._station.waits.interrupt(sequence.job.job_id)  # its own task waits for its KV, or for room
        elif sequence.job.job_id not in self._stepping:
            self._tasks.create_task(self._give_up(sequence, why))

    def _stop_all(self, why: MooncakeError) -> None:
        for sequence in self._core.sequences():
            self._stop(sequence, why)

    def _gateway_lost(self, endpoint: str) -> None:
        for sequence in self._core.sequences():
            if sequence.job.stream_endpoint == endpoint:
                self._stop(sequence, Aborted("the gateway is gone"))

    async def _give_up(self, sequence: DecodeSequence, error: MooncakeError) -> None:
        if not sequence.is_over and not isinstance(error, Aborted):
            self._station.report_failure(sequence.job.job_id, sequence.job.stream_endpoint, error)
        self._core.stopped(sequence)
        await self._close(sequence)

    async def _close(self, sequence: DecodeSequence) -> None:
        await self._contexts.retire(sequence)
        await self._station.release(sequence.arena_job)
        self._core.forget(sequence)
        self._slots.forget(sequence.job.job_id)
        self._over.ring()
        self._changed.ring()

    def _left_s(self, sequence: DecodeSequence) -> float:
        return max(_MIN_TIMEOUT_S, sequence.admitted_s + sequence.job.deadline_s - monotonic())

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _step_forever(self) -> None:
        news: list[tuple[NewToken, Drawn]] = []
        while True:
            if self._prompts.is_due and await self._compute_chunk(news):
                news = []
            self._open_gates()
            batch = self._core.plan_step()
            if self._clock.holds(batch):
                self._settle(news)
                news = []
                batch = await self._changed.until(self._next_batch)
                if not batch:
                    continue
            self._stepping = frozenset(sequence.job.job_id for sequence in batch)
            slots = [self._slots.next(sequence) for sequence in batch]
            tokens = sum(sequence.length for sequence in batch)
            self._clock.begin()
            step = self._station.on_engine_thread(self._engine.decode, slots)
            await asyncio.sleep(0)  # lets the engine thread have the interpreter first; what follows is for others
            self._settle(news)
            news = await self._finish_step(batch, step)
            self._core.stepped(len(batch), tokens, self._clock.end())

    def _next_batch(self) -> list[DecodeSequence] | None:
        """For an instance that pauses: sequences that are all stalled ask for room whenever something has changed.

        Nobody in the batch means that a prompt is to be computed.
        """
        self._open_gates()
        batch = self._core.plan_step()
        if not batch:
            self._room.ask()
        return batch if self._prompts.is_due or not self._clock.holds(batch) else None

    async def _compute_chunk(self, news: Sequence[tuple[NewToken, Drawn]]) -> bool:
        """A chunk of a prompt, while what the step before has brought goes out. False if there is no time for one."""
        forward = self._prompts.start(self._core.batch(), self._core.longest_wait_s(monotonic()))
        if forward is None:
            return False
        await asyncio.sleep(0)
        self._settle(news)
        end = await self._prompts.finish(forward)
        if end is not None:
            self._prompt_over(end)
        return True

    def _prompt_over(self, end: PromptEnd) -> None:
        """Tell the gateway the first token, and let the sequence into the next batch."""
        prompt, sequence = end.prompt, end.prompt.sequence
        drawn = sequence.filter_failure or end.result
        if isinstance(drawn, MooncakeError):
            self._tasks.create_task(self._give_up(sequence, drawn))
            return
        log.info(
            "prompt_computed",
            job_id=sequence.job.job_id,
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=prompt.cached_tokens,
            chunk_tokens=prompt.chunk_tokens,
        )
        finish = self._core.prefilled(sequence, prompt.blocks, drawn.token)
        self._post(sequence.job.stream_endpoint, first_token(prompt, drawn, finish, monotonic()))
        if finish is not None:
            self._tasks.create_task(self._close(sequence))

    async def _finish_step(
        self, batch: Sequence[DecodeSequence], step: "asyncio.Future[list[Drawn]]"
    ) -> list[tuple[NewToken, Drawn]]:
        try:
            drawn = await step
        except Exception as error:
            log.error("engine_failed", jobs=len(batch), exc_info=error)
            failure = InternalError(f"decode failed: {type(error).__name__}")
            for sequence in batch:
                sequence.stop = sequence.stop or failure
            drawn = []
        self._stepping = frozenset()
        for sequence in batch:
            if sequence.stage is SequenceStage.SWAPPED:  # its own task looks after it
                continue
            sequence.stop = sequence.stop or sequence.filter_failure
            if sequence.stop is not None:
                self._tasks.create_task(self._give_up(sequence, sequence.stop))
        if not drawn:
            return []
        by_sequence = {id(sequence): one for sequence, one in zip(batch, drawn, strict=True)}
        news = self._core.step_finished(batch, [one.token for one in drawn])
        return [(new, by_sequence[id(new.sequence)]) for new in news]

    def _settle(self, news: Sequence[tuple[NewToken, Drawn]]) -> None:
        """Everything a finished step leads to; runs while the next one computes."""
        by_gateway: dict[str, list[TokenEntry]] = defaultdict(list)
        for new, drawn in news:
            job = new.sequence.job
            entry = TokenEntry(
                job_id=job.job_id, position=new.position, token=new.token, logprob=drawn.logprob, finish=new.finish
            )
            by_gateway[job.stream_endpoint].append(entry)
            self._share(new.sequence)
            if new.finish is not None:
                self._tasks.create_task(self._close(new.sequence))
        for endpoint, entries in by_gateway.items():
            self._send(endpoint, entries)
        self._room.ask()

    def _send(self, endpoint: str, entries: Sequence[TokenEntry]) -> None:
        self._post(endpoint, TokenBatch(instance_id=self._station.me.instance_id, entries=tuple(entries)))

    def _post(self, endpoint: str, word: DecodeGranted | FirstToken | TokenBatch) -> None:
        try:
            self._station.peers.get(endpoint).post(word)
        except PeerUnreachable:
            self._gateway_lost(endpoint)

    def _share(self, sequence: DecodeSequence) -> None:
        whole = self._core.whole_blocks(sequence)
        if whole is None:
            return
        seal = Seal(job_id=sequence.arena_job, first_block=whole.first_block, keys=b"".join(whole.keys))
        try:
            self._station.messenger.post(seal)
        except PeerUnreachable:  # sharing is for others; a lost messenger ends this job by another way
            log.debug("seal_undelivered", job_id=sequence.job.job_id)


async def run(config: DecodeConfig, lifecycle: Lifecycle) -> None:
    """Run a decode instance until *lifecycle* says stop."""
    async with asyncio.TaskGroup() as tasks:
        await DecodeService(config, tasks).run(lifecycle)
