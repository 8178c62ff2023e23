"""What this gateway's clients experience under vLLM's metric names, for dashboards and schedulers that ask for those.

The unit is a choice, which is a request to vLLM's engine. It waits until its first token is here and runs from then on.
What the conductor knows follows in gateway/vllm_mesh_metrics.py; docs/monitoring.md says what is not told, and why.
Pure: whoever feeds it has the clock.
"""

import asyncio
import enum
from types import TracebackType
from typing import Final, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mooncake_mesh.errors import DeadlineExceeded, Rejected
from mooncake_mesh.gateway.api import TokenEvent
from mooncake_mesh.gateway.buckets import REQUEST_S, TBT_S, TOKENS, TTFT_S
from mooncake_proto.serving import FinishReason

PREFIX: Final = "vllm"
LABELS: Final = ("model_name", "engine")
ENGINE: Final = "0"  # vLLM numbers the engines behind one door: here that is one, the mesh


class FinishedReason(enum.Enum):
    """vLLM's words. ``abort``: the client left, or the time was over; ``error``: the mesh could not finish it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_ABORTS: Final = (asyncio.CancelledError, GeneratorExit, DeadlineExceeded)
_REASONS: Final = {FinishReason.STOP: FinishedReason.STOP, FinishReason.LENGTH: FinishedReason.LENGTH}


class VllmMetrics:
    """All series of this gateway. One instance per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._models: dict[str, _ModelSeries] = {}
        self.running = _gauge("num_requests_running", "Choices with a first token", registry)
        self.waiting = _gauge("num_requests_waiting", "Choices whose first token is still to come", registry)
        self.queries = _counter("prefix_cache_queries", "Prompt tokens that were looked for in the pool", registry)
        self.hits = _counter("prefix_cache_hits", "Prompt tokens found in the pool", registry)
        self.prompt = _counter("prompt_tokens", "Prompt tokens of choices with a first token", registry)
        self.generation = _counter("generation_tokens", "Tokens drawn", registry)
        self.success = Counter(
            f"{PREFIX}:request_success", "Ended choices", [*LABELS, "finished_reason"], registry=registry
        )
        self.ttft = _histogram("time_to_first_token_seconds", "From the request's arrival", TTFT_S, registry)
        self.itl = _histogram("inter_token_latency_seconds", "Between two tokens of a choice", TBT_S, registry)
        self.mean_itl = _histogram(
            "request_time_per_output_token_seconds", "Mean between the tokens of a whole choice", TBT_S, registry
        )
        self.e2e = _histogram("e2e_request_latency_seconds", "From arrival to the last token", REQUEST_S, registry)
        self.queue = _histogram("request_queue_time_seconds", "In the queue of who computes", REQUEST_S, registry)
        self.prefill = _histogram("request_prefill_time_seconds", "Computing the prompt", REQUEST_S, registry)
        self.decode = _histogram("request_decode_time_seconds", "From the first token to the last", REQUEST_S, registry)
        self.prompts = _histogram("request_prompt_tokens", "Prompt tokens of a whole choice", TOKENS, registry)
        self.answers = _histogram("request_generation_tokens", "Tokens of a whole choice", TOKENS, registry)

    def serve(self, model: str) -> None:
        """Tell of *model* from now on, before its first request: a scheduler may miss what is not there."""
        self._series(model)

    def choice(self, model: str, *, prompt_tokens: int, arrived_s: float) -> "ChoiceMetrics":
        """One choice of a request that came at *arrived_s*. It counts while it is entered."""
        return ChoiceMetrics(self._series(model), prompt_tokens, arrived_s)

    def _series(self, model: str) -> "_ModelSeries":
        series = self._models.get(model)
        if series is None:
            series = self._models[model] = _ModelSeries(self, model)
        return series


