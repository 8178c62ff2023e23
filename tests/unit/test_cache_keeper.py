"""The keeper of context caches over a scripted mesh and pool: who is filled, how often, and what becomes of it.

And the HTTP doors over the same: without a file for caches, and the tokens a creation is charged for.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from mooncake_mesh.errors import MooncakeError, Rejected, TooLong
from mooncake_mesh.gateway import cache_keeper
from mooncake_mesh.gateway.api import TokenEvent, TokenRequest
from mooncake_mesh.gateway.cache_keeper import CacheKeeper
from mooncake_mesh.gateway.cache_pins import PinState
from mooncake_mesh.gateway.cache_thread import CacheThread
from mooncake_mesh.gateway.context_cache import CacheDraft, CacheLimits, CacheStatus, ContextCache, ContextCaches
from mooncake_mesh.kv.block_hash import token_bytes
from mooncake_mesh.policy.request_class import BATCH_PRIORITY
from tests.unit.gateway_doubles import MODEL, Gateway, Script, ScriptedMesh, ask, fails, get, hangs, says

TOKENS = (1, 2, 3, 4)
ID = "cache-1"


class Pool:
    """Answers pins with ``states``, the last of them again and again."""

    def __init__(self, *pinned: int | None) -> None:
        self.pinned = list(pinned)
        self.asked: list[tuple[str, bytes, str, float]] = []
        self.was_unpinned = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def pin(self, pin_id: str, prefix: bytes, *, model: str, tenant: str, keep_s: float) -> PinState | None:
        self.asked.append((pin_id, prefix, tenant, keep_s))
        await self.gate.wait()
        n_pinned = self.pinned.pop(0) if len(self.pinned) > 1 else self.pinned[0]
        return None if n_pinned is None else PinState(n_blocks=2, n_pinned=n_pinned)

    async def unpin(self, pin_id: str) -> None:
        assert pin_id == ID
        self.was_unpinned.set()


class Bench:
    """One keeper at work."""

    def __init__(self, caches: CacheThread, mesh: ScriptedMesh, pool: Pool, keeper: CacheKeeper) -> None:
        self.caches = caches
        self.mesh = mesh
        self.pool = pool
        self.keeper = keeper

    async def create(self) -> None:
        now_s = time.time()
        draft = CacheDraft(model=MODEL, messages=({"role": "system", "content": "x"},))
        cache = ContextCache(
            id=ID, tenant="acme", draft=draft, tokens=4, created_at=int(now_s), expires_at=int(now_s) + 100
        )
        await self.caches.call(ContextCaches.create, cache, token_bytes(TOKENS), now_s)
        self.keeper.look()

    async def until(self, status: CacheStatus) -> ContextCache:
        while True:
            cache = await self.caches.call(ContextCaches.get, "acme", ID)
            if cache.state is status:
                return cache
            self.keeper.look()
            await asyncio.sleep(0)


def play(script: Script, pool: Pool, scene: Callable[[Bench], Awaitable[None]]) -> None:
    async def run() -> None:
        caches, mesh = CacheThread(":memory:", CacheLimits()), ScriptedMesh(script)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            bench = Bench(caches, mesh, pool, CacheKeeper(caches, mesh, pool, tasks))
            keeping = tasks.create_task(bench.keeper.run())
            await bench.create()
            await scene(bench)
            keeping.cancel()
        caches.close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_keeper, "_FIRST_PAUSE_S", 0.001)


def test_what_the_pool_lacks_is_computed_behind_the_clients() -> None:
    async def scene(bench: Bench) -> None:
        await bench.until(CacheStatus.READY)
        (request,) = bench.mesh.requests
        assert (request.prompt, request.stopping.max_new_tokens, request.tenant) == (TOKENS, 1, "acme")
        assert 0 < request.priority < BATCH_PRIORITY
        pin_id, prefix, tenant, keep_s = bench.pool.asked[-1]
        assert (pin_id, prefix, tenant, 90 < keep_s <= 100) == (ID, token_bytes(TOKENS), "acme", True)

    play(says("a"), Pool(0, 2), scene)


def test_what_the_pool_has_is_not_computed() -> None:
    async def scene(bench: Bench) -> None:
        await bench.until(CacheStatus.READY)
        assert bench.mesh.requests == []

    play(says("a"), Pool(2), scene)


def test_what_was_lost_is_pending_and_computed_again() -> None:
    async def scene(bench: Bench) -> None:
        await bench.until(CacheStatus.READY)
        bench.pool.pinned = [1]
        bench.mesh.script = hangs()
        await bench.until(CacheStatus.PENDING)
        await bench.mesh.until(lambda: len(bench.mesh.open) == 1)

    play(says("a"), Pool(2), scene)


def test_trouble_that_may_pass_is_tried_again() -> None:
    async def scene(bench: Bench) -> None:
        while len(bench.mesh.requests) < 3:
            bench.keeper.look()
            await asyncio.sleep(0)
        bench.mesh.script, bench.pool.pinned = says("a"), [0, 2]
        await bench.until(CacheStatus.READY)

    play(fails(Rejected("busy", unavailable=False, retry_after_s=1.0)), Pool(0), scene)


@pytest.mark.parametrize(
    "error",
    [TooLong("no"), Rejected("prefill_pool_too_small", unavailable=True, retry_after_s=1.0)],
    ids=["too long", "pool too small"],
)
def test_what_can_never_be_is_an_error(error: MooncakeError) -> None:
    async def scene(bench: Bench) -> None:
        cache = await bench.until(CacheStatus.ERROR)
        assert cache.error is not None
        assert cache.error.type == error.code
        assert len(bench.mesh.requests) == 1

    play(fails(error), Pool(0), scene)


def test_what_the_pool_never_keeps_is_an_error() -> None:
    async def scene(bench: Bench) -> None:
        cache = await bench.until(CacheStatus.ERROR)
        assert cache.error is not None
        assert (cache.error.type, cache.error.message) == ("no_room", "of 2 blocks the pool keeps 1")
        assert len(bench.mesh.requests) == 5

    play(says("a"), Pool(1), scene)


def test_while_nobody_serves_the_model_nothing_happens() -> None:
    async def scene(bench: Bench) -> None:
        while len(bench.pool.asked) < 3:
            bench.keeper.look()
            await asyncio.sleep(0)
        await bench.until(CacheStatus.PENDING)
        assert bench.mesh.requests == []

    play(says("a"), Pool(None), scene)


def test_deleted_while_it_was_pinned_it_is_unpinned() -> None:
    async def scene(bench: Bench) -> None:
        await bench.until(CacheStatus.READY)
        bench.pool.gate.clear()
        n_asked = len(bench.pool.asked)
        while len(bench.pool.asked) == n_asked:
            bench.keeper.look()
            await asyncio.sleep(0)
        bench.keeper.forget(ID)
        await bench.pool.was_unpinned.wait()
        bench.pool.was_unpinned.clear()
        bench.pool.gate.set()
        await bench.pool.was_unpinned.wait()

    play(says("a"), Pool(2), scene)


def test_deleted_while_it_was_filled_it_is_unpinned() -> None:
    async def scene(bench: Bench) -> None:
        await bench.mesh.until(lambda: len(bench.mesh.open) == 1)
        await bench.caches.call(ContextCaches.delete, "acme", ID)
        released.set()
        await bench.pool.was_unpinned.wait()
        assert len(bench.mesh.requests) == 1

    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        await released.wait()
        async for event in says("a")(request):
            yield event

    released = asyncio.Event()
    play(script, Pool(0, 2), scene)


# --- the doors without caches -----------------------------------------------------------------------------------------


def test_without_a_file_the_api_says_so() -> None:
    gateway = Gateway(says("hi"))
    for exchange in (get(gateway, "/v1/caching"), get(gateway, "/v1/caching/refs/tags/t"), ask(gateway, "/v1/caching")):
        assert (exchange.status, exchange.json()["error"]["code"]) == (501, "context_caching_off")
    message = {"role": "cache", "content": "tag=t"}
    refused = ask(gateway, "/v1/chat/completions", {"messages": [message]})
    assert (refused.status, refused.json()["error"]["code"]) == (501, "context_caching_off")


def test_without_a_file_headers_are_no_hit() -> None:
    gateway = Gateway(says("hi", cached=3))
    message = {"role": "user", "content": "the cache"}
    answer = ask(gateway, "/v1/chat/completions", {"messages": [message]}, x_msh_context_cache="cache-1")
    assert (answer.status, "msh-context-cache-id" in answer.headers) == (200, False)
