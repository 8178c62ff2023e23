"""A run's figures for people, in the layout and by the names of ``vllm bench serve``, and for machines."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from mooncake_mesh.loadtest.mesh_counters import MeshCounters
from mooncake_mesh.loadtest.outcomes import LoadObjectives, Spread, Summary

_WIDTH: Final = 56
_LABEL: Final = 42


def text_report(summary: Summary, objectives: LoadObjectives, mesh: MeshCounters | None) -> str:
    """The table, without a newline at its end."""
    lines = [_rule(" Serving Benchmark Result ", "="), *_totals(summary, objectives)]
    lines += [_rule(" The mesh ", "-"), *_of_mesh(summary, mesh)]
    for title, name, spread in (
        ("Time to First Token", "TTFT", summary.ttft),
        ("Time per Output Token (excl. 1st token)", "TPOT", summary.tpot),
        ("Inter-token Latency", "ITL", summary.itl),
        ("Longest 10 % of a request's intervals", "TBT", summary.tbt),
        ("End-to-end Latency", "E2EL", summary.e2e),
    ):
        lines += [_rule(f" {title} ", "-"), *_spread(name, spread)]
    for reason, n in summary.reasons.items():
        lines.append(f"{n} x {reason}")
    return "\n".join([*lines, "=" * _WIDTH])


def json_report(summary: Summary, objectives: LoadObjectives, mesh: MeshCounters | None) -> dict[str, Any]:
    """The same figures; the names that ``vllm bench serve`` has too are its own, times of these are in milliseconds."""
    shared = {
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.requests_per_s,
        "request_goodput": summary.goodput_per_s,
        "output_throughput": summary.output_tokens_per_s,
        "total_token_throughput": summary.tokens_per_s,
        "max_output_tokens_per_s": summary.peak_output_tokens_per_s,
        "max_concurrent_requests": summary.peak_concurrent,
    }
    for name, spread in (("ttft", summary.ttft), ("tpot", summary.tpot), ("itl", summary.itl), ("e2el", summary.e2e)):
        shared |= {
            f"mean_{name}_ms": 1e3 * spread.mean_s,
            f"median_{name}_ms": 1e3 * spread.median_s,
            f"std_{name}_ms": 1e3 * spread.std_s,
            f"p90_{name}_ms": 1e3 * spread.p90_s,
            f"p99_{name}_ms": 1e3 * spread.p99_s,
        }
    return {
        **shared,
        "refused": summary.refused,
        "reasons": summary.reasons,
        "tbt": asdict(summary.tbt),
        "objectives": asdict(objectives),
        "good": summary.good,
        "good_share": summary.good_share,
        "cached_tokens": summary.cached_tokens,
        "hit_rate": summary.hit_rate,
        "wasted_prefill_tokens": summary.wasted_prefill_tokens,
        "mesh": None if mesh is None else asdict(mesh),
    }


def _totals(summary: Summary, objectives: LoadObjectives) -> Iterator[str]:
    yield _row("Successful requests:", f"{summary.completed}")
    yield _row("Refused requests (429, 503):", f"{summary.refused}")
    yield _row("Failed requests:", f"{summary.failed}")
    yield _row("Benchmark duration (s):", f"{summary.duration_s:.2f}")
    yield _row("Total input tokens:", f"{summary.input_tokens}")
    yield _row("Total generated tokens:", f"{summary.output_tokens}")
    yield _row("Request throughput (req/s):", f"{summary.requests_per_s:.2f}")
    yield _row("Objectives:", _limits(objectives))
    yield _row("Request goodput (req/s):", f"{summary.goodput_per_s:.2f}")
    yield _row("Good requests of all:", f"{summary.good} ({summary.good_share:.1%})")
    yield _row("Output token throughput (tok/s):", f"{summary.output_tokens_per_s:.2f}")
    yield _row("Peak output token throughput (tok/s):", f"{summary.peak_output_tokens_per_s:.2f}")
    yield _row("Peak concurrent requests:", f"{summary.peak_concurrent}")
    yield _row("Total token throughput (tok/s):", f"{summary.tokens_per_s:.2f}")


def _of_mesh(summary: Summary, mesh: MeshCounters | None) -> Iterator[str]:
    unknown = "not told"
    cached, rate, wasted = summary.cached_tokens, summary.hit_rate, summary.wasted_prefill_tokens
    yield _row("Prompt tokens from the pool:", unknown if cached is None else f"{cached}")
    yield _row("Hit rate:", unknown if rate is None else f"{rate:.1%}")
    yield _row("Wasted prefill, by this client (tok):", unknown if wasted is None else f"{wasted}")
    if mesh is not None:
        yield _row("Wasted prefill, by the mesh (tok):", f"{mesh.wasted_prefill_tokens}")
        yield _row("Good requests, by the mesh:", f"{mesh.good} of {mesh.ended}")
        yield _row("KV moved between nodes (MiB):", f"{mesh.transferred_bytes / 2**20:.1f}")


def _spread(name: str, spread: Spread) -> Iterator[str]:
    for label, value_s in (
        ("Mean", spread.mean_s),
        ("Median", spread.median_s),
        ("P90", spread.p90_s),
        ("P99", spread.p99_s),
    ):
        yield _row(f"{label} {name} (ms):", f"{1e3 * value_s:.2f}")


def _limits(objectives: LoadObjectives) -> str:
    named = (("TTFT", objectives.ttft_s), ("TBT", objectives.tbt_s))
    return ", ".join(f"{name} {limit:g} s" for name, limit in named if limit is not None) or "none"


def _row(label: str, value: str) -> str:
    return f"{label:<{_LABEL}} {value}"


def _rule(title: str, mark: str) -> str:
    return title.center(_WIDTH, mark)
