"""The rules of context caches over their SQLite store: lifetimes, limits, tags, tenants, and races between them."""

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mooncake_mesh.errors import ConfigError, InvalidRequest
from mooncake_mesh.gateway.context_cache import (
    LONGEST_TTL_S,
    CacheDraft,
    CacheError,
    CacheLimits,
    CacheNotFound,
    CacheQuotaExceeded,
    CacheStatus,
    CacheUnusable,
    CacheUse,
    ContextCache,
    ContextCaches,
    Lifetime,
    Page,
)
from mooncake_mesh.gateway.context_cache_store import SqliteCacheStore

NOW = 1_000_000.5
ME, OTHER = "acme", "other"
MODEL = "m"
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {"a": 1, "b": 2}}}


class Kept:
    """Caches in a file, and the file."""

    def __init__(self, path: Path | str = ":memory:", **limits: int) -> None:
        self.store = SqliteCacheStore(path)
        self.caches = ContextCaches(self.store, CacheLimits(**limits))

    def create(
        self, cache_name: str, /, *, tenant: str = ME, tokens: int = 100, ttl_s: int = 60, **draft: Any
    ) -> ContextCache:
        cache = ContextCache(
            id=f"cache-{cache_name}",
            tenant=tenant,
            draft=CacheDraft(model=MODEL, messages=(SYSTEM,), **draft),
            tokens=tokens,
            created_at=int(NOW),
            expires_at=int(NOW) + ttl_s,
        )
        return self.caches.create(cache, b"\0\0\0\0" * tokens, NOW)

    def use(self, name: str, *, now_s: float = NOW, tenant: str = ME, model: str = MODEL, **use: Any) -> ContextCache:
        return self.caches.use(tenant, CacheUse(cache_id=f"cache-{name}", **use), model, now_s)

    def mark(self, name: str, state: CacheStatus) -> bool:
        error = CacheError(type="t", message="m") if state is CacheStatus.ERROR else None
        with self.store.transaction():
            return self.store.mark(f"cache-{name}", state, error)

    def ids(self, **page: Any) -> list[str]:
        return [cache.id.removeprefix("cache-") for cache in self.caches.page(ME, Page(**page))]


# --- lifetimes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lifetime", "end"),
    [
        (Lifetime(), 7),
        (Lifetime(ttl_s=0, expires_at=0), 7),
        (Lifetime(ttl_s=1), int(NOW) + 1),
        (Lifetime(ttl_s=LONGEST_TTL_S, expires_at=0), int(NOW) + LONGEST_TTL_S),
        (Lifetime(expires_at=int(NOW) + 1), int(NOW) + 1),
    ],
)
def test_when_a_cache_expires(lifetime: Lifetime, end: int) -> None:
    assert lifetime.end(NOW, 7) == end


