"""Context caches through the SDK: the calls of /v1/caching, over the client's connection (docs/context-caching.md)."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from mooncake_mesh.client.caching_answers import (
    CacheTag,
    ContextCache,
    read_cache,
    read_caches,
    read_tag,
    read_tags,
)
from mooncake_mesh.client.options import CacheOptions, ListOptions, Message
from mooncake_mesh.errors import InvalidRequest
from mooncake_proto.client import CachingAction


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingTransport:
    """What the calls need of the client: to send one with a name, a query and a body, and the model that is served."""

    call: Callable[[CachingAction, str, Mapping[str, str], bytes], Awaitable[bytes]]
    served_model: Callable[[], Awaitable[str]]

    async def post(self, action: CachingAction, name: str, fields: Mapping[str, Any]) -> bytes:
        """Fields that are None are not sent. Raises InvalidRequest for what JSON cannot say."""
        given = {field: value for field, value in fields.items() if value is not None}
        try:
            body = json.dumps(given, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the request is not JSON: {error}") from error
        return await self.call(action, name, {}, body)

    async def page(self, action: CachingAction, options: Mapping[str, Any]) -> bytes:
        query = {name: str(value) for name, value in options.items() if name != "metadata" and value is not None}
        metadata: Mapping[str, str] = options.get("metadata") or {}
        query |= {f"metadata[{key}]": value for key, value in metadata.items()}
        return await self.call(action, "", query, b"")


class Caching:
    """``client.caching``: caches of the API key's tenant; those of others do not exist (InvalidRequest, with the code
    ``context_cache_not_found``). ``tags`` has the calls for tags."""

    def __init__(self, transport: CachingTransport) -> None:
        self._transport = transport
        self.tags = CachingTags(transport)

    async def create(
        self, messages: Sequence[Message], *, model: str | None = None, **options: Unpack[CacheOptions]
    ) -> ContextCache:
        """Begin to keep *messages*; the answer comes at once, ``pending``. It can be used from then on."""
        model = model or await self._transport.served_model()
        fields = {"model": model, "messages": messages, **options}
        return read_cache(await self._transport.post(CachingAction.CREATE, "", fields))

    async def list(self, **options: Unpack[ListOptions]) -> tuple[ContextCache, ...]:
        """Caches, newest first; ``after`` and ``before`` are ids and do not belong to the list themselves."""
        return read_caches(await self._transport.page(CachingAction.LIST, options))

    async def get(self, cache_id: str) -> ContextCache:
        """The cache as it is now."""
        return read_cache(await self._transport.call(CachingAction.GET, cache_id, {}, b""))

    async def update(
        self,
        cache_id: str,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl: int | None = None,
        expired_at: int | None = None,
    ) -> ContextCache:
        """New metadata, a new expiry, or neither: the cache is looked after anew."""
        fields = {"metadata": metadata, "ttl": ttl, "expired_at": expired_at}
        return read_cache(await self._transport.post(CachingAction.UPDATE, cache_id, fields))

    async def delete(self, cache_id: str) -> None:
        """Requests that use it go on. InvalidRequest where it is not there."""
        await self._transport.call(CachingAction.DELETE, cache_id, {}, b"")


class CachingTags:
    """``client.caching.tags``: names that point to caches, and may be pointed elsewhere."""

    def __init__(self, transport: CachingTransport) -> None:
        self._transport = transport

    async def point(self, tag: str, cache_id: str) -> CacheTag:
        """Let *tag* mean this cache from now on."""
        fields = {"tag": tag, "cache_id": cache_id}
        return read_tag(await self._transport.post(CachingAction.POINT_TAG, "", fields))

    async def list(self, **options: Unpack[ListOptions]) -> tuple[CacheTag, ...]:
        """Tags, newest first; ``after`` and ``before`` are tags."""
        return read_tags(await self._transport.page(CachingAction.LIST_TAGS, options))

    async def get(self, tag: str) -> CacheTag:
        return read_tag(await self._transport.call(CachingAction.GET_TAG, tag, {}, b""))

    async def content(self, tag: str) -> ContextCache:
        """The cache that the tag points to."""
        return read_cache(await self._transport.call(CachingAction.TAG_CONTENT, tag, {}, b""))

    async def delete(self, tag: str) -> None:
        """A tag that is not there is fine."""
        await self._transport.call(CachingAction.DELETE_TAG, tag, {}, b"")
