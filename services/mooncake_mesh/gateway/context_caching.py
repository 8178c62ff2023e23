"""Context caching as the doors use it: calls of the API, and chats that name a cache.

A chat that names one is turned into the chat it stands for, before anything else looks at it: the cached messages in
place of the ``cache`` message. With headers the body is whole already, and the cache counts if the chat begins as it.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mooncake_mesh.errors import InvalidRequest, TooLong
from mooncake_mesh.gateway.cache_keeper import CacheKeeper
from mooncake_mesh.gateway.cache_thread import CacheThread
from mooncake_mesh.gateway.caching_requests import (
    CACHE_HEADER,
    cache_headers,
    cache_message,
    parse_create,
    parse_page,
    parse_tag,
    parse_update,
)
from mooncake_mesh.gateway.context_cache import (
    LONGEST_TTL_S,
    CacheUnusable,
    CacheUse,
    CachingOff,
    ContextCache,
    ContextCaches,
    Json,
)
from mooncake_mesh.gateway.json_fields import read_json_object
from mooncake_mesh.gateway.openai_requests import ChatRequest
from mooncake_mesh.gateway.preparation import Preparation, ServedModel
from mooncake_mesh.gateway.rate_limits import TenantRates
from mooncake_mesh.gateway.tools import ChatMessage
from mooncake_mesh.kv.block_hash import token_bytes

_MARK: Final = b"cache"
_PROBES: Final = ((), (ChatMessage(role="user", content="a"),), (ChatMessage(role="user", content="b"),))
"""Ways in which a cached beginning may go on: what the model's prompts for all of them share is its prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedChat:
    """A chat as it is to be served. ``cache`` is None where none counts."""

    body: bytes
    cache: ContextCache | None = None
    is_dry_run: bool = False

    def headers(self, cached_tokens: int, now_s: float) -> dict[str, str]:
        """What the response says of the cache; *cached_tokens* of the prompt were found in the pool."""
        cache = self.cache
        if cache is None:
            return {}
        return {
            "msh-context-cache-id": cache.id,
            "msh-context-cache-token-saved": str(min(cached_tokens, cache.tokens)),
            "msh-context-cache-token-exp": str(cache.expires_at),
            "msh-context-cache-token-ttl": str(max(0, int(cache.expires_at - now_s))),
        }


class NoContextCaching:
    """In a gateway that was given no file for caches."""

    async def resolve(self, body: bytes, headers: Mapping[str, str], tenant: str) -> ResolvedChat:
        """Headers that name a cache are no hit. Raises CachingOff for a message that does."""
        del headers, tenant
        if _MARK in body and cache_message(read_json_object(body)) is not None:
            raise CachingOff()
        return ResolvedChat(body=body)


