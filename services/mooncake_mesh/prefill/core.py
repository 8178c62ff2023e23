"""What a prefill instance decides, pure: which job is next, how its prompt is cut, what became of it.

The order is that of :mod:`~mooncake_mesh.policy.queue_order`. The first few in it acquire their blocks, and fetch their
prefix, while another one is computed; they keep them when somebody overtakes them. Whose turn it is to be computed is
the first one that has its blocks by then: from then on nobody overtakes it.

::

    QUEUED → ACQUIRING → READY → COMPUTING → SENDING → DONE
       └─────────┴─────────┴─────────┴──────────┴────→ FAILED | CANCELLED
"""

import enum
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Self

from mooncake_mesh.engine.api import TokenFilter
from mooncake_mesh.errors import InvalidTransition, MooncakeError
from mooncake_mesh.kv.layout import KvLayout
from mooncake_mesh.policy.chunking import ChunkSample, fit_chunk_cost, longest_chunk, plan_chunks
from mooncake_mesh.policy.fair_share import FairShares
from mooncake_mesh.policy.queue_order import QueueRules, WaitingPrompt, insertion_index, is_late
from mooncake_mesh.policy.request_class import BEGUN
from mooncake_proto.ids import JobId
from mooncake_proto.serving import PrefillJob, QueueTurn

AHEAD_JOBS: Final = 2
"""So many of those that wait acquire their blocks ahead of their turn, the next one first."""

_RECENT_PREFILLS: Final = 8
_CHUNK_SAMPLES: Final = 128


