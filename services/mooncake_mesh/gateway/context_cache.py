"""Context caches: what a tenant keeps of a conversation's beginning, for how long, and under which tags. Pure.

::

    pending ──→ ready ──(lost from the pool)──→ pending        expiry: inactive, whatever it was but an error
       └──────→ error                                          reset_ttl or an update of an inactive one: pending

A cache is a hint to the pool plus the messages themselves: a request that uses one is always answered in full, from
the pool as far as the prefix is there. A cache of another tenant does not exist. Times are Unix seconds, the caller's.
"""

import enum
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from mooncake_mesh.errors import InvalidRequest

Json = dict[str, Any]

LONGEST_TTL_S: Final = 3600
KEPT_AFTER_EXPIRY_S: Final = 86_400
"""How long an inactive cache can be brought back."""
_TAG_RE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]{0,127}")


class CacheNotFound(InvalidRequest):
    """There is no such cache or tag, or it is another tenant's."""

    code = "context_cache_not_found"


class CacheUnusable(InvalidRequest):
    """The cache is there, and expired or failed."""

    code = "context_cache_unusable"


class CacheQuotaExceeded(InvalidRequest):
    """The tenant stores as much as it may."""

    code = "context_cache_quota_exceeded"


class CachingOff(InvalidRequest):
    """This gateway keeps no context caches."""

    code = "context_caching_off"

    def __init__(self) -> None:
        super().__init__("this gateway keeps no context caches: gateway.cache_db is not set")


class CacheStatus(enum.Enum):
    PENDING = "pending"
    READY = "ready"
    ERROR = "error"
    INACTIVE = "inactive"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheError:
    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDraft:
    """What its creator says of a cache. ``messages`` and ``tools`` are as they were given."""

    model: str
    messages: tuple[Json, ...]
    tools: tuple[Json, ...] = ()
    name: str = ""
    description: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCache:
    """One cache. ``state`` is as stored: ask :meth:`status` for what it is now. ``tokens`` is the prefix' length."""

    id: str
    tenant: str
    draft: CacheDraft
    tokens: int
    created_at: int
    expires_at: int
    state: CacheStatus = CacheStatus.PENDING
    error: CacheError | None = None

    def status(self, now_s: float) -> CacheStatus:
        if self.state is not CacheStatus.ERROR and now_s >= self.expires_at:
            return CacheStatus.INACTIVE
        return self.state

    def json(self, now_s: float) -> Json:
        """The object as the API shows it."""
        draft = self.draft
        shown = {
            "id": self.id,
            "object": "context-cache",
            "status": self.status(now_s).value,
            "created_at": self.created_at,
            "expired_at": self.expires_at,
            "tokens": self.tokens,
            "model": draft.model,
            "messages": list(draft.messages),
            "tools": list(draft.tools),
            "name": draft.name,
            "description": draft.description,
            "metadata": dict(draft.metadata),
        }
        if self.error is not None:
            shown["error"] = {"type": self.error.type, "message": self.error.message}
        return shown

    def begins(self, messages: Sequence[Any], tools: Sequence[Any]) -> bool:
        """Whether a request with these begins as this cache does: every field of every message, and all tools in order.

        Compared as JSON: 1 is not 1.0 and not true; the order of an object's keys does not count.
        """
        n = len(self.draft.messages)
        is_same = list(map(_canonical, messages[:n])) == list(map(_canonical, self.draft.messages))
        return is_same and list(map(_canonical, tools)) == list(map(_canonical, self.draft.tools))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTag:
    """A name that points to a cache of its tenant."""

    tenant: str
    tag: str
    cache_id: str
    created_at: int

    def json(self) -> Json:
        shown = {"tag": self.tag, "cache_id": self.cache_id, "created_at": self.created_at}
        return {**shown, "object": "cache_object.tag", "owned_by": self.tenant}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """When a cache is to expire; None and 0 say nothing. At most one of the two says something."""

    ttl_s: int | None = None
    expires_at: int | None = None

    def end(self, now_s: float, default: int) -> int:
        """The Unix second of expiry, *default* where nothing was said. Raises InvalidRequest."""
        if self.ttl_s and self.expires_at:
            raise InvalidRequest("ttl and expired_at exclude each other: give one", param="expired_at")
        if self.ttl_s:
            return int(now_s) + checked_ttl_s(self.ttl_s, "ttl")
        if self.expires_at:
            if not now_s < self.expires_at <= now_s + LONGEST_TTL_S:
                message = f"expired_at must lie in the future, at most {LONGEST_TTL_S} seconds from now"
                raise InvalidRequest(message, param="expired_at")
            return self.expires_at
        return default


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a list: up to ``limit`` entries, newest first unless ``is_ascending``, behind or before a cursor."""

    limit: int = 20
    is_ascending: bool = False
    after: str | None = None
    before: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """How a request names a cache: by ``cache_id`` or by ``tag``, one of them. ``reset_ttl_s`` 0 leaves its expiry."""

    cache_id: str = ""
    tag: str = ""
    reset_ttl_s: int = 0
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Of one tenant: tokens of all its caches that have not expired, tokens of one, caches and tags in all."""

    tenant_tokens: int = 1_000_000
    cache_tokens: int = 128 * 1024
    caches: int = 1000
    tags: int = 1000


