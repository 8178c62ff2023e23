"""The doors of a gateway that asks for API keys: who is let in, whose the request is, and when it is too much."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import structlog
from starlette.routing import Route

from mooncake_mesh.client import InvalidApiKey, MooncakeClient, Rejected
from mooncake_mesh.gateway import api_keys
from mooncake_mesh.gateway.doorkeeper import PUBLIC_PATHS, Doorkeeper
from mooncake_mesh.gateway.rate_limits import TenantLimits
from mooncake_mesh.gateway.sdk_door import SdkDoor
from mooncake_proto.client import Cancel, Models, ModelsQuery
from mooncake_proto.control import Failure
from mooncake_proto.envelope import Envelope
from mooncake_proto.ids import MessageId
from tests.unit.gateway_doubles import MODEL, Exchange, Gateway, fails, says
from tests.unit.mesh_doubles import RawPeer, serving

BODY = orjson.dumps({"model": MODEL, "prompt": "a secret plan", "max_tokens": 4})
COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as events:
        yield events


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / api_keys.FILE_NAME


def guarded(file: Path) -> Gateway:
    return Gateway(says("ok"), doorkeeper=Doorkeeper(file))


async def ask(gateway: Gateway, key: str, *, path: str = COMPLETIONS, body: bytes = BODY) -> Exchange:
    return await Exchange(gateway.app, path, body, authorization=f"Bearer {key}").run()


def test_nothing_but_health_answers_without_a_key(file: Path) -> None:
    """Field report P40: every route there is, and some that there are not (vllm-project/vllm#18892, #58144)."""
    api_keys.add(file, "app", "acme", None)
    gateway = guarded(file)
    paths = {route.path.replace("{name:path}", MODEL) for route in gateway.app.routes if isinstance(route, Route)}
    assert {COMPLETIONS, "/metrics", "/tokenize", "/health"} <= paths

    async def run() -> None:
        for path in sorted({*paths, "/", "/nothing", "/health/", "//health", "/health/x", "/docs", "/openapi.json"}):
            for method in ("GET", "POST", "PUT", "OPTIONS"):
                for headers in ({}, {"authorization": "Bearer mk-000000000000-" + "A" * 43}, {"x-api-key": "x"}):
                    answer = await Exchange(gateway.app, path, b"{}", method=method, **headers).run()
                    if path in PUBLIC_PATHS:
                        assert answer.status == (200 if method == "GET" else 405), (method, path)
                        continue
                    assert answer.status == 401, (method, path)
                    assert answer.json()["error"]["type"] == "authentication_error"
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert answer.headers["www-authenticate"] == "Bearer"

    asyncio.run(run())
    assert not gateway.mesh.requests


@pytest.mark.parametrize("scheme", ["", "Basic ", "Bearer"])
def test_a_right_key_in_the_wrong_place_is_none(file: Path, scheme: str) -> None:
    key = api_keys.add(file, "app", "acme", None)
    exchange = Exchange(guarded(file).app, COMPLETIONS, BODY, authorization=scheme + key)
    assert asyncio.run(exchange.run()).status == 401


def test_the_request_is_its_tenant_s(file: Path) -> None:
    keys = {tenant: api_keys.add(file, f"{tenant}-app", tenant, None) for tenant in ("acme", "umbrella")}
    gateway = guarded(file)

    async def run() -> None:
        for key in keys.values():
            assert (await ask(gateway, key)).status == 200

    asyncio.run(run())
    assert [request.tenant for request in gateway.mesh.requests] == ["acme", "umbrella"]


def test_too_many_requests_are_429_with_the_time_to_come_back(file: Path) -> None:
    key = api_keys.add(file, "app", "acme", TenantLimits(requests_per_minute=2))
    other = api_keys.add(file, "other", "acme", TenantLimits(requests_per_minute=2))
    free = api_keys.add(file, "free", "umbrella", None)
    gateway = guarded(file)

    async def run() -> None:
        assert (await ask(gateway, key)).status == 200
        assert (await ask(gateway, key, path="/tokenize")).status == 200
        refused = await ask(gateway, other)
        assert refused.status == 429
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-mooncake-reject-reason"] == "tenant_requests_per_minute"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await ask(gateway, free)).status == 200

    asyncio.run(run())


def test_too_many_tokens_are_429_after_they_were_generated(file: Path) -> None:
    key = api_keys.add(file, "app", "acme", TenantLimits(tokens_per_minute=len("a secret plan") + 2))
    gateway = guarded(file)

    async def run() -> None:
        assert (await ask(gateway, key)).status == 200
        refused = await ask(gateway, key)
        assert refused.status == 429
        assert refused.headers["x-mooncake-reject-reason"] == "tenant_tokens_per_minute"

    asyncio.run(run())
    assert len(gateway.mesh.requests) == 1


def test_a_prompt_that_the_mesh_refuses_costs_no_tokens(file: Path) -> None:
    key = api_keys.add(file, "app", "acme", TenantLimits(tokens_per_minute=len("a secret plan") + 2))
    gateway = guarded(file)

    async def run() -> None:
        gateway.mesh.script = fails(Rejected("no_room", unavailable=False, retry_after_s=1.0))
        for _ in range(3):
            assert (await ask(gateway, key)).headers["x-mooncake-reject-reason"] == "no_room"
        gateway.mesh.script = says("ok")
        assert (await ask(gateway, key)).status == 200

    asyncio.run(run())


def test_a_change_of_the_file_counts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    key = api_keys.add(file, "app", "acme", None)
    keeper = Doorkeeper(file)
    assert keeper.admit(key) == "acme"
    second = api_keys.add(file, "second", "umbrella", None)
    api_keys.revoke(file, "app")
    now_s = 1.5
    assert keeper.admit(second) == "umbrella"
    with pytest.raises(InvalidApiKey):
        keeper.admit(key)
    file.write_text("{")
    now_s = 3.0
    with pytest.raises(InvalidApiKey):
        keeper.admit(second)


def test_without_a_file_of_keys_everybody_is_let_in() -> None:
    assert Doorkeeper(None).admit("") == ""


def test_no_key_is_in_a_log(file: Path, logs: list[structlog.typing.EventDict]) -> None:
    key = api_keys.add(file, "app", "acme", None)
    gateway = guarded(file)

    async def run() -> None:
        await ask(gateway, key)
        await ask(gateway, key + "x")
        await ask(gateway, key[:-1] + ("A" if key[-1] != "A" else "B"))

    asyncio.run(run())
    assert [(line["id"], line["given"]) for line in logs if line["event"] == "api_key_refused"] == [
        ("", True),
        (key.split("-")[1], True),
    ]
    assert key.split("-", 2)[2][:20] not in repr(logs)
    assert key not in repr(logs)
    assert "secret plan" not in repr(logs)


# --- the door for SDK clients -----------------------------------------------------------------------------------------


def test_the_sdk_s_requests_need_a_key_too(file: Path) -> None:
    key = api_keys.add(file, "app", "acme", TenantLimits(requests_per_minute=1))
    keeper = Doorkeeper(file)
    gateway = Gateway(says("ok"), doorkeeper=keeper)

    async def run() -> None:
        door = SdkDoor(gateway.mesh, gateway.completions, keeper)
        async with serving(door.handlers()) as server:
            async with MooncakeClient(server.endpoint, api_key="") as stranger:
                assert (await stranger.health()).live
                with pytest.raises(InvalidApiKey, match="is needed"):
                    await stranger.models()
                with pytest.raises(InvalidApiKey):
                    await stranger.generate("x", model=MODEL)
            async with RawPeer(server.endpoint) as peer:
                for body in (Cancel(target="1"), Cancel(target="1", api_key="mk-"), ModelsQuery(api_key=key[:-1])):
                    await peer.send_message(body, Envelope(id=MessageId("1"), deadline_s=5.0))
                    _, answer = await peer.receive()
                    assert isinstance(answer, Failure)
                    assert answer.code == "invalid_api_key"
                await peer.send_message(ModelsQuery(api_key=key), Envelope(id=MessageId("1"), deadline_s=5.0))
                assert isinstance((await peer.receive())[1], Models)
            async with MooncakeClient(server.endpoint, api_key=key) as client:
                assert (await client.generate("x")).text == "ok"
                with pytest.raises(Rejected, match="tenant_requests_per_minute") as refused:
                    await client.generate("x")
                assert 50 < refused.value.retry_after_s <= 60

    asyncio.run(run())
    assert [request.tenant for request in gateway.mesh.requests] == ["acme"]


def test_the_sdk_takes_its_key_from_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = api_keys.add(file, "app", "acme", None)
    monkeypatch.setenv("MOONCAKE_API_KEY", key)
    keeper = Doorkeeper(file)
    gateway = Gateway(says("ok"), doorkeeper=keeper)

    async def run() -> None:
        door = SdkDoor(gateway.mesh, gateway.completions, keeper)
        async with serving(door.handlers()) as server, MooncakeClient(server.endpoint) as client:
            assert [model.id for model in await client.models()] == [MODEL]

    asyncio.run(run())
