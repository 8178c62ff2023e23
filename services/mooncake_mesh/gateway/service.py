"""The gateway process: the doors above, the mesh below.

====== =============== ==================================================
socket who connects    what flows
====== =============== ==================================================
HTTP   OpenAI clients  see gateway/http.py
ROUTER SDK clients     Generate, Cancel, ModelsQuery, HealthQuery
ROUTER workers         FirstToken, TokenBatch, JobFailed
DEALER conductor       Schedule, Outcomes, membership
DEALER workers         PrefillJob, DecodeJob, CancelJob
DEALER messengers      PinPrefix
====== =============== ==================================================

The token streams have a socket of their own, so that no burst of new requests stands before a running one's tokens.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from mooncake_mesh.config import EngineKind, GatewayConfig
from mooncake_mesh.errors import MeshError
from mooncake_mesh.gateway import api_keys
from mooncake_mesh.gateway.accepting import HttpServer, listen
from mooncake_mesh.gateway.cache_keeper import CacheKeeper
from mooncake_mesh.gateway.cache_pins import MessengerPins
from mooncake_mesh.gateway.cache_thread import CacheThread
from mooncake_mesh.gateway.completion import CompletionLimits, Completions
from mooncake_mesh.gateway.context_cache import CacheLimits
from mooncake_mesh.gateway.context_caching import ContextCaching, NoContextCaching
from mooncake_mesh.gateway.doorkeeper import Doorkeeper
from mooncake_mesh.gateway.http import HttpLimits, create_app
from mooncake_mesh.gateway.mesh import CacheSharing, MeshClient
from mooncake_mesh.gateway.metrics import DoorMetrics
from mooncake_mesh.gateway.sdk_door import SdkDoor
from mooncake_mesh.gateway.tokenizer import ByteTokenizer, Tokenizer
from mooncake_mesh.gateway.tracing import load_tracing
from mooncake_mesh.mesh.conductors import Conductors
from mooncake_mesh.mesh.curve import Audience
from mooncake_mesh.mesh.membership import Membership
from mooncake_mesh.mesh.rpc import Caller, RpcServer
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_proto.control import Load, Member, Ping, Pong, Role
from mooncake_proto.ids import InstanceId, NodeId, new_incarnation

log = structlog.get_logger(__name__)

_DRAIN_S: Final = 30.0
_START_S: Final = 10.0


class GatewayService:
    """One gateway."""

    def __init__(self, config: GatewayConfig, tasks: asyncio.TaskGroup) -> None:
        self._config = config
        self._tasks = tasks
        self._member = Member(
            role=Role.GATEWAY,
            instance_id=InstanceId(config.instance_id),
            node_id=NodeId(config.node_id),
            incarnation=new_incarnation(),
            endpoint=config.bind,
        )

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serve until *lifecycle* says stop, then let running requests finish for a while."""
        config = self._config
        tracing = load_tracing(config.instance_id)
        tokenizer = await asyncio.to_thread(load_tokenizer, config)
        conductors = Conductors(config.conductor)
        doorkeeper = Doorkeeper(None if config.keys is None else config.keys / api_keys.FILE_NAME)
        sharing = CacheSharing.ACROSS_TENANTS if config.share_cache_across_tenants else CacheSharing.WITHIN_TENANT
        mesh = MeshClient(
            conductors,
            self._tasks,
            max_replacements=config.max_replacements,
            sharing=sharing,
            on_end=tracing.choice_ended,
        )
        metrics = DoorMetrics(CollectorRegistry())
        limits = CompletionLimits(
            deadline_s=config.request_deadline_s, max_concurrent_requests=config.max_concurrent_requests
        )
        completions = Completions(mesh, {served_name(config): tokenizer}, metrics, limits, doorkeeper.rates, tracing)
        kept = self._keep_caches(mesh, completions)
        streams = RpcServer(config.stream_bind, {Ping: self._ping, **mesh.stream_handlers()}, self._tasks)
        mesh.stream_endpoint = streams.endpoint
        door = SdkDoor(mesh, completions, doorkeeper, kept.caching)
        clients = RpcServer(config.bind, {Ping: self._ping, **door.handlers()}, self._tasks, audience=Audience.CLIENTS)
        http_limits = HttpLimits(max_body_bytes=config.max_body_bytes)
        http = await self._http_server(create_app(mesh, completions, metrics, http_limits, doorkeeper, kept.caching))
        membership = Membership(
            conductors, self._member, lambda: Load(running_jobs=completions.running), on_cluster=mesh.heard
        )
        serving = self._tasks.create_task(http.serve())
        joining = self._tasks.create_task(membership.run())
        watching = self._tasks.create_task(mesh.watch())
        reporting = self._tasks.create_task(mesh.ledger.run(self._member.instance_id, conductors.post))
        await _poll(lambda: http.started or serving.done(), timeout_s=_START_S)
        if not http.started:
            raise MeshError("the HTTP server does not start")
        lifecycle.ready(http=f"http://{config.host}:{http.port}", sdk=clients.endpoint)
        await lifecycle.stopping.wait()

        completions.drain()
        await membership.leave()
        await self._drain(completions)
        http.should_exit = True
        await serving
        joining.cancel()
        reporting.cancel()
        watching.cancel()
        await asyncio.gather(joining, reporting, return_exceptions=True)
        await kept.close()
        await clients.close()
        await streams.close()
        mesh.close()
        conductors.close()
        completions.close()
        await asyncio.to_thread(tracing.close)

    def _keep_caches(self, mesh: MeshClient, completions: Completions) -> "_NoCaches | _KeptCaches":
        config = self._config
        if config.cache_db is None:
            return _NoCaches()
        limits = CacheLimits(tenant_tokens=config.cache_tenant_tokens)
        return _KeptCaches(CacheThread(config.cache_db, limits), mesh, completions, self._tasks)

    async def _drain(self, completions: Completions) -> None:
        await _poll(lambda: not completions.running, timeout_s=_DRAIN_S)
        if completions.running:
            log.warning("drain_incomplete", running=completions.running)

    async def _http_server(self, app: Starlette) -> HttpServer:
        settings = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", http="httptools", timeout_graceful_shutdown=2
        )
        return HttpServer(settings, await listen(self._config.host, self._config.port), self._tasks)

    def _ping(self, _: Ping, __: Caller) -> Pong:
        return Pong(role=Role.GATEWAY, instance_id=self._member.instance_id, incarnation=self._member.incarnation)


