"""A live mesh and a collector of OpenTelemetry: one that listens, and one that takes nothing."""

import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import pytest

from tests.mesh.harness import MODEL, Mesh

pytestmark = pytest.mark.mesh

otlp: Final = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="the extra otel is not installed"
)

TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT: Final = "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Keeps the resource and the spans of all that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Posted)
        self.services: set[str] = set()
        self.spans: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, body: bytes) -> None:
        for resource in otlp.ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            self.services.add(named["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


class _Posted(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        assert self.path == "/v1/traces"
        self.server.take(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Tests say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def ask(mesh: Mesh) -> dict[str, Any]:
    question = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "content-type": "application/json"}
    request = urllib.request.Request(f"{mesh.http}/v1/chat/completions", json.dumps(question).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def traced(url: str) -> Mesh:
    """Spans wait until the gateway stops, or for a minute."""
    return Mesh(environ={"gateway": {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "60000"}})


def test_a_collector_gets_the_whole_trace_of_a_request_before_its_gateway_is_gone(collector: Collector) -> None:
    with traced(collector.url) as mesh:
        answer = ask(mesh)
        mesh.terminate("gateway0")
        assert mesh.exit_code("gateway0") == 0
    assert collector.services == {"mooncake-gateway"}
    spans = {span.name: span for span in collector.spans}
    assert spans.keys() == {"chat", "choice", "placing", "acquiring", "queued", "prefill", "kv transfer", "decode"}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    chat, choice = spans["chat"], spans["choice"]
    assert chat.parent_span_id.hex() == PARENT
    said = {attribute.key: attribute.value for attribute in chat.attributes}
    assert said["mooncake.request_id"].string_value == answer["id"].removeprefix("chatcmpl-")
    assert said["gen_ai.usage.output_tokens"].int_value == 4
    assert choice.parent_span_id == chat.span_id
    assert all(spans[name].parent_span_id == choice.span_id for name in spans.keys() - {"chat", "choice"})
    assert all(chat.start_time_unix_nano <= span.start_time_unix_nano for span in collector.spans)


def test_a_collector_that_hangs_holds_up_no_request_and_no_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf, traced(f"http://127.0.0.1:{deaf.getsockname()[1]}") as mesh:
        assert ask(mesh)["usage"]["completion_tokens"] == 4
        mesh.terminate("gateway0")
        assert mesh.exit_code("gateway0") == 0
