"""The shell of a prefill instance: its core decides, the cost model says when the work is done.

As in the live worker, the jobs next in line get their blocks, and fetch their prefix, while another one computes; KV
leaves for the decode node while it is computed.
"""

from collections.abc import Callable
from typing import Final

from bench.simulator_flight import Flight, zero_tokens
from bench.simulator_node import INCARNATION, SimNode
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.policy.queue_order import QueueRules
from mooncake_mesh.prefill.core import JobStage, PrefillCore, QueuedJob, QueueFull
from mooncake_proto.control import Load, Member, Role
from mooncake_proto.ids import InstanceId, JobId, TransferId
from mooncake_proto.serving import PrefillJob, QueueTurn, Sampling, Stopping
from mooncake_proto.transfer import Acquire, Acquired

_RATE_MEMORY: Final = 0.8
_SAMPLING: Final = Sampling(temperature=0.0)


class PrefillShell:
    """One prefill instance. ``on_computed`` hears of each first token, ``on_computing`` of each start."""

    def __init__(
        self,
        node: SimNode,
        name: str,
        *,
        block_tokens: int,
        chunk_tokens: int,
        holders: dict[str, SimNode],
        on_computing: Callable[[Flight], None],
        on_computed: Callable[[Flight], None],
        on_late: Callable[[Flight], None],
        rules: QueueRules | None = None,
    ) -> None:
        self.node = node
        self.core = PrefillCore(
            chunk_tokens=chunk_tokens, block_tokens=block_tokens, max_queued_jobs=1 << 30, rules=rules
        )
        self.member: Member = node.register_worker(Role.PREFILL, InstanceId(name), block_tokens)
        self.flights: dict[JobId, Flight] = {}
        self.is_computing = False
        self._block_tokens = block_tokens
        self._holders = holders
        self._on_computing = on_computing
        self._on_computed = on_computed
        self._on_late = on_late
        self._is_acquiring = False
        self._tokens_per_s = 0.0
        self._load: Load | None = None

    def load(self) -> Load:
        """As the live worker reports it. The same object again while nothing changes."""
        core = self.core
        queued = core.queued_prompts()
        known = self._load
        running_jobs = core.running_jobs - core.queued_jobs
        count = (running_jobs, core.prefills)
        if known is not None and not (queued or known.queued_prompts) and (known.running_jobs, known.prefills) == count:
            return known
        self._load = Load(
            queued_jobs=core.queued_jobs,
            queued_tokens=sum(uncached for uncached, _ in queued),
            running_jobs=running_jobs,
            prefill_tokens_per_s=self._tokens_per_s,
            queued_prompts=queued,
            queued_waits_s=core.queued_waits_s(self.node.clock.now_s),
            prefill_elapsed_s=core.elapsed_s(self.node.clock.now_s),
            prefills=core.prefills,
            recent_prefills=core.recent_prefills(),
        )
        return self._load

    def submit(self, flight: Flight, max_new_tokens: int) -> None:
        placement = flight.placement
        job = PrefillJob(
            job_id=flight.job_id,
            transfer_id=TransferId(f"kv-{flight.job_id}"),
            incarnation=INCARNATION,
            tokens=zero_tokens(flight.prompt_tokens),
            keys=flight.keys,
            sampling=_SAMPLING,
            stopping=Stopping(max_new_tokens=max_new_tokens),
            drawn_tokens=flight.drawn,
            stream_endpoint="sim://gateway",
            decode=placement.decode,
            deadline_s=float("inf"),
            fetch_from=placement.fetch_from,
            fetch_prefix_blocks=placement.fetch_prefix_blocks,
            local_prefix_blocks=placement.local_prefix_blocks,
            turn=self._turn(flight),
        )
        entry = self.core.submit(job, self.node.clock.now_s)
        assert not isinstance(entry, QueueFull), "the simulated queue has no end"
        self.flights[flight.job_id] = flight
        self._acquire_next()

    def _turn(self, flight: Flight) -> QueueTurn:
        """What the gateway says of it."""
        placement, waited_s = flight.placement, self.node.clock.now_s - flight.record.arrival_s
        within_s = None if placement.ttft_slo_s is None else max(0.0, placement.ttft_slo_s - waited_s)
        return QueueTurn(service_s=placement.prefill_est_s, waited_s=waited_s, first_token_within_s=within_s)

    def _end_late_jobs(self) -> None:
        """Who waits in vain is refused before it keeps others waiting."""
        for entry in self.core.late_jobs(self.node.clock.now_s):
            has_blocks = entry.stage is JobStage.READY
            self.core.move(entry, JobStage.CANCELLED)
            self._on_late(self.flights.pop(entry.job.job_id))
            if has_blocks:
                self.node.release(entry.job.job_id)

    # --- blocks and prefix --------------------------------------------------------------------------------------------

    def _acquire_next(self) -> None:
        if self._is_acquiring:
            return
        self._end_late_jobs()
        entry = self.core.next_to_acquire()
        if entry is None:
            return
        self._is_acquiring = True
        job = entry.job
        request = Acquire(
            job_id=job.job_id,
            instance_id=self.member.instance_id,
            incarnation=INCARNATION,
            keys=job.keys,
            n_blocks=-(-entry.prompt_tokens // self._block_tokens),
            max_cached_blocks=(entry.prompt_tokens - 1) // self._block_tokens,
            fetch_from=job.fetch_from,
            fetch_blocks=job.fetch_prefix_blocks,
        )
        source = self._holders[job.fetch_from] if job.fetch_from else None
        if source is None or not self.node.fetch(source, request, lambda: self._acquire(entry, request)):
            self._acquire(entry, request)

    def _acquire(self, entry: QueuedJob, request: Acquire) -> None:
        def acquired(got: Acquired) -> None:
            self._is_acquiring = False
            self.core.acquired(entry, got.blocks, got.cached_blocks)
            self._compute_next()
            self._acquire_next()

        self.node.acquire(request, acquired)

    # --- computing ----------------------------------------------------------------------------------------------------

    def _compute_next(self) -> None:
        if self.is_computing:
            return
        entry = self.core.next_to_compute()
        if entry is None:
            return
        flight = self.flights[entry.job.job_id]
        self.is_computing = True
        self.core.move(entry, JobStage.COMPUTING)
        now_s = self.node.clock.now_s
        entry.started_s = now_s
        flight.computing_since_s = now_s
        self._on_computing(flight)
        end_s = now_s
        for chunk in self.core.chunks(entry):
            end_s += self.node.kind.prefill_s(chunk.end - chunk.start, chunk.start)
        flight.record.prefill_s += end_s - now_s
        flight.prompt_begun(
            cached_tokens=entry.cached_tokens,
            queue_s=now_s - entry.queued_s,
            block_tokens=self._block_tokens,
        )
        self.node.clock.at(end_s, lambda: self._computed(entry, flight))

    def _computed(self, entry: QueuedJob, flight: Flight) -> None:
        first = entry.cached_tokens // self._block_tokens
        keys = list(split_keys(flight.keys))[first:]
        if keys:
            self.node.messenger.seal(flight.job_id, first, keys)
            self.node.publish()
        elapsed_s = self.node.clock.now_s - entry.started_s
        self.core.computed(entry, elapsed_s)
        rate = (entry.prompt_tokens - entry.cached_tokens) / elapsed_s
        remembered = _RATE_MEMORY * self._tokens_per_s
        self._tokens_per_s = remembered + (1 - _RATE_MEMORY) * rate if remembered else rate
        self.is_computing = False
        self.core.move(entry, JobStage.SENDING)
        self._on_computed(flight)
        self._compute_next()
        self._acquire_next()

    def sent(self, flight: Flight) -> None:
        """The last of its KV has left: the job is over here."""
        entry = self.core.get(flight.job_id)
        assert entry is not None, "a job is sent once"
        self.core.move(entry, JobStage.DONE)
        del self.flights[flight.job_id]
        self.node.release(flight.job_id)