class _NoCaches:
    """No file for context caches is configured."""

    caching = NoContextCaching()

    async def close(self) -> None:
        """Nothing is open."""


class _KeptCaches:
    """Context caches and who looks after them."""

    def __init__(
        self, caches: CacheThread, mesh: MeshClient, completions: Completions, tasks: asyncio.TaskGroup
    ) -> None:
        self._caches = caches
        self._pins = MessengerPins(mesh)
        keeper = CacheKeeper(caches, mesh, self._pins, tasks)
        self.caching = ContextCaching(caches, keeper, completions.preparation, completions.rates)
        self._keeping = tasks.create_task(keeper.run())

    async def close(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        self._pins.close()
        await asyncio.to_thread(self._caches.close)


def served_name(config: GatewayConfig) -> str:
    """What clients call the model."""
    return config.served_model_name or config.model


def load_tokenizer(config: GatewayConfig) -> Tokenizer:
    """The tokenizer that fits the workers' engine. Raises ModelError for a model that is not there."""
    if config.engine is EngineKind.FAKE:
        return ByteTokenizer()
    from mooncake_mesh.engine.model_files import resolve_model
    from mooncake_mesh.gateway.model_tokenizer import ModelTokenizer

    return ModelTokenizer(resolve_model(config.model))


async def _poll(holds: Callable[[], bool], *, timeout_s: float) -> None:
    """Wait until *holds*, for what has no event to wait on, or until *timeout_s* is over."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not holds() and asyncio.get_running_loop().time() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def run(config: GatewayConfig, lifecycle: Lifecycle) -> None:
    """Run a gateway until *lifecycle* says stop."""
    async with asyncio.TaskGroup() as tasks:
        await GatewayService(config, tasks).run(lifecycle)
