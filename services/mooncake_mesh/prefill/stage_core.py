"""What a further stage of a prefill instance, and its head, decide about chunks in flight. Pure.

At a stage, a chunk is computed when its activations are here and every chunk before it is computed or dropped. The
head numbers the chunks of all its jobs; chunk *n* takes slot ``n % slots`` of every stage's memory, so it may start
only when every stage is done with chunk ``n - slots``.
"""

from dataclasses import dataclass

from mooncake_mesh.errors import InvalidRequest, MooncakeError, PeerUnreachable
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_proto.ids import BlockKey, Incarnation, JobId, TransferId
from mooncake_proto.pipeline import StageChunk


@dataclass(slots=True)
class StageWork:
    """One chunk at one stage. ``stop`` says why it should end early; the engine thread reads it between layers."""

    chunk: StageChunk
    stop: MooncakeError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPrompt:
    """What a head tells the stages of a whole prompt. ``keys`` are those of its whole blocks, packed; KV of the first
    ``cached_blocks`` of them was there before."""

    job_id: JobId
    transfer_id: TransferId | None
    n_tokens: int
    cached_blocks: int
    keys: bytes


def ends_prompt(chunk: StageChunk) -> bool:
    """Whether it is the last one of its prompt."""
    return chunk.start + chunk.n_tokens == chunk.prompt_tokens


def prefix_keys(chunk: StageChunk, block_tokens: int) -> list[BlockKey]:
    """Keys of the whole blocks before *chunk*, as far as it says."""
    return list(split_keys(chunk.keys))[: chunk.start // block_tokens]


class StageCore:
    """Chunks of one stage, in the order of their numbers."""

    def __init__(self) -> None:
        self._pipeline: Incarnation | None = None
        self._waiting: dict[int, StageWork] = {}
        self._taken: dict[int, StageWork] = {}
        self._arrived: dict[int, int] = {}
        self._last = -1
        self.chunks = 0

    @property
    def running_jobs(self) -> int:
        return len({work.chunk.job_id for work in self._all()})

    @property
    def waiting_tokens(self) -> int:
        return sum(work.chunk.n_tokens for work in self._waiting.values())

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._taken

    def join(self, pipeline: Incarnation) -> None:
        """Chunks of *pipeline* will come. Those of a former one must be over."""
        assert self.is_idle, "a stage drops its chunks before it joins"
        self._pipeline = pipeline
        self._arrived.clear()
        self._last = -1

    def is_in(self, pipeline: Incarnation) -> bool:
        return pipeline == self._pipeline

    def leave(self, why: MooncakeError) -> None:
        """Stop what is here and take no chunks until the stage has joined again."""
        self._pipeline = None
        self.drop_all(why)

    def offer(self, chunk: StageChunk) -> StageWork:
        """A chunk to compute. Raises PeerUnreachable for one of another pipeline, InvalidRequest out of order."""
        if chunk.pipeline != self._pipeline:
            raise PeerUnreachable("this stage is not in that pipeline any more")
        if chunk.number <= self._last:
            raise InvalidRequest(f"chunk {chunk.number} after chunk {self._last}", param="number")
        self._last = chunk.number
        work = self._waiting[chunk.number] = StageWork(chunk)
        return work

    def arrived(self, pipeline: Incarnation, number: int, size_bytes: int) -> None:
        """Activations are here, perhaps sooner than their chunk, or later than its end."""
        if pipeline == self._pipeline and (number in self._waiting or number > self._last):
            self._arrived[number] = size_bytes

    def next(self) -> StageWork | None:
        """Take the next chunk, to compute it or, where it was stopped, to end it. None while there is nothing to do."""
        number = next(iter(self._waiting), None)
        if number is None or (number not in self._arrived and self._waiting[number].stop is None):
            return None
        work = self._taken[number] = self._waiting.pop(number)
        return work

    def size_bytes(self, work: StageWork) -> int:
        """How much arrived for it."""
        return self._arrived[work.chunk.number]

    def done(self, work: StageWork) -> None:
        """It is computed, or given up."""
        self.chunks += work.stop is None
        self._taken.pop(work.chunk.number, None)
        self._arrived.pop(work.chunk.number, None)

    def drop(self, job_id: JobId, why: MooncakeError) -> None:
        """Stop the chunks of a job that are here."""
        for work in self._all():
            if work.chunk.job_id == job_id:
                work.stop = work.stop or why

    def drop_all(self, why: MooncakeError) -> None:
        for work in self._all():
            work.stop = work.stop or why

    def _all(self) -> list[StageWork]:
        return [*self._taken.values(), *self._waiting.values()]


class Flight:
    """The head's view of one pipeline: chunks that were started and are not over yet."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._next = 0
        self._open: set[int] = set()

    @property
    def n_open(self) -> int:
        return len(self._open)

    def begin(self) -> int | None:
        """Number of the next chunk; None while its slot is in use."""
        if self._next - min(self._open, default=self._next) >= self._slots:
            return None
        number = self._next
        self._open.add(number)
        self._next += 1
        return number

    def over(self, number: int) -> None:
        """Every stage is done with it, and with what it sent on."""
        self._open.discard(number)
