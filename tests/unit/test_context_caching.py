"""Context caching behind the HTTP doors, over a scripted mesh: what creations and uses answer, cost and leave alone."""

from pathlib import Path
from typing import Any

import pytest

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.rate_limits import TenantLimits
from mooncake_mesh.gateway.tokenizer import ByteTokenizer
from mooncake_mesh.gateway.tools import ChatMessage, Tool
from tests.unit.caching_site import QUESTION, SHARED, SYSTEM, Site, play
from tests.unit.gateway_doubles import CONTEXT_TOKENS


def test_a_cache_is_as_long_as_what_all_its_prompts_share(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache = await site.create(metadata={"k": "v"}, tools=[])
        assert (cache["status"], cache["tokens"], cache["messages"]) == ("pending", SHARED, [SYSTEM])
        assert cache["expired_at"] - cache["created_at"] == 3600
        assert {"name", "description", "metadata", "tools", "model", "object", "id"} <= cache.keys()
        assert "error" not in cache

    play(scene, tmp_path)


def test_a_message_stands_for_the_cached_ones(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache = await site.create()
        plain = await site.chat(SYSTEM, QUESTION)
        by_message = await site.chat({"role": "cache", "content": f"cache_id={cache['id']}"}, QUESTION)
        one, other = site.mesh.requests
        assert one.prompt == other.prompt
        assert plain.json()["choices"] == by_message.json()["choices"]
        assert by_message.headers["msh-context-cache-token-saved"] == str(SHARED)  # 500 cached tokens are not all its

    play(scene, tmp_path)


def test_tokens_are_told_beforehand(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        answer = await site.call("POST", "/tokenizers/estimate-token-count", {"messages": [SYSTEM]})
        assert answer.json() == {"data": {"total_tokens": SHARED + len("assistant\n")}}

    play(scene, tmp_path)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"ttl": 60, "expired_at": 4_000_000_000}, "invalid_request", "expired_at"),
        ({"ttl": 3601}, "invalid_request", "ttl"),
        ({"ttl": -1}, "invalid_request", "ttl"),
        ({"model": "moonshot-v1-8k"}, "model_not_found", "model"),
        ({"messages": [{**SYSTEM, "content": "x" * CONTEXT_TOKENS}]}, "context_length_exceeded", "messages"),
    ],
)
def test_creations_that_fail(fields: dict[str, Any], code: str, param: str, tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        refused = await site.create(**fields)
        assert (refused["error"]["code"], refused["error"]["param"]) == (code, param)
        assert (await site.call("GET", "/caching")).json() == {"object": "list", "data": []}

    play(scene, tmp_path)


def test_headers_that_are_no_hit_change_nothing(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache = await site.create()
        for messages, cache_id in (([SYSTEM, QUESTION], "cache-none"), ([QUESTION], cache["id"])):
            answer = await site.chat(*messages, x_msh_context_cache=cache_id, x_msh_context_cache_reset_ttl="7")
            assert (answer.status, "msh-context-cache-id" in answer.headers) == (200, False)
        assert (await site.call("GET", f"/caching/{cache['id']}")).json() == cache
        hit = await site.chat(SYSTEM, QUESTION, x_msh_context_cache=cache["id"])
        assert hit.headers["msh-context-cache-id"] == cache["id"]

    play(scene, tmp_path)


def test_every_call_is_one_of_the_tenant_s_requests(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        cache = await site.create()
        reference = f"cache_id={cache['id']}"
        statuses = [
            (await site.chat({"role": "cache", "content": f"{reference};dry_run=1"})).status,
            (await site.chat({"role": "cache", "content": "tag=none"})).status,
            (await site.call("GET", "/caching")).status,
            (await site.chat({"role": "cache", "content": reference}, QUESTION)).status,
            (await site.chat({"role": "cache", "content": "tag=none"})).status,
        ]
        assert statuses == [200, 404, 200, 200, 429]
        assert len(site.mesh.requests) == 1

    play(scene, tmp_path, TenantLimits(requests_per_minute=5))


def test_a_creation_is_charged_its_tokens(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.create()
        refused = await site.create()
        assert refused["error"]["type"] == "rate_limit_error"

    play(scene, tmp_path, TenantLimits(tokens_per_minute=SHARED + 1))


def test_a_template_that_refuses_some_prompts_is_asked_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some want the user to have the last word."""
    encode = ByteTokenizer.encode_chat

    def strict(
        self: ByteTokenizer, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...], scope: str | None
    ) -> list[int]:
        if messages[-1].role != "user":
            raise InvalidRequest("the user speaks last", param="messages")
        return encode(self, messages, tools, scope)

    async def scene(site: Site) -> None:
        assert (await site.create())["tokens"] == SHARED + len("user\n")

    monkeypatch.setattr(ByteTokenizer, "encode_chat", strict)
    play(scene, tmp_path)
