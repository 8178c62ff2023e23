"""What load tools say of a run, each in its own file format, and what the gateway counted meanwhile: pure.

Times are means, in seconds. TPOT is that of the tokens behind the first, but GuideLLM's and the gateway's are means
over all intervals, where the others give every request the same weight: equal as long as answers are equally long.
"""

import json
import math
from dataclasses import dataclass, fields
from typing import Final

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run as one side saw it. ``hit_rate`` is None where the tool does not tell."""

    answered: int
    failed: int
    ttft_s: float
    tpot_s: float
    output_tokens: int
    output_tokens_per_s: float
    hit_rate: float | None = None


def read_aiperf(text: str) -> Figures:
    """Of ``profile_export_aiperf.json``. Raises LookupError or ValueError for anything else, as the others do."""
    told = json.loads(text)
    errors = told.get("error_request_count", {"avg": 0})
    hits = told.get("overall_usage_prompt_cache_read_pct")
    return Figures(
        answered=int(told["request_count"]["avg"]),
        failed=int(errors["avg"]),
        ttft_s=told["time_to_first_token"]["avg"] / 1e3,
        tpot_s=told["inter_token_latency"]["avg"] / 1e3,
        output_tokens=int(told["total_output_tokens"]["avg"]),
        output_tokens_per_s=told["output_token_throughput"]["avg"],
        hit_rate=None if hits is None else hits["avg"] / 100,
    )


def read_guidellm(text: str) -> Figures:
    """Of the JSON output of `guidellm run`."""
    told = json.loads(text)["benchmarks"][0]["metrics"]
    totals = told["request_totals"]
    return Figures(
        answered=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        ttft_s=told["time_to_first_token_ms"]["successful"]["mean"] / 1e3,
        tpot_s=told["inter_token_latency_ms"]["successful"]["mean"] / 1e3,
        output_tokens=int(told["output_token_count"]["successful"]["total_sum"]),
        output_tokens_per_s=told["output_tokens_per_second"]["successful"]["mean"],
    )


def read_vllm(text: str) -> Figures:
    """Of the result file of `vllm bench serve`, and of the JSON report of `mooncake bench serve`."""
    told = json.loads(text)
    return Figures(
        answered=told["completed"],
        failed=told["failed"] + told.get("refused", 0),
        ttft_s=told["mean_ttft_ms"] / 1e3,
        tpot_s=told["mean_tpot_ms"] / 1e3,
        output_tokens=told["total_output_tokens"],
        output_tokens_per_s=told["output_throughput"],
        hit_rate=told.get("hit_rate"),
    )


_SUMS: Final = {
    "ttft_s": "mooncake_time_to_first_token_seconds_sum",
    "first_tokens": "mooncake_time_to_first_token_seconds_count",
    "intervals_s": "mooncake_time_between_tokens_seconds_sum",
    "intervals": "mooncake_time_between_tokens_seconds_count",
    "prompt_tokens": "mooncake_prompt_tokens_total",
    "cached_tokens": "mooncake_cached_tokens_total",
    "output_tokens": "mooncake_generated_tokens_total",
}
_REQUESTS: Final = "mooncake_requests_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCounters:
    """What a gateway has counted since its start."""

    answered: float
    failed: float
    ttft_s: float
    first_tokens: float
    intervals_s: float
    intervals: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float

    def __sub__(self, before: "GatewayCounters") -> "GatewayCounters":
        names = [field.name for field in fields(self)]
        return GatewayCounters(**{name: getattr(self, name) - getattr(before, name) for name in names})

    def figures(self, tool: Figures) -> Figures:
        """Of the run that *tool* tells of, whose counters these are. A gateway knows no duration: the tool's is taken,
        so that throughputs differ by what was counted."""
        duration_s = tool.output_tokens / tool.output_tokens_per_s if tool.output_tokens_per_s else math.inf
        return Figures(
            answered=int(self.answered),
            failed=int(self.failed),
            ttft_s=self.ttft_s / max(1.0, self.first_tokens),
            tpot_s=self.intervals_s / max(1.0, self.intervals),
            output_tokens=int(self.output_tokens),
            output_tokens_per_s=self.output_tokens / duration_s,
            hit_rate=self.cached_tokens / max(1.0, self.prompt_tokens),
        )


def read_gateway(text: str) -> GatewayCounters:
    """Of ``/metrics``."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    sums = {field: sum(s.value for s in samples if s.name == name) for field, name in _SUMS.items()}
    endings = [(s.labels["outcome"], s.value) for s in samples if s.name == _REQUESTS]
    return GatewayCounters(
        answered=sum(n for outcome, n in endings if outcome == "ok"),
        failed=sum(n for outcome, n in endings if outcome != "ok"),
        **sums,
    )
