"""The conductor's report as Prometheus metrics: it has no HTTP of its own, so every gateway tells it with its own."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncake_mesh.gateway.member_metrics import member_metrics
from mooncake_mesh.gateway.metrics import PREFIX
from mooncake_mesh.gateway.vllm_mesh_metrics import vllm_mesh_metrics
from mooncake_proto.control import ClassReport, Latency, StatusReport

_QUANTILES: Final = ("0.5", "0.9", "0.99")
_ENDINGS: Final = ("finished", "refused", "failed", "cancelled")


def mesh_metrics(report: StatusReport) -> bytes:
    """In the text format, to be put behind a gateway's own."""
    registry = CollectorRegistry()
    registry.register(_Report(report))
    return generate_latest(registry)


class _Report(Collector):
    def __init__(self, report: StatusReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        report = self._report
        yield CounterMetricFamily(f"{PREFIX}_placements", "Requests placed", value=report.placed_total)
        yield CounterMetricFamily(f"{PREFIX}_placements_refused", "Requests not placed", value=report.rejected_total)
        factor = GaugeMetricFamily(
            f"{PREFIX}_estimate_factor", "Observed over modelled times of late", labels=["instance"]
        )
        error = GaugeMetricFamily(
            f"{PREFIX}_estimate_error_ratio", "Mean relative error of the corrected estimates", labels=["instance"]
        )
        for known in report.estimates:
            factor.add_metric([known.instance_id], known.factor)
            error.add_metric([known.instance_id], known.error)
        yield from (factor, error)
        yield from _classes(report.classes)
        yield from member_metrics(report.cluster.members)
        yield from vllm_mesh_metrics(report.cluster.members)


def _classes(classes: tuple[ClassReport, ...]) -> Iterator[Metric]:
    ended = CounterMetricFamily(f"{PREFIX}_slo_requests", "Requests by how they ended", labels=["class", "ending"])
    good = CounterMetricFamily(f"{PREFIX}_slo_good_requests", "Answered whole within both objectives", labels=["class"])
    refused = CounterMetricFamily(f"{PREFIX}_slo_refusals", "Refused requests by reason", labels=["class", "reason"])
    tokens = CounterMetricFamily(f"{PREFIX}_slo_tokens", "Tokens of prompts and answers", labels=["class"])
    good_tokens = CounterMetricFamily(f"{PREFIX}_slo_good_tokens", "Those of good requests", labels=["class"])
    wasted = CounterMetricFamily(
        f"{PREFIX}_wasted_prefill_tokens", "Computed for requests that were not good", labels=["class"]
    )
    rate = GaugeMetricFamily(f"{PREFIX}_slo_goodput", "Good requests a second of the last minute", labels=["class"])
    ttft = _quantiles("ttft", "Time to first token of late")
    tbt = _quantiles("tbt", "Mean of the longest 10 % of token intervals of late")
    for report in classes:
        name = report.name
        for ending in _ENDINGS:
            ended.add_metric([name, ending], getattr(report, ending))
        for reason, count in report.refusals.items():
            refused.add_metric([name, reason], count)
        good.add_metric([name], report.good)
        tokens.add_metric([name], report.tokens)
        good_tokens.add_metric([name], report.good_tokens)
        wasted.add_metric([name], report.wasted_tokens)
        rate.add_metric([name], report.good_per_s)
        _add(ttft, name, report.ttft)
        _add(tbt, name, report.tbt)
    yield from (ended, good, refused, tokens, good_tokens, wasted, rate, ttft, tbt)


def _quantiles(what: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_slo_{what}_seconds", text, labels=["class", "quantile"])


def _add(family: GaugeMetricFamily, name: str, latency: Latency) -> None:
    for quantile, value in zip(_QUANTILES, (latency.p50_s, latency.p90_s, latency.p99_s), strict=True):
        family.add_metric([name, quantile], value)
