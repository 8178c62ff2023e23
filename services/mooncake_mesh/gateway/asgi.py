"""What the HTTP door needs of ASGI: bounded bodies, JSON answers, server-sent events, and news of the client's leaving.

Raw ASGI instead of Starlette's responses: a stream's every token passes here, and a request for one whole answer must
notice a disconnect as well.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Final

import orjson
import structlog
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.gateway.openai_errors import BodyTooLarge, Problem, problem_of
from mooncake_mesh.gateway.openai_responses import Json
from mooncake_proto.ids import RequestId

log = structlog.get_logger()

CLIENT_HAS_LEFT: Final = "client_has_left"
"""Where in a scope's state the server puts the function that looks; see gateway/accepting.py."""
_SSE_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGone(Exception):
    """The client closed its connection."""


def request_id_of(scope: Scope) -> RequestId:
    """The server's own id of this request, see Front."""
    return RequestId(scope["state"]["request_id"])


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int) -> bytes:
    """The request's body. Raises BodyTooLarge when it is longer than *max_bytes*, or ClientGone.

    Of a body that is too long as much again is read and dropped, so that a client that writes before it reads gets to
    see the refusal. A client that asks first (``Expect: 100-continue``) is refused by the declared length alone.
    """
    headers = Headers(scope=scope)
    refusal = BodyTooLarge(f"the body is longer than {max_bytes} bytes")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > (max_bytes if "expect" in headers else 2 * max_bytes):
        raise refusal
    parts = []
    size = 0
    while size <= 2 * max_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        else:
            parts.clear()
        if not message.get("more_body", False):
            break
    if size > max_bytes:
        raise refusal
    return b"".join(parts)


def client_has_left(scope: Scope) -> bool:
    """Whether nobody is at the other end any more, as far as the server can tell now, also ahead of ``receive``."""
    look = scope["state"].get(CLIENT_HAS_LEFT)
    return look is not None and look()


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns never: raises ClientGone when the client has left. Call after the whole body was read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone


async def while_client_is_there(scope: Scope, receive: Receive, serving: Coroutine[Any, Any, None]) -> None:
    """Run *serving*, which is cancelled when the client leaves. Call after the whole body was read."""
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(wait_for_disconnect(receive))
            await serving
            watch.cancel()
    except* ClientGone:
        log.debug("client_gone", request_id=request_id_of(scope), path=scope["path"])


def logged_problem(error: MooncakeError, request_id: RequestId) -> Problem:
    """How *error*, with which one request ends, is told to its client. What is not the client's fault is logged."""
    problem = problem_of(error, request_id=request_id)
    if problem.status >= 500:
        log.warning("request_failed", request_id=request_id, code=error.code, reason=str(error))
    return problem


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def problem_response(problem: Problem) -> Response:
    headers = dict(problem.headers)
    if problem.status == 413:
        headers["connection"] = "close"  # the rest of the body is not worth reading
    return json_response(problem.body(), status=problem.status, headers=headers)


class EventStream:
    """A response of server-sent events that starts with the first of them, with ``headers`` as they are then."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._starting = asyncio.Lock()
        self.headers: dict[str, str] = {}
        self.started = False

    async def event(self, content: Any, kind: str | None = None) -> None:
        """Send *content* as JSON in one event, with its *kind* where the endpoint has several."""
        if not self.started:
            await self._start()
        head = b"data: " if kind is None else b"event: " + kind.encode() + b"\ndata: "
        body = head + orjson.dumps(content) + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _start(self) -> None:
        async with self._starting:  # choices run side by side: the others' events wait for the head
            if not self.started:
                more = [(name.encode(), value.encode()) for name, value in self.headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": [*_SSE_HEADERS, *more]})
                self.started = True

    async def done(self) -> None:
        """End the response with the customary last event."""
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def end(self) -> None:
        """End the response of an endpoint whose last event speaks for itself."""
        await self._send({"type": "http.response.body", "body": b""})


class HttpAnswer:
    """One HTTP response as a Door."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi = (scope, receive, send)
        self._events = EventStream(send)

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """For a response that has not begun yet, unless it is an error."""
        self._events.headers.update(headers)

    async def chunk(self, chunk: Json) -> None:
        await self._events.event(chunk)

    async def whole(self, response: Json) -> None:
        if self._events.started:
            await self._events.done()
        else:
            await json_response(response, headers=self._events.headers)(*self._asgi)

    async def fail(self, problem: Problem) -> None:
        """The error: as the response while nothing was sent, else as an event."""
        if self._events.started:
            await self._events.event(problem.body())
            await self._events.done()
        else:
            await problem_response(problem)(*self._asgi)
