"""A coupled engine, as baseline: prefill and decoding share the instance, scheduled per iteration.

Two ways of sharing. PREFILL_FIRST (vLLM 0.5 as it comes): while a prompt waits and its KV fits, an iteration computes
prompts and nobody decodes. CHUNKED: every iteration decodes everybody and computes a piece of the oldest prompts; the
piece is fixed, or as large as keeps the step within a share of the TBT objective. ONE_AT_A_TIME serves one request
from its first to its last token, as the arXiv paper ran its baseline on long prompts.
"""

import enum
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.nodes import NodeKind
from bench.simulator_clock import VirtualClock
from bench.simulator_results import Interval, RequestRecord, longest_mean_s, mean_s
from bench.traces import BLOCK_TOKENS, TraceRequest
from mooncake_mesh.kv.block_pool import BlockPool, NoRoom
from mooncake_proto.ids import BlockKey

GROWTH_TOKENS: Final = 170
"""Room that each admitted request is given for its answer."""

_LEAST_CHUNK: Final = 64
_LEAST_PREDICTED_S: Final = 1.0
_PACE_STEP: Final = 0.05
"""The pace follows the ninth decile of what predictions are exceeded by; short ones say nothing of a queue."""


class Batching(enum.Enum):
    PREFILL_FIRST = "prefill_first"
    CHUNKED = "chunked"
    ONE_AT_A_TIME = "one_at_a_time"


class PrefixCache(enum.Enum):
    """Where an instance keeps the KV of prompts it has seen: nowhere, in what VRAM has left, or in host memory too."""

    NONE = "none"
    HBM = "hbm"
    DRAM = "dram"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """``chunk_step_s`` bounds a mixed step (0: chunks are always ``chunk_tokens``)."""

    kind: NodeKind
    batching: Batching = Batching.PREFILL_FIRST
    cache: PrefixCache = PrefixCache.NONE
    chunk_tokens: int = 512
    chunk_step_s: float = 0.0
    batch_tokens: int = 8192


@dataclass(slots=True)
class _Sequence:
    request: TraceRequest
    record: RequestRecord
    keys: Sequence[BlockKey]
    holder: str
    uncached_s: float
    cached_tokens: int = 0
    computed: int = 0
    log_start: int = -1
    paused_s: float = 0.0


