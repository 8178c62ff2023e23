"""A mesh in memory that plays scripts, for tests of the gateway's doors."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.types import Message

from mooncake_mesh.gateway.api import Readiness, TokenEvent, TokenRequest
from mooncake_mesh.gateway.completion import CompletionLimits, Completions
from mooncake_mesh.gateway.doorkeeper import Doorkeeper
from mooncake_mesh.gateway.http import HttpLimits, create_app
from mooncake_mesh.gateway.metrics import DoorMetrics
from mooncake_mesh.gateway.tokenizer import BYTE_EOS, ByteTokenizer
from mooncake_proto.client import RequestTrace
from mooncake_proto.control import ModelCard, StatusReport
from mooncake_proto.decisions import DecisionsReport
from mooncake_proto.ids import RequestId
from mooncake_proto.serving import FinishReason, TokenLogprob

Script = Callable[[TokenRequest], AsyncIterator[TokenEvent]]

MODEL = "fake"
CONTEXT_TOKENS = 1024


def card(name: str = MODEL, context: int = CONTEXT_TOKENS) -> ModelCard:
    return ModelCard(
        name=name, fingerprint="f", dtype="float32", block_tokens=16, block_bytes=1024, max_context_tokens=context
    )


class ScriptedMesh:
    """Plays ``script`` for every request. ``requests`` are all that came; ``open`` those not ended or closed yet."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[TokenRequest] = []
        self.open: set[str] = set()
        self.cancelled: list[str] = []
        self.changed = asyncio.Event()
        self.cards: tuple[ModelCard, ...] = (card(),)
        self.state = Readiness(ready=True, reasons=())
        self.content: set[RequestId] = set()
        self.known: StatusReport | None = None
        self.decided: DecisionsReport | None = None

    def models(self) -> tuple[ModelCard, ...]:
        return self.cards

    def readiness(self) -> Readiness:
        return self.state

    def satisfied(self, request_id: RequestId) -> None:
        self.content.add(request_id)

    def traces(self, request_id: str, tenant: str) -> tuple[RequestTrace, ...]:
        """Nothing is remembered."""
        return ()

    async def report(self) -> StatusReport | None:
        return self.known

    async def decisions(self, *, after: int) -> DecisionsReport | None:
        return self.decided

    async def generate(self, request: TokenRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        self.open.add(request.request_id)
        self._tell()
        finished = False
        try:
            async with aclosing(self.script(request)) as events:  # type: ignore[type-var]
                async for event in events:
                    finished = event.finish is not None
                    yield event
        finally:
            self.open.discard(request.request_id)
            if not finished:
                self.cancelled.append(request.request_id)
            self._tell()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until *condition* holds; it is tried again whenever a request begins or ends."""
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def _tell(self) -> None:
        self.changed.set()


def says(text: str | bytes, *, cached: int = 0, end: FinishReason | None = None) -> Script:
    """Draws the bytes of *text*, then the end token; stops at the request's max_new_tokens, as a worker does."""
    tokens = [*(text.encode() if isinstance(text, str) else text)]
    if end is None:
        tokens.append(BYTE_EOS)

    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        for index, token in enumerate(tokens):
            await asyncio.sleep(0)
            event = event_of(request, tokens, index, token, cached=cached, end=end)
            yield event
            if event.finish is not None:
                return

    return script


def event_of(
    request: TokenRequest, tokens: Sequence[int], index: int, token: int, *, cached: int, end: FinishReason | None
) -> TokenEvent:
    finish = None
    if token in request.stopping.stop_token_ids:
        finish = FinishReason.STOP
    elif index + 1 == request.stopping.max_new_tokens:
        finish = FinishReason.LENGTH
    elif index + 1 == len(tokens):
        finish = end or FinishReason.LENGTH
    logprob = None
    if request.sampling.top_logprobs is not None:
        top = tuple((other, -0.5 - other) for other in range(97, 97 + request.sampling.top_logprobs))
        logprob = TokenLogprob(logprob=-0.25 * index, top=top)
    return TokenEvent(token=token, logprob=logprob, finish=finish, cached_tokens=cached if index == 0 else None)


def fails(error: Exception, *, after: bytes = b"") -> Script:
    """Draws the bytes *after*, then raises *error*."""

    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        for index, token in enumerate(after):
            yield TokenEvent(token=token, cached_tokens=0 if index == 0 else None)
        raise error

    return script


def hangs(*, after: bytes = b"") -> Script:
    """Draws the bytes *after*, then nothing more."""

    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        for index, token in enumerate(after):
            yield TokenEvent(token=token, cached_tokens=0 if index == 0 else None)
        await asyncio.Event().wait()

    return script


class Gateway:
    """The doors over one ScriptedMesh."""

    def __init__(
        self,
        script: Script,
        *,
        limits: CompletionLimits | None = None,
        http: HttpLimits | None = None,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        self.mesh = ScriptedMesh(script)
        self.metrics = DoorMetrics(CollectorRegistry())
        self.completions = Completions(
            self.mesh,
            {MODEL: ByteTokenizer()},
            self.metrics,
            limits or CompletionLimits(),
            None if doorkeeper is None else doorkeeper.rates,
        )
        keeper = doorkeeper or Doorkeeper(None)
        self.app: Starlette = create_app(self.mesh, self.completions, self.metrics, http or HttpLimits(), keeper)

    def outcome(self, endpoint: str, outcome: str) -> float:
        """How many requests of *endpoint* ended so."""
        labels = {"endpoint": endpoint, "outcome": outcome}
        return self.metrics.registry.get_sample_value("mooncake_requests_total", labels) or 0.0


class Exchange:
    """One HTTP exchange with an ASGI application, at the level of its messages."""

    def __init__(
        self, app: Starlette, path: str, body: bytes | Sequence[bytes] = b"", *, method: str = "POST", **headers: str
    ) -> None:
        self._app = app
        path, _, query = path.partition("?")
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
            "client": ("test", 1),
            "server": ("test", 80),
            "state": {},
        }
        self._parts = [body] if isinstance(body, bytes) else list(body)
        self._gone = asyncio.Event()
        self.parts_read = 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.complete = False

    async def run(self) -> "Exchange":
        """Until the application returns."""
        await self._app(self._scope, self._receive, self._send)
        return self

    def disconnect(self) -> None:
        self._gone.set()

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return orjson.loads(self.body)

    def events(self) -> list[Any]:
        """The JSON of a stream's events; asserts the exact framing and the last event."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, end = self.body.split(b"\n\n")
        assert end == b""
        assert events.pop() == b"data: [DONE]"
        assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
        return [orjson.loads(event.removeprefix(b"data: ")) for event in events]

    async def _receive(self) -> Message:
        if self.parts_read < len(self._parts):
            part = self._parts[self.parts_read]
            self.parts_read += 1
            return {"type": "http.request", "body": part, "more_body": self.parts_read < len(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        assert not self.complete
        if message["type"] == "http.response.start":
            assert self.status == 0
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert self.status
            self.chunks.append(message.get("body", b""))
            self.complete = not message.get("more_body", False)


def ask(gateway: "Gateway", path: str, fields: dict[str, Any] | None = None, **headers: str) -> Exchange:
    """One POST of the model's name and *fields*, run to its end in an event loop of its own."""
    body = orjson.dumps({"model": MODEL, **(fields or {})})
    return asyncio.run(Exchange(gateway.app, path, body, **headers).run())


def get(gateway: "Gateway", path: str, **headers: str) -> Exchange:
    return asyncio.run(Exchange(gateway.app, path, b"", method="GET", **headers).run())
