"""The shell of a decode instance: its core says who is in the batch, the cost model how long a step takes.

Between two changes of the batch nothing is decided, so the steps in between are taken at once: the lengths of the
sequences move by as many tokens, and only last tokens go through the core. That is exact; a test compares it with
single steps. All sequences of a batch share its intervals, so they are kept once, for the instance. When each of them
will next want something (its end, more blocks) is known in steps, and kept in a heap.

While a prompt is computed here, each step has a chunk of it, and its whole chunks are alike. Its blocks can be found
once all are computed, as on a prefill node.
"""

import heapq
from collections.abc import Callable, Mapping
from typing import Final

from bench.simulator_flight import Flight, decode_job
from bench.simulator_node import INCARNATION, SimNode
from bench.simulator_prompts import InlineShell
from bench.simulator_results import Interval
from bench.simulator_window import Window, window_of
from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.prompt_line import InlinePrompt
from mooncake_mesh.decode.sequences import DecodeSequence, QueueFull, SequenceStage
from mooncake_mesh.errors import NoFreeBlocks, Rejected
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_proto.control import Load, Member, Role
from mooncake_proto.ids import InstanceId, JobId
from mooncake_proto.transfer import Acquire, Acquired

_GROW_AHEAD_TOKENS: Final = 8
"""The core asks for room this long before a sequence needs it; a window ends there, so that it can."""