class CoupledEngine:
    """One instance. Steps between two changes of its batch are taken at once."""

    def __init__(self, name: str, setup: EngineSetup, clock: VirtualClock) -> None:
        self.name = name
        self._setup = setup
        self._kind = setup.kind
        self._clock = clock
        self._pool = _pool(setup)
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: deque[_Sequence] = deque()
        self._ends: list[tuple[int, int, _Sequence]] = []
        self._context = 0
        self._reserved = 0
        self._step = 0
        self._log: list[Interval] = []
        self._paused_s = 0.0
        self._window = 0
        self._window_start_s = 0.0
        self._window_steps = 0
        self._is_decoding = False
        self._is_computing = False
        self._pace = 1.0

    # --- looking (for routers) ----------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        return len(self._waiting) + len(self._prefilling) + len(self._ends)

    def predicted_ttft_s(self, request: TraceRequest) -> float:
        """Prefill of those who wait, then of *request* with what is cached of it here."""
        queued = sum(
            self._kind.prefill_s(
                sequence.request.input_tokens - sequence.computed - sequence.cached_tokens, sequence.cached_tokens
            )
            for sequence in self._prefilling
        ) + sum(sequence.uncached_s for sequence in self._waiting)
        cached = self._matched(request.keys, request.input_tokens)
        return queued + self._kind.prefill_s(request.input_tokens - cached, cached)

    def surely_within(self, predicted_s: float, limit_s: float) -> bool:
        """Whether nine of ten requests with such a prediction had their first token in *limit_s* of late: a prompt
        shares its steps with those that decode, which no prediction counts."""
        return predicted_s * self._pace <= limit_s

    # --- requests in --------------------------------------------------------------------------------------------------

    def submit(self, request: TraceRequest, record: RequestRecord) -> None:
        record.prefill = record.decode = self.name
        keys = request.keys[: request.input_tokens // BLOCK_TOKENS]
        sequence = _Sequence(
            request=request,
            record=record,
            keys=keys,
            holder=f"r{record.index}",
            uncached_s=self._kind.prefill_s(request.input_tokens, 0),
        )
        if self._room_tokens(sequence) > self._kind.vram_kv_tokens:
            record.refused = "kv_too_large"
            return
        self._waiting.append(sequence)
        if self._is_decoding:
            self._shorten()
        elif not self._is_computing:
            self._next()

    # --- iterations ---------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Start the next iteration."""
        self._is_decoding = self._is_computing = False
        if self._setup.batching is Batching.CHUNKED:
            self._admit(1 << 62)
            if self._prefilling:
                self._mixed_step()
                return
        elif self._setup.batching is Batching.PREFILL_FIRST or not self._ends:
            self._admit(self._setup.batch_tokens)
            if self._prefilling:
                self._prefill_step()
                return
        if self._ends:
            self._decode_window()

    def _admit(self, token_limit: int) -> None:
        """Let waiting requests in, oldest first, while their KV fits and up to *token_limit* prompt tokens."""
        alone = self._setup.batching is Batching.ONE_AT_A_TIME
        tokens = sum(s.request.input_tokens - s.cached_tokens - s.computed for s in self._prefilling)
        while self._waiting and not (alone and (self._prefilling or self._ends)):
            sequence = self._waiting[0]
            if self._prefilling and tokens + sequence.request.input_tokens > token_limit:
                return
            if not self._take_room(sequence):
                return
            self._waiting.popleft()
            tokens += sequence.request.input_tokens - sequence.cached_tokens
            sequence.record.queue_s = self._clock.now_s - sequence.record.arrival_s
            self._prefilling.append(sequence)

    def _prefill_step(self) -> None:
        """All admitted prompts in one forward; decoding waits meanwhile."""
        batch = list(self._prefilling)
        self._prefilling.clear()
        kind = self._kind
        elapsed_s = kind.prefill_s(batch[0].request.input_tokens - batch[0].cached_tokens, batch[0].cached_tokens)
        batch[0].record.prefill_s = elapsed_s
        idle_s = kind.prefill_base_s + kind.prefill_pad_tokens * kind.prefill_token_s
        for sequence in batch[1:]:
            alone_s = kind.prefill_s(sequence.request.input_tokens - sequence.cached_tokens, sequence.cached_tokens)
            sequence.record.prefill_s = max(0.0, alone_s - idle_s)
            elapsed_s += sequence.record.prefill_s

        def computed() -> None:
            self._paused_s += elapsed_s
            for sequence in batch:
                self._first_token(sequence)
            self._next()

        self._is_computing = True
        self._clock.at(self._clock.now_s + elapsed_s, computed)

    def _mixed_step(self) -> None:
        """One iteration of everybody who decodes, and the next piece of the oldest prompts."""
        head = self._prefilling[0]
        start = head.cached_tokens + head.computed
        budget = self._chunk_tokens(start)
        pieces: list[tuple[_Sequence, int]] = []
        attention_s, prefix, tokens = 0.0, 0, 0
        for sequence in self._prefilling:
            at = sequence.cached_tokens + sequence.computed
            piece = min(budget - tokens, sequence.request.input_tokens - at)
            if piece <= 0:
                break
            attention_s += self._kind.prefill_pair_s * ((at + piece) ** 2 - at * at)
            prefix += at
            tokens += piece
            pieces.append((sequence, piece))
        batch = len(self._ends)
        step_s = self._kind.mixed_step_s(batch, self._context + prefix, tokens, 0)
        step_s += attention_s - self._kind.prefill_pair_s * tokens * tokens
        decode_s = self._kind.decode_step_s(batch, self._context) if batch else 0.0

        def computed() -> None:
            self._stepped(step_s, 1)
            for sequence, piece in pieces:
                sequence.computed += piece
                sequence.record.prefill_s += (step_s - decode_s) * piece / tokens
                if sequence.cached_tokens + sequence.computed == sequence.request.input_tokens:
                    self._prefilling.popleft()
                    self._first_token(sequence)
            self._next()

        self._is_computing = True
        self._clock.at(self._clock.now_s + step_s, computed)

    def _chunk_tokens(self, start: int) -> int:
        """The fixed piece, or the largest that keeps the step below its bound."""
        if not self._setup.chunk_step_s or not self._ends:
            return self._setup.chunk_tokens
        kind, batch = self._kind, len(self._ends)
        fixed_s = kind.step_base_s + kind.prefill_token_s * (batch + kind.prefill_pad_tokens)
        fixed_s += kind.step_context_token_s * (self._context + start)
        left_s, linear_s = self._setup.chunk_step_s - fixed_s, kind.prefill_token_s + 2 * kind.prefill_pair_s * start
        if left_s <= 0:
            return _LEAST_CHUNK
        pair_s = kind.prefill_pair_s
        if pair_s:
            tokens = int((math.sqrt(linear_s * linear_s + 4 * pair_s * left_s) - linear_s) / (2 * pair_s))
        else:
            tokens = int(left_s / linear_s)
        return max(_LEAST_CHUNK, min(tokens, self._setup.chunk_tokens))

    def _decode_window(self) -> None:
        self._is_decoding = True
        self._window_start_s = self._clock.now_s
        self._schedule(self._ends[0][0] - self._step)

    def _schedule(self, steps: int) -> None:
        self._window += 1
        self._window_steps = steps
        window = self._window

        def over() -> None:
            if window == self._window:
                self._stepped(self._elapsed_s(steps) / steps, steps)
                self._next()

        self._clock.at(self._window_start_s + self._elapsed_s(steps), over)

    def _shorten(self) -> None:
        """Somebody has come: the window ends with the step that is running."""
        elapsed_s = self._clock.now_s - self._window_start_s
        steps = 1 + int(elapsed_s / (self._elapsed_s(self._window_steps) / self._window_steps))
        while steps > 1 and self._elapsed_s(steps - 1) >= elapsed_s:
            steps -= 1
        while self._elapsed_s(steps) < elapsed_s:
            steps += 1
        if steps < self._window_steps:
            self._schedule(steps)

    def _elapsed_s(self, steps: int) -> float:
        batch = len(self._ends)
        first_s = self._kind.decode_step_s(batch, self._context)
        return steps * first_s + self._kind.step_context_token_s * batch * steps * (steps - 1) / 2

    def _stepped(self, step_s: float, steps: int) -> None:
        """Everybody in the batch has *steps* more tokens."""
        if not self._ends:
            return
        self._log.append((step_s + self._paused_s, 1))
        if steps > 1:
            self._log.append((step_s, steps - 1))
        self._paused_s = 0.0
        self._step += steps
        self._context += steps * len(self._ends)
        while self._ends and self._ends[0][0] <= self._step:
            self._finish(heapq.heappop(self._ends)[2])

    # --- a sequence's way ---------------------------------------------------------------------------------------------

    def _first_token(self, sequence: _Sequence) -> None:
        record = sequence.record
        record.first_token_s = self._clock.now_s
        if record.ttft_est_s >= _LEAST_PREDICTED_S:
            was_later = record.ttft_s > self._pace * record.ttft_est_s
            self._pace += _PACE_STEP * (0.9 if was_later else -0.1)
        record.computed_tokens = record.input_tokens - sequence.cached_tokens
        record.cached_tokens = sequence.cached_tokens
        record.cached_blocks = sequence.cached_tokens // BLOCK_TOKENS
        self._remember(sequence)
        self._context += record.input_tokens + 1
        sequence.log_start = len(self._log)
        sequence.paused_s = self._paused_s
        if record.output_tokens < 2:
            self._finish(sequence)
        else:
            heapq.heappush(self._ends, (self._step + record.output_tokens - 1, record.index, sequence))

    def _finish(self, sequence: _Sequence) -> None:
        record = sequence.record
        record.finished_s = self._clock.now_s
        intervals = self._log[sequence.log_start :]
        if intervals:  # what had paused before it came is none of its own
            intervals[0] = (intervals[0][0] - sequence.paused_s, intervals[0][1])
        record.tbt_s = longest_mean_s(intervals)
        record.tbt_mean_s = mean_s(intervals)
        self._context -= record.input_tokens + record.output_tokens
        self._reserved -= 1
        if self._setup.cache is PrefixCache.HBM and self._pool is not None:
            self._pool.release(sequence.holder)

    # --- KV -----------------------------------------------------------------------------------------------------------

    def _room_tokens(self, sequence: _Sequence) -> int:
        return sequence.request.input_tokens + GROWTH_TOKENS

    def _matched(self, keys: Sequence[BlockKey], input_tokens: int) -> int:
        """Tokens of the cached prefix that help: at least one is computed."""
        if self._pool is None:
            return 0
        usable = (input_tokens - 1) // BLOCK_TOKENS
        return len(self._pool.match(keys[:usable])) * BLOCK_TOKENS

    def _take_room(self, sequence: _Sequence) -> bool:
        """Take the KV room that a request needs; whether there was that much."""
        n_blocks = -(-self._room_tokens(sequence) // BLOCK_TOKENS)
        if self._setup.cache is PrefixCache.HBM and self._pool is not None:
            cached = self._pool.match(sequence.keys[: (sequence.request.input_tokens - 1) // BLOCK_TOKENS])
            self._pool.hold(sequence.holder, cached)
            if isinstance(self._pool.reserve(sequence.holder, n_blocks - len(cached)), NoRoom):
                self._pool.release(sequence.holder)
                return False
            sequence.cached_tokens = len(cached) * BLOCK_TOKENS
        else:
            ahead = sum(s.request.input_tokens for s in self._prefilling) + GROWTH_TOKENS * (self._reserved + 1)
            if self._context + ahead + sequence.request.input_tokens > self._kind.vram_kv_tokens:
                return False
            sequence.cached_tokens = self._matched(sequence.keys, sequence.request.input_tokens)
        self._reserved += 1
        return True

    def _remember(self, sequence: _Sequence) -> None:
        """Share the prompt's whole blocks."""
        pool = self._pool
        if pool is None:
            return
        if self._setup.cache is PrefixCache.HBM:
            blocks = pool.blocks_of(sequence.holder)
            first = sequence.cached_tokens // BLOCK_TOKENS
            for block, key in zip(blocks[first:], sequence.keys[first:], strict=False):
                pool.seal(sequence.holder, block, key)
        else:
            cached = pool.match(sequence.keys)
            pool.hold(sequence.holder, cached)
            fresh = pool.reserve(sequence.holder, len(sequence.keys) - len(cached))
            if not isinstance(fresh, NoRoom):
                for block, key in zip(fresh, sequence.keys[len(cached) :], strict=True):
                    pool.seal(sequence.holder, block, key)
            pool.release(sequence.holder)
        pool.drain_events()


def _pool(setup: EngineSetup) -> BlockPool | None:
    match setup.cache:
        case PrefixCache.NONE:
            return None
        case PrefixCache.HBM:
            return BlockPool(setup.kind.vram_kv_tokens // BLOCK_TOKENS)
        case PrefixCache.DRAM:
            return BlockPool(setup.kind.dram_kv_tokens // BLOCK_TOKENS)