@pytest.mark.parametrize(
    ("lifetime", "param"),
    [
        (Lifetime(ttl_s=-1), "ttl"),
        (Lifetime(ttl_s=LONGEST_TTL_S + 1), "ttl"),
        (Lifetime(expires_at=int(NOW)), "expired_at"),
        (Lifetime(expires_at=-1), "expired_at"),
        (Lifetime(expires_at=int(NOW) + LONGEST_TTL_S + 1), "expired_at"),
        (Lifetime(ttl_s=5, expires_at=int(NOW) + 5), "expired_at"),
    ],
)
def test_lifetimes_that_are_refused(lifetime: Lifetime, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        lifetime.end(NOW, 7)
    assert refusal.value.param == param


def test_a_pending_cache_can_be_used() -> None:
    kept = Kept()
    kept.create("a")
    assert kept.use("a").status(NOW) is CacheStatus.PENDING


def test_it_expires_between_look_up_and_use() -> None:
    kept = Kept()
    cache = kept.create("a", ttl_s=60)
    kept.mark("a", CacheStatus.READY)
    assert kept.caches.get(ME, "cache-a").status(cache.expires_at - 0.1) is CacheStatus.READY
    with pytest.raises(CacheUnusable, match="expired"):
        kept.use("a", now_s=cache.expires_at)


def test_reset_counts_from_now_and_revives() -> None:
    kept = Kept()
    kept.create("a", ttl_s=60)
    kept.mark("a", CacheStatus.READY)
    extended = kept.use("a", reset_ttl_s=10)
    assert (extended.expires_at, extended.status(NOW)) == (int(NOW) + 10, CacheStatus.READY)
    revived = kept.use("a", now_s=NOW + 10, reset_ttl_s=100)  # it expired this moment
    assert (revived.expires_at, revived.status(NOW + 10)) == (int(NOW) + 110, CacheStatus.PENDING)


def test_a_dry_run_changes_nothing() -> None:
    kept = Kept()
    cache = kept.create("a", ttl_s=60)
    kept.use("a", reset_ttl_s=1000, is_dry_run=True)
    assert kept.caches.get(ME, "cache-a") == cache


def test_a_failed_cache_stays_so_until_it_is_updated() -> None:
    kept = Kept()
    kept.create("a", ttl_s=60)
    kept.mark("a", CacheStatus.ERROR)
    for now_s in (NOW, NOW + 100):
        with pytest.raises(CacheUnusable, match="failed"):
            kept.use("a", now_s=now_s, reset_ttl_s=60)
    shown = kept.caches.get(ME, "cache-a").json(NOW + 100)
    assert (shown["status"], shown["error"]) == ("error", {"type": "t", "message": "m"})
    updated = kept.caches.update(ME, "cache-a", None, Lifetime(ttl_s=60), NOW).json(NOW)
    assert (updated["status"], "error" in updated) == ("pending", False)


def test_an_update_goes_back_to_pending() -> None:
    kept = Kept()
    cache = kept.create("a", metadata={"k": "v"})
    kept.mark("a", CacheStatus.READY)
    updated = kept.caches.update(ME, "cache-a", {"k": "w"}, Lifetime(), NOW)
    assert (updated.status(NOW), updated.draft.metadata, updated.expires_at) == (
        CacheStatus.PENDING,
        {"k": "w"},
        cache.expires_at,
    )
    late = kept.caches.update(ME, "cache-a", None, Lifetime(), NOW + 100)
    assert late.status(NOW + 100) is CacheStatus.INACTIVE


def test_it_is_of_one_model() -> None:
    kept = Kept()
    kept.create("a")
    with pytest.raises(CacheUnusable, match="model"):
        kept.use("a", model="other", reset_ttl_s=600)
    assert kept.caches.get(ME, "cache-a").expires_at == int(NOW) + 60


# --- tenants and limits -----------------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[ContextCaches], object]] = {
    "get": lambda caches: caches.get(OTHER, "cache-a"),
    "update": lambda caches: caches.update(OTHER, "cache-a", None, Lifetime(), NOW),
    "delete": lambda caches: caches.delete(OTHER, "cache-a"),
    "use": lambda caches: caches.use(OTHER, CacheUse(cache_id="cache-a"), MODEL, NOW),
    "use of a tag": lambda caches: caches.use(OTHER, CacheUse(tag="t"), MODEL, NOW),
    "point": lambda caches: caches.point_tag(OTHER, "mine", "cache-a", NOW),
    "tag": lambda caches: caches.tag(OTHER, "t"),
    "content": lambda caches: caches.tag_content(OTHER, "t"),
    "list from": lambda caches: caches.page(OTHER, Page(after="cache-a")),
}


@pytest.mark.parametrize("call", CALLS)
def test_another_tenant_finds_nothing(call: str) -> None:
    kept = Kept()
    kept.create("a", tags=("t",))
    with pytest.raises(CacheNotFound) as foreign:
        CALLS[call](kept.caches)
    kept.caches.delete(ME, "cache-a")
    with pytest.raises(CacheNotFound) as missing:
        CALLS[call](kept.caches)
    assert str(foreign.value) == str(missing.value)


def test_a_tenant_has_its_share_of_tokens() -> None:
    kept = Kept(tenant_tokens=250, cache_tokens=150)
    with pytest.raises(CacheQuotaExceeded):
        kept.create("large", tokens=151)
    kept.create("a", ttl_s=10)
    kept.create("b", ttl_s=1000)
    with pytest.raises(CacheQuotaExceeded):
        kept.create("c")
    kept.create("c", tenant=OTHER)
    kept.mark("b", CacheStatus.ERROR)  # what failed takes no room
    kept.create("d", ttl_s=1000)
    late = NOW + 10  # a has expired
    kept.caches.update(ME, "cache-b", None, Lifetime(), late)
    with pytest.raises(CacheQuotaExceeded):
        kept.use("a", now_s=late, reset_ttl_s=100)
    assert kept.caches.get(ME, "cache-a").status(late) is CacheStatus.INACTIVE


def test_expired_ones_make_room_where_there_are_too_many() -> None:
    kept = Kept(caches=2, tags=1)
    kept.create("a", ttl_s=0)
    kept.create("b", tags=("t",))
    kept.create("c")
    assert kept.ids() == ["c", "b"]
    with pytest.raises(CacheQuotaExceeded):
        kept.create("d")
    with pytest.raises(CacheQuotaExceeded):
        kept.caches.point_tag(ME, "u", "cache-b", NOW)
    kept.caches.point_tag(ME, "t", "cache-c", NOW)


# --- tags and lists ---------------------------------------------------------------------------------------------------


def test_a_tag_moves_and_goes_with_its_cache() -> None:
    kept = Kept()
    kept.create("a", tags=("t",))
    kept.create("b")
    using = kept.caches.use(ME, CacheUse(tag="t"), MODEL, NOW)
    moved = kept.caches.point_tag(ME, "t", "cache-b", NOW)
    assert (using.id, kept.caches.tag_content(ME, "t").id) == ("cache-a", "cache-b")
    assert kept.caches.tag_page(ME, Page()) == [moved]
    kept.caches.delete(ME, "cache-b")
    assert kept.caches.tag_page(ME, Page()) == []
    kept.caches.delete_tag(ME, "t")
    with pytest.raises(CacheNotFound):
        kept.caches.point_tag(ME, "t", "cache-b", NOW)