class CacheStore(Protocol):
    """Where caches and tags are kept. Every call is made within a transaction, alone among all processes."""

    def transaction(self) -> AbstractContextManager[None]: ...

    def add(self, cache: ContextCache, prefix: bytes) -> None: ...

    def find(self, tenant: str, cache_id: str) -> ContextCache | None: ...

    def save(self, cache: ContextCache) -> None:
        """Of a cache that is there: metadata, expiry, state and error."""

    def remove(self, tenant: str, cache_id: str) -> bool:
        """With its tags; whether it was there."""

    def page(self, tenant: str, page: Page) -> list[ContextCache]:
        """Raises CacheNotFound for a cursor that is not there."""

    def stored_tokens(self, tenant: str, now_s: float) -> int:
        """Of caches that neither failed nor expired."""

    def count(self, tenant: str) -> int: ...

    def remove_oldest_inactive(self, tenant: str, now_s: float) -> bool: ...

    def put_tag(self, tag: CacheTag) -> None: ...

    def find_tag(self, tenant: str, tag: str) -> CacheTag | None: ...

    def remove_tag(self, tenant: str, tag: str) -> None: ...

    def tag_page(self, tenant: str, page: Page) -> list[CacheTag]: ...

    def count_tags(self, tenant: str) -> int: ...


