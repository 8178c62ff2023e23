"""Prometheus metrics of the doors. Every name of this project begins with ``mooncake_``; times are in seconds.

Some are told by vLLM's names too: see gateway/vllm_metrics.py.
"""

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mooncake_mesh.gateway.buckets import REQUEST_S, TBT_S, TTFT_S
from mooncake_mesh.gateway.vllm_metrics import VllmMetrics

PREFIX: Final = "mooncake"


class Outcome(enum.Enum):
    """How a request ended, as its client saw it."""

    OK = "ok"
    INVALID = "invalid"  # 4xx: the caller's mistake
    REJECTED = "rejected"  # 429 or 503 before any work
    DEADLINE = "deadline"
    CANCELLED = "cancelled"  # the client went away
    ERROR = "error"


class DoorMetrics:
    """What clients of this gateway experience; ``vllm`` tells it in vLLM's words. One instance per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.vllm = VllmMetrics(registry)
        self._requests = Counter(
            f"{PREFIX}_requests", "Requests by endpoint and outcome", ["endpoint", "outcome"], registry=registry
        )
        self._running = Gauge(f"{PREFIX}_requests_running", "Requests in flight", registry=registry)
        self._ttft = Histogram(
            f"{PREFIX}_time_to_first_token_seconds", "From the request's arrival", buckets=TTFT_S, registry=registry
        )
        self._tbt = Histogram(
            f"{PREFIX}_time_between_tokens_seconds", "Between two tokens of a choice", buckets=TBT_S, registry=registry
        )
        self._e2e = Histogram(
            f"{PREFIX}_request_duration_seconds", "From arrival to the last byte", buckets=REQUEST_S, registry=registry
        )
        self._prompt = Counter(f"{PREFIX}_prompt_tokens", "Prompt tokens, each prompt once", registry=registry)
        self._cached = Counter(f"{PREFIX}_cached_tokens", "Prompt tokens found in the pool", registry=registry)
        self._generated = Counter(f"{PREFIX}_generated_tokens", "Tokens drawn", registry=registry)
        # Bound once: these two run for every token.
        self.observe_ttft_s = self._ttft.observe
        self.observe_tbt_s = self._tbt.observe

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts one request in flight, whatever ends it."""
        with self._running.track_inprogress():
            yield

    def ended(self, endpoint: str, outcome: Outcome, duration_s: float) -> None:
        self._requests.labels(endpoint, outcome.value).inc()
        self._e2e.observe(duration_s)

    def tokens(self, *, prompt: int, cached: int, generated: int) -> None:
        """Counts of one request that started to run."""
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._generated.inc(generated)
