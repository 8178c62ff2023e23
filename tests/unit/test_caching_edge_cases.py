"""Context caching where it is easily got wrong, at the HTTP doors: one test for each case (docs/context-caching.md).

What needs real processes is in tests/mesh/test_context_caching.py.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_mesh.gateway.api import TokenEvent, TokenRequest
from mooncake_mesh.gateway.context_cache import ContextCaches
from tests.unit.caching_site import QUESTION, SHARED, SYSTEM, Site, play
from tests.unit.gateway_doubles import Exchange, says

HOUR_S = 3600
CACHE = {"role": "cache", "content": "tag=t"}
WEIGH = {"type": "function", "function": {"name": "weigh", "parameters": {}}}
BERTH = {"type": "function", "function": {"name": "berth", "parameters": {}}}


def refusal(exchange: Exchange) -> tuple[int, str, str | None]:
    error = exchange.json()["error"]
    return exchange.status, error["code"], error["param"]


async def is_hit(site: Site, cache_id: str, *messages: dict[str, Any], **fields: Any) -> bool:
    """Whether a chat that names the cache by header is served as one of it; it is served in any case."""
    body = {"messages": list(messages), "max_tokens": 2, **fields}
    answer = await site.call("POST", "/chat/completions", body, x_msh_context_cache=cache_id)
    assert answer.status == 200
    return answer.headers.get("msh-context-cache-id") == cache_id


# --- the state of the cache -------------------------------------------------------------------------------------------


def test_used_while_pending_it_is_answered_at_full_price(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache = await site.create()
        answer = await site.ask(f"cache_id={cache['id']}")
        assert (cache["status"], (await site.cache(cache["id"]))["status"]) == ("pending", "pending")
        assert (answer.status, answer.headers["msh-context-cache-id"]) == (200, cache["id"])
        assert answer.headers["msh-context-cache-token-saved"] == "0"

    play(scene, tmp_path, script=says("hi", cached=0))


def test_expired_between_look_up_and_use_it_is_refused_or_no_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By message that is a refusal. By headers, where the gateway itself looks it up first, the chat is served."""

    async def scene(site: Site) -> None:
        cache = await site.create(ttl=60)
        found = await site.cache(cache["id"])
        site.now_s = found["expired_at"]
        assert refusal(await site.ask(f"cache_id={cache['id']}"))[:2] == (400, "context_cache_unusable")
        site.now_s -= 1

        def look_up(*args: Any) -> Any:
            site.now_s += 1
            return get(*args)

        get = ContextCaches.get
        monkeypatch.setattr(ContextCaches, "get", look_up)
        assert not await is_hit(site, cache["id"], SYSTEM, QUESTION)

    play(scene, tmp_path)


@pytest.mark.parametrize("first", ["reset_ttl", "expiry"])
def test_reset_ttl_racing_expiry_revives_in_either_order(first: str, tmp_path: Path) -> None:
    """One request that resets and one that does not, in the second of expiry: only for the latter the order counts."""

    async def scene(site: Site) -> None:
        cache_id = (await site.create(ttl=60))["id"]
        site.now_s += 60
        resets, plain = f"cache_id={cache_id};reset_ttl=90", f"cache_id={cache_id}"
        asked = [resets, plain] if first == "reset_ttl" else [plain, resets]
        statuses = [answer.status for answer in await asyncio.gather(*map(site.ask, asked))]
        assert statuses == ([200, 200] if first == "reset_ttl" else [400, 200])
        cache = await site.cache(cache_id)
        assert (cache["status"], cache["expired_at"]) == ("pending", int(site.now_s) + 90)

    play(scene, tmp_path)