class ContextCaches:
    """The rules over a store. Of a tenant's calls each one is a transaction; all raise InvalidRequest."""

    def __init__(self, store: CacheStore, limits: CacheLimits) -> None:
        self._store = store
        self.limits = limits

    def create(self, cache: ContextCache, prefix: bytes, now_s: float) -> ContextCache:
        """Keep a new cache and point its tags to it. *prefix* are its tokens as on the wire."""
        if cache.tokens > self.limits.cache_tokens:
            message = f"the cache comes to {cache.tokens} tokens; it may have {self.limits.cache_tokens}"
            raise CacheQuotaExceeded(message, param="messages")
        with self._store.transaction():
            self._check_quota(cache, now_s)
            if self._store.count(cache.tenant) >= self.limits.caches and not self._store.remove_oldest_inactive(
                cache.tenant, now_s
            ):
                raise CacheQuotaExceeded(f"there are {self.limits.caches} caches already")
            self._store.add(cache, prefix)
            for tag in cache.draft.tags:
                self._point(CacheTag(tenant=cache.tenant, tag=tag, cache_id=cache.id, created_at=int(now_s)))
        return cache

    def get(self, tenant: str, cache_id: str) -> ContextCache:
        with self._store.transaction():
            return self._get(tenant, cache_id)

    def page(self, tenant: str, page: Page) -> list[ContextCache]:
        with self._store.transaction():
            return self._store.page(tenant, page)

    def update(
        self, tenant: str, cache_id: str, metadata: Mapping[str, str] | None, lifetime: Lifetime, now_s: float
    ) -> ContextCache:
        """Its new metadata and expiry, None and nothing leaving the old; it is looked after anew: pending."""
        with self._store.transaction():
            cache = self._get(tenant, cache_id)
            draft = cache.draft if metadata is None else replace(cache.draft, metadata=metadata)
            ends_at = lifetime.end(now_s, cache.expires_at)
            return self._renew(replace(cache, draft=draft), ends_at, CacheStatus.PENDING, now_s)

    def delete(self, tenant: str, cache_id: str) -> None:
        """Requests that use it go on: they have its messages."""
        with self._store.transaction():
            if not self._store.remove(tenant, cache_id):
                raise _no_cache(cache_id)

    def use(self, tenant: str, use: CacheUse, model: object, now_s: float) -> ContextCache:
        """The cache for one request to *model*; a pending one is fine, and an expired one whose time is reset now.

        A dry run changes nothing, and says what would be.
        """
        with self._store.transaction():
            cache = self._get(tenant, use.cache_id or self._tag(tenant, use.tag).cache_id)
            status = cache.status(now_s)
            if model != cache.draft.model:
                raise CacheUnusable(
                    f"the context cache {cache.id} is of the model {cache.draft.model!r}", param="model"
                )
            if status is CacheStatus.ERROR:
                raise CacheUnusable(f"the context cache {cache.id} has failed", param="cache_id")
            if status is CacheStatus.INACTIVE and not use.reset_ttl_s:
                raise CacheUnusable(f"the context cache {cache.id} has expired: reset_ttl brings it back")
            if not use.reset_ttl_s or use.is_dry_run:
                return cache
            state = CacheStatus.PENDING if status is CacheStatus.INACTIVE else cache.state
            return self._renew(cache, int(now_s) + use.reset_ttl_s, state, now_s)

    def point_tag(self, tenant: str, tag: str, cache_id: str, now_s: float) -> CacheTag:
        """A tag that is there points elsewhere from now on."""
        with self._store.transaction():
            self._get(tenant, cache_id)
            return self._point(CacheTag(tenant=tenant, tag=tag, cache_id=cache_id, created_at=int(now_s)))

    def tag(self, tenant: str, tag: str) -> CacheTag:
        with self._store.transaction():
            return self._tag(tenant, tag)

    def tag_content(self, tenant: str, tag: str) -> ContextCache:
        with self._store.transaction():
            return self._get(tenant, self._tag(tenant, tag).cache_id)

    def tag_page(self, tenant: str, page: Page) -> list[CacheTag]:
        with self._store.transaction():
            return self._store.tag_page(tenant, page)

    def delete_tag(self, tenant: str, tag: str) -> None:
        """One that is not there is fine."""
        with self._store.transaction():
            self._store.remove_tag(tenant, tag)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _get(self, tenant: str, cache_id: str) -> ContextCache:
        cache = self._store.find(tenant, cache_id)
        if cache is None:
            raise _no_cache(cache_id)
        return cache

    def _tag(self, tenant: str, tag: str) -> CacheTag:
        found = self._store.find_tag(tenant, tag)
        if found is None:
            raise CacheNotFound(f"the tag {tag[:128]!r} does not exist", param="tag")
        return found

    def _point(self, tag: CacheTag) -> CacheTag:
        is_new = self._store.find_tag(tag.tenant, tag.tag) is None
        if is_new and self._store.count_tags(tag.tenant) >= self.limits.tags:
            raise CacheQuotaExceeded(f"there are {self.limits.tags} tags already", param="tag")
        self._store.put_tag(tag)
        return tag

    def _renew(self, cache: ContextCache, ends_at: int, state: CacheStatus, now_s: float) -> ContextCache:
        is_back = cache.status(now_s) in (CacheStatus.INACTIVE, CacheStatus.ERROR) and now_s < ends_at
        if is_back:
            self._check_quota(cache, now_s)
        renewed = replace(cache, expires_at=ends_at, state=state, error=None)
        self._store.save(renewed)
        return renewed

    def _check_quota(self, cache: ContextCache, now_s: float) -> None:
        stored = self._store.stored_tokens(cache.tenant, now_s)
        if stored + cache.tokens > self.limits.tenant_tokens:
            message = (
                f"{cache.tokens} tokens beside {stored} stored ones exceed the {self.limits.tenant_tokens} allowed"
            )
            raise CacheQuotaExceeded(message, param="messages")


def checked_tag(tag: str, param: str) -> str:
    """Raises InvalidRequest."""
    if not _TAG_RE.fullmatch(tag):
        message = f"{param} must be 1 to 128 letters, digits, _, - and ., the first a letter"
        raise InvalidRequest(message, param=param)
    return tag


def checked_ttl_s(value: int, param: str) -> int:
    """Raises InvalidRequest."""
    if not 0 <= value <= LONGEST_TTL_S:
        raise InvalidRequest(f"{param} must be between 0 and {LONGEST_TTL_S}", param=param)
    return value


def _no_cache(cache_id: str) -> CacheNotFound:
    return CacheNotFound(f"the context cache {cache_id[:128]!r} does not exist", param="cache_id")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
