"""Context caches on a thread of their own: their file is not read on the event loop."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from mooncake_mesh.gateway.context_cache import CacheLimits, ContextCaches
from mooncake_mesh.gateway.context_cache_store import SqliteCacheStore

_P = ParamSpec("_P")
_T = TypeVar("_T")

CacheStoreError = sqlite3.Error
"""What the file raises when it cannot be read or written."""


class CacheThread:
    """Runs calls to the caches' rules, and to their store, one after the other."""

    def __init__(self, path: Path | str, limits: CacheLimits) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._store = SqliteCacheStore(path)
        self._caches = ContextCaches(self._store, limits)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="context-caches")

    async def call(
        self, method: Callable[Concatenate[ContextCaches, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """``ContextCaches.method(*args)``."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(self._caches, *args, **kwargs))

    async def store(
        self, method: Callable[Concatenate[SqliteCacheStore, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """``SqliteCacheStore.method(*args)``, in a transaction of its own."""

        def work() -> _T:
            with self._store.transaction():
                return method(self._store, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Call when nobody calls any more."""
        self._thread.shutdown()
        self._store.close()
