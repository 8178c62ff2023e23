"""The ZeroMQ door: what the SDK calls. The same requests as over HTTP, through the same code."""

import asyncio
import secrets
import time

import orjson

from mooncake_mesh.errors import Aborted
from mooncake_mesh.gateway.api import Mesh
from mooncake_mesh.gateway.caching_sdk_door import CachingSdkDoor
from mooncake_mesh.gateway.completion import Completions
from mooncake_mesh.gateway.context_caching import ContextCaching, NoContextCaching, ResolvedChat, dry_run_answer
from mooncake_mesh.gateway.doorkeeper import Doorkeeper
from mooncake_mesh.gateway.model_list import model_list
from mooncake_mesh.gateway.openai_responses import Json
from mooncake_mesh.mesh.rpc import Caller, Handler
from mooncake_proto.client import (
    CachingCall,
    Cancel,
    Generate,
    GenerationDelta,
    GenerationEnd,
    HealthQuery,
    HealthReport,
    Models,
    ModelsQuery,
    Operation,
    TraceQuery,
    Traces,
)
from mooncake_proto.control import Ok
from mooncake_proto.ids import RequestId


class SdkDoor:
    """Handlers for the ROUTER that SDK clients connect to."""

    def __init__(
        self,
        mesh: Mesh,
        completions: Completions,
        doorkeeper: Doorkeeper,
        caching: ContextCaching | NoContextCaching | None = None,
    ) -> None:
        self._doorkeeper = doorkeeper
        self._mesh = mesh
        self._caching = caching or NoContextCaching()
        self._completions = completions
        self._caches = CachingSdkDoor(self._caching, doorkeeper, completions.rates)
        self._created = int(time.time())
        self._running: dict[tuple[bytes, str], asyncio.Task[object]] = {}
        self._cancelled: set[tuple[bytes, str]] = set()

    def handlers(self) -> dict[type, Handler]:
        return {
            Generate: self._generate,
            Cancel: self._cancel,
            CachingCall: self._caches.answer,
            ModelsQuery: self._models,
            HealthQuery: self._health,
            TraceQuery: self._trace,
        }

    async def _generate(self, request: Generate, caller: Caller) -> None:
        """Answers with deltas and one end, or one Failure. Cancelled in silence when the client stops reading."""
        tenant = self._doorkeeper.admit(request.api_key)
        task = asyncio.current_task()
        assert task is not None
        key = (caller.identity, caller.message_id)
        self._running[key] = task
        try:
            door = _Replies(caller)
            request_id, chat = RequestId(secrets.token_hex(16)), ResolvedChat(body=request.request)
            if request.operation is Operation.CHAT:
                chat = await self._caching.resolve(request.request, {}, tenant)
            if chat.is_dry_run:
                await door.whole(dry_run_answer(chat, request_id))
                return
            await self._completions.serve(request.operation, chat.body, door, request_id=request_id, tenant=tenant)
        except asyncio.CancelledError:
            if key not in self._cancelled or task.uncancel():
                raise
            raise Aborted("the request was cancelled by its client") from None
        finally:
            self._running.pop(key, None)
            self._cancelled.discard(key)

    def _cancel(self, request: Cancel, caller: Caller) -> Ok:
        """The reader of the stream hears of it too: it need not be who cancels."""
        self._doorkeeper.admit(request.api_key)
        key = (caller.identity, request.target)
        if key in self._running and key not in self._cancelled:
            self._cancelled.add(key)
            self._running[key].cancel()
        return Ok()

    def _models(self, query: ModelsQuery, _: Caller) -> Models:
        self._doorkeeper.admit(query.api_key)
        return Models(response=orjson.dumps(model_list(self._completions.preparation.served(), self._created)))

    def _trace(self, query: TraceQuery, _: Caller) -> Traces:
        return Traces(traces=self._mesh.traces(query.request_id, self._doorkeeper.admit(query.api_key)))

    def _health(self, _: HealthQuery, __: Caller) -> HealthReport:
        readiness = self._mesh.readiness()
        is_ready = readiness.ready and not self._completions.draining
        reasons = (*readiness.reasons, *(("draining",) if self._completions.draining else ()))
        return HealthReport(live=True, ready=is_ready, reasons=reasons)


class _Replies:
    """A Door whose chunks are replies. A client that is gone ends the request."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def chunk(self, chunk: Json) -> None:
        self._caller.reply(GenerationDelta(chunk=orjson.dumps(chunk)))

    async def whole(self, response: Json) -> None:
        self._caller.reply(GenerationEnd(response=orjson.dumps(response)))
