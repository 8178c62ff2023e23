"""The SDK's calls for context caches and tags, over ZeroMQ to the gateway's own door."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mooncake_mesh.client import ContextCache, InvalidRequest, MooncakeClient, Rejected, SyncMooncakeClient
from mooncake_mesh.client.caching_answers import CacheError, read_cache
from mooncake_mesh.gateway.rate_limits import TenantLimits
from mooncake_proto.client import CachingAction, CachingAnswer, CachingCall
from mooncake_proto.errors import MalformedMessage
from tests.unit.caching_site import QUESTION, SYSTEM, Site, play
from tests.unit.client_doubles import Gateway, gateway_thread
from tests.unit.gateway_doubles import MODEL
from tests.unit.mesh_doubles import ANY_PORT, serving

TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {}}}
SHOWN = {
    "id": "cache-1",
    "object": "context-cache",
    "status": "error",
    "created_at": 1,
    "expired_at": 2,
    "tokens": 3,
    "model": MODEL,
    "messages": [SYSTEM],
    "tools": [],
    "name": "",
    "description": "",
    "metadata": {},
    "error": {"type": "no_room", "message": "m"},
}


def played(
    scene: Callable[[Site, MooncakeClient], Awaitable[None]], folder: Path, limits: TenantLimits | None = None
) -> None:
    """*scene* with a client of the tenant acme."""

    async def connected(site: Site) -> None:
        async with (
            serving(site.sdk_handlers, ANY_PORT) as server,
            MooncakeClient(server.endpoint, api_key=site.key) as client,
        ):
            await scene(site, client)

    play(connected, folder, limits)


def test_a_cache_is_made_shown_used_updated_and_deleted(tmp_path: Path) -> None:
    async def scene(site: Site, client: MooncakeClient) -> None:
        cache = await client.caching.create(
            [SYSTEM], tools=[TOOL], name="n", description="d", metadata={"k": "v"}, tags=["t"], ttl=60
        )
        assert (cache.status, cache.model, cache.messages, cache.tools) == ("pending", MODEL, (SYSTEM,), (TOOL,))
        assert (cache.name, cache.description, cache.metadata, cache.error) == ("n", "d", {"k": "v"}, None)
        assert cache.expired_at - cache.created_at == 60
        assert await client.caching.get(cache.id) == cache
        assert cache.raw == await site.cache(cache.id)
        answer = await client.chat([cache.message(reset_ttl=90), QUESTION], max_tokens=2)
        assert (answer.text, answer.usage.cached_tokens) == ("hi", 500)
        updated = await client.caching.update(cache.id, metadata={"k": "w"}, ttl=30)
        assert (updated.metadata, updated.expired_at) == ({"k": "w"}, int(site.now_s) + 30)
        await client.caching.delete(cache.id)
        for gone in (client.caching.get(cache.id), client.caching.delete(cache.id)):
            with pytest.raises(InvalidRequest) as refusal:
                await gone
            assert refusal.value.code == "context_cache_not_found"

    played(scene, tmp_path)


def test_lists_take_a_page_and_metadata(tmp_path: Path) -> None:
    async def scene(site: Site, client: MooncakeClient) -> None:
        made = []
        for number in range(3):
            made.append(await client.caching.create([SYSTEM], metadata={"n": str(number)}))
            site.now_s += 1
        caching = client.caching
        assert await caching.list() == tuple(reversed(made))
        assert await caching.list(order="asc", limit=1, after=made[0].id) == (made[1],)
        assert await caching.list(before=made[1].id) == (made[2],)
        assert await caching.list(metadata={"n": "1"}) == (made[1],)

    played(scene, tmp_path)


def test_tags_are_pointed_listed_followed_and_deleted(tmp_path: Path) -> None:
    async def scene(_: Site, client: MooncakeClient) -> None:
        one, two = await client.caching.create([SYSTEM], model=MODEL), await client.caching.create([SYSTEM, QUESTION])
        tags = client.caching.tags
        for cache in (one, two):
            tag = await tags.point("t", cache.id)
            assert (tag.tag, tag.cache_id, tag.owned_by) == ("t", cache.id, "acme")
        assert (await tags.list(), await tags.get("t"), await tags.content("t")) == ((tag,), tag, two)
        for _again in range(2):
            await tags.delete("t")
        assert await tags.list() == ()

    played(scene, tmp_path)


def test_what_the_gateway_refuses_is_typed(tmp_path: Path) -> None:
    async def scene(_: Site, client: MooncakeClient) -> None:
        cache = await client.caching.create([SYSTEM])
        for call, code, param in (
            (client.caching.create([SYSTEM], ttl=1, expired_at=2), "invalid_request", "expired_at"),
            (client.caching.update(cache.id, ttl=-1), "invalid_request", "ttl"),
            (client.caching.tags.point("1", cache.id), "invalid_request", "tag"),
            (client.caching.list(limit=0), "invalid_request", "limit"),
            (client.caching.create([{"role": "system", "content": object()}]), "invalid_request", None),
        ):
            with pytest.raises(InvalidRequest) as refusal:
                await call
            assert (refusal.value.code, refusal.value.param) == (code, param)

    played(scene, tmp_path)


def test_every_call_is_one_of_the_tenant_s_requests(tmp_path: Path) -> None:
    async def scene(_: Site, client: MooncakeClient) -> None:
        assert await client.caching.list() == ()
        await client.caching.tags.delete("t")
        with pytest.raises(Rejected):
            await client.caching.list()

    played(scene, tmp_path, TenantLimits(requests_per_minute=2))


def test_a_cache_says_how_it_is_used_and_why_it_failed() -> None:
    cache = read_cache(json.dumps(SHOWN).encode())
    assert cache.error == CacheError(type="no_room", message="m")
    assert cache.message() == {"role": "cache", "content": "cache_id=cache-1"}
    assert cache.message(reset_ttl=5)["content"] == "cache_id=cache-1;reset_ttl=5"
    with pytest.raises(MalformedMessage):
        read_cache(b'{"id": "cache-1"}')


def test_the_plain_client_has_the_same_calls() -> None:
    def answer(call: CachingCall, _: object) -> CachingAnswer:
        asked.append((call.action, call.name))
        tag = {"tag": "t", "cache_id": "c", "created_at": 1, "owned_by": "acme"}
        is_list = call.action in (CachingAction.LIST, CachingAction.LIST_TAGS)
        is_tag = call.action in (CachingAction.POINT_TAG, CachingAction.GET_TAG, CachingAction.LIST_TAGS)
        one = tag if is_tag else SHOWN
        return CachingAnswer(response=json.dumps({"data": [one]} if is_list else one).encode())

    asked: list[tuple[CachingAction, str]] = []
    gateway = Gateway()
    gateway.more = {CachingCall: answer}
    with gateway_thread(gateway) as endpoint, SyncMooncakeClient(endpoint) as client:
        caching, tags = client.caching, client.caching.tags
        cache = caching.create([SYSTEM])
        assert isinstance(cache, ContextCache)
        assert [*caching.list(), caching.get("c"), caching.update("c", ttl=1), tags.content("t")] == [cache] * 4
        tag = tags.point("t", "c")
        assert [*tags.list(), tags.get("t")] == [tag] * 2
        caching.delete("c")
        tags.delete("t")
    assert {action for action, _ in asked} == set(CachingAction)
    assert {name for _, name in asked} == {"", "c", "t"}
