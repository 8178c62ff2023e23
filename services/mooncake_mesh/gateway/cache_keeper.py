"""Sees to it that the pool has what context caches promise: pins it, and has it computed where it is not (any more).

Every gateway looks after all caches in the file they share. Pinning again is free; a cache is filled by the one gateway
that claims it, with a request of one token that stands behind those of clients. A cache that cannot be filled for good
reason (no request of its size could run) fails; whatever may pass is tried again, less and less often.
"""

import asyncio
import math
import secrets
import time
from array import array
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import structlog

from mooncake_mesh.errors import Aborted, DeadlineExceeded, MooncakeError, Rejected
from mooncake_mesh.gateway.api import Mesh, TokenRequest
from mooncake_mesh.gateway.cache_pins import CachePins, PinState
from mooncake_mesh.gateway.cache_thread import CacheStoreError, CacheThread
from mooncake_mesh.gateway.context_cache import KEPT_AFTER_EXPIRY_S, CacheError, CacheStatus
from mooncake_mesh.gateway.context_cache_store import KeptCache, SqliteCacheStore
from mooncake_mesh.policy.request_class import BATCH_PRIORITY
from mooncake_proto.ids import RequestId
from mooncake_proto.serving import Sampling, Stopping

log = structlog.get_logger(__name__)

_LOOK_EVERY_S: Final = 5.0
_FILL_DEADLINE_S: Final = 120.0
_FILLS_AT_ONCE: Final = 2
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_MOST_VAIN_FILLS: Final = 5
"""Fills after which the prefix was not whole in the pool, one after the other: it does not fit."""
_FILL_PRIORITY: Final = BATCH_PRIORITY - 1  # batch work may have to wait for ever


@dataclass(slots=True)
class _Trouble:
    """Of one cache: when it may be filled next, how often in a row that failed, and how often in vain."""

    not_before_s: float = 0.0
    failures: int = 0
    vain: int = 0


