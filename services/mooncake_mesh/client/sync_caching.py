"""``caching`` of the synchronous client: the same calls, without ``await``."""

from collections.abc import Mapping, Sequence
from typing import Unpack

from mooncake_mesh.client.caching import Caching
from mooncake_mesh.client.caching_answers import CacheTag, ContextCache
from mooncake_mesh.client.client_loop import ClientLoop
from mooncake_mesh.client.options import CacheOptions, ListOptions, Message


class SyncCaching:
    """As Caching."""

    def __init__(self, loop: ClientLoop) -> None:
        self._loop = loop
        self.tags = SyncCachingTags(loop)

    def create(
        self, messages: Sequence[Message], *, model: str | None = None, **options: Unpack[CacheOptions]
    ) -> ContextCache:
        """Begin to keep *messages*; the answer comes at once, ``pending``. It can be used from then on."""
        return self._loop.run(self._caching.create(messages, model=model, **options))

    def list(self, **options: Unpack[ListOptions]) -> tuple[ContextCache, ...]:
        """Caches, newest first; ``after`` and ``before`` are ids and do not belong to the list themselves."""
        return self._loop.run(self._caching.list(**options))

    def get(self, cache_id: str) -> ContextCache:
        """The cache as it is now."""
        return self._loop.run(self._caching.get(cache_id))

    def update(
        self,
        cache_id: str,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl: int | None = None,
        expired_at: int | None = None,
    ) -> ContextCache:
        """New metadata, a new expiry, or neither: the cache is looked after anew."""
        return self._loop.run(self._caching.update(cache_id, metadata=metadata, ttl=ttl, expired_at=expired_at))

    def delete(self, cache_id: str) -> None:
        """Requests that use it go on. InvalidRequest where it is not there."""
        self._loop.run(self._caching.delete(cache_id))

    @property
    def _caching(self) -> Caching:
        return self._loop.client.caching


class SyncCachingTags:
    """As CachingTags."""

    def __init__(self, loop: ClientLoop) -> None:
        self._loop = loop

    def point(self, tag: str, cache_id: str) -> CacheTag:
        """Let *tag* mean this cache from now on."""
        return self._loop.run(self._loop.client.caching.tags.point(tag, cache_id))

    def list(self, **options: Unpack[ListOptions]) -> tuple[CacheTag, ...]:
        """Tags, newest first; ``after`` and ``before`` are tags."""
        return self._loop.run(self._loop.client.caching.tags.list(**options))

    def get(self, tag: str) -> CacheTag:
        return self._loop.run(self._loop.client.caching.tags.get(tag))

    def content(self, tag: str) -> ContextCache:
        """The cache that the tag points to."""
        return self._loop.run(self._loop.client.caching.tags.content(tag))

    def delete(self, tag: str) -> None:
        """A tag that is not there is fine."""
        self._loop.run(self._loop.client.caching.tags.delete(tag))
