"""What clients may say to the context caching API, and what is refused, field by field."""

from typing import Any

import pytest

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.caching_requests import (
    cache_headers,
    cache_message,
    parse_create,
    parse_page,
    parse_reference,
    parse_tag,
    parse_update,
)
from mooncake_mesh.gateway.context_cache import CacheUse, Lifetime, Page

SYSTEM = {"role": "system", "content": "Be brief."}
BODY: dict[str, Any] = {"model": "m", "messages": [SYSTEM]}
CACHE = {"role": "cache", "content": "tag=t"}


@pytest.mark.parametrize(
    ("content", "use"),
    [
        ("cache_id=cache-1", CacheUse(cache_id="cache-1")),
        ("tag=t;reset_ttl=3600;dry_run=1", CacheUse(tag="t", reset_ttl_s=3600, is_dry_run=True)),
        ("dry_run=0;reset_ttl=0;tag=t", CacheUse(tag="t")),
    ],
)
def test_a_reference(content: str, use: CacheUse) -> None:
    assert parse_reference(content) == use


@pytest.mark.parametrize(
    "content",
    [
        None,
        7,
        "",
        ";",
        "tag=t;",
        ";tag=t",
        "tag=t;;dry_run=1",
        "tag=",
        "tag",
        "tag=t;cache_id=c",
        "tag=t;tag=t",
        "reset_ttl=1",
        "tag=t;ttl=1",
        "tag=t; dry_run=1",
        "tag=t;dry_run=2",
        "tag=t;dry_run=true",
        "tag=t;reset_ttl=-1",
        "tag=t;reset_ttl=3601",
        "tag=t;reset_ttl=1.5",
        "tag=t;reset_ttl=x",
    ],
)
def test_a_reference_that_is_none(content: object) -> None:
    with pytest.raises(InvalidRequest):
        parse_reference(content)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [SYSTEM, CACHE]},
        {"messages": [CACHE, CACHE]},
        {"messages": [CACHE, SYSTEM, CACHE]},
        {"messages": [CACHE], "tools": []},
        {"messages": [CACHE], "tools": [{"type": "function"}]},
        {"messages": [{"role": "cache"}]},
    ],
)
def test_cache_messages_that_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        cache_message(body)


def test_chats_with_and_without_a_cache_message() -> None:
    assert cache_message({"messages": [CACHE, SYSTEM], "tools": None}) == CacheUse(tag="t")
    others: list[dict[str, Any]] = [{}, {"messages": "cache"}, {"messages": [SYSTEM, "cache"]}, {"messages": []}]
    for other in others:
        assert cache_message(other) is None


def test_headers() -> None:
    assert cache_headers({}) is None
    assert cache_headers({"x-msh-context-cache-dryrun": "1"}) is None
    both = {"x-msh-context-cache-dryrun": "1", "x-msh-context-cache-reset-ttl": "60"}
    assert cache_headers({"x-msh-context-cache": "c", **both}) == CacheUse(
        cache_id="c", reset_ttl_s=60, is_dry_run=True
    )
    for name, value in (("dryrun", "yes"), ("reset-ttl", "-1"), ("reset-ttl", "3601"), ("reset-ttl", "soon")):
        with pytest.raises(InvalidRequest):
            cache_headers({"x-msh-context-cache": "c", f"x-msh-context-cache-{name}": value})


def test_a_creation() -> None:
    request = parse_create(
        {**BODY, "ttl": 60, "name": "n", "metadata": {"k": "v"}, "tags": ["a", "b", "a"], "tools": []}
    )
    assert (request.lifetime, request.draft.tags) == (Lifetime(ttl_s=60), ("a", "b"))
    assert (request.draft.messages, request.draft.tools, request.draft.metadata) == ((SYSTEM,), (), {"k": "v"})
    assert [message.content for message in request.chat.messages] == ["Be brief."]


CALL = {"id": "1", "type": "function", "function": {"name": "weigh", "arguments": "{}"}}


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"messages": []},
        {"messages": "x"},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [CACHE]},
        {"messages": [{**SYSTEM, "partial": True}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]},
        {"messages": [{**SYSTEM, "x": "\ud83d"}]},
        {"messages": [{**SYSTEM, "\ud83d": 1}]},
        {"messages": [{**SYSTEM, "x": 10**30}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": "\ud83d"}}}]},
        {"name": "x" * 257},
        {"description": "x" * 513},
        {"metadata": {str(i): "" for i in range(17)}},
        {"metadata": {"x" * 65: ""}},
        {"metadata": {"k": "x" * 513}},
        {"metadata": {"k": 1}},
        {"metadata": []},
        {"ttl": 1.5},
        {"ttl": True},
        {"expired_at": "soon"},
        {"tags": ["1a"]},
        {"tags": [""]},
        {"tags": ["a b"]},
        {"tags": ["a" * 129]},
        {"tags": "a"},
    ],
)
def test_creations_that_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        parse_create({**BODY, **change})


def test_an_update() -> None:
    assert parse_update({}).metadata is None
    assert parse_update({"metadata": {}, "ttl": 5}).metadata == {}
    with pytest.raises(InvalidRequest):
        parse_update({"metadata": {"k": None}})


def test_tags() -> None:
    assert parse_tag({"tag": "a-1_B.c", "cache_id": "c"}) == ("a-1_B.c", "c")
    for body in ({"tag": "a"}, {"cache_id": "c"}, {"tag": "ä", "cache_id": "c"}, {"tag": "a\n", "cache_id": "c"}):
        with pytest.raises(InvalidRequest):
            parse_tag(body)


def test_pages() -> None:
    assert parse_page({}) == Page()
    query = {"limit": "5", "order": "asc", "after": "c", "metadata[k]": "v"}
    assert parse_page(query) == Page(limit=5, is_ascending=True, after="c", metadata={"k": "v"})
    for wrong in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "a", "before": "b"}):
        with pytest.raises(InvalidRequest):
            parse_page(wrong)
