"""Requests as OpenTelemetry traces, from the HTTP door to what an exporter gets."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from mooncake_mesh.errors import Aborted, ConfigError, MooncakeError, Rejected
from mooncake_mesh.gateway.api import TokenEvent, TokenRequest
from mooncake_mesh.gateway.completion import CompletionLimits, Completions
from mooncake_mesh.gateway.doorkeeper import Doorkeeper
from mooncake_mesh.gateway.http import HttpLimits, create_app
from mooncake_mesh.gateway.metrics import DoorMetrics
from mooncake_mesh.gateway.request_events import CallerLeft, JobsAccepted, Placed, Started
from mooncake_mesh.gateway.request_story import RequestStory
from mooncake_mesh.gateway.tokenizer import ByteTokenizer
from mooncake_mesh.gateway.tracing import NoTracing, Tracing, load_tracing
from tests.unit.gateway_doubles import MODEL, Exchange, Script, ScriptedMesh, fails, hangs, says
from tests.unit.test_gateway_core_races import D0, P0, entry, first, job, placement

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from mooncake_mesh.gateway.otel import OtelTracing, exporting

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 3}


class TellingMesh(ScriptedMesh):
    """Tells a story of every choice: that of one which went well, up to its reader's leaving."""

    def __init__(self, script: Script, on_end: Callable[[RequestStory], None]) -> None:
        super().__init__(script)
        self._on_end = on_end

    async def generate(self, request: TokenRequest) -> AsyncGenerator[TokenEvent, None]:
        story = RequestStory(request, 100.0, 1_700_000_000.0)
        story.note(Started(), 100.0)
        story.note(Placed(placement=placement(0)), 100.5)
        story.note(JobsAccepted(job_id=job(0)), 100.75)
        story.note(first(0, 0, 7), 101.0)
        story.note(entry(0, 1, 8), 102.0)
        try:
            async for event in super().generate(request):
                yield event
        finally:
            story.note(CallerLeft(), 103.0)
            self._on_end(story)


@dataclass
class Traced:
    """A gateway whose spans end up in ``spans``."""

    script: Script
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = OtelTracing(provider)
        self.mesh = TellingMesh(self.script, self.tracing.choice_ended)
        metrics = DoorMetrics(CollectorRegistry())
        tokenizers = {MODEL: ByteTokenizer()}
        completions = Completions(self.mesh, tokenizers, metrics, CompletionLimits(), tracing=self.tracing)
        self.app = create_app(self.mesh, completions, metrics, HttpLimits(), Doorkeeper(None))

    def exchange(self, body: object = BODY, path: str = "/v1/completions", **headers: str) -> Exchange:
        return Exchange(self.app, path, json.dumps(body).encode(), **headers)

    def ask(self, body: object = BODY, path: str = "/v1/completions", **headers: str) -> Exchange:
        return asyncio.run(self.exchange(body, path, **headers).run())

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    @property
    def root(self) -> ReadableSpan:
        [root] = [span for span in self.spans if span.kind is SpanKind.SERVER]
        return root

    def under(self, parent: ReadableSpan) -> list[ReadableSpan]:
        return [span for span in self.spans if span.parent and span.parent.span_id == parent.context.span_id]


def test_a_request_is_one_tree_of_spans() -> None:
    traced = Traced(says("abc", cached=1))
    traced.ask()
    root = traced.root
    assert (root.name, root.parent, root.status.status_code) == ("text_completion", None, StatusCode.UNSET)
    [choice] = traced.under(root)
    assert [span.name for span in traced.under(choice)] == ["placing", "queued", "prefill", "kv transfer", "decode"]
    assert len(traced.spans) == 7
    assert {span.context.trace_id for span in traced.spans} == {root.context.trace_id}
    assert len({span.context.span_id for span in traced.spans}) == 7


def test_spans_have_the_times_of_the_story() -> None:
    traced = Traced(says("abc"))
    traced.ask()
    [choice] = traced.under(traced.root)
    came_ns = 1_700_000_000 * 10**9
    lies = {
        span.name: ((span.start_time - came_ns) / 1e9, (span.end_time - came_ns) / 1e9)
        for span in traced.spans
        if span.kind is not SpanKind.SERVER and span.start_time is not None and span.end_time is not None
    }
    assert lies["choice"] == (0.0, 3.0)
    assert lies["placing"] == (0.0, 0.5)
    began_s, ended_s = lies["prefill"]
    assert (began_s, ended_s) == (pytest.approx(0.9, abs=1e-6), 1.0)
    assert lies["kv transfer"] == (1.0, 2.0)
    assert lies["decode"] == (1.0, 3.0)
    happened = [(event.name, round((event.timestamp - came_ns) / 1e9, 6)) for event in choice.events]
    assert happened[:2] == [("received", 0.0), ("jobs accepted", 0.75)]


def test_the_request_says_what_was_asked_and_answered() -> None:
    traced = Traced(says("abc", cached=1))
    answer = traced.ask()
    said = dict(traced.root.attributes or {})
    assert said.pop("mooncake.request_id") == answer.json()["id"].removeprefix("cmpl-")
    assert said == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL,
        "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
    }
    [prefill] = [span for span in traced.spans if span.name == "prefill"]
    assert (prefill.attributes or {})["mooncake.instances"] == P0.instance_id
    [decode] = [span for span in traced.spans if span.name == "decode"]
    assert (decode.attributes or {})["mooncake.instances"] == D0.instance_id