class ContextCaching:
    """One gateway's context caching. Every method raises InvalidRequest; those of a tenant see only what is theirs."""

    def __init__(self, caches: CacheThread, keeper: CacheKeeper, preparation: Preparation, rates: TenantRates) -> None:
        self._caches = caches
        self._keeper = keeper
        self._preparation = preparation
        self._rates = rates

    # --- chats --------------------------------------------------------------------------------------------------------

    async def resolve(self, body: bytes, headers: Mapping[str, str], tenant: str) -> ResolvedChat:
        """The chat that *body* and *headers* stand for.

        A dry run or a refusal is not served afterwards: it counts as a request here. Raises Rejected for one too many.
        """
        if _MARK not in body and CACHE_HEADER not in headers:
            return ResolvedChat(body=body)
        try:
            chat = await self._resolve(body, headers, tenant)
        except InvalidRequest:
            self._rates.take_request(tenant, time.monotonic())
            raise
        if chat.is_dry_run:
            self._rates.take_request(tenant, time.monotonic())
        return chat

    async def _resolve(self, body: bytes, headers: Mapping[str, str], tenant: str) -> ResolvedChat:
        named = cache_headers(headers)
        chat = await self._preparation.parse(body, dict)
        use = cache_message(chat)
        if use is None:
            return ResolvedChat(body=body) if named is None else await self._by_headers(body, chat, named, tenant)
        if named is not None:
            raise InvalidRequest("a cache is named by a message or by headers, not by both", param="messages[0]")
        cache = await self._use(use, tenant, chat.get("model"))
        chat["messages"] = [*cache.draft.messages, *chat["messages"][1:]]
        if cache.draft.tools:
            chat["tools"] = list(cache.draft.tools)
        return ResolvedChat(body=json.dumps(chat).encode(), cache=cache, is_dry_run=use.is_dry_run)

    async def _by_headers(self, body: bytes, chat: Json, use: CacheUse, tenant: str) -> ResolvedChat:
        """A cache that cannot be used, or that the chat does not begin with, is no hit; a dry run says why."""
        messages, tools = chat.get("messages"), chat.get("tools") or []
        try:
            cache = await self._caches.call(ContextCaches.get, tenant, use.cache_id)
            is_list = isinstance(messages, list) and isinstance(tools, list)
            if not is_list or not cache.begins(messages or [], tools):
                raise CacheUnusable("the request does not begin with the messages and tools of the cache")
            cache = await self._use(use, tenant, chat.get("model"))
        except InvalidRequest:
            if use.is_dry_run:
                raise
            return ResolvedChat(body=body)
        return ResolvedChat(body=body, cache=cache, is_dry_run=use.is_dry_run)

    async def _use(self, use: CacheUse, tenant: str, model: object) -> ContextCache:
        cache = await self._caches.call(ContextCaches.use, tenant, use, model, time.time())
        if use.reset_ttl_s and not use.is_dry_run:
            self._keeper.look()
        return cache

    # --- caches -------------------------------------------------------------------------------------------------------

    async def create(self, body: bytes, tenant: str) -> Json:
        """Starts as pending; raises Rejected too, while nobody serves the model or the tenant had its share."""
        request = await self._preparation.parse(body, parse_create)
        now_s = time.time()
        expires_at = request.lifetime.end(now_s, int(now_s) + LONGEST_TTL_S)
        model = self._preparation.model(request.draft.model)
        prefix = await self._shared_prefix(model, request.chat)
        self._rates.take_tokens(tenant, len(prefix), time.monotonic())
        cache = ContextCache(
            id=f"cache-{secrets.token_hex(12)}",
            tenant=tenant,
            draft=request.draft,
            tokens=len(prefix),
            created_at=int(now_s),
            expires_at=expires_at,
        )
        await self._caches.call(ContextCaches.create, cache, token_bytes(prefix), now_s)
        self._keeper.look()
        return cache.json(now_s)

    async def get(self, cache_id: str, tenant: str) -> Json:
        return (await self._caches.call(ContextCaches.get, tenant, cache_id)).json(time.time())

    async def page(self, query: Mapping[str, str], tenant: str) -> Json:
        caches = await self._caches.call(ContextCaches.page, tenant, parse_page(query))
        now_s = time.time()
        return {"object": "list", "data": [cache.json(now_s) for cache in caches]}

    async def update(self, cache_id: str, body: bytes, tenant: str) -> Json:
        request = await self._preparation.parse(body, parse_update)
        now_s = time.time()
        cache = await self._caches.call(
            ContextCaches.update, tenant, cache_id, request.metadata, request.lifetime, now_s
        )
        self._keeper.look()
        return cache.json(now_s)

    async def delete(self, cache_id: str, tenant: str) -> Json:
        await self._caches.call(ContextCaches.delete, tenant, cache_id)
        self._keeper.forget(cache_id)
        return {"deleted": True, "id": cache_id, "object": "context_cache_object.deleted"}

    # --- tags ---------------------------------------------------------------------------------------------------------

    async def point_tag(self, body: bytes, tenant: str) -> Json:
        tag, cache_id = await self._preparation.parse(body, parse_tag)
        return (await self._caches.call(ContextCaches.point_tag, tenant, tag, cache_id, time.time())).json()

    async def tag(self, tag: str, tenant: str) -> Json:
        return (await self._caches.call(ContextCaches.tag, tenant, tag)).json()

    async def tag_content(self, tag: str, tenant: str) -> Json:
        return (await self._caches.call(ContextCaches.tag_content, tenant, tag)).json(time.time())

    async def tag_page(self, query: Mapping[str, str], tenant: str) -> Json:
        page = replace(parse_page(query), metadata={})
        tags = await self._caches.call(ContextCaches.tag_page, tenant, page)
        return {"object": "list", "data": [tag.json() for tag in tags]}

    async def delete_tag(self, tag: str, tenant: str) -> Json:
        await self._caches.call(ContextCaches.delete_tag, tenant, tag)
        return {"deleted": True, "object": "cache_object.tag.deleted", "tag": tag}

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _shared_prefix(self, model: ServedModel, chat: ChatRequest) -> tuple[int, ...]:
        """Tokens that every prompt shares that begins as *chat*. Raises InvalidRequest where there is none."""
        tools = () if chat.tool_use is None else chat.tool_use.tools
        prompts: list[tuple[int, ...]] = []
        refusal: InvalidRequest | None = None
        for more in _PROBES:
            try:
                prompts.append(await self._preparation.encode_chat(model.tokenizer, (*chat.messages, *more), tools))
            except InvalidRequest as error:  # some templates want a user's turn at the end, others no two in a row
                refusal = error
        if not prompts:
            assert refusal is not None
            raise refusal
        prefix = prompts[0][: _common(prompts)]
        if len(prefix) >= model.max_context_tokens:
            message = f"messages come to {len(prefix)} tokens; this model's context holds {model.max_context_tokens}"
            raise TooLong(message, param="messages")
        return prefix


def dry_run_answer(chat: ResolvedChat, request_id: str) -> Json:
    """A chat completion without a choice: the cache is usable, and nothing was computed or counted."""
    assert chat.cache is not None
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": chat.cache.draft.model,
        "choices": [],
        "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}},
    }


def _common(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many first tokens all *prompts* share."""
    shortest, longest = min(prompts), max(prompts)  # in order: what these two share, all between them do
    differing = (i for i, (one, other) in enumerate(zip(shortest, longest, strict=False)) if one != other)
    return next(differing, min(len(shortest), len(longest)))
