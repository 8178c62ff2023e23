"""A gateway with context caches over a scripted mesh, at the level of HTTP, with a clock that stands."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from mooncake_mesh.gateway.api_keys import add
from mooncake_mesh.gateway.cache_keeper import CacheKeeper
from mooncake_mesh.gateway.cache_pins import PinState
from mooncake_mesh.gateway.cache_thread import CacheThread
from mooncake_mesh.gateway.context_cache import CacheLimits
from mooncake_mesh.gateway.context_caching import ContextCaching
from mooncake_mesh.gateway.doorkeeper import Doorkeeper
from mooncake_mesh.gateway.http import HttpLimits, create_app
from mooncake_mesh.gateway.rate_limits import TenantLimits
from mooncake_mesh.gateway.sdk_door import SdkDoor
from mooncake_mesh.gateway.tokenizer import ByteTokenizer
from mooncake_mesh.gateway.tools import ChatMessage
from tests.unit.gateway_doubles import MODEL, Exchange, Gateway, Script, says

SYSTEM = {"role": "system", "content": "You know the harbour by heart."}
QUESTION = {"role": "user", "content": "Which ship?"}
SHARED = len(ByteTokenizer().encode_chat([ChatMessage(role="system", content=SYSTEM["content"])])) - len("assistant\n")


class _EmptyPool:
    async def pin(self, pin_id: str, prefix: bytes, *, model: str, tenant: str, keep_s: float) -> PinState | None:
        return PinState(n_blocks=2, n_pinned=0)

    async def unpin(self, pin_id: str) -> None:
        """Nothing is pinned."""


class Site:
    """A gateway without a keeper at work: its caches stay pending. ``now_s`` is the time of its doors.

    ``key`` is that of the tenant acme, ``other_key`` that of another one.
    """

    def __init__(
        self, gateway: Gateway, doorkeeper: Doorkeeper, caching: ContextCaching, keys: tuple[str, str]
    ) -> None:
        self.mesh = gateway.mesh
        limits = HttpLimits()
        self.app = create_app(gateway.mesh, gateway.completions, gateway.metrics, limits, doorkeeper, caching)
        self.sdk_handlers = SdkDoor(gateway.mesh, gateway.completions, doorkeeper, caching).handlers()
        self.key, self.other_key = keys
        self.now_s = 1_000_000.5

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None, **headers: str) -> Exchange:
        data = b"" if body is None else orjson.dumps({"model": MODEL, **body})
        headers.setdefault("authorization", f"Bearer {self.key}")
        return await Exchange(self.app, f"/v1{path}", data, method=method, **headers).run()

    async def call_as_other(self, method: str, path: str, body: dict[str, Any] | None = None) -> Exchange:
        return await self.call(method, path, body, authorization=f"Bearer {self.other_key}")

    async def create(self, **fields: Any) -> Any:
        exchange = await self.call("POST", "/caching", {"messages": [SYSTEM], **fields})
        return exchange.json()

    async def cache(self, cache_id: str) -> Any:
        """As the API shows it now."""
        exchange = await self.call("GET", f"/caching/{cache_id}")
        assert exchange.status == 200
        return exchange.json()

    async def chat(self, *messages: dict[str, Any], **headers: str) -> Exchange:
        return await self.call("POST", "/chat/completions", {"messages": list(messages), "max_tokens": 2}, **headers)

    async def ask(self, reference: str) -> Exchange:
        """A question after a cache message."""
        return await self.chat({"role": "cache", "content": reference}, QUESTION)


def play(
    scene: Callable[[Site], Awaitable[None]],
    folder: Path,
    limits: TenantLimits | None = None,
    script: Script | None = None,
) -> None:
    """Run *scene*; the mesh finds 500 tokens of each prompt in the pool, or follows *script*."""

    async def run() -> None:
        file = folder / "keys.json"
        keys = (add(file, "app", "acme", limits), add(file, "other-app", "other", limits))
        doorkeeper, caches = Doorkeeper(file), CacheThread(":memory:", CacheLimits())
        gateway = Gateway(script or says("hi", cached=500), doorkeeper=doorkeeper)
        async with asyncio.TaskGroup() as tasks:
            keeper = CacheKeeper(caches, gateway.mesh, _EmptyPool(), tasks)
            caching = ContextCaching(caches, keeper, gateway.completions.preparation, doorkeeper.rates)
            site = Site(gateway, doorkeeper, caching, keys)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "time", lambda: site.now_s)
                await scene(site)
        caches.close()

    asyncio.run(run())
