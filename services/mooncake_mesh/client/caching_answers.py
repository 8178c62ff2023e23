"""Answers of the context caching API as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake_mesh.client.answers import Json, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheError:
    """Why a cache cannot be."""

    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCache:
    """``status`` is "pending", "ready", "inactive" or "error"; times are Unix seconds; ``tokens`` is the length of the
    prefix that is kept."""

    id: str
    status: str
    created_at: int
    expired_at: int
    tokens: int
    model: str
    messages: tuple[Json, ...]
    tools: tuple[Json, ...]
    name: str
    description: str
    metadata: Mapping[str, str]
    error: CacheError | None
    raw: Json = field(repr=False, compare=False)

    def message(self, *, reset_ttl: int = 0) -> dict[str, Any]:
        """What stands for the cached messages, as the first of a chat's; *reset_ttl* lets the cache live for so many
        seconds from that request on."""
        reset = f";reset_ttl={reset_ttl}" if reset_ttl else ""
        return {"role": "cache", "content": f"cache_id={self.id}{reset}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTag:
    tag: str
    cache_id: str
    created_at: int
    owned_by: str
    raw: Json = field(repr=False, compare=False)


def read_cache(data: bytes) -> ContextCache:
    """Raises MalformedMessage, as all of these."""
    return read_json(data, _cache)


def read_caches(data: bytes) -> tuple[ContextCache, ...]:
    return read_json(data, lambda raw: tuple(map(_cache, raw["data"])))


def read_tag(data: bytes) -> CacheTag:
    return read_json(data, _tag)


def read_tags(data: bytes) -> tuple[CacheTag, ...]:
    return read_json(data, lambda raw: tuple(map(_tag, raw["data"])))


def _cache(raw: Json) -> ContextCache:
    error = raw.get("error")
    return ContextCache(
        id=raw["id"],
        status=raw["status"],
        created_at=raw["created_at"],
        expired_at=raw["expired_at"],
        tokens=raw["tokens"],
        model=raw["model"],
        messages=tuple(raw["messages"]),
        tools=tuple(raw["tools"]),
        name=raw["name"],
        description=raw["description"],
        metadata=raw["metadata"],
        error=None if error is None else CacheError(type=error["type"], message=error["message"]),
        raw=raw,
    )


def _tag(raw: Json) -> CacheTag:
    return CacheTag(
        tag=raw["tag"],
        cache_id=raw["cache_id"],
        created_at=raw["created_at"],
        owned_by=raw["owned_by"],
        raw=raw,
    )
