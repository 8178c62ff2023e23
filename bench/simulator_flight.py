"""One request on its way through a simulated mesh, and the interface between the shells that it passes."""

import math
from dataclasses import dataclass, field
from typing import Final, cast

from bench.simulator_node import INCARNATION
from bench.simulator_results import Interval, RequestRecord, longest_mean_s, mean_s
from bench.traces import TraceRequest
from mooncake_proto.ids import InstanceId, JobId, TransferId
from mooncake_proto.serving import DecodeGate, DecodeJob, InlinePrefill, Placement, Sampling, Stopping

_ZEROS: Final = memoryview(bytes(1 << 20))


@dataclass(slots=True)
class Flight:
    """A job of a request. ``drawn`` tokens came from earlier jobs of it; ``intervals`` are all it has had so far.

    ``admission`` counts the jobs of its decode instance; those in ``refused_by`` had no place for it.
    """

    request: TraceRequest
    record: RequestRecord
    placement: Placement
    job_id: JobId
    keys: bytes
    prompt_tokens: int
    drawn: int
    intervals: list[Interval] = field(default_factory=list)
    last_token_s: float = math.nan
    computing_since_s: float = math.nan
    has_decode_blocks: bool = False
    is_computed: bool = False
    arriving_blocks: int = 0
    sent_s: float = math.nan
    log_start: int = -1
    admission: int = 0
    refused_by: tuple[InstanceId, ...] = ()

    @property
    def gate(self) -> DecodeGate | None:
        """What keeps its first token back until it may be decoded. One that was decoded before passes at once."""
        draws_more = self.request.output_tokens > self.drawn + 1
        return self.placement.gate if self.is_first_job and draws_more else None

    @property
    def is_first_job(self) -> bool:
        return self.drawn == 0

    @property
    def is_inline(self) -> bool:
        """Whether its decode instance computes its prompt."""
        return self.placement.inline_step is not None

    def prompt_begun(self, *, cached_tokens: int, queue_s: float, block_tokens: int) -> None:
        """Its prompt is computed from now on, but for *cached_tokens*."""
        record = self.record
        record.computed_tokens += self.prompt_tokens - cached_tokens
        if self.is_first_job:
            record.queue_s = queue_s
            record.cached_tokens = cached_tokens
            record.cached_blocks = cached_tokens // block_tokens

    def token_at(self, now_s: float) -> None:
        """A token that belongs to no step: prefill drew it."""
        if not math.isnan(self.last_token_s):
            self.intervals.append((now_s - self.last_token_s, 1))
        self.last_token_s = now_s

    def finished(self, now_s: float) -> None:
        """All tokens are there: the record is complete."""
        self.record.finished_s = now_s
        self.record.tbt_s = longest_mean_s(self.intervals)
        self.record.tbt_mean_s = mean_s(self.intervals)


def zero_tokens(n: int) -> bytes:
    """*n* packed tokens that nobody reads: a view, since an overloaded mesh has gigabytes of prompts in its queues."""
    return cast("bytes", _ZEROS[: 4 * n]) if 4 * n <= len(_ZEROS) else bytes(4 * n)


def decode_job(flight: Flight, output_tokens: int, now_s: float) -> DecodeJob:
    """What the gateway sends the decode worker: *output_tokens* are drawn in all, and tokens are zeros."""
    gate, ttft_slo_s = flight.gate, flight.placement.ttft_slo_s
    left_s = None if ttft_slo_s is None else max(0.0, flight.record.arrival_s + ttft_slo_s - now_s)
    inline = None
    if flight.placement.inline_step is not None:
        inline = InlinePrefill(
            step=flight.placement.inline_step,
            fetch_from=flight.placement.fetch_from,
            fetch_prefix_blocks=flight.placement.fetch_prefix_blocks,
        )
    return DecodeJob(
        job_id=flight.job_id,
        transfer_id=TransferId(f"kv-{flight.job_id}"),
        incarnation=INCARNATION,
        tokens=zero_tokens(flight.prompt_tokens),
        keys=flight.keys,
        key_root=bytes(16),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_new_tokens=output_tokens),
        drawn_tokens=flight.drawn,
        stream_endpoint="sim://gateway",
        deadline_s=math.inf,
        gate=gate,
        first_token_within_s=None if gate is None else left_s,
        inline_prefill=inline,
    )
