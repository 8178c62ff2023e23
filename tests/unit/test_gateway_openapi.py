"""The description of the door, the endpoints that are not here, and what a client calls its requests."""

import asyncio
import json

import openapi_spec_validator
import pytest
import structlog
from starlette.routing import Route
from structlog.testing import LogCapture
from structlog.typing import Processor

from mooncake_mesh.gateway import completion
from mooncake_mesh.gateway.not_here import not_here_routes
from mooncake_mesh.gateway.openapi import openapi
from mooncake_mesh.gateway.trace_context import trace_labels
from tests.unit.gateway_doubles import MODEL, Exchange, Gateway, says

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def call(gateway: Gateway, path: str, body: bytes = b"", *, method: str = "GET", **headers: str) -> Exchange:
    return asyncio.run(Exchange(gateway.app, path, body, method=method, **headers).run())


def test_the_description_is_valid_and_served() -> None:
    document = call(Gateway(says("")), "/openapi.json").json()
    openapi_spec_validator.validate(document)
    assert document == json.loads(json.dumps(openapi()))


def test_every_endpoint_is_described_with_its_methods() -> None:
    gateway = Gateway(says(""))
    absent = {route.endpoint for route in not_here_routes()}
    served = {
        (route.path.replace("{name:path}", "{name}"), method.lower())
        for route in gateway.app.routes
        if isinstance(route, Route)
        and route.endpoint not in absent
        and not route.path.startswith("/page")
        and route.path != "/"
        for method in route.methods or {"POST"}
        if method != "HEAD" and "caching{path" not in route.path
    }
    described = {
        (path, method)
        for path, calls in openapi()["paths"].items()
        if not path.startswith("/v1/caching")
        for method in calls
        if method != "parameters"
    }
    assert served == described


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/speech", "/v1/batches/b1/cancel", "/v1/responses/r1"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_what_openai_has_and_this_server_has_not_is_501(path: str, method: str) -> None:
    answer = call(Gateway(says("")), path, b"{}", method=method)
    assert answer.status == 501
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("not_implemented", "invalid_request_error", None)
    assert error["message"].startswith(path)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-more",
        f"ff-{TRACE}-b7ad6b7169203331-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
    ],
)
def test_a_malformed_traceparent_is_none(header: str) -> None:
    assert trace_labels({"traceparent": header}) == {}


def test_labels_of_the_client_are_in_the_log_lines_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace_labels({"traceparent": f"01-{TRACE}-b7ad6b7169203331-01-more"})["trace_id"] == TRACE
    lines = LogCapture()
    processors: list[Processor] = [structlog.contextvars.merge_contextvars, lines]
    monkeypatch.setattr(completion, "log", structlog.wrap_logger(structlog.PrintLogger(), processors=processors))
    body = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
    labels = {"traceparent": PARENT, "x_request_id": "mine-7"}
    answer = call(Gateway(says("ok")), "/v1/completions", body, method="POST", **labels)
    [line] = lines.entries
    assert (line["event"], line["trace_id"], line["client_request_id"]) == ("request_finished", TRACE, "mine-7")
    assert line["completion_tokens"] == 3
    assert answer.headers["x-request-id"] == "mine-7"
