"""What requests experienced, class by class, against the objectives.

Goodput is counted as the papers do: a request is good only if it was answered whole, with its first token and its
token intervals inside both objectives; all that ended count in the denominator, refused ones too. A client that left
is in neither: nobody knows what it would have seen.

An objective is a time, or a multiple of what the request would have taken alone (the papers' 10× for the first token
and 5× for a token interval).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from mooncake_mesh.policy.request_class import RequestClass, class_of
from mooncake_proto.control import ClassReport, Latency
from mooncake_proto.serving import Ending, Outcome

_WINDOW: Final = 2048
"""Requests of each class that quantiles are taken over."""

_RATE_S: Final = 60.0
_LONGEST_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevels:
    """What a request is held against: for each time a fixed objective, or a factor on the unloaded time, which wins.
    Neither: no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None
    ttft_factor: float | None = None
    tbt_factor: float | None = None

    def ttft_limit_s(self, unloaded_s: float) -> float | None:
        return self.ttft_s if self.ttft_factor is None else self.ttft_factor * unloaded_s

    def tbt_limit_s(self, unloaded_s: float) -> float | None:
        return self.tbt_s if self.tbt_factor is None else self.tbt_factor * unloaded_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloaded:
    """What a request would have taken on an idle mesh: to its first token, and for a decode step on its own."""

    ttft_s: float
    tbt_s: float


@dataclass(slots=True)
class _Tally:
    endings: Counter[Ending] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    good: int = 0
    tokens: int = 0
    good_tokens: int = 0
    wasted_tokens: int = 0
    ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    tbts_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    good_at_s: deque[float] = field(default_factory=deque)


class SloMonitor:
    """Mutated only by :meth:`ended`. Memory is bounded but for the good requests of the last minute."""

    def __init__(self, levels: ServiceLevels, *, started_s: float) -> None:
        self._levels = levels
        self._started_s = started_s
        self._tallies: dict[RequestClass, _Tally] = {}

    def ended(self, outcome: Outcome, unloaded: Unloaded, now_s: float) -> None:
        """Count a request. A batch request has no objective: it is good once it is whole."""
        kind = class_of(outcome.priority)
        tally = self._tallies.setdefault(kind, _Tally())
        tally.endings[outcome.ending] += 1
        if outcome.ending is Ending.REFUSED:
            tally.refusals[outcome.reason] += 1
        if outcome.ttft_s is not None:
            tally.ttfts_s.append(outcome.ttft_s)
        if outcome.tbt_s is not None:
            tally.tbts_s.append(outcome.tbt_s)
        if outcome.ending is Ending.CANCELLED:
            return
        tokens = outcome.prompt_tokens + outcome.generated_tokens
        tally.tokens += tokens
        if outcome.ending is Ending.FINISHED and (kind is RequestClass.BATCH or self._is_in_time(outcome, unloaded)):
            tally.good += 1
            tally.good_tokens += tokens
            tally.good_at_s.append(now_s)
        else:
            tally.wasted_tokens += outcome.computed_tokens
        while tally.good_at_s and tally.good_at_s[0] < now_s - _RATE_S:
            tally.good_at_s.popleft()

    def _is_in_time(self, outcome: Outcome, unloaded: Unloaded) -> bool:
        ttft_limit_s = self._levels.ttft_limit_s(unloaded.ttft_s)
        tbt_limit_s = self._levels.tbt_limit_s(unloaded.tbt_s)
        return within(outcome.ttft_s, ttft_limit_s) and within(outcome.tbt_s, tbt_limit_s)

    def report(self, now_s: float) -> tuple[ClassReport, ...]:
        """All classes that had a request, most urgent first."""
        return tuple(self._report(kind, self._tallies[kind], now_s) for kind in RequestClass if kind in self._tallies)

    def _report(self, kind: RequestClass, tally: _Tally, now_s: float) -> ClassReport:
        levels, endings = self._levels, tally.endings
        span_s = min(_RATE_S, max(1.0, now_s - self._started_s))
        return ClassReport(
            name=kind.value,
            requests=endings.total(),
            finished=endings[Ending.FINISHED],
            refused=endings[Ending.REFUSED],
            failed=endings[Ending.FAILED],
            cancelled=endings[Ending.CANCELLED],
            good=tally.good,
            good_per_s=sum(at_s >= now_s - _RATE_S for at_s in tally.good_at_s) / span_s,
            tokens=tally.tokens,
            good_tokens=tally.good_tokens,
            wasted_tokens=tally.wasted_tokens,
            ttft=_latency(tally.ttfts_s, levels.ttft_s if levels.ttft_factor is None else None),
            tbt=_latency(tally.tbts_s, levels.tbt_s if levels.tbt_factor is None else None),
            refusals=dict(sorted(tally.refusals.items())),
        )


def longest_mean_s(intervals_s: Sequence[float]) -> float | None:
    """TBT of a request: the mean of its longest 10 % of token intervals, at least one; None without any."""
    if not intervals_s:
        return None
    n = max(1, ceil(_LONGEST_SHARE * len(intervals_s)))
    return sum(sorted(intervals_s)[-n:]) / n


def quantile(ordered: Sequence[float], q: float) -> float:
    """The least of *ordered* (ascending, not empty) that at least the share *q* does not exceed."""
    return ordered[max(0, ceil(q * len(ordered)) - 1)]


def within(value_s: float | None, limit_s: float | None) -> bool:
    """Whether an objective is kept: one that is not set is, and so is one on what there was none of."""
    return value_s is None or limit_s is None or value_s <= limit_s


def _latency(values_s: Sequence[float], objective_s: float | None) -> Latency:
    ordered = sorted(values_s)
    p50_s, p90_s, p99_s = (quantile(ordered, q) if ordered else 0.0 for q in (0.5, 0.9, 0.99))
    return Latency(p50_s=p50_s, p90_s=p90_s, p99_s=p99_s, objective_s=objective_s)
