"""What clients say to the context caching API, validated: bodies, lists' queries, and how a chat names a cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.context_cache import CacheDraft, CacheUse, Json, Lifetime, Page, checked_tag, checked_ttl_s
from mooncake_mesh.gateway.json_fields import Fields, UnsupportedParameter, checked_string
from mooncake_mesh.gateway.openai_requests import ChatRequest, parse_chat

CACHE_HEADER: Final = "x-msh-context-cache"
DRY_RUN_HEADER: Final = "x-msh-context-cache-dryrun"
RESET_TTL_HEADER: Final = "x-msh-context-cache-reset-ttl"
_MAX_NAME_CHARS: Final = 256
_MAX_DESCRIPTION_CHARS: Final = 512
_MAX_METADATA: Final = 16
_MAX_METADATA_KEY_CHARS: Final = 64
_MAX_METADATA_VALUE_CHARS: Final = 512
_MAX_TAGS: Final = 16
_MAX_LIST: Final = 100
_MAX_ID_CHARS: Final = 256
_MAX_TIME_S: Final = 1 << 53
_CHAT_FIELDS: Final = ("model", "messages", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRequest:
    """``chat`` is the cached beginning as a chat request would have it."""

    draft: CacheDraft
    lifetime: Lifetime
    chat: ChatRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    metadata: Mapping[str, str] | None
    lifetime: Lifetime


def parse_create(body: Json) -> CreateRequest:
    """Raises InvalidRequest."""
    fields = Fields(body)
    chat = parse_chat({name: body[name] for name in _CHAT_FIELDS if name in body})
    messages, tools = body["messages"], body.get("tools") or []
    _check_messages(messages, tools)
    _check_can_be_answered(messages, tools)
    tags = fields.array("tags", longest=_MAX_TAGS) or []
    draft = CacheDraft(
        model=chat.options.model,
        messages=tuple(messages),
        tools=tuple(tools),
        name=fields.string("name", longest=_MAX_NAME_CHARS) or "",
        description=fields.string("description", longest=_MAX_DESCRIPTION_CHARS) or "",
        metadata=_metadata(fields) or {},
        tags=tuple(dict.fromkeys(checked_tag(checked_string(tag, "tags", longest=128), "tags") for tag in tags)),
    )
    return CreateRequest(draft=draft, lifetime=_lifetime(fields), chat=chat)


def parse_update(body: Json) -> UpdateRequest:
    """Raises InvalidRequest."""
    fields = Fields(body)
    return UpdateRequest(metadata=_metadata(fields), lifetime=_lifetime(fields))


def parse_tag(body: Json) -> tuple[str, str]:
    """Tag and cache id. Raises InvalidRequest."""
    fields = Fields(body)
    tag = fields.string("tag", longest=_MAX_ID_CHARS)
    cache_id = fields.string("cache_id", longest=_MAX_ID_CHARS)
    if cache_id is None:
        raise InvalidRequest("cache_id is required", param="cache_id")
    return checked_tag(tag or "", "tag"), cache_id


def parse_page(query: Mapping[str, str]) -> Page:
    """Raises InvalidRequest."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    limit = _whole(query.get("limit", "20"), "limit")
    if not 1 <= limit <= _MAX_LIST:
        raise InvalidRequest(f"limit must be between 1 and {_MAX_LIST}", param="limit")
    after, before = query.get("after") or None, query.get("before") or None
    if after and before:
        raise InvalidRequest("after and before exclude each other: give one", param="before")
    metadata = {key[9:-1]: value for key, value in query.items() if key.startswith("metadata[") and key.endswith("]")}
    if len(metadata) > _MAX_METADATA:
        raise InvalidRequest(f"metadata has more than {_MAX_METADATA} entries", param="metadata")
    return Page(limit=limit, is_ascending=order == "asc", after=after, before=before, metadata=metadata)


