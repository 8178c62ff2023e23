"""Requests as OpenTelemetry traces: the only module that imports it.

Spans go into the SDK's queue, which is bounded (OTEL_BSP_MAX_QUEUE_SIZE) and emptied by a thread of its own; where a
collector does not keep up, the oldest are dropped, and the SDK logs that. Nothing here waits for a collector.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from threading import Thread
from types import MappingProxyType
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mooncake_mesh.errors import MooncakeError, Rejected
from mooncake_mesh.gateway.openai_errors import problem_of
from mooncake_mesh.gateway.openai_responses import Usage
from mooncake_mesh.gateway.request_story import RequestStory
from mooncake_mesh.gateway.span_plan import PlannedSpan, planned
from mooncake_proto.client import Operation
from mooncake_proto.ids import RequestId

_OPERATIONS: Final = MappingProxyType({Operation.CHAT: "chat", Operation.COMPLETION: "text_completion"})
_CLOSING_S: Final = 5.0
_TOO_MANY_REQUESTS: Final = 429
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class OtelTracing:
    """Implements ``Tracing`` of gateway/tracing.py over *provider*, which it closes."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("mooncake_mesh", version("mooncake-mesh"))
        self._open: dict[str, Span] = {}

    @contextmanager
    def request(
        self, operation: Operation, request_id: RequestId, headers: Mapping[str, str]
    ) -> Iterator["_OpenRequest"]:
        name = _OPERATIONS[operation]
        span = self._tracer.start_span(
            name,
            context=_PROPAGATOR.extract(headers, Context()),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": name, "mooncake.request_id": request_id},
        )
        if span.is_recording():
            self._open[request_id] = span
        try:
            yield _OpenRequest(span)
        except asyncio.CancelledError:
            span.set_attribute("mooncake.cancelled", True)
            raise
        except Exception as error:
            _note_error(span, error, request_id)
            raise
        finally:
            self._open.pop(request_id, None)
            span.end()

    def choice_ended(self, story: RequestStory) -> None:
        request = self._open.get(story.request_id.rpartition("-")[0])
        if request is not None:
            self._draw(planned(story.trace()), request)

    def close(self) -> None:
        """By a thread that may be left behind: a collector that hangs can hold the SDK for longer."""
        closing = Thread(target=self._provider.shutdown, name="otel-shutdown", daemon=True)
        closing.start()
        closing.join(_CLOSING_S)

    def _draw(self, plan: PlannedSpan, parent: Span) -> None:
        span = self._tracer.start_span(
            plan.name,
            context=set_span_in_context(parent, Context()),
            attributes=plan.attributes,
            start_time=_ns(plan.start_s),
        )
        for event in plan.events:
            span.add_event(event.name, event.attributes, _ns(event.at_s))
        for child in plan.children:
            self._draw(child, span)
        if plan.error:
            span.set_status(Status(StatusCode.ERROR, plan.error))
        span.end(_ns(plan.end_s))


class _OpenRequest:
    def __init__(self, span: Span) -> None:
        self._span = span

    def answered(self, model: str, usage: Usage, finish_reasons: Sequence[str]) -> None:
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.response.finish_reasons": finish_reasons,
            }
        )


def exporting(instance_id: str) -> TracerProvider:
    """Sends spans over OTLP/HTTP, as OpenTelemetry's variables say."""
    ours = {
        "service.name": "mooncake-gateway",
        "service.version": version("mooncake-mesh"),
        "service.instance.id": instance_id,
    }
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _note_error(span: Span, error: Exception, request_id: RequestId) -> None:
    """A request that is the caller's own mistake is no failure of the server."""
    code = error.code if isinstance(error, MooncakeError) else type(error).__name__
    span.set_attribute("error.type", code)
    if isinstance(error, Rejected):
        span.set_attribute("mooncake.refusal", error.reason)
    status = problem_of(error, request_id=request_id).status
    if status >= 500 or status == _TOO_MANY_REQUESTS:
        span.set_status(Status(StatusCode.ERROR, code))


def _ns(at_s: float) -> int:
    return round(at_s * 1e9)
