"""The HTTP door: OpenAI's endpoints, health, metrics and tokens, as one ASGI application.

::

    POST /v1/chat/completions  /v1/completions   answers, whole or streamed
    POST /v1/responses                           the same in OpenAI's newer words, see gateway/responses_door.py
    GET  /v1/models  /v1/models/NAME             what is served now
    …    /v1/caching                             context caches, see gateway/caching_door.py
    POST /tokenize  /detokenize                  the model's tokenizer
    POST /v1/tokenizers/estimate-token-count     how many tokens a chat has
    GET  /health  /ping                          200 while the process lives
    GET  /ready                                  200 while a request could be served, else 503 with the reasons
    GET  /metrics  /version  /openapi.json
    …    /v1/embeddings  and others of OpenAI's  501, see gateway/not_here.py
    GET  /                                       the page, see gateway/page

Where API keys are asked for (docs/security.md) only ``/health``, ``/ping``, ``/ready`` and the page's static files
answer without one.

A client's ``x-request-id`` is a label: it is sent back and stands in this gateway's logs, with the ids of a
``traceparent``; nothing else depends on them. A failure after the first byte
of a stream is an event with the error body, then ``[DONE]``.
"""

import secrets
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.gateway.api import Mesh
from mooncake_mesh.gateway.asgi import (
    ClientGone,
    HttpAnswer,
    client_has_left,
    json_response,
    logged_problem,
    problem_response,
    read_body,
    request_id_of,
    wait_for_disconnect,
    while_client_is_there,
)
from mooncake_mesh.gateway.caching_door import caching_routes
from mooncake_mesh.gateway.completion import Completions
from mooncake_mesh.gateway.context_caching import ContextCaching, NoContextCaching, ResolvedChat, dry_run_answer
from mooncake_mesh.gateway.doorkeeper import Doorkeeper, HttpDoorkeeper, tenant_of
from mooncake_mesh.gateway.mesh_metrics import mesh_metrics
from mooncake_mesh.gateway.metrics import DoorMetrics
from mooncake_mesh.gateway.not_here import not_here_routes
from mooncake_mesh.gateway.openai_errors import MethodNotAllowed, UnknownPath, problem_of
from mooncake_mesh.gateway.openai_responses import Json
from mooncake_mesh.gateway.openapi import openapi
from mooncake_mesh.gateway.page import page_routes
from mooncake_mesh.gateway.preparation import ServedModel
from mooncake_mesh.gateway.responses_door import Responding
from mooncake_mesh.gateway.standing import standing_of
from mooncake_mesh.gateway.token_requests import detokenize, estimate_tokens, tokenize
from mooncake_mesh.gateway.trace_context import trace_labels
from mooncake_proto.client import Operation

log = structlog.get_logger()

_LONGEST_LABEL: Final = 128
_RETRY_AFTER_S: Final = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """``max_body_bytes`` holds while a body is read, whatever its headers say."""

    max_body_bytes: int = 8 << 20


def create_app(
    mesh: Mesh,
    completions: Completions,
    metrics: DoorMetrics,
    limits: HttpLimits,
    doorkeeper: Doorkeeper,
    caching: ContextCaching | NoContextCaching | None = None,
) -> Starlette:
    """The application. *completions* may serve other doors too; who made it drains and closes it."""
    side = _SideDoors(mesh, completions, metrics, limits)
    caching = caching or NoContextCaching()
    routes = [
        Route("/v1/chat/completions", _Answering(completions, Operation.CHAT, limits, caching), methods=["POST"]),
        Route("/v1/completions", _Answering(completions, Operation.COMPLETION, limits, caching), methods=["POST"]),
        Route("/v1/responses", Responding(completions, limits.max_body_bytes), methods=["POST"]),
        *caching_routes(caching, completions.rates, limits.max_body_bytes),
        Route("/v1/models", side.models),
        Route("/v1/models/{name:path}", side.model),
        Route("/tokenize", side.tokenize, methods=["POST"]),
        Route("/detokenize", side.detokenize, methods=["POST"]),
        Route("/v1/tokenizers/estimate-token-count", side.estimate_tokens, methods=["POST"]),
        Route("/health", side.health),
        Route("/ping", side.health),
        Route("/ready", side.ready),
        Route("/metrics", side.metrics),
        Route("/version", side.version),
        Route("/openapi.json", side.openapi),
        *not_here_routes(),
        *page_routes(mesh, doorkeeper),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(_Front), Middleware(HttpDoorkeeper, doorkeeper=doorkeeper)],
        exception_handlers={MooncakeError: _answer_error, HTTPException: _answer_http_exception},
    )


