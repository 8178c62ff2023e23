"""A live run and a simulated one of the same requests, side by side: pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from statistics import median
from typing import Final

from bench.report import Report
from bench.simulator_results import RequestRecord, RunResult, quantile
from mooncake_mesh.loadtest.outcomes import Ending, LoadObjectives, RequestResult, summarise

_QUANTILES: Final = (0.5, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs. A good request was answered whole within the objectives."""

    ttft_s: Sequence[float]
    tbt_s: Sequence[float]
    hit_rate: float
    refused: int
    failed: int
    good: int
    duration_s: float

    @property
    def goodput_per_s(self) -> float:
        return self.good / self.duration_s


def live_side(results: Sequence[RequestResult], objectives: LoadObjectives) -> Side:
    summary = summarise(results, objectives)
    whole = [result for result in results if result.ending is Ending.OK]
    return Side(
        ttft_s=[result.ttft_s for result in whole if result.ttft_s is not None],
        tbt_s=[result.tbt_s for result in whole if result.tbt_s is not None],
        hit_rate=summary.hit_rate or 0.0,
        refused=summary.refused,
        failed=summary.failed,
        good=summary.good,
        duration_s=summary.duration_s,
    )


def simulated_side(result: RunResult, objectives: LoadObjectives) -> Side:
    """Both objectives are set."""
    ttft_s, tbt_s = objectives.ttft_s, objectives.tbt_s
    if ttft_s is None or tbt_s is None:
        raise ValueError("objectives: both are needed")
    ends_s = [record.finished_s for record in result.served]
    return Side(
        ttft_s=[record.ttft_s for record in result.served],
        tbt_s=result.tbts(),
        hit_rate=result.token_hit(),
        refused=result.rejected,
        failed=sum(not record.refused and isnan(record.finished_s) for record in result.records),
        good=sum(record.meets(ttft_s, tbt_s) for record in result.records),
        duration_s=max(ends_s, default=0.0) - min(record.arrival_s for record in result.records),
    )


def paired_ttfts(results: Sequence[RequestResult], records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """(live, simulated) of every request that was answered in both runs. Both are in order of arrival."""
    in_order = sorted(results, key=lambda result: result.sent_s)
    return [
        (live.ttft_s, record.ttft_s)
        for live, record in zip(in_order, records, strict=True)
        if live.ending is Ending.OK and live.ttft_s is not None and record.is_whole
    ]


def compare(report: Report, live: Side, simulated: Side, pairs: Sequence[tuple[float, float]]) -> None:
    """Rows with what the simulator says as value and what was measured live as baseline."""
    for name, ours, theirs in (
        ("TTFT", simulated.ttft_s, live.ttft_s),
        ("TBT", simulated.tbt_s, live.tbt_s),
    ):
        for q in _QUANTILES:
            value, baseline = quantile(ours, q), quantile(theirs, q)
            report.row(f"{name} P{q * 100:.0f}", value, "s", baseline=baseline, n=len(theirs))
    if pairs:
        ratios = [said / measured for measured, said in pairs]
        report.row(
            "TTFT of the same request (median; 10 to 90 %)",
            median(said for _, said in pairs),
            "s",
            baseline=median(measured for measured, _ in pairs),
            ratio=median(ratios),
            spread=(quantile(ratios, 0.1), quantile(ratios, 0.9)),
            n=len(pairs),
        )
    report.row("hit rate", simulated.hit_rate, "of prompt tokens", baseline=live.hit_rate)
    report.row("goodput", simulated.goodput_per_s, "requests/s", baseline=live.goodput_per_s)
    for name in ("good", "refused", "failed"):
        report.row(name, getattr(simulated, name), "requests", baseline=getattr(live, name))