class CacheKeeper:
    """One gateway's part in keeping all caches. Create inside a running loop."""

    def __init__(self, caches: CacheThread, mesh: Mesh, pins: CachePins, tasks: asyncio.TaskGroup) -> None:
        self._caches = caches
        self._mesh = mesh
        self._pins = pins
        self._tasks = tasks
        self._news = asyncio.Event()
        self._slots = asyncio.Semaphore(_FILLS_AT_ONCE)
        self._filling: dict[str, asyncio.Task[None]] = {}
        self._prefixes: dict[str, bytes] = {}
        self._trouble: dict[str, _Trouble] = {}
        self._deleted: set[str] = set()  # since the last look, or while they were filled

    def look(self) -> None:
        """Something is new: look at once instead of in a while."""
        self._news.set()

    def forget(self, cache_id: str) -> None:
        """The cache is deleted: nothing is kept for it any more."""
        self._deleted.add(cache_id)
        self._tasks.create_task(self._pins.unpin(cache_id))

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._news.clear()
                try:
                    await self._look()
                except CacheStoreError as error:  # the disk is full, or the file locked for long: it may pass
                    log.error("context_caches_unreadable", error=str(error))
                await self._wait()
        finally:
            for task in self._filling.values():
                task.cancel()

    async def _wait(self) -> None:
        """Until there is news, a cache that could not be filled is due, or it is time to look anyway."""
        due_s = min((trouble.not_before_s for trouble in self._trouble.values()), default=math.inf)
        pause_s = min(_LOOK_EVERY_S, max(_FIRST_PAUSE_S, due_s - time.monotonic()))
        try:
            async with asyncio.timeout(pause_s):
                await self._news.wait()
        except TimeoutError:
            return

    async def _look(self) -> None:
        now_s = time.time()
        await self._caches.store(SqliteCacheStore.purge, now_s - KEPT_AFTER_EXPIRY_S)
        self._deleted &= self._filling.keys()
        kept = {cache.id: cache for cache in await self._caches.store(SqliteCacheStore.kept, now_s)}
        for table in (self._prefixes, self._trouble):
            for cache_id in table.keys() - kept.keys():
                del table[cache_id]
        for cache in kept.values():
            if cache.id not in self._filling:
                await self._look_at(cache)

    async def _look_at(self, cache: KeptCache) -> None:
        state = await self._pin(cache)
        if state is None:
            return
        if state.is_whole:
            await self._is_whole(cache)
            return
        await self._mark(cache, CacheStatus.PENDING)
        cache = replace(cache, state=CacheStatus.PENDING)
        trouble = self._trouble.setdefault(cache.id, _Trouble())
        if time.monotonic() >= trouble.not_before_s:
            self._filling[cache.id] = self._tasks.create_task(self._fill(cache, trouble))

    async def _pin(self, cache: KeptCache) -> PinState | None:
        prefix = await self._prefix(cache)
        keep_s = cache.expires_at - time.time()
        if prefix is None or keep_s <= 0:
            return None
        state = await self._pins.pin(cache.id, prefix, model=cache.model, tenant=cache.tenant, keep_s=keep_s)
        if cache.id in self._deleted:  # meanwhile
            await self._pins.unpin(cache.id)
            return None
        return state

    async def _prefix(self, cache: KeptCache) -> bytes | None:
        if cache.id not in self._prefixes:
            prefix = await self._caches.store(SqliteCacheStore.prefix, cache.id)
            if prefix is None:
                return None
            self._prefixes[cache.id] = prefix
        return self._prefixes[cache.id]

    async def _is_whole(self, cache: KeptCache) -> None:
        self._trouble.pop(cache.id, None)
        await self._mark(cache, CacheStatus.READY)

    async def _mark(self, cache: KeptCache, state: CacheStatus, error: CacheError | None = None) -> None:
        """A cache that was deleted meanwhile has been pinned in vain."""
        if state is cache.state:
            return
        if await self._caches.store(SqliteCacheStore.mark, cache.id, state, error):
            log.info("context_cache", cache_id=cache.id, status=state.value, error=error and error.message)
        else:
            await self._pins.unpin(cache.id)

    # --- filling ------------------------------------------------------------------------------------------------------

    async def _fill(self, cache: KeptCache, trouble: _Trouble) -> None:
        """Have the prefix computed, in another task's turn; then look whether it is there."""
        try:
            async with self._slots:
                now_s = time.time()
                if await self._caches.store(SqliteCacheStore.claim, cache.id, now_s, now_s + _FILL_DEADLINE_S):
                    await self._compute(cache, trouble)
                    await self._caches.store(SqliteCacheStore.unclaim, cache.id)
        except CacheStoreError as error:
            log.error("context_cache_unreadable", cache_id=cache.id, error=str(error))
        finally:
            del self._filling[cache.id]

    async def _compute(self, cache: KeptCache, trouble: _Trouble) -> None:
        try:
            await self._run(cache)
        except MooncakeError as error:
            log.info("context_cache_not_filled", cache_id=cache.id, code=error.code, reason=str(error)[:200])
            if _may_pass(error):
                self._pause(trouble)
            else:
                await self._mark(cache, CacheStatus.ERROR, CacheError(type=error.code, message=str(error)[:500]))
            return
        state = await self._pin(cache)
        if state is None:
            return
        if state.is_whole:
            await self._is_whole(cache)
            return
        trouble.vain += 1
        self._pause(trouble)
        if trouble.vain >= _MOST_VAIN_FILLS:
            message = f"of {state.n_blocks} blocks the pool keeps {state.n_pinned}"
            await self._mark(cache, CacheStatus.ERROR, CacheError(type="no_room", message=message))

    async def _run(self, cache: KeptCache) -> None:
        prefix = await self._prefix(cache)
        if prefix is None:
            return
        request = TokenRequest(
            request_id=RequestId(f"{cache.id}-{secrets.token_hex(4)}"),
            model=cache.model,
            prompt=_tokens(prefix),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_new_tokens=1),
            deadline_s=_FILL_DEADLINE_S,
            tenant=cache.tenant,
            priority=_FILL_PRIORITY,
        )
        async with aclosing(self._mesh.generate(request)) as events:
            async for _ in events:
                pass

    def _pause(self, trouble: _Trouble) -> None:
        trouble.failures += 1
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * (1 << min(trouble.failures - 1, 10)))
        trouble.not_before_s = time.monotonic() + pause_s


def _may_pass(error: MooncakeError) -> bool:
    """Whether a fill that ended so may succeed another time."""
    if isinstance(error, Rejected):
        return not error.reason.endswith("_pool_too_small")
    return error.retryable or isinstance(error, Aborted | DeadlineExceeded)


def _tokens(prefix: bytes) -> tuple[int, ...]:
    tokens = array("i")
    tokens.frombytes(prefix)
    return tuple(tokens)
