"""Context caches in an SQLite file, which the gateways of one host share. See the ``CacheStore`` of context_cache.py.

A transaction takes the database's write lock at once, so that what it reads is true until it ends; in write-ahead mode
a killed process leaves whole transactions only. One thread at a time.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mooncake_mesh.errors import ConfigError
from mooncake_mesh.gateway.context_cache import (
    CacheDraft,
    CacheError,
    CacheNotFound,
    CacheStatus,
    CacheTag,
    ContextCache,
    Page,
)

_BUSY_TIMEOUT_S: Final = 5.0
_VERSION: Final = 1
_SCHEMA: Final = """
create table if not exists caches (
    seq integer primary key autoincrement,
    id text not null unique,
    tenant text not null,
    model text not null,
    state text not null,
    created_at integer not null,
    expires_at integer not null,
    tokens integer not null,
    name text not null,
    description text not null,
    metadata text not null,
    messages text not null,
    tools text not null,
    prefix blob not null,
    error_type text,
    error_message text,
    claimed_until_s real not null default 0
);
create index if not exists caches_of_tenant on caches (tenant, seq);
create table if not exists tags (
    seq integer primary key autoincrement,
    tenant text not null,
    tag text not null,
    cache_id text not null references caches (id) on delete cascade,
    created_at integer not null,
    unique (tenant, tag)
);
create index if not exists tags_of_cache on tags (cache_id);
"""
_COLUMNS: Final = (
    "id, tenant, model, state, created_at, expires_at, tokens, name, description, metadata, messages, tools,"
    " error_type, error_message"
)
_LIVE: Final = "state != 'error' and expires_at > ?"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCache:
    """A cache whose KV is to be in the pool now."""

    id: str
    tenant: str
    model: str
    expires_at: int
    state: CacheStatus


class SqliteCacheStore:
    """Implements ``CacheStore``, and what the keeper asks."""

    def __init__(self, path: Path | str) -> None:
        """Opens the file, made readable to its owner only where it is new. Raises ConfigError."""
        try:
            if path != ":memory:":
                Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path}: {error}", path="cache_db") from error

    def _prepare(self) -> None:
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = normal")
        self._db.execute("pragma foreign_keys = on")
        with self.transaction():
            (version,) = self._db.execute("pragma user_version").fetchone()
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"its format is {version}, this version knows {_VERSION}")
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"pragma user_version = {_VERSION}")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("begin immediate")
        try:
            yield
        except BaseException:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")

    # --- caches -------------------------------------------------------------------------------------------------------

    def add(self, cache: ContextCache, prefix: bytes) -> None:
        draft = cache.draft
        values = (
            cache.id,
            cache.tenant,
            draft.model,
            cache.state.value,
            cache.created_at,
            cache.expires_at,
            cache.tokens,
            draft.name,
            draft.description,
            json.dumps(dict(draft.metadata)),
            json.dumps(draft.messages),
            json.dumps(draft.tools),
            None,
            None,
            prefix,
        )
        marks = ", ".join("?" * len(values))
        self._db.execute(f"insert into caches ({_COLUMNS}, prefix) values ({marks})", values)

    def find(self, tenant: str, cache_id: str) -> ContextCache | None:
        sql = f"select {_COLUMNS} from caches where tenant = ? and id = ?"
        row = self._db.execute(sql, (tenant, cache_id)).fetchone()
        return None if row is None else _cache(row)

    def save(self, cache: ContextCache) -> None:
        error = cache.error
        self._db.execute(
            "update caches set metadata = ?, expires_at = ?, state = ?, error_type = ?, error_message = ? where id = ?",
            (
                json.dumps(dict(cache.draft.metadata)),
                cache.expires_at,
                cache.state.value,
                error and error.type,
                error and error.message,
                cache.id,
            ),
        )

    def remove(self, tenant: str, cache_id: str) -> bool:
        sql = "delete from caches where tenant = ? and id = ?"
        return self._db.execute(sql, (tenant, cache_id)).rowcount > 0

    def page(self, tenant: str, page: Page) -> list[ContextCache]:
        rows = self._page("caches", _COLUMNS, "id", tenant, page)
        return [_cache(row) for row in rows]

    def stored_tokens(self, tenant: str, now_s: float) -> int:
        sql = f"select coalesce(sum(tokens), 0) from caches where tenant = ? and {_LIVE}"
        return self._number(sql, tenant, now_s)

    def count(self, tenant: str) -> int:
        return self._number("select count(*) from caches where tenant = ?", tenant)

    def remove_oldest_inactive(self, tenant: str, now_s: float) -> bool:
        sql = f"delete from caches where seq = (select min(seq) from caches where tenant = ? and not ({_LIVE}))"
        return self._db.execute(sql, (tenant, now_s)).rowcount > 0

    # --- tags ---------------------------------------------------------------------------------------------------------

    def put_tag(self, tag: CacheTag) -> None:
        self._db.execute(
            "insert into tags (tenant, tag, cache_id, created_at) values (?, ?, ?, ?)"
            " on conflict (tenant, tag) do update set cache_id = excluded.cache_id, created_at = excluded.created_at",
            (tag.tenant, tag.tag, tag.cache_id, tag.created_at),
        )

    def find_tag(self, tenant: str, tag: str) -> CacheTag | None:
        sql = "select tenant, tag, cache_id, created_at from tags where tenant = ? and tag = ?"
        row = self._db.execute(sql, (tenant, tag)).fetchone()
        return None if row is None else _tag(row)

    def remove_tag(self, tenant: str, tag: str) -> None:
        self._db.execute("delete from tags where tenant = ? and tag = ?", (tenant, tag))

    def tag_page(self, tenant: str, page: Page) -> list[CacheTag]:
        rows = self._page("tags", "tenant, tag, cache_id, created_at", "tag", tenant, page)
        return [_tag(row) for row in rows]

    def count_tags(self, tenant: str) -> int:
        return self._number("select count(*) from tags where tenant = ?", tenant)

    # --- the keeper ---------------------------------------------------------------------------------------------------

    def kept(self, now_s: float) -> list[KeptCache]:
        """Every tenant's caches that are neither expired nor failed, oldest first."""
        sql = f"select id, tenant, model, expires_at, state from caches where {_LIVE} order by seq"
        rows = self._db.execute(sql, (now_s,))
        return [
            KeptCache(id=row[0], tenant=row[1], model=row[2], expires_at=row[3], state=CacheStatus(row[4]))
            for row in rows
        ]

    def prefix(self, cache_id: str) -> bytes | None:
        """Its tokens as on the wire; None for one that is gone."""
        row = self._db.execute("select prefix from caches where id = ?", (cache_id,)).fetchone()
        return None if row is None else bytes(row[0])

    def claim(self, cache_id: str, now_s: float, until_s: float) -> bool:
        """Whether the caller alone fills this cache until *until_s*."""
        sql = "update caches set claimed_until_s = ? where id = ? and claimed_until_s <= ?"
        return self._db.execute(sql, (until_s, cache_id, now_s)).rowcount > 0

    def unclaim(self, cache_id: str) -> None:
        self._db.execute("update caches set claimed_until_s = 0 where id = ?", (cache_id,))

    def mark(self, cache_id: str, state: CacheStatus, error: CacheError | None) -> bool:
        """Whether the cache is still there."""
        sql = "update caches set state = ?, error_type = ?, error_message = ? where id = ?"
        values = (state.value, error and error.type, error and error.message, cache_id)
        return self._db.execute(sql, values).rowcount > 0

    def purge(self, expired_before_s: float) -> int:
        """Remove what expired before that; how many."""
        return self._db.execute("delete from caches where expires_at < ?", (expired_before_s,)).rowcount

    # --- inside -------------------------------------------------------------------------------------------------------

    def _number(self, sql: str, *values: object) -> int:
        (number,) = self._db.execute(sql, values).fetchone()
        return int(number)

    def _page(self, table: str, columns: str, name: str, tenant: str, page: Page) -> list[Any]:
        where, values = ["tenant = ?"], [tenant]
        for cursor, comes_later in ((page.after, page.is_ascending), (page.before, not page.is_ascending)):
            if cursor is not None:
                seq = self._seq(table, name, tenant, cursor)
                where.append(f"seq {'>' if comes_later else '<'} {seq}")
        for key, value in page.metadata.items():
            where.append("exists (select 1 from json_each(metadata) where key = ? and value = ?)")
            values += [key, value]
        # the entries before a cursor are those right before it
        is_ascending = page.is_ascending == (page.before is None)
        order = "asc" if is_ascending else "desc"
        sql = f"select {columns} from {table} where {' and '.join(where)} order by seq {order} limit {page.limit}"
        rows = self._db.execute(sql, values).fetchall()
        return rows if page.before is None else rows[::-1]

    def _seq(self, table: str, name: str, tenant: str, cursor: str) -> int:
        row = self._db.execute(f"select seq from {table} where tenant = ? and {name} = ?", (tenant, cursor)).fetchone()
        if row is None:
            raise CacheNotFound(f"there is no {cursor[:128]!r} to list from", param="after")
        return int(row[0])


def _cache(row: Any) -> ContextCache:
    draft = CacheDraft(
        model=row[2],
        name=row[7],
        description=row[8],
        metadata=json.loads(row[9]),
        messages=tuple(json.loads(row[10])),
        tools=tuple(json.loads(row[11])),
    )
    error = None if row[12] is None else CacheError(type=row[12], message=row[13])
    return ContextCache(
        id=row[0],
        tenant=row[1],
        draft=draft,
        tokens=row[6],
        created_at=row[4],
        expires_at=row[5],
        state=CacheStatus(row[3]),
        error=error,
    )


def _tag(row: Any) -> CacheTag:
    return CacheTag(tenant=row[0], tag=row[1], cache_id=row[2], created_at=row[3])