def test_reset_ttl_revives_an_expired_cache(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache_id = (await site.create(ttl=60))["id"]
        site.now_s += 1000
        assert (await site.cache(cache_id))["status"] == "inactive"
        answer = await site.ask(f"cache_id={cache_id};reset_ttl=30")
        assert (answer.status, answer.headers["msh-context-cache-token-ttl"]) == (200, "29")  # whole seconds, floored
        cache = await site.cache(cache_id)
        assert (cache["status"], cache["expired_at"]) == ("pending", int(site.now_s) + 30)

    play(scene, tmp_path)


# --- the message that names it ----------------------------------------------------------------------------------------


def test_a_cache_message_that_is_not_the_first_is_refused(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.create(tags=["t"])
        assert refusal(await site.chat(SYSTEM, CACHE)) == (400, "invalid_request", "messages[1].role")
        assert site.mesh.requests == []

    play(scene, tmp_path)


def test_a_second_cache_message_is_refused(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.create(tags=["t"])
        assert refusal(await site.chat(CACHE, CACHE, QUESTION)) == (400, "invalid_request", "messages[1].role")
        assert site.mesh.requests == []

    play(scene, tmp_path)


@pytest.mark.parametrize("tools", [[], [WEIGH]], ids=["none of them", "one"])
def test_a_cache_message_with_tools_is_refused(tools: list[Any], tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.create(tags=["t"])
        body = {"messages": [CACHE, QUESTION], "max_tokens": 2}
        refused = await site.call("POST", "/chat/completions", {**body, "tools": tools})
        assert refusal(refused) == (400, "invalid_request", "tools")
        assert (await site.call("POST", "/chat/completions", {**body, "tools": None})).status == 200

    play(scene, tmp_path)


def test_an_unknown_key_in_a_cache_message_is_refused(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.create(tags=["t"])
        for content in ("tag=t;ttl=60", "id=t", "tag=t;Reset_ttl=60", "tag=t; dry_run=1"):
            assert refusal(await site.ask(content)) == (400, "invalid_request", "messages[0].content")

    play(scene, tmp_path)


def test_a_trailing_semicolon_in_a_cache_message_is_refused(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.create(tags=["t"])
        for content in ("tag=t;", "tag=t;dry_run=1;"):
            assert refusal(await site.ask(content)) == (400, "invalid_request", "messages[0].content")
        assert (await site.ask("tag=t")).status == 200

    play(scene, tmp_path)


def test_a_dry_run_computes_and_changes_nothing(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache = await site.create()
        answer = await site.ask(f"cache_id={cache['id']};reset_ttl=60;dry_run=1")
        assert (answer.status, answer.json()["choices"], answer.json()["usage"]["total_tokens"]) == (200, [], 0)
        assert answer.headers["msh-context-cache-id"] == cache["id"]
        assert (await site.cache(cache["id"]), site.mesh.requests) == (cache, [])
        assert refusal(await site.ask("cache_id=none;dry_run=1"))[:2] == (404, "context_cache_not_found")
        site.now_s = cache["expired_at"]
        assert refusal(await site.ask(f"cache_id={cache['id']};dry_run=1"))[:2] == (400, "context_cache_unusable")

    play(scene, tmp_path)


# --- headers ----------------------------------------------------------------------------------------------------------


def test_response_headers_name_cache_saved_tokens_expiry_and_time_left(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache = await site.create(ttl=60)
        for answer in (
            await site.ask(f"cache_id={cache['id']}"),
            await site.chat(SYSTEM, QUESTION, x_msh_context_cache=cache["id"]),
        ):
            named = {name: value for name, value in answer.headers.items() if name.startswith("msh-context-cache")}
            assert named == {
                "msh-context-cache-id": cache["id"],
                "msh-context-cache-token-saved": str(SHARED),
                "msh-context-cache-token-exp": str(cache["expired_at"]),
                "msh-context-cache-token-ttl": "59",
            }

    play(scene, tmp_path)


@pytest.mark.parametrize(
    "message",
    [
        {**SYSTEM, "name": "x"},
        {**SYSTEM, "content": SYSTEM["content"] + " "},
        {**SYSTEM, "role": "user"},
        {**SYSTEM, "content": [{"type": "text", "text": SYSTEM["content"]}]},
    ],
    ids=["one more", "content", "role", "form"],
)
def test_a_prefix_that_differs_in_one_field_is_no_hit(message: dict[str, Any], tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache_id = (await site.create())["id"]
        assert not await is_hit(site, cache_id, message, QUESTION)
        assert await is_hit(site, cache_id, SYSTEM, QUESTION)

    play(scene, tmp_path)


def test_tools_in_another_order_are_no_hit(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache_id = (await site.create(tools=[WEIGH, BERTH]))["id"]
        for tools in ([BERTH, WEIGH], [WEIGH], []):
            assert not await is_hit(site, cache_id, SYSTEM, QUESTION, tools=tools)
        assert await is_hit(site, cache_id, SYSTEM, QUESTION, tools=[WEIGH, BERTH])

    play(scene, tmp_path)


# --- lifetimes --------------------------------------------------------------------------------------------------------


def test_a_ttl_of_0_says_nothing_and_means_an_hour(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        for fields in ({"ttl": 0}, {"ttl": 0, "expired_at": 0}, {}):
            cache = await site.create(**fields)
            assert cache["expired_at"] == cache["created_at"] + HOUR_S
        await site.ask(f"cache_id={cache['id']};reset_ttl=0")
        updated = (await site.call("PUT", f"/caching/{cache['id']}", {"ttl": 0})).json()
        assert updated["expired_at"] == cache["expired_at"]

    play(scene, tmp_path)


def test_a_negative_ttl_is_refused(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache = await site.create()
        path = f"/caching/{cache['id']}"
        assert refusal(await site.call("PUT", path, {"ttl": -1})) == (400, "invalid_request", "ttl")
        assert (await site.create(ttl=-1))["error"]["param"] == "ttl"
        assert refusal(await site.ask(f"cache_id={cache['id']};reset_ttl=-1")) == (400, "invalid_request", "reset_ttl")
        assert (await site.cache(cache["id"])) == cache

    play(scene, tmp_path)


def test_a_ttl_beyond_the_longest_is_refused(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        longest = int(site.now_s) + HOUR_S
        assert (await site.create(ttl=HOUR_S + 1))["error"]["param"] == "ttl"
        assert (await site.create(expired_at=longest + 1))["error"]["param"] == "expired_at"
        cache = await site.create(ttl=HOUR_S)
        assert cache["expired_at"] == longest
        answer = await site.ask(f"cache_id={cache['id']};reset_ttl={HOUR_S + 1}")
        assert refusal(answer) == (400, "invalid_request", "reset_ttl")

    play(scene, tmp_path)


def test_ttl_and_expired_at_together_are_refused(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        both = {"ttl": 60, "expired_at": int(site.now_s) + 60}
        assert (await site.create(**both))["error"]["param"] == "expired_at"
        cache = await site.create()
        refused = await site.call("PUT", f"/caching/{cache['id']}", both)
        assert refusal(refused) == (400, "invalid_request", "expired_at")
        assert (await site.call("GET", "/caching")).json()["data"] == [cache]

    play(scene, tmp_path)


# --- owners, tags and lists -------------------------------------------------------------------------------------------


def test_another_owner_s_cache_looks_like_one_that_never_was(tmp_path: Path) -> None:
    """Status, code and words are the same, whatever is asked; and the pool is not hinted at either."""

    async def scene(site: Site) -> None:
        theirs = (await site.create(tags=["t"]))["id"]
        missing = "cache-" + "0" * (len(theirs) - len("cache-"))

        async def about(cache_id: str, tag: str) -> list[bytes]:
            chat = {"messages": [{"role": "cache", "content": f"cache_id={cache_id};reset_ttl=9"}, QUESTION]}
            tagged = {"messages": [{"role": "cache", "content": f"tag={tag};dry_run=1"}]}
            answers = [
                await site.call_as_other("GET", f"/caching/{cache_id}"),
                await site.call_as_other("PUT", f"/caching/{cache_id}", {"ttl": 5}),
                await site.call_as_other("DELETE", f"/caching/{cache_id}"),
                await site.call_as_other("GET", f"/caching?after={cache_id}"),
                await site.call_as_other("POST", "/caching/refs/tags", {"tag": "mine", "cache_id": cache_id}),
                await site.call_as_other("GET", f"/caching/refs/tags/{tag}"),
                await site.call_as_other("GET", f"/caching/refs/tags/{tag}/content"),
                await site.call_as_other("POST", "/chat/completions", chat),
                await site.call_as_other("POST", "/chat/completions", tagged),
            ]
            assert {answer.status for answer in answers} == {404}
            return [
                answer.body.replace(cache_id.encode(), b"ID").replace(b"'" + tag.encode(), b"'TAG")
                for answer in answers
            ]

        assert await about(theirs, "t") == await about(missing, "u")
        assert (await site.call_as_other("GET", "/caching")).json()["data"] == []
        named = {"authorization": f"Bearer {site.other_key}", "x_msh_context_cache": theirs}
        served = await site.chat(SYSTEM, QUESTION, **named)
        assert (served.status, "msh-context-cache-id" in served.headers) == (200, False)

    play(scene, tmp_path)


def test_a_tag_that_is_pointed_elsewhere_during_a_request_counts_from_the_next_one(tmp_path: Path) -> None:
    released = asyncio.Event()

    async def script(request: TokenRequest) -> AsyncIterator[TokenEvent]:
        await released.wait()
        async for event in says("hi", cached=500)(request):
            yield event

    async def scene(site: Site) -> None:
        one, two = await site.create(tags=["t"]), await site.create(messages=[{**SYSTEM, "content": "Be brief."}])
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(site.ask("tag=t"))
            await site.mesh.until(lambda: len(site.mesh.open) == 1)
            await site.call("POST", "/caching/refs/tags", {"tag": "t", "cache_id": two["id"]})
            released.set()
        after = await site.ask("tag=t")
        assert running.result().headers["msh-context-cache-id"] == one["id"]
        assert after.headers["msh-context-cache-id"] == two["id"]
        first, second = (bytes(token for token in request.prompt if token < 256) for request in site.mesh.requests)
        assert SYSTEM["content"].encode() in first
        assert b"Be brief." in second

    play(scene, tmp_path, script=script)


def test_deleting_a_tag_twice_succeeds_twice(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache_id = (await site.create(tags=["t"]))["id"]
        answers = [await site.call("DELETE", "/caching/refs/tags/t") for _ in range(2)]
        deleted = {"deleted": True, "object": "cache_object.tag.deleted", "tag": "t"}
        assert [(answer.status, answer.json()) for answer in answers] == [(200, deleted)] * 2
        assert (await site.cache(cache_id))["id"] == cache_id

    play(scene, tmp_path)


def test_lists_go_on_behind_after_and_end_before_before(tmp_path: Path) -> None:
    """Both exclusive; caches and tags alike, newest first."""

    async def scene(site: Site) -> None:
        ids = []
        for number in range(5):
            site.now_s += 1
            ids.append((await site.create(tags=[f"t{number}"]))["id"])
        ids.reverse()

        async def listed(query: str) -> list[str]:
            return [cache["id"] for cache in (await site.call("GET", f"/caching?{query}")).json()["data"]]

        assert await listed(f"after={ids[1]}&limit=2") == ids[2:4]
        assert await listed(f"before={ids[3]}&limit=2") == ids[1:3]
        assert await listed(f"before={ids[0]}") == await listed(f"after={ids[4]}") == []
        tags = (await site.call("GET", "/caching/refs/tags?after=t3&limit=2")).json()["data"]
        assert [tag["tag"] for tag in tags] == ["t2", "t1"]

    play(scene, tmp_path)
