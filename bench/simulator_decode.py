"""The shell of a decode instance: its core says who is in the batch, the cost model how long a step takes.

Between two changes of the batch nothing is decided, so the steps in between are taken at once: the lengths of the
sequences move by as many tokens, and only the last step goes through the core. That is exact; a test compares it with
single steps. All sequences of a batch share its intervals, so they are kept once, for the instance.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from bench.simulator_flight import Flight
from bench.simulator_node import INCARNATION, SimNode
from bench.simulator_results import Interval
from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.sequences import DecodeSequence, QueueFull, SequenceStage
from mooncake_mesh.errors import NoFreeBlocks, Rejected
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.policy.admission import decode_refusal
from mooncake_mesh.policy.views import InstanceView, Objectives, RequestShape
from mooncake_proto.control import Load, Member, Role
from mooncake_proto.ids import InstanceId, JobId, TransferId
from mooncake_proto.serving import DecodeJob, GateKind, Sampling, Stopping
from mooncake_proto.transfer import Acquire, Acquired

_STEP_MEMORY: Final = 0.9
_GROW_AHEAD_TOKENS: Final = 8
"""The core asks for room this long before a sequence needs it; a window ends there, so that it can."""

_SAMPLING: Final = Sampling(temperature=0.0)


class DecodeShell:
    """One decode instance. ``shares``: what it received can be found by others (as in the live system) or not."""

    def __init__(
        self,
        node: SimNode,
        name: str,
        *,
        block_tokens: int,
        max_batch: int,
        longest_window_steps: int,
        shares: bool,
        on_room: Callable[[Flight], None],
        on_granted: Callable[[Flight], None],
        on_refused: Callable[[Flight, str], None],
        on_finished: Callable[[Flight], None],
        on_preempted: Callable[[Flight, int], None],
    ) -> None:
        self.node = node
        self.core = DecodeCore(block_tokens=block_tokens, max_batch=max_batch, max_jobs=1 << 30, step_cost=node.kind)
        self.member: Member = node.register_worker(Role.DECODE, InstanceId(name), block_tokens)
        self._block_tokens = block_tokens
        self._longest_window_steps = longest_window_steps
        self._shares = shares
        self._on_room = on_room
        self._on_granted = on_granted
        self._on_refused = on_refused
        self._on_finished = on_finished
        self._on_preempted = on_preempted
        self._flights: dict[JobId, Flight] = {}
        self._cached_blocks: dict[JobId, int] = {}
        self._joined: dict[JobId, Flight] = {}
        self._log: list[Interval] = []
        self._batch: list[DecodeSequence] = []
        self._start_s = 0.0
        self._steps = 0
        self._first_step_s = 0.0
        self._step_growth_s = 0.0
        self._window = 0
        self._step_s = 0.0

    def load(self) -> Load:
        """As the live worker reports it; the window's steps that are over are in it."""
        core = self.core
        waiting = core.n_waiting
        stepped = min(self._steps_by(self.node.clock.now_s), self._steps)
        return Load(
            queued_jobs=waiting,
            queued_tokens=core.waiting_tokens,
            running_jobs=core.n_jobs - waiting,
            running_tokens=core.running_tokens + stepped * len(self._batch),
            step_s=self._step_s_after(stepped),
            sequences=self._progress(stepped),
            decoded_tokens=core.decoded_tokens,
            steps=core.steps + stepped,
            recent_steps=(*core.recent_steps(), self._step(stepped)) if stepped else core.recent_steps(),
        )

    def _step(self, n: int) -> tuple[int, int, float]:
        """The *n*-th step of the window as a sample: sequences, tokens of KV, seconds."""
        sequences = len(self._batch)
        tokens = sum(sequence.length for sequence in self._batch) + (n - 1) * sequences
        return sequences, tokens, self._first_step_s + (n - 1) * self._step_growth_s

    def _stepped_tokens(self) -> int:
        """Tokens of the window's steps that are over; the core hears of them when the window is."""
        return min(self._steps_by(self.node.clock.now_s), self._steps) * len(self._batch)

    def _progress(self, stepped: int) -> tuple[tuple[int, int], ...]:
        """That of the core, with *stepped* tokens more for all that are in the batch."""
        progress = self.core.progress()
        if not stepped:
            return progress
        started = (seq for seq in self.core.sequences() if not seq.is_waiting)
        return tuple(
            (tokens + stepped, decoded + stepped) if seq.stage is SequenceStage.RUNNING else (tokens, decoded)
            for seq, (tokens, decoded) in zip(started, progress, strict=True)
        )

    @property
    def running(self) -> int:
        return len(self._batch)

    # --- jobs in ------------------------------------------------------------------------------------------------------

    def submit(self, flight: Flight, output_tokens: int) -> None:
        """Enter a job of which *output_tokens* are drawn in all; its blocks are asked for at once.

        Only holding is left to its gate: the check of the others comes when the prompt is computed (:meth:`refusal`).
        """
        gate = flight.placement.gate
        if gate is not None and (gate.kind is not GateKind.HOLD or flight.drawn):
            gate = None
        job = DecodeJob(
            job_id=flight.job_id,
            transfer_id=TransferId(f"kv-{flight.job_id}"),
            incarnation=INCARNATION,
            tokens=bytes(4 * flight.prompt_tokens),
            keys=flight.keys,
            key_root=bytes(16),
            sampling=_SAMPLING,
            stopping=Stopping(max_new_tokens=output_tokens),
            drawn_tokens=flight.drawn,
            stream_endpoint="sim://gateway",
            deadline_s=math.inf,
            gate=gate,
            first_token_within_s=None if gate is None else flight.placement.ttft_slo_s,
        )
        sequence = self.core.submit(job, self.node.clock.now_s)
        assert not isinstance(sequence, QueueFull), "the simulated queue has no end"
        self._flights[flight.job_id] = flight
        request = Acquire(
            job_id=flight.job_id,
            instance_id=self.member.instance_id,
            incarnation=INCARNATION,
            keys=flight.keys,
            n_blocks=-(-(flight.prompt_tokens + 1) // self._block_tokens),
            max_cached_blocks=sequence.sealed_blocks,
        )

        def acquired(got: Acquired) -> None:
            sequence.blocks = list(got.blocks)
            flight.has_decode_blocks = True
            prompt_blocks = -(-flight.prompt_tokens // self._block_tokens)
            flight.arriving_blocks = max(0, prompt_blocks - got.cached_blocks)
            self._cached_blocks[flight.job_id] = got.cached_blocks
            self._on_room(flight)

        self.node.acquire(request, acquired)

    def landed(self, flight: Flight) -> None:
        """All KV of the prompt and the first token are here."""
        sequence = self.core.get(flight.job_id)
        assert sequence is not None, "a job lands once"
        cached = self._cached_blocks.pop(flight.job_id)
        keys = list(split_keys(flight.keys))[cached:]
        if self._shares and keys:
            self.node.messenger.seal(flight.job_id, cached, keys)
            self.node.publish()
        self.core.landed(sequence, sequence.blocks)
        self.core.first_token(flight.job_id, 0)
        if self._batch:  # it joins at the next step
            self._shorten(self._steps_by(self.node.clock.now_s) + 1)
        else:
            self._begin()

    def refusal(self, flight: Flight, objectives: Objectives, decode_s: float) -> str:
        """The second check of the papers, when a prompt is computed: why it is not decoded here; empty when it is."""
        core, pool = self.core, self.node.messenger.pool
        view = InstanceView(
            instance_id=self.member.instance_id,
            node_id=self.node.node_id,
            blocks_total=pool.n_blocks,
            blocks_available=pool.available_blocks,
            running_jobs=core.n_jobs - core.n_waiting,
            running_tokens=core.running_tokens + self._stepped_tokens(),
        )
        shape = RequestShape(
            prompt_tokens=flight.prompt_tokens,
            max_new_tokens=1,
            block_tokens=self._block_tokens,
            block_bytes=self.node.block_bytes,
            prefix_blocks={},
        )
        refused = decode_refusal(shape, view, self.node.kind, objectives, decode_s)
        return "" if refused is None else refused.reason

    def dropped(self, flight: Flight) -> None:
        """A job that is not to be decoded: its place and its blocks are given back."""
        sequence = self.core.get(flight.job_id)
        assert sequence is not None, "a job is dropped before it is decoded"
        del self._flights[flight.job_id]
        sequence.stop = Rejected("tbt_objective", unavailable=False, retry_after_s=1.0)
        self.core.stopped(sequence)
        self.core.forget(sequence)
        self._cached_blocks.pop(flight.job_id, None)
        self.node.withdraw(flight.job_id)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Plan the next window: who steps, and how often before anything has to be decided."""
        self._open_gates()
        batch = self._batch = self.core.plan_step()
        if not batch:
            self._steps = 0
            return
        context = 0
        steps = self._longest_window_steps
        for sequence in batch:
            context += sequence.length
            steps = min(steps, self._steps_alone(sequence))
            flight = self._flights[sequence.job.job_id]
            if flight.log_start < 0:
                flight.log_start = len(self._log)
                self._joined[flight.job_id] = flight
        if len(self._joined) > len(batch):
            self._set_aside({sequence.job.job_id for sequence in batch})
        kind = self.node.kind
        self._start_s = self.node.clock.now_s
        self._first_step_s = kind.decode_step_s(len(batch), context)
        self._step_growth_s = kind.decode_step_s(len(batch), context + len(batch)) - self._first_step_s
        self._schedule(steps)

    def _open_gates(self) -> None:
        verdicts = self.core.open_gates(self.node.clock.now_s)
        for sequence in verdicts.granted:
            self._on_granted(self._flights[sequence.job.job_id])
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
        return left if room - _GROW_AHEAD_TOKENS >= left else max(1, room - _GROW_AHEAD_TOKENS)

    def _schedule(self, steps: int) -> None:
        self._steps = steps
        self._window += 1
        window = self._window

        def over() -> None:
            if window == self._window:
                self._finish_window()

        self.node.clock.at(self._start_s + self._elapsed_s(steps), over)

    def _shorten(self, steps: int) -> None:
        if steps < self._steps:
            self._schedule(steps)

    def _elapsed_s(self, steps: int) -> float:
        return steps * self._first_step_s + self._step_growth_s * steps * (steps - 1) / 2

    def _steps_by(self, now_s: float) -> int:
        """Whole steps of the window that are over at *now_s*."""
        if not self._batch:
            return 0
        elapsed_s, a, b = now_s - self._start_s, self._step_growth_s / 2, self._first_step_s - self._step_growth_s / 2
        steps = int(elapsed_s / b) if a <= 0 else int((math.sqrt(b * b + 4 * a * elapsed_s) - b) / (2 * a))
        while self._elapsed_s(steps) > elapsed_s:
            steps -= 1
        while self._elapsed_s(steps + 1) <= elapsed_s:
            steps += 1
        return steps

    def _step_s_after(self, steps: int) -> float:
        """The live worker's moving average after *steps* of the window; they grow by the same time each."""
        if not steps:
            return self._step_s
        memory = _STEP_MEMORY**steps
        average = memory * (self._step_s or self._first_step_s) + (1 - memory) * self._first_step_s
        return average + self._step_growth_s * (steps - (1 - memory) / (1 - _STEP_MEMORY))

    def _finish_window(self) -> None:
        batch, steps = self._batch, self._steps
        step_s = self._elapsed_s(steps) / steps
        self._log.append((step_s, steps))
        self._step_s = self._step_s_after(steps)
        self.core.stepped(*self._step(steps), steps=steps)
        for sequence in batch:
            sequence.length += steps - 1
            sequence.drawn += steps - 1
        for new in self.core.step_finished(batch, [0] * len(batch)):
            if new.finish is not None:
                self._finish(new.sequence)
        self._grow()
        self._begin()

    def _finish(self, sequence: DecodeSequence) -> None:
        flight = self._leave(sequence)
        self.core.forget(sequence)
        self.node.release(flight.job_id)
        self._on_finished(flight)

    def _leave(self, sequence: DecodeSequence) -> Flight:
        flight = self._flights.pop(sequence.job.job_id)
        self._fold(flight)
        return flight

    def _grow(self) -> None:
        for job_id, blocks in self.core.wants_growth().items():
            sequence = self.core.get(job_id)
            if sequence is None or sequence.is_over:
                continue
            victim = self.core.grown(sequence, self.node.messenger.grow(job_id, blocks))
            if victim is not None:
                self._preempt(victim)
        self.node.publish()

    def _preempt(self, victim: DecodeSequence) -> None:
        """Its request is placed again, with the tokens it has so far."""
        flight = self._leave(victim)
        victim.stop = NoFreeBlocks("preempted: the KVCache pool of the node is full")
        self.core.stopped(victim)
        self.core.forget(victim)
        self.node.release(victim.job.job_id)
        self._on_preempted(flight, victim.drawn)


def blocks_in_use(shells: Sequence[DecodeShell]) -> float:
    """The fullest pool's share of referenced blocks."""
    return max((1 - s.node.messenger.pool.available_blocks / s.node.messenger.pool.n_blocks for s in shells), default=0)