class _Front:
    """Gives each request its id, and turns what nobody expected into a 500 that tells only this id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        headers = Headers(scope=scope)
        label = _label(headers.get("x-request-id")) or request_id
        labels = trace_labels(headers) | ({} if label == request_id else {"client_request_id": label})
        started = False

        async def labelled(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", label.encode())]
            await send(message)

        with structlog.contextvars.bound_contextvars(**labels):
            try:
                await self._app(scope, receive, labelled)
            except ClientGone:
                log.debug("client_gone", request_id=request_id, path=scope["path"])
            except Exception as error:
                log.exception("http_request_failed", request_id=request_id, path=scope["path"])
                if started:
                    raise  # the server cuts the connection: the client cannot take it for a whole answer
                await problem_response(problem_of(error, request_id=request_id))(scope, receive, labelled)


class _Answering:
    """Chats or completions."""

    def __init__(
        self,
        completions: Completions,
        operation: Operation,
        limits: HttpLimits,
        caching: ContextCaching | NoContextCaching,
    ) -> None:
        self._completions = completions
        self._caching = caching
        self._operation = operation
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if client_has_left(scope):
            await wait_for_disconnect(receive)
        body = await read_body(scope, receive, max_bytes=self._limits.max_body_bytes)
        await while_client_is_there(scope, receive, self._serve(body, HttpAnswer(scope, receive, send), scope))

    async def _serve(self, body: bytes, answer: "HttpAnswer", scope: Scope) -> None:
        request_id, tenant = request_id_of(scope), tenant_of(scope)
        try:
            headers = Headers(scope=scope)
            standing, chat = standing_of(headers), ResolvedChat(body=body)
            if self._operation is Operation.CHAT:
                chat = await self._caching.resolve(body, headers, tenant)
            if chat.is_dry_run:
                answer.add_headers(chat.headers(0, time.time()))
                await answer.whole(dry_run_answer(chat, request_id))
                return
            await self._completions.serve(
                self._operation,
                chat.body,
                answer,
                request_id=request_id,
                tenant=tenant,
                standing=standing,
                headers=headers,
                found=lambda cached_tokens: answer.add_headers(chat.headers(cached_tokens, time.time())),
            )
        except MooncakeError as error:
            await answer.fail(logged_problem(error, request_id))
        except Exception as error:  # boundary of one request: reported, and the others go on
            log.exception("request_crashed", request_id=request_id)
            await answer.fail(problem_of(error, request_id=request_id))


class _SideDoors:
    """The endpoints that do not generate."""

    def __init__(self, mesh: Mesh, completions: Completions, metrics: DoorMetrics, limits: HttpLimits) -> None:
        self._mesh = mesh
        self._completions = completions
        self._registry = metrics.registry
        self._limits = limits
        self._created = int(time.time())

    async def models(self, _: Request) -> Response:
        served = self._completions.preparation.served()
        return json_response({"object": "list", "data": [self._card(model) for model in served]})

    async def model(self, request: Request) -> Response:
        return json_response(self._card(self._completions.preparation.model(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        return json_response(await tokenize(self._completions.preparation, await self._body(request)))

    async def estimate_tokens(self, request: Request) -> Response:
        return json_response(await estimate_tokens(self._completions.preparation, await self._body(request)))

    async def detokenize(self, request: Request) -> Response:
        return json_response(await detokenize(self._completions.preparation, await self._body(request)))

    async def health(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        readiness = self._mesh.readiness()
        reasons = [*readiness.reasons, *(["draining"] if self._completions.draining else [])]
        if readiness.ready and not self._completions.draining:
            return json_response({"ready": True, "reasons": []})
        return json_response({"ready": False, "reasons": reasons}, status=503, headers={"retry-after": _RETRY_AFTER_S})

    async def metrics(self, _: Request) -> Response:
        """This gateway's own, and those of the whole mesh while the conductor answers."""
        text, report = generate_latest(self._registry), await self._mesh.report()
        if report is not None:
            text += mesh_metrics(report)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def version(self, _: Request) -> Response:
        return json_response({"version": version("mooncake-mesh")})

    async def openapi(self, _: Request) -> Response:
        return json_response(openapi())

    async def _body(self, request: Request) -> bytes:
        """Counts as one of the tenant's requests. Raises Rejected when it has had its share."""
        self._completions.rates.take_request(tenant_of(request.scope), time.monotonic())
        return await read_body(request.scope, request.receive, max_bytes=self._limits.max_body_bytes)

    def _card(self, model: ServedModel) -> Json:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "mooncake",
            "max_model_len": model.max_context_tokens,
        }


async def _answer_error(request: Request, error: Exception) -> Response:
    return problem_response(problem_of(error, request_id=request_id_of(request.scope)))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    method, path = request.scope["method"], request.scope["path"][:200]
    if error.status_code == 405:
        known: MooncakeError = MethodNotAllowed(f"{method} is not allowed for {path}")
    elif error.status_code == 404:
        known = UnknownPath(f"there is no {path} here")
    else:
        raise error
    response = problem_response(problem_of(known, request_id=request_id_of(request.scope)))
    response.headers.update(error.headers or {})
    return response


def _label(given: str | None) -> str | None:
    """A client's request id if it can go back into a header: printable ASCII, not too long."""
    if given and len(given) <= _LONGEST_LABEL and given.isascii() and given.isprintable():
        return given
    return None