class _ModelSeries:
    """The series of one model, bound once: two of them grow with every token."""

    def __init__(self, of: VllmMetrics, model: str) -> None:
        labels = (model, ENGINE)
        self.running, self.waiting = of.running.labels(*labels), of.waiting.labels(*labels)
        self.queries, self.hits = of.queries.labels(*labels), of.hits.labels(*labels)
        self.prompt, self.generation = of.prompt.labels(*labels), of.generation.labels(*labels)
        self.success = {reason: of.success.labels(*labels, reason.value) for reason in FinishedReason}
        self.ttft, self.itl, self.e2e = of.ttft.labels(*labels), of.itl.labels(*labels), of.e2e.labels(*labels)
        self.queue, self.prefill = of.queue.labels(*labels), of.prefill.labels(*labels)
        self.decode, self.mean_itl = of.decode.labels(*labels), of.mean_itl.labels(*labels)
        self.prompts, self.answers = of.prompts.labels(*labels), of.answers.labels(*labels)


class ChoiceMetrics:
    """One choice: hears its tokens in order, and counts its end when it is left, however that is.

    A refusal before the first token is no end: vLLM's engine never sees such a request.
    """

    def __init__(self, series: _ModelSeries, prompt_tokens: int, arrived_s: float) -> None:
        self._series = series
        self._prompt_tokens = prompt_tokens
        self._arrived_s = arrived_s
        self._first: TokenEvent | None = None
        self._first_s = self._last_s = arrived_s
        self._tokens = 0
        self._finished: FinishedReason | None = None

    def __enter__(self) -> Self:
        self._series.waiting.inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self._series.waiting if self._first is None else self._series.running).dec()
        if self._finished is not None:
            self._whole(self._finished)
        elif isinstance(error, _ABORTS):
            self._series.success[FinishedReason.ABORT].inc()
        elif self._first is not None or not isinstance(error, Rejected):
            self._series.success[FinishedReason.ERROR].inc()

    def token(self, event: TokenEvent, now_s: float) -> None:
        """The next one is here. One that only says that the mesh gave up was not drawn."""
        if event.finish is FinishReason.CANCELLED:
            return
        if self._first is None:
            self._begun(event, now_s)
        else:
            self._series.itl.observe(now_s - self._last_s)
        self._last_s = now_s
        self._tokens += 1
        self._series.generation.inc()
        if event.finish is not None:
            self._finished = _REASONS[event.finish]

    def satisfied(self) -> None:
        """The text is whole, whatever more could be drawn: a stop string."""
        self._finished = FinishedReason.STOP

    def _begun(self, first: TokenEvent, now_s: float) -> None:
        series = self._series
        self._first, self._first_s = first, now_s
        series.waiting.dec()
        series.running.inc()
        series.ttft.observe(now_s - self._arrived_s)
        series.prompt.inc(self._prompt_tokens)
        series.queries.inc(self._prompt_tokens)
        series.hits.inc(first.cached_tokens or 0)

    def _whole(self, reason: FinishedReason) -> None:
        series, decode_s = self._series, self._last_s - self._first_s
        series.success[reason].inc()
        series.e2e.observe(self._last_s - self._arrived_s)
        series.decode.observe(decode_s)
        series.prompts.observe(self._prompt_tokens)
        series.answers.observe(self._tokens)
        if self._tokens > 1:
            series.mean_itl.observe(decode_s / (self._tokens - 1))
        if self._first is not None and self._first.queue_s is not None:
            series.queue.observe(self._first.queue_s)
        if self._first is not None and self._first.prefill_s is not None:
            series.prefill.observe(self._first.prefill_s)


def _gauge(name: str, text: str, registry: CollectorRegistry) -> Gauge:
    return Gauge(f"{PREFIX}:{name}", text, LABELS, registry=registry)


def _counter(name: str, text: str, registry: CollectorRegistry) -> Counter:
    return Counter(f"{PREFIX}:{name}", text, LABELS, registry=registry)


def _histogram(name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"{PREFIX}:{name}", text, LABELS, buckets=buckets, registry=registry)
