"""What became of the requests of a run, and what is counted from it: pure.

Times are seconds since the start of the run. TTFT counts from when a request was sent, TPOT is the mean time of the
tokens after the first, ITL every single interval, TBT of a request the mean of its longest 10 % of intervals (as the
mesh counts it). A request is good if it was answered whole within the objectives; goodput counts those.
"""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

from mooncake_mesh.policy.slo import longest_mean_s, quantile, within


class Ending(enum.Enum):
    OK = "ok"
    REFUSED = "refused"  # 429 or 503: come back later
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """One request as its client saw it. ``token_s`` has one entry for each token; ``reason`` is empty when all is well.

    ``cached_tokens`` of the prompt were found in the pool; None where the server does not tell.
    """

    sent_s: float
    input_tokens: int
    ending: Ending = Ending.FAILED
    reason: str = ""
    token_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int | None = None
    ended_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def intervals_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        n = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / n if n > 0 else None

    @property
    def tbt_s(self) -> float | None:
        return longest_mean_s(self.intervals_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadObjectives:
    """None: no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    def met_by(self, result: RequestResult) -> bool:
        """Whether *result* is good."""
        return result.ending is Ending.OK and within(result.ttft_s, self.ttft_s) and within(result.tbt_s, self.tbt_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of a quantity in seconds; zeros where nothing was measured."""

    mean_s: float = 0.0
    median_s: float = 0.0
    std_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. Token counts and times are of requests that were answered whole.

    ``wasted_prefill_tokens`` were computed for answers that were whole but not good.
    """

    duration_s: float
    completed: int
    refused: int
    failed: int
    reasons: dict[str, int]
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    good: int
    wasted_prefill_tokens: int | None
    peak_output_tokens_per_s: float
    peak_concurrent: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    tbt: Spread
    e2e: Spread

    @property
    def requests(self) -> int:
        return self.completed + self.refused + self.failed

    @property
    def requests_per_s(self) -> float:
        return self.completed / self.duration_s

    @property
    def goodput_per_s(self) -> float:
        return self.good / self.duration_s

    @property
    def good_share(self) -> float:
        return self.good / self.requests if self.requests else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def tokens_per_s(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.duration_s

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were found in the pool; None where the server does not tell."""
        return None if self.cached_tokens is None else self.cached_tokens / max(1, self.input_tokens)


def summarise(results: Sequence[RequestResult], objectives: LoadObjectives) -> Summary:
    """*results* is not empty."""
    whole = [result for result in results if result.ending is Ending.OK]
    late = [result for result in whole if not objectives.met_by(result)]
    endings = Counter(result.ending for result in results)
    duration_s = max(result.ended_s for result in results) - min(result.sent_s for result in results)
    return Summary(
        duration_s=max(duration_s, 1e-9),
        completed=endings[Ending.OK],
        refused=endings[Ending.REFUSED],
        failed=endings[Ending.FAILED],
        reasons=dict(Counter(result.reason for result in results if result.reason).most_common()),
        input_tokens=sum(result.input_tokens for result in whole),
        output_tokens=sum(result.output_tokens for result in whole),
        cached_tokens=_total([result.cached_tokens for result in whole]),
        good=len(whole) - len(late),
        wasted_prefill_tokens=_total(
            [None if r.cached_tokens is None else r.input_tokens - r.cached_tokens for r in late]
        ),
        peak_output_tokens_per_s=_peak_rate([at_s for result in results for at_s in result.token_s]),
        peak_concurrent=_peak_concurrent(results),
        ttft=_spread([r.ttft_s for r in whole]),
        tpot=_spread([r.tpot_s for r in whole]),
        itl=_spread([interval_s for r in whole for interval_s in r.intervals_s]),
        tbt=_spread([r.tbt_s for r in whole]),
        e2e=_spread([r.e2e_s for r in whole]),
    )


def _spread(values_s: Sequence[float | None]) -> Spread:
    known = sorted(value for value in values_s if value is not None)
    if not known:
        return Spread()
    return Spread(
        mean_s=fmean(known),
        median_s=median(known),
        std_s=pstdev(known),
        p90_s=quantile(known, 0.90),
        p99_s=quantile(known, 0.99),
    )


def _total(counts: Sequence[int | None]) -> int | None:
    """None as soon as one is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _peak_rate(times_s: Sequence[float]) -> float:
    """The most in one second of the run's clock."""
    return float(max(Counter(int(at_s) for at_s in times_s).values(), default=0))


def _peak_concurrent(results: Sequence[RequestResult]) -> int:
    changes = sorted([(r.ended_s, -1) for r in results] + [(r.sent_s, 1) for r in results])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
