"""``POST /v1/responses``: a chat that is asked for, and answered, in OpenAI's newer words."""

import structlog
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.gateway.asgi import (
    EventStream,
    client_has_left,
    json_response,
    logged_problem,
    problem_response,
    read_body,
    request_id_of,
    wait_for_disconnect,
    while_client_is_there,
)
from mooncake_mesh.gateway.completion import Completions
from mooncake_mesh.gateway.doorkeeper import tenant_of
from mooncake_mesh.gateway.openai_errors import Problem, problem_of
from mooncake_mesh.gateway.openai_requests import ChatRequest
from mooncake_mesh.gateway.openai_responses import Json
from mooncake_mesh.gateway.responses_events import ResponseEvents
from mooncake_mesh.gateway.responses_requests import in_own_words, parse_responses
from mooncake_mesh.gateway.standing import standing_of
from mooncake_proto.client import Operation

log = structlog.get_logger()


class Responding:
    """The endpoint, as an ASGI application."""

    def __init__(self, completions: Completions, max_body_bytes: int) -> None:
        self._completions = completions
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if client_has_left(scope):
            await wait_for_disconnect(receive)
        body = await read_body(scope, receive, max_bytes=self._max_body_bytes)
        await while_client_is_there(scope, receive, self._serve(body, _Response(scope, receive, send), scope))

    async def _serve(self, body: bytes, response: "_Response", scope: Scope) -> None:
        request_id, headers = request_id_of(scope), Headers(scope=scope)
        try:
            await self._completions.serve(
                Operation.CHAT,
                body,
                response,
                request_id=request_id,
                tenant=tenant_of(scope),
                standing=standing_of(headers),
                headers=headers,
                read_chat=response.read,
            )
        except MooncakeError as error:
            await response.fail(in_own_words(logged_problem(error, request_id)))
        except Exception as error:  # boundary of one request: reported, and the others go on
            log.exception("request_crashed", request_id=request_id)
            await response.fail(problem_of(error, request_id=request_id))


class _Response:
    """One HTTP response as a Door. It hears the request first, of which the answer repeats a part."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi = (scope, receive, send)
        self._stream = EventStream(send)
        self._events = ResponseEvents(request_id_of(scope), "", {})

    def read(self, body: Json) -> ChatRequest:
        """Raises InvalidRequest."""
        request = parse_responses(body)
        self._events = ResponseEvents(request_id_of(self._asgi[0]), request.chat.options.model, request.told)
        return request.chat

    async def chunk(self, chunk: Json) -> None:
        await self._send(self._events.chunk(chunk))

    async def whole(self, response: Json) -> None:
        if self._stream.started:
            await self._send(self._events.ended(response))
            await self._stream.end()
        else:
            await json_response(self._events.whole(response))(*self._asgi)

    async def fail(self, problem: Problem) -> None:
        """The error: as an answer while nothing was sent, else as the last event."""
        if self._stream.started:
            await self._send([self._events.failed(problem)])
            await self._stream.end()
        else:
            await problem_response(problem)(*self._asgi)

    async def _send(self, events: list[Json]) -> None:
        for event in events:
            await self._stream.event(event, event["type"])
