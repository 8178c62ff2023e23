"""What a simulated run brought, request by request, and what is counted from it.

An effective request was answered whole and met both objectives; the denominator is always all requests. TBT of a
request is the mean of its longest 10 % of token intervals, the one between first and second token included.
"""

import csv
import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.traces import TraceRequest

_LONGEST_SHARE: Final = 0.1


class TbtKind(enum.Enum):
    """Which number of a request is held against the TBT objective."""

    LONGEST = "longest"
    MEAN = "mean"


@dataclass(slots=True)
class RequestRecord:
    """One request. ``refused`` is the reason it was not served, else empty; times are of the run's clock, NaN = never.

    ``prefill_s`` is all the prefill time spent on it, whatever became of it.
    """

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    refused: str = ""
    prefill: str = ""
    decode: str = ""
    input_blocks: int = 0
    cached_blocks: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    prefill_s: float = 0.0
    queue_s: float = 0.0
    ttft_est_s: float = math.nan
    first_token_s: float = math.nan
    finished_s: float = math.nan
    tbt_s: float = math.nan
    tbt_mean_s: float = math.nan

    @classmethod
    def of(cls, index: int, request: TraceRequest, block_tokens: int) -> "RequestRecord":
        """Of a request that has not come yet."""
        return cls(
            index=index,
            arrival_s=request.arrival_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            input_blocks=-(-request.input_tokens // block_tokens),
        )

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def is_whole(self) -> bool:
        return not self.refused and not math.isnan(self.finished_s)

    def meets(self, ttft_s: float, tbt_s: float, kind: TbtKind = TbtKind.LONGEST) -> bool:
        """Whether the request was answered whole within both objectives."""
        tbt = self.tbt_s if kind is TbtKind.LONGEST else self.tbt_mean_s
        return self.is_whole and self.ttft_s <= ttft_s and (self.output_tokens < 2 or tbt <= tbt_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """A run is not worth finishing once more than ``share`` of all its requests have missed an objective for sure."""

    ttft_s: float
    tbt_s: float
    share: float = 0.1

    def is_hopeless(self, records: Sequence[RequestRecord], arrived: int, now_s: float) -> bool:
        """Whether that is so, with the first *arrived* of *records* there."""
        allowed = self.share * len(records)
        bad = 0
        for record in records[:arrived]:
            if math.isnan(record.first_token_s):
                bad += bool(record.refused) or now_s - record.arrival_s > self.ttft_s
            else:
                bad += record.ttft_s > self.ttft_s or record.tbt_s > self.tbt_s
            if bad > allowed:
                return True
        return False


Interval = tuple[float, int]
"""(seconds, how many times): token intervals, those of one length together."""


def longest_mean_s(intervals: Iterable[Interval]) -> float:
    """Mean of the longest 10 % of *intervals*, at least one; NaN without any."""
    ordered = sorted(intervals, reverse=True)
    wanted = left = max(1, math.ceil(_LONGEST_SHARE * sum(n for _, n in ordered)))
    total_s = 0.0
    for seconds, n in ordered:
        taken = min(n, left)
        total_s += seconds * taken
        left -= taken
        if not left:
            return total_s / wanted
    return math.nan


def mean_s(intervals: Iterable[Interval]) -> float:
    pairs = list(intervals)
    n = sum(count for _, count in pairs)
    return sum(seconds * count for seconds, count in pairs) / n if n else math.nan


def quantile(values: Sequence[float], q: float) -> float:
    """The least value that a share *q* of *values* does not exceed; NaN without any."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """The whole mesh at one moment. ``decode_share`` is the fullest decode pool's share in use."""

    time_s: float
    prefill_busy: int
    prefill_queued: int
    decode_running: int
    decode_share: float


@dataclass(slots=True)
class RunResult:
    """All records of one run, in order of arrival. Instances changed their role ``switched`` times."""

    name: str
    records: list[RequestRecord]
    samples: list[LoadSample] = field(default_factory=list)
    preempted: int = 0
    events: int = 0
    wall_s: float = 0.0
    transferred_bytes: int = 0
    switched: int = 0

    @property
    def served(self) -> list[RequestRecord]:
        return [record for record in self.records if record.is_whole]

    @property
    def rejected(self) -> int:
        return sum(bool(record.refused) for record in self.records)

    def share(self, ttft_s: float, tbt_s: float, kind: TbtKind = TbtKind.LONGEST) -> float:
        """Effective requests / all."""
        return sum(record.meets(ttft_s, tbt_s, kind) for record in self.records) / max(1, len(self.records))

    def token_share(self, ttft_s: float, tbt_s: float, kind: TbtKind = TbtKind.LONGEST) -> float:
        """Tokens (in and out) of effective requests / of all."""
        good = sum(_tokens(record) for record in self.records if record.meets(ttft_s, tbt_s, kind))
        return good / max(1, sum(map(_tokens, self.records)))

    def wasted_tokens(self, ttft_s: float, tbt_s: float) -> int:
        """Prompt tokens computed for requests that were not answered whole within the objectives."""
        return sum(record.computed_tokens for record in self.records if not record.meets(ttft_s, tbt_s))

    def refused_tokens(self) -> int:
        """Prompt tokens computed for requests that were refused after all."""
        return sum(record.computed_tokens for record in self.records if record.refused)

    def ttfts(self) -> list[float]:
        return [record.ttft_s for record in self.records if not math.isnan(record.first_token_s)]

    def tbts(self) -> list[float]:
        return [record.tbt_s for record in self.served if not math.isnan(record.tbt_s)]

    def mean_ttft_s(self) -> float:
        return _mean(self.ttfts())

    def mean_prefill_s(self) -> float:
        """Prefill time per request that was computed."""
        return _mean([record.prefill_s for record in self.records if record.computed_tokens])

    def block_hit(self) -> float:
        """Cached blocks / blocks of the prompts that were computed."""
        computed = [record for record in self.records if record.computed_tokens]
        return sum(r.cached_blocks for r in computed) / max(1, sum(r.input_blocks for r in computed))

    def token_hit(self) -> float:
        computed = [record for record in self.records if record.computed_tokens]
        return sum(r.cached_tokens for r in computed) / max(1, sum(r.input_tokens for r in computed))

    def request_hit(self) -> float:
        """Share of computed requests that found more than one block."""
        computed = [record for record in self.records if record.computed_tokens]
        return sum(r.cached_blocks > 1 for r in computed) / max(1, len(computed))

    def reasons(self) -> dict[str, int]:
        """How many were refused for what."""
        found: dict[str, int] = {}
        for record in self.records:
            if record.refused:
                found[record.refused] = found.get(record.refused, 0) + 1
        return dict(sorted(found.items()))

    def digest_rows(self) -> list[tuple[object, ...]]:
        """What must be equal in two runs of the same input: who went where, and when."""
        return [
            (r.index, r.refused, r.prefill, r.decode, r.cached_tokens, repr(r.first_token_s), repr(r.finished_s))
            for r in self.records
        ]


def write_csv(result: RunResult, path: Path) -> None:
    """One line a request."""
    columns: dict[str, Callable[[RequestRecord], object]] = {
        "index": lambda r: r.index,
        "arrival_s": lambda r: f"{r.arrival_s:.6f}",
        "input_tokens": lambda r: r.input_tokens,
        "output_tokens": lambda r: r.output_tokens,
        "refused": lambda r: r.refused,
        "prefill": lambda r: r.prefill,
        "decode": lambda r: r.decode,
        "cached_tokens": lambda r: r.cached_tokens,
        "prefill_s": lambda r: f"{r.prefill_s:.6f}",
        "queue_s": lambda r: f"{r.queue_s:.6f}",
        "ttft_est_s": lambda r: f"{r.ttft_est_s:.6f}",
        "ttft_s": lambda r: f"{r.ttft_s:.6f}",
        "tbt_s": lambda r: f"{r.tbt_s:.6f}",
        "tbt_mean_s": lambda r: f"{r.tbt_mean_s:.6f}",
        "finished_s": lambda r: f"{r.finished_s:.6f}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([read(record) for read in columns.values()] for record in result.records)


def _tokens(record: RequestRecord) -> int:
    return record.input_tokens + record.output_tokens


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