def test_a_failed_creation_leaves_nothing() -> None:
    kept = Kept(tags=1)
    with pytest.raises(CacheQuotaExceeded):
        kept.create("a", tags=("t", "u"))
    assert (kept.ids(), kept.caches.tag_page(ME, Page())) == ([], [])


@pytest.mark.parametrize(
    ("page", "ids"),
    [
        ({}, "edcba"),
        ({"limit": 2}, "ed"),
        ({"limit": 2, "is_ascending": True}, "ab"),
        ({"limit": 2, "after": "cache-d"}, "cb"),
        ({"limit": 2, "before": "cache-b"}, "dc"),
        ({"limit": 2, "is_ascending": True, "after": "cache-b"}, "cd"),
        ({"limit": 2, "is_ascending": True, "before": "cache-e"}, "cd"),
        ({"metadata": {"n": "b"}}, "b"),
        ({"metadata": {"n": "b", "x": "y"}}, ""),
    ],
)
def test_lists(page: dict[str, Any], ids: str) -> None:
    kept = Kept()
    for name in "abcde":
        kept.create(name, metadata={"n": name})
    kept.create("other", tenant=OTHER)
    assert kept.ids(**page) == list(ids)


# --- what a request begins with ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "tools", "is_hit"),
    [
        ([SYSTEM], [TOOL], True),
        ([SYSTEM, {"role": "user", "content": "x"}], [TOOL], True),
        ([dict(reversed(SYSTEM.items()))], [TOOL], True),
        ([{**SYSTEM, "name": "x"}], [TOOL], False),
        ([{**SYSTEM, "content": "Be brief. "}], [TOOL], False),
        ([{"role": "user", "content": "x"}, SYSTEM], [TOOL], False),
        ([], [TOOL], False),
        ([SYSTEM], [], False),
        ([SYSTEM], [TOOL, TOOL], False),
        ([SYSTEM], [{**TOOL, "strict": True}], False),
        ([SYSTEM], [{**TOOL, "function": {"name": "weigh", "parameters": {"a": 1.0, "b": 2}}}], False),
        ([SYSTEM], [{**TOOL, "function": {"name": "weigh", "parameters": {"a": True, "b": 2}}}], False),
    ],
)
def test_a_hit_is_equal_in_every_field(messages: list[Any], tools: list[Any], is_hit: bool) -> None:
    cache = Kept().create("a", tools=(TOOL,))
    assert cache.begins(messages, tools) is is_hit


def test_the_order_of_tools_counts() -> None:
    other = {**TOOL, "type": "other"}
    cache = Kept().create("a", tools=(TOOL, other))
    assert cache.begins([SYSTEM], [TOOL, other])
    assert not cache.begins([SYSTEM], [other, TOOL])


# --- the file ---------------------------------------------------------------------------------------------------------


def test_two_gateways_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "caches.sqlite"
    one, two = Kept(path), Kept(path)
    created = one.create("a", tags=("t",), tools=(TOOL,), metadata={"k": "v"}, name="n", description="d")
    assert two.caches.tag_content(ME, "t") == replace(created, draft=replace(created.draft, tags=()))
    claims = []
    for kept in (one, two, one):
        with kept.store.transaction():
            claims.append(kept.store.claim("cache-a", NOW, NOW + 10))
    with two.store.transaction():
        claims.append(two.store.claim("cache-a", NOW + 10, NOW + 20))
    assert claims == [True, False, False, True]
    two.caches.delete(ME, "cache-a")
    assert one.ids() == []
    assert not one.mark("a", CacheStatus.READY)
    assert path.stat().st_mode & 0o777 == 0o600
    one.store.close()
    two.store.close()


def test_what_the_keeper_sees() -> None:
    kept = Kept()
    kept.create("a", ttl_s=10, tokens=2)
    kept.create("b", tenant=OTHER)
    kept.create("failed")
    kept.mark("failed", CacheStatus.ERROR)
    store = kept.store
    assert [(one.id, one.tenant) for one in store.kept(NOW)] == [("cache-a", ME), ("cache-b", OTHER)]
    assert [one.id for one in store.kept(NOW + 10)] == ["cache-b"]
    assert (store.prefix("cache-a"), store.prefix("cache-none")) == (b"\0" * 8, None)
    assert store.purge(NOW + 11) == 1


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "caches.sqlite"
    path.write_text("no database, and long enough not to be taken for an empty one " * 20)
    with pytest.raises(ConfigError, match="cache_db"):
        SqliteCacheStore(path)
    with pytest.raises(ConfigError, match="cache_db"):
        SqliteCacheStore(tmp_path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "caches.sqlite"
    SqliteCacheStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("pragma user_version = 2")
    db.close()
    with pytest.raises(ConfigError, match="format is 2"):
        SqliteCacheStore(path)