def test_every_choice_is_a_child_of_its_request() -> None:
    traced = Traced(says("abc"))
    traced.ask({**BODY, "n": 2}, "/v1/completions")
    ids = {(span.attributes or {})["mooncake.choice_id"] for span in traced.under(traced.root)}
    request_id = str((traced.root.attributes or {})["mooncake.request_id"])
    assert ids == {f"{request_id}-0", f"{request_id}-1"}


def test_a_request_is_part_of_its_callers_trace() -> None:
    traced = Traced(says("abc"))
    traced.ask(traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=1")
    assert traced.root.parent is not None
    assert traced.root.parent.span_id == int(PARENT, 16)
    assert {span.context.trace_id for span in traced.spans} == {int(TRACE, 16)}
    assert traced.root.context.trace_state.to_header() == "vendor=1"


def test_what_its_caller_does_not_sample_is_not_exported() -> None:
    traced = Traced(says("abc"))
    assert traced.ask(traceparent=f"00-{TRACE}-{PARENT}-00").status == 200
    assert traced.spans == []


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01"])
def test_a_malformed_traceparent_is_none(header: str) -> None:
    traced = Traced(says("abc"))
    assert traced.ask(traceparent=header).status == 200
    assert traced.root.parent is None


@pytest.mark.parametrize(
    ("error", "status", "attributes"),
    [
        (
            Rejected("decode_full", unavailable=False, retry_after_s=1.0),
            StatusCode.ERROR,
            {"error.type": "rejected", "mooncake.refusal": "decode_full"},
        ),
        (Aborted("it broke off"), StatusCode.ERROR, {"error.type": "aborted"}),
        (ValueError("a bug"), StatusCode.ERROR, {"error.type": "ValueError"}),
    ],
)
def test_an_error_is_the_status_of_its_request(
    error: MooncakeError, status: StatusCode, attributes: dict[str, str]
) -> None:
    traced = Traced(fails(error))
    traced.ask()
    assert traced.root.status.status_code is status
    assert attributes.items() <= dict(traced.root.attributes or {}).items()
    assert [span.name for span in traced.under(traced.root)] == ["choice"]


def test_a_mistake_of_the_caller_has_a_name_and_is_no_failure_of_the_server() -> None:
    traced = Traced(says("abc"))
    assert traced.ask({"model": "nobody", "prompt": "hi"}).status == 404
    assert traced.root.status.status_code is StatusCode.UNSET
    assert (traced.root.attributes or {})["error.type"] == "model_not_found"


def test_a_client_that_leaves_ends_its_trace() -> None:
    async def scenario(traced: Traced) -> None:
        exchange = traced.exchange()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(exchange.run())
            await traced.mesh.until(lambda: bool(traced.mesh.open))
            exchange.disconnect()

    traced = Traced(hangs())
    asyncio.run(scenario(traced))
    assert (traced.root.attributes or {})["mooncake.cancelled"] is True
    assert traced.root.status.status_code is StatusCode.UNSET
    assert len(traced.under(traced.root)) == 1


def test_a_choice_of_no_open_request_is_nobodys() -> None:
    traced = Traced(says("abc"))
    traced.ask()
    before = len(traced.spans)
    story = RequestStory(traced.mesh.requests[0], 0.0, 0.0)
    traced.tracing.choice_ended(story)
    assert len(traced.spans) == before


# --- what is configured -----------------------------------------------------------------------------------------------

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
HERE = "http://127.0.0.1:9"


def loaded(**environ: str) -> Tracing:
    return load_tracing("gateway0", environ)


@pytest.mark.parametrize("off", [{}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_without_a_collector_nothing_is_traced(off: dict[str, str]) -> None:
    where = {ENDPOINT: HERE} if off else {ENDPOINT: ""}
    assert isinstance(loaded(**where, **off), NoTracing)


@pytest.mark.parametrize("variable", [ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_who_wants_traces_without_the_extra_is_told_at_the_start(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake_mesh.gateway.otel", None)
    with pytest.raises(ConfigError, match=r"mooncake-mesh\[otel\]") as refused:
        loaded(**{variable: HERE})
    assert refused.value.path == variable


def test_a_protocol_that_is_not_spoken_is_refused() -> None:
    with pytest.raises(ConfigError, match="http/protobuf") as refused:
        loaded(**{ENDPOINT: HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert refused.value.path == "OTEL_EXPORTER_OTLP_PROTOCOL"


def test_the_service_has_a_name_unless_it_is_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, HERE)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    names = []
    for given in (None, "mine"):
        if given is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", given)
        provider = exporting("gateway7")
        names.append(
            (provider.resource.attributes["service.name"], provider.resource.attributes["service.instance.id"])
        )
        OtelTracing(provider).close()
    assert names == [("mooncake-gateway", "gateway7"), ("mine", "gateway7")]