class DecodeShell:
    """One decode instance. ``batch_blocks`` of KV can be decoded at a time, 0: all of the node's.
    ``shares``: what it received can be found by others (as in the live system) or not."""

    def __init__(
        self,
        node: SimNode,
        name: str,
        *,
        block_tokens: int,
        max_batch: int,
        longest_window_steps: int,
        batch_blocks: int,
        shares: bool,
        holders: Mapping[str, SimNode],
        on_room: Callable[[Flight], None],
        on_shown: Callable[[Flight], None],
        on_prompt_computed: Callable[[Flight], None],
        on_refused: Callable[[Flight, str], None],
        on_finished: Callable[[Flight], None],
        on_preempted: Callable[[Flight, int], None],
    ) -> None:
        self.node = node
        self.core = DecodeCore(block_tokens=block_tokens, max_batch=max_batch, max_jobs=1 << 30, step_cost=node.kind)
        self.member: Member = node.register_worker(Role.DECODE, InstanceId(name), block_tokens)
        self._block_tokens = block_tokens
        self._longest_window_steps = longest_window_steps
        self._batch_blocks = batch_blocks
        self._shares = shares
        self._prompts = InlineShell(node, holders, block_tokens=block_tokens, on_first=self._wake)
        self._on_room = on_room
        self._on_shown = on_shown
        self._on_prompt_computed = on_prompt_computed
        self._on_refused = on_refused
        self._on_finished = on_finished
        self._on_preempted = on_preempted
        self._flights: dict[JobId, Flight] = {}
        self._cached_blocks: dict[JobId, int] = {}
        self._joined: dict[JobId, Flight] = {}
        self._log: list[Interval] = []
        self._batch: list[DecodeSequence] = []
        self._n_steps = 0
        self._events: list[tuple[int, int, DecodeSequence]] = []
        self._context = 0
        self._n_submitted = 0
        self._n_active = 0
        self._has_ready = False
        self._held: set[JobId] = set()
        self._sits_somebody_out = False
        self._wanting: list[DecodeSequence] = []
        self._window = Window(0.0, 0.0, 0.0, 0, 0, 0)
        self._steps = 0  # of the window; none: idle
        self._window_number = 0
        self._step_s = 0.0
        self._idle_load: Load | None = None

    def load(self) -> Load:
        """As the live worker reports it; the window's steps that are over are in it. One object while it is idle."""
        core = self.core
        if not core.n_jobs and self._idle_load is not None:
            return self._idle_load
        load = self._load_now()
        self._idle_load = None if core.n_jobs else load
        return load

    def _load_now(self) -> Load:
        core, window, stepped = self.core, self._window, self._stepped()
        decoded = stepped if self._batch else 0
        progress = core.progress()
        if stepped:
            ahead = zip(core.unheld(), progress, strict=True)
            progress = tuple(
                [
                    (length + stepped, drawn + stepped) if sequence.stage is SequenceStage.RUNNING else (length, drawn)
                    for sequence, (length, drawn) in ahead
                ]
            )
        return Load(
            blocks_total=self._batch_blocks,
            max_batch=core.max_batch,
            queued_jobs=core.n_waiting,
            queued_tokens=core.waiting_tokens,
            running_jobs=len(progress),
            running_tokens=sum([tokens for tokens, _ in progress]),
            step_s=window.step_s_after(decoded, self._step_s),
            sequences=progress,
            decoded_tokens=core.decoded_tokens,
            steps=core.steps + decoded,
            recent_steps=(window.sample(decoded, self.node.kind),) if decoded else core.recent_steps()[-1:],
            queued_prompts=window.prompts(self._prompts.waiting(), stepped),
        )

    def _stepped(self) -> int:
        """Steps of the window that are over."""
        return min(self._steps, self._window.steps_by(self.node.clock.now_s)) if self._steps else 0

    @property
    def running(self) -> int:
        return len(self._batch)

    # --- jobs in ------------------------------------------------------------------------------------------------------

    def submit(self, flight: Flight, output_tokens: int) -> None:
        """Enter a job of which *output_tokens* are drawn in all; its blocks are asked for at once."""
        job = decode_job(flight, output_tokens, self.node.clock.now_s)
        sequence = self.core.submit(job, self.node.clock.now_s)
        assert not isinstance(sequence, QueueFull), "the simulated queue has no end"
        self._flights[flight.job_id] = flight
        self._n_submitted += 1
        flight.admission = self._n_submitted
        request = Acquire(
            job_id=flight.job_id,
            instance_id=self.member.instance_id,
            incarnation=INCARNATION,
            keys=flight.keys,
            n_blocks=-(-(flight.prompt_tokens + 1) // self._block_tokens),
            max_cached_blocks=sequence.sealed_blocks,
        )
        if flight.is_inline:
            self._prompts.submit(flight, sequence, request)
            return

        def acquired(got: Acquired) -> None:
            sequence.blocks = list(got.blocks)
            flight.has_decode_blocks = True
            prompt_blocks = -(-flight.prompt_tokens // self._block_tokens)
            flight.arriving_blocks = max(0, prompt_blocks - got.cached_blocks)
            self._cached_blocks[flight.job_id] = got.cached_blocks
            self._on_room(flight)

        self.node.acquire(request, acquired)

    def computed(self, flight: Flight) -> None:
        """Its first token is here."""
        self.core.first_token(flight.job_id, 0, self.node.clock.now_s)
        if flight.gate is not None:
            self._held.add(flight.job_id)
            self._wake()

    def landed(self, flight: Flight) -> None:
        """All KV of the prompt is here, perhaps of one that was refused when it was computed."""
        if (sequence := self.core.get(flight.job_id)) is None:
            return
        cached = self._cached_blocks.pop(flight.job_id)
        keys = list(split_keys(flight.keys))[cached:]
        if self._shares and keys:
            self.node.messenger.seal(flight.job_id, cached, keys)
            self.node.publish()
        self.core.landed(sequence, sequence.blocks)
        self._may_join(sequence)
        self._wake()

    def _may_join(self, sequence: DecodeSequence) -> None:
        """Its prompt is here and its first token known."""
        if sequence.is_granted:
            self._n_active += 1
            self._has_ready = True
        else:
            self._held.add(sequence.job.job_id)

    def _wake(self) -> None:
        """Somebody has come: what is computed changes with the next step."""
        if not self._steps:
            self._begin()
        elif (steps := self._window.steps_by(self.node.clock.now_s) + 1) < self._steps:
            self._schedule(steps)

    def dropped(self, flight: Flight) -> None:
        """A job that is not to be decoded: its place and its blocks are given back."""
        sequence = self.core.get(flight.job_id)
        assert sequence is not None, "a job is dropped before it is decoded"
        del self._flights[flight.job_id]
        self._held.discard(flight.job_id)
        sequence.stop = Rejected("tbt_objective", unavailable=False, retry_after_s=1.0)
        self.core.stopped(sequence)
        self.core.forget(sequence)
        self._cached_blocks.pop(flight.job_id, None)
        self.node.withdraw(flight.job_id)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Plan the next window: who steps, and how often before anything has to be decided."""
        self._open_gates()
        now_s, is_due, waited_s = self.node.clock.now_s, self._prompts.is_due, 0.0
        if self._has_ready or self._sits_somebody_out:
            waited_s = self.core.longest_wait_s(now_s) if is_due else 0.0
            self._plan()
        batch = self._batch
        prompt = self._prompts.begin(len(batch), self._context, waited_s)
        if not batch and prompt is None:
            self._steps = 0
            return
        self._window, alike = window_of(self.node.kind, now_s, len(batch), self._context, prompt)
        if is_due and prompt is None:
            alike = 1  # it has no time for a chunk; the next one has
        events = [self._events[0][0] - self._n_steps] if batch else []
        self._schedule(min(self._longest_window_steps, alike or self._longest_window_steps, *events))

    def _plan(self) -> None:
        """Let the core say who is in the batch. As long as nobody sits out, that is who was in it and who came."""
        batch = self._batch = self.core.plan_step()
        if self._sits_somebody_out:
            self._events.clear()
            self._context = 0
            entering = batch
            self._set_aside({sequence.job.job_id for sequence in batch})
        else:
            entering = [sequence for sequence in batch if sequence.job.job_id not in self._joined]
        for sequence in entering:
            self._context += sequence.length
            self._expect(sequence)
            flight = self._flights[sequence.job.job_id]
            if flight.log_start < 0:
                flight.log_start = len(self._log)
                self._joined[flight.job_id] = flight
        if self._sits_somebody_out or len(batch) == self._n_active:
            self._sits_somebody_out = len(batch) != self._n_active
        else:  # somebody who was in the batch, or should have come, is not in it
            self._sits_somebody_out = True
            self._plan()
        self._has_ready = False

    def _expect(self, sequence: DecodeSequence) -> None:
        """Note when *sequence* is at its end or wants more blocks."""
        at = self._n_steps + self._steps_alone(sequence)
        heapq.heappush(self._events, (at, self._flights[sequence.job.job_id].admission, sequence))

    def _open_gates(self) -> None:
        """Let the core decide on those whose first token is here and that were not granted yet."""
        if not self._held:
            return
        verdicts = self.core.open_gates(self.node.clock.now_s)
        for sequence in verdicts.shown:
            self._on_shown(self._flights[sequence.job.job_id])
        for sequence in verdicts.granted:
            self._held.discard(sequence.job.job_id)
            self._may_join(sequence)
        for sequence, refused in verdicts.refused:
            flight = self._flights[sequence.job.job_id]
            self.dropped(flight)
            self._on_refused(flight, refused.reason)

    def _set_aside(self, stepping: set[JobId]) -> None:
        """Stalled sequences sit out: the intervals of the others are not theirs."""
        for job_id in [job_id for job_id in self._joined if job_id not in stepping]:
            self._fold(self._joined[job_id])

    def _fold(self, flight: Flight) -> None:
        """Give a flight the intervals since it joined the batch. Its first one began when its last token was there."""
        if self._joined.pop(flight.job_id, None) is None:
            return
        log = self._log[flight.log_start :]
        flight.log_start = -1
        if log:
            (first_s, n), rest = log[0], log[1:]
            elapsed_s = sum(seconds * count for seconds, count in log)
            waited_s = self.node.clock.now_s - elapsed_s - flight.last_token_s
            flight.intervals += [(waited_s + first_s, 1), (first_s, n - 1), *rest]
            flight.last_token_s = self.node.clock.now_s

    def _steps_alone(self, sequence: DecodeSequence) -> int:
        """Steps until *sequence* is at its end or wants more blocks."""
        left = sequence.job.stopping.max_new_tokens - sequence.drawn
        room = len(sequence.blocks) * self._block_tokens - sequence.position
        return left if room >= left else max(1, room - _GROW_AHEAD_TOKENS)

    def _schedule(self, steps: int) -> None:
        self._steps = steps
        self._window_number += 1
        number = self._window_number

        def over() -> None:
            if number == self._window_number:
                self._finish_window()

        self.node.clock.at(self._window.start_s + self._window.elapsed_s(steps), over)

    def _finish_window(self) -> None:
        batch, steps, window = self._batch, self._steps, self._window
        if batch:
            self._log += window.intervals(steps)
            self._step_s = window.step_s_after(steps, self._step_s)
            self.core.stepped(*window.sample(steps, self.node.kind), steps=steps)
        self._n_steps += steps
        self._context += steps * len(batch)
        for sequence in batch:
            sequence.length += steps
            sequence.drawn += steps
        ending = self._due()
        for sequence in ending:  # the core draws the last token
            sequence.length -= 1
            sequence.drawn -= 1
        for new in self.core.step_finished(ending, [0] * len(ending)):
            assert new.finish is not None, "it has all its tokens"
            self._finish(new.sequence)
        if ending:
            self._batch = [sequence for sequence in batch if not sequence.is_over]
        if window.chunk_tokens and (prompt := self._prompts.computed(window, steps)) is not None:
            self._prompt_over(prompt)
        if self._wanting or self._has_ready or self._sits_somebody_out:
            self._grow()
        self.node.publish()
        self._begin()

    def _prompt_over(self, prompt: InlinePrompt) -> None:
        """Its first token is drawn; perhaps there are to be more."""
        flight = self._flights[prompt.sequence.job.job_id]
        finish = self.core.prefilled(prompt.sequence, prompt.blocks, 0)
        self._on_prompt_computed(flight)
        if finish is None:
            self._may_join(prompt.sequence)
            return
        del self._flights[flight.job_id]
        self.core.forget(prompt.sequence)
        self.node.release(flight.job_id)
        self._on_finished(flight)

    def _due(self) -> list[DecodeSequence]:
        """Sequences that are at their end now; those that want to grow are left for :meth:`_grow`."""
        ending = []
        while self._events and self._events[0][0] <= self._n_steps:
            sequence = heapq.heappop(self._events)[2]
            if sequence.drawn >= sequence.job.stopping.max_new_tokens:
                ending.append(sequence)
            else:
                self._wanting.append(sequence)
        return ending

    def _finish(self, sequence: DecodeSequence) -> None:
        self._context -= sequence.length
        flight = self._leave(sequence)
        self.core.forget(sequence)
        self.node.release(flight.job_id)
        self._on_finished(flight)

    def _leave(self, sequence: DecodeSequence) -> Flight:
        self._n_active -= 1
        flight = self._flights.pop(sequence.job.job_id)
        self._fold(flight)
        return flight

    def _grow(self) -> None:
        """Ask for more blocks for all that the core names. Who gets none has one step at a time, then sits out."""
        for job_id, blocks in self.core.wants_growth().items():
            sequence = self.core.get(job_id)
            if sequence is None or sequence.is_over:
                continue
            got = self.node.messenger.grow(job_id, blocks)
            victim = self.core.grown(sequence, got)
            if not got:
                self._sits_somebody_out = True
            if victim is not None:
                self._preempt(victim)
        for sequence in self._wanting:
            if not sequence.is_over:
                self._expect(sequence)
        self._wanting.clear()

    def _preempt(self, victim: DecodeSequence) -> None:
        """Its request is placed again, with the tokens it has so far."""
        self._sits_somebody_out = True
        flight = self._leave(victim)
        victim.stop = NoFreeBlocks("preempted: the KVCache pool of the node is full")
        self.core.stopped(victim)
        self.core.forget(victim)
        self.node.release(victim.job.job_id)
        self._on_preempted(flight, victim.drawn)