class JobStage(enum.Enum):
    QUEUED = "queued"
    ACQUIRING = "acquiring"
    READY = "ready"
    COMPUTING = "computing"
    SENDING = "sending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ORDER: Final = (
    JobStage.QUEUED,
    JobStage.ACQUIRING,
    JobStage.READY,
    JobStage.COMPUTING,
    JobStage.SENDING,
    JobStage.DONE,
)
_ENDS: Final = frozenset({JobStage.DONE, JobStage.FAILED, JobStage.CANCELLED})
_MOVES: Final = frozenset(
    {
        *itertools.pairwise(_ORDER),
        (JobStage.COMPUTING, JobStage.DONE),  # nothing to send: one token was all that was wanted
        *((stage, end) for stage in _ORDER[:-1] for end in (JobStage.FAILED, JobStage.CANCELLED)),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Prompt positions ``start`` .. ``end - 1`` of one forward."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBlocks:
    """The blocks of one chunk: ``n_blocks`` of those of its prompt, from ``first_block`` on."""

    first_block: int
    n_blocks: int

    @classmethod
    def of(cls, start: int, n_tokens: int, layout: KvLayout) -> Self:
        """Those of *n_tokens* positions from *start* on, which is the first one of a block."""
        first_block = start // layout.block_tokens
        return cls(first_block=first_block, n_blocks=layout.blocks_for(start + n_tokens) - first_block)


class LayerProgress:
    """Layers of one chunk: written on the engine thread, announced on the loop, in as few turns of it as possible.

    There is no lock. The writer counts before it looks whether a turn is due, and the turn takes that back before it
    reads the count; in whatever order the two threads run, every layer is announced once.
    """

    def __init__(self, first_layer: int = 0) -> None:
        self._written = first_layer
        self._announced = first_layer
        self._is_due = False

    def wrote(self, layer: int) -> bool:
        """Engine thread: *layer*, the next one, is written. Whether a :meth:`take` must be scheduled for it."""
        self._written = layer + 1
        if self._is_due:
            return False
        self._is_due = True
        return True

    def take(self) -> range:
        """Loop: the layers to announce now, perhaps none."""
        self._is_due = False
        first, self._announced = self._announced, self._written
        return range(first, self._announced)


class QueueFull(enum.Enum):
    """The answer to one job too many."""

    QUEUE_FULL = "queue_full"


@dataclass(slots=True)
class QueuedJob:
    """One job and where it stands.

    ``stop`` says why it should end early; the engine thread reads it between layers. ``cached_tokens`` is what the
    placement expected until the blocks are acquired, which took ``acquire_s``. ``filter`` rules its token.
    ``has_turn``: it is, or was, its turn to be computed. Times as in :meth:`submit`.
    """

    job: PrefillJob
    prompt_tokens: int
    queued_s: float
    waiting: WaitingPrompt
    stage: JobStage = JobStage.QUEUED
    blocks: tuple[int, ...] = ()
    cached_tokens: int = 0
    acquire_s: float = 0.0
    acquired_s: float = 0.0
    started_s: float = 0.0
    has_turn: bool = False
    filter: TokenFilter | None = None
    stop: MooncakeError | None = None
    history: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.stage in _ENDS

    @property
    def is_begun(self) -> bool:
        """Whether it is being computed, or about to be."""
        return self.has_turn and self.stage in (JobStage.READY, JobStage.COMPUTING)

    @property
    def is_idle(self) -> bool:
        """Whether it waits with nobody working on it."""
        return self.stage is JobStage.QUEUED or (self.stage is JobStage.READY and not self.has_turn)


class PrefillCore:
    """Jobs of one prefill instance: in the order of *rules*, first come, first served without any.

    *stages* says through how many processes chunks go.
    """

    def __init__(
        self,
        *,
        chunk_tokens: int,
        block_tokens: int,
        max_queued_jobs: int,
        rules: QueueRules | None = None,
        stages: int = 1,
    ) -> None:
        self._stages = stages
        self._chunk_samples: deque[ChunkSample] = deque(maxlen=_CHUNK_SAMPLES)
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._max_queued_jobs = max_queued_jobs
        self._rules = rules
        self._shares = FairShares()
        self._jobs: dict[JobId, QueuedJob] = {}
        self._queue: list[QueuedJob] = []
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=_RECENT_PREFILLS)
        self.prefills = 0

    @property
    def queued_jobs(self) -> int:
        """Jobs that wait, with nobody working on them."""
        return sum(job.is_idle for job in self._jobs.values())

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed, as far as is known."""
        return sum(uncached for uncached, _ in self.queued_prompts())

    def queued_prompts(self) -> tuple[tuple[int, int], ...]:
        """(uncached, cached) tokens of every job that is not computed yet, in their order, as far as is known."""
        jobs = [*self._begun(), *self._queue]
        return tuple((job.prompt_tokens - job.cached_tokens, job.cached_tokens) for job in jobs)

    def queued_priorities(self) -> tuple[int, ...]:
        """Priorities of the :meth:`queued_prompts`, begun ones being overtaken by nobody; empty where none has one."""
        queued = [job.waiting.priority for job in self._queue]
        if not any(queued):
            return ()
        return (*(BEGUN for _ in self._begun()), *queued)

    def queued_waits_s(self, now_s: float) -> tuple[float, ...] | None:
        """How long each of the last :meth:`queued_prompts`, which have not begun, has waited; None without rules."""
        if self._rules is None:
            return None
        return tuple(max(0.0, now_s - job.waiting.arrival_s) for job in self._queue)

    def elapsed_s(self, now_s: float) -> float:
        """How long the job at the head has been computed; 0 while it is not."""
        head = next(self._begun(), None)
        return now_s - head.started_s if head is not None and head.stage is JobStage.COMPUTING else 0.0

    def recent_prefills(self) -> tuple[tuple[int, int, float], ...]:
        """(uncached tokens, cached tokens, seconds) of the last computed jobs, newest last."""
        return tuple(self._recent)

    @property
    def running_jobs(self) -> int:
        """All jobs that are not over, those that wait among them."""
        return len(self._jobs)

    def get(self, job_id: JobId) -> QueuedJob | None:
        return self._jobs.get(job_id)

    def jobs(self) -> list[QueuedJob]:
        return list(self._jobs.values())

    def submit(self, job: PrefillJob, now_s: float) -> QueuedJob | QueueFull:
        """Queue a job, which must be new."""
        if len(self._jobs) >= self._max_queued_jobs:
            return QueueFull.QUEUE_FULL
        if job.job_id in self._jobs:
            raise InvalidTransition(f"job {job.job_id}", old=self._jobs[job.job_id].stage.value, new="queued")
        prompt_tokens = len(job.tokens) // 4
        hinted_blocks = max(job.local_prefix_blocks, job.fetch_prefix_blocks)
        usable_blocks = min(hinted_blocks, (prompt_tokens - 1) // self._block_tokens)
        entry = QueuedJob(
            job=job,
            prompt_tokens=prompt_tokens,
            queued_s=now_s,
            cached_tokens=usable_blocks * self._block_tokens,
            waiting=self._waiting(job.turn or _ANY_TURN, now_s),
        )
        self._jobs[job.job_id] = entry
        self._queue.insert(self._index(entry, now_s), entry)
        return entry

    def next_to_acquire(self) -> QueuedJob | None:
        """The next job that acquires its blocks now; None when as many as may have theirs, or nobody waits."""
        waiting = (entry for entry in self._queue if entry.stop is None)
        for entry in itertools.islice(waiting, AHEAD_JOBS):
            if entry.stage is JobStage.QUEUED:
                self.move(entry, JobStage.ACQUIRING)
                return entry
        return None

    def next_to_compute(self) -> QueuedJob | None:
        """Take the first job off the queue that has its blocks: it is its turn. None when nobody has."""
        for i, entry in enumerate(self._queue):
            if entry.stage is JobStage.READY and entry.stop is None:
                del self._queue[i]
                entry.has_turn = True
                self._shares.served(entry.waiting.share_start)
                del self._jobs[entry.job.job_id]
                self._jobs[entry.job.job_id] = entry  # the order of what has begun is that of its beginning
                return entry
        if not self._queue:
            self._shares.idle()
        return None

    def late_jobs(self, now_s: float) -> list[QueuedJob]:
        """Waiting jobs that would miss the objective for their first token even if it were their turn now."""
        if self._rules is None:
            return []
        return [
            entry for entry in self._queue if entry.is_idle and entry.stop is None and is_late(entry.waiting, now_s)
        ]

    def _begun(self) -> Iterator[QueuedJob]:
        return (job for job in self._jobs.values() if job.is_begun)

    def _waiting(self, turn: QueueTurn, now_s: float) -> WaitingPrompt:
        within_s, tenant = turn.first_token_within_s, turn.fairness_id
        return WaitingPrompt(
            arrival_s=now_s - turn.waited_s,
            service_s=turn.service_s,
            ttft_s=None if within_s is None else within_s + turn.waited_s,
            priority=turn.priority,
            tenant=tenant,
            share_start=self._shares.start((turn.priority, tenant), turn.service_s),
        )

    def _index(self, entry: QueuedJob, now_s: float) -> int:
        if self._rules is None:
            return len(self._queue)
        begun_s = sum(job.waiting.service_s for job in self._begun())
        free_s = now_s + max(0.0, begun_s - self.elapsed_s(now_s))
        queue = [other.waiting for other in self._queue]
        return insertion_index(entry.waiting, queue, free_s=free_s, rules=self._rules)

    def acquired(self, entry: QueuedJob, blocks: tuple[int, ...], cached_blocks: int) -> None:
        """Its blocks are here; the caller asked for few enough cached ones that the last token is computed."""
        self.move(entry, JobStage.READY)
        entry.blocks = blocks
        entry.cached_tokens = cached_blocks * self._block_tokens

    def chunks(self, entry: QueuedJob) -> list[Chunk]:
        """How the uncached part of the prompt is cut; every boundary but the last falls between blocks."""
        start, end = entry.cached_tokens, entry.prompt_tokens
        if self._stages > 1:
            planned = plan_chunks(
                start,
                end,
                stages=self._stages,
                largest=longest_chunk(self._chunk_tokens),
                block_tokens=self._block_tokens,
                cost=fit_chunk_cost(self._chunk_samples),
            )
            return [Chunk(start=first, end=last) for first, last in planned]
        step = self._chunk_tokens or end
        return [Chunk(start=at, end=min(at + step, end)) for at in range(start, end, step)]

    def chunk_passed(self, chunk: Chunk, slowest_s: float) -> None:
        """The slowest stage took *slowest_s* for *chunk*: later prompts are cut by it."""
        self._chunk_samples.append(ChunkSample(start=chunk.start, end=chunk.end, elapsed_s=max(slowest_s, 1e-9)))

    def computed(self, entry: QueuedJob, elapsed_s: float) -> None:
        """Its prompt took *elapsed_s* to compute: a sample for whoever predicts such times."""
        self.prefills += 1
        self._recent.append((entry.prompt_tokens - entry.cached_tokens, entry.cached_tokens, elapsed_s))

    def move(self, entry: QueuedJob, stage: JobStage) -> None:
        """Advance a job; one that is over leaves the books. Raises InvalidTransition and changes nothing."""
        if (entry.stage, stage) not in _MOVES:
            raise InvalidTransition(
                f"job {entry.job.job_id}", old=entry.stage.value, new=stage.value, history=entry.history
            )
        entry.history.append(entry.stage.value)
        entry.stage = stage
        if entry.is_over:
            del self._jobs[entry.job.job_id]
            if not entry.has_turn:
                self._queue.remove(entry)


_ANY_TURN: Final = QueueTurn(service_s=0.0)