def cache_message(body: Json) -> CacheUse | None:
    """How the first message names a cache, if it has the role ``cache``. Raises InvalidRequest."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    places = [i for i, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "cache"]
    if not places:
        return None
    if places != [0]:
        param = f"messages[{places[-1]}].role"
        raise InvalidRequest("there may be one message of the role cache, the first", param=param)
    if body.get("tools") is not None:
        raise InvalidRequest("tools must not be given with a cache message: the cache has its own", param="tools")
    return parse_reference(messages[0].get("content"))


def parse_reference(content: object) -> CacheUse:
    """``cache_id=ID;reset_ttl=S;dry_run=1``, or ``tag=TAG;…``; no semicolon at the end. Raises InvalidRequest."""
    param = "messages[0].content"
    text = checked_string(content, param, longest=1024)
    found: dict[str, str] = {}
    for part in text.split(";"):
        name, equals, value = part.partition("=")
        if name not in ("cache_id", "tag", "reset_ttl", "dry_run") or not equals or not value or name in found:
            message = "the content of a cache message is cache_id=ID or tag=TAG, with ;reset_ttl=SECONDS and ;dry_run=1"
            raise InvalidRequest(message, param=param)
        found[name] = value
    if ("cache_id" in found) == ("tag" in found):
        raise InvalidRequest("a cache message names cache_id or tag, one of them", param=param)
    return CacheUse(
        cache_id=found.get("cache_id", ""),
        tag=found.get("tag", ""),
        reset_ttl_s=checked_ttl_s(_whole(found.get("reset_ttl", "0"), "reset_ttl"), "reset_ttl"),
        is_dry_run=_flag(found.get("dry_run", "0"), "dry_run"),
    )


def cache_headers(headers: Mapping[str, str]) -> CacheUse | None:
    """How a request's headers name a cache, if they do. Raises InvalidRequest."""
    cache_id = headers.get(CACHE_HEADER)
    if not cache_id:
        return None
    return CacheUse(
        cache_id=cache_id,
        reset_ttl_s=checked_ttl_s(_whole(headers.get(RESET_TTL_HEADER) or "0", RESET_TTL_HEADER), RESET_TTL_HEADER),
        is_dry_run=_flag(headers.get(DRY_RUN_HEADER) or "0", DRY_RUN_HEADER),
    )


def _check_messages(messages: list[Json], tools: list[Any]) -> None:
    """What chat lets pass and a cache does not: an unfinished message, and tool calls that nobody answered."""
    names = {tool.get("function", {}).get("name") for tool in tools if isinstance(tool, dict)}
    answered = {message.get("tool_call_id") for message in messages if message.get("role") == "tool"}
    for i, message in enumerate(messages):
        if message.get("partial"):
            raise UnsupportedParameter("a partial message cannot be cached", param=f"messages[{i}].partial")
        for call in message.get("tool_calls") or ():
            if call.get("id") not in answered or call.get("function", {}).get("name") not in names:
                message_text = "every tool call must be answered by a tool message, and its tool be listed in tools"
                raise InvalidRequest(message_text, param=f"messages[{i}].tool_calls")


def _check_can_be_answered(messages: list[Json], tools: list[Any]) -> None:
    """Fields that a chat ignores are kept and shown again: a value without a form in JSON would spoil every list."""
    for name, value in (("messages", messages), ("tools", tools)):
        try:
            orjson.dumps([[[[value]]]])  # as deep as in a list of caches
        except TypeError as error:
            raise InvalidRequest(f"{name} cannot be kept: {error}", param=name) from None


def _lifetime(fields: Fields) -> Lifetime:
    ttl_s = fields.integer("ttl", low=-_MAX_TIME_S, high=_MAX_TIME_S)
    return Lifetime(ttl_s=ttl_s, expires_at=fields.integer("expired_at", low=-_MAX_TIME_S, high=_MAX_TIME_S))


def _metadata(fields: Fields) -> dict[str, str] | None:
    raw = fields.raw("metadata")
    if raw is None:
        return None
    if not isinstance(raw, dict) or len(raw) > _MAX_METADATA:
        raise InvalidRequest(f"metadata must be an object of at most {_MAX_METADATA} pairs", param="metadata")
    return {
        checked_string(key, "metadata", longest=_MAX_METADATA_KEY_CHARS): checked_string(
            value, f"metadata.{key[:_MAX_METADATA_KEY_CHARS]}", longest=_MAX_METADATA_VALUE_CHARS
        )
        for key, value in raw.items()
    }


def _whole(text: str, param: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 15):
        raise InvalidRequest(f"{param} must be a whole number", param=param)
    return int(text)


def _flag(text: str, param: str) -> bool:
    if text not in ("0", "1"):
        raise InvalidRequest(f"{param} must be 0 or 1", param=param)
    return text == "1"
