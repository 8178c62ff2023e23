"""Context caches on a mesh of fake engines: from creation to use, through full pools and deaths, between tenants."""

import http.client
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import zmq

from mooncake_mesh.client import SyncMooncakeClient
from mooncake_mesh.gateway import api_keys
from mooncake_mesh.mesh import key_folder
from tests.mesh import clients
from tests.mesh.harness import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(180)]

MODEL: Final = "fake"
BLOCK_TOKENS: Final = 16
POOL_TOKENS: Final = 8192
SYSTEM: Final = {"role": "system", "content": "You know the harbour by heart. " * 100}
QUESTION: Final = {"role": "user", "content": "Which ship is the smallest?"}
_NUMBERS: Final = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant's view of the mesh."""

    mesh: Mesh
    key: str

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> clients.Answer:
        data = None if body is None else json.dumps(body).encode()
        every = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        return clients.request(self.mesh.http, method, f"/v1{path}", data, {**every, **(headers or {})})

    def done(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.call(method, path, body)
        assert answer.status == 200, answer.body
        return answer.json()

    def create(self, content: str, **fields: Any) -> Any:
        system = {"role": "system", "content": content}
        return self.done("POST", "/caching", {"model": MODEL, "messages": [system], **fields})

    def wait_status(self, cache_id: str, status: str) -> Any:
        def look() -> Any:
            cache = self.done("GET", f"/caching/{cache_id}")
            return cache if cache["status"] == status else None

        return self.mesh.wait(
            look, timeout_s=30, what=f"the cache to be {status}", tell=lambda: self.done("GET", f"/caching/{cache_id}")
        )

    def chat(self, messages: list[Any], headers: Mapping[str, str] | None = None, **fields: Any) -> clients.Answer:
        """Asked again where an arena this small looks full to the conductor, which it may until the next beat."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}

        def answered() -> clients.Answer | None:
            answer = self.call("POST", "/chat/completions", body, headers)
            return None if answer.status == 429 else answer

        return self.mesh.wait(answered, what="room for another prompt")

    def ask(self, reference: str, **fields: Any) -> clients.Answer:
        return self.chat([{"role": "cache", "content": reference}, QUESTION], **fields)


def cached(answer: clients.Answer) -> int:
    assert answer.status == 200, answer.body
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def fill(tenant: Tenant, n_tokens: int) -> None:
    """Prompts of more than *n_tokens* together that have nothing in common, nor with those of another call.

    Each is short enough that two of them have room beside the cache: a pin yields to what running requests need.
    """
    text = "and another ship " * 60
    for _ in range(-(-n_tokens // len(text))):
        answer = tenant.chat([{"role": "user", "content": f"{next(_NUMBERS)} {text}"}])
        assert answer.status == 200, answer.body


def code(answer: clients.Answer) -> tuple[int, str]:
    return answer.status, str(answer.json()["error"]["code"])


@pytest.fixture(autouse=True, scope="module")
def _no_socket_is_left() -> Iterator[None]:
    """ZeroMQ's context ends only when every socket is closed, and takes its threads' descriptors with it."""
    yield
    zmq.Context.instance().term()


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tenant, Tenant]]:
    folder = tmp_path_factory.mktemp("caching")
    keys = key_folder.create(folder / "mesh", "node0")
    file = keys.folder / api_keys.FILE_NAME
    acme, other = (api_keys.add(file, f"{name}-app", name, None) for name in ("acme", "other"))
    flags = {"gateway": [f"--keys={keys.folder}", f"--cache-db={folder / 'caches.sqlite'}"]}
    flags["decode"] = ["--fake-decode-s-base=0.01"]
    flags["messenger1"] = ["--arena-bytes=16MiB"]  # the small pool is that of the prefill instance
    with Mesh(flags=flags, arena_bytes="1MiB") as mesh:
        yield Tenant(mesh=mesh, key=acme), Tenant(mesh=mesh, key=other)


@pytest.fixture(scope="module")
def acme(tenants: tuple[Tenant, Tenant]) -> Tenant:
    return tenants[0]


@pytest.fixture(scope="module")
def cache(acme: Tenant) -> Any:
    """The system prompt as a cache that is ready."""
    created = acme.create(SYSTEM["content"], name="harbour", tags=["harbour-1"])
    assert (created["object"], created["status"]) == ("context-cache", "pending")
    return acme.wait_status(created["id"], "ready")


def test_a_chat_finds_the_cached_tokens(acme: Tenant, cache: Any) -> None:
    answer = acme.ask(f"cache_id={cache['id']}")
    whole = cache["tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached(answer) == whole >= 3000
    assert answer.headers["msh-context-cache-id"] == cache["id"]
    assert int(answer.headers["msh-context-cache-token-saved"]) == whole
    assert int(answer.headers["msh-context-cache-token-exp"]) == cache["expired_at"]
    assert 0 < int(answer.headers["msh-context-cache-token-ttl"]) <= 3600
    plain = acme.chat([SYSTEM, QUESTION])
    assert plain.json()["choices"] == answer.json()["choices"]
    assert "msh-context-cache-id" not in plain.headers


def test_a_stream_says_it_too(acme: Tenant, cache: Any) -> None:
    answer = acme.ask("tag=harbour-1", stream=True, stream_options={"include_usage": True})
    saved = int(answer.headers["msh-context-cache-token-saved"])
    assert saved >= 3000
    events = [json.loads(line[6:]) for line in answer.body.split(b"\n\n") if line.startswith(b"data: {")]
    assert saved == min(cache["tokens"], events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_by_headers(acme: Tenant, cache: Any) -> None:
    use = {"X-Msh-Context-Cache": cache["id"], "X-Msh-Context-Cache-Reset-TTL": "1800"}
    hit = acme.chat([SYSTEM, QUESTION], use)
    assert (hit.headers["msh-context-cache-id"], cached(hit) >= 3000) == (cache["id"], True)
    assert abs(int(hit.headers["msh-context-cache-token-ttl"]) - 1800) <= 5
    for messages in ([{**SYSTEM, "name": "x"}, QUESTION], [QUESTION]):
        miss = acme.chat(messages, use)
        assert miss.status == 200
        assert "msh-context-cache-id" not in miss.headers
    dry = acme.chat([QUESTION], {"X-Msh-Context-Cache": cache["id"], "X-Msh-Context-Cache-DryRun": "1"})
    assert code(dry) == (400, "context_cache_unusable")


def test_a_dry_run_computes_nothing(acme: Tenant, cache: Any) -> None:
    answer = acme.ask(f"cache_id={cache['id']};dry_run=1")
    assert (answer.status, answer.json()["choices"], answer.json()["usage"]["total_tokens"]) == (200, [], 0)
    assert answer.headers["msh-context-cache-id"] == cache["id"]
    assert code(acme.ask("cache_id=cache-none;dry_run=1")) == (404, "context_cache_not_found")


def test_over_zeromq(acme: Tenant, cache: Any) -> None:
    with SyncMooncakeClient(acme.mesh.sdk, api_key=acme.key) as client:
        found = client.caching.tags.content("harbour-1")
        assert found == client.caching.get(cache["id"])
        assert (found.id, found.tokens, found.status) == (cache["id"], cache["tokens"], "ready")
        assert client.chat([found.message(), QUESTION], model=MODEL, max_tokens=4).usage.cached_tokens >= 3000
        made = client.caching.create([{"role": "system", "content": "An inland harbour. " * 40}], ttl=60)
        (listed,) = client.caching.list(limit=1)
        assert (listed.id, listed.tokens) == (made.id, made.tokens)  # it may be ready by now
        client.caching.delete(made.id)
    assert acme.call("GET", f"/caching/{made.id}").status == 404


def test_of_another_tenant_there_is_nothing(tenants: tuple[Tenant, Tenant], cache: Any) -> None:
    acme, other = tenants
    path = f"/caching/{cache['id']}"
    for answer in (
        other.call("GET", path),
        other.call("PUT", path, {"ttl": 60}),
        other.call("DELETE", path),
        other.ask(f"cache_id={cache['id']}"),
        other.ask("tag=harbour-1"),
        other.call("GET", "/caching/refs/tags/harbour-1/content"),
        other.call("POST", "/caching/refs/tags", {"tag": "mine", "cache_id": cache["id"]}),
    ):
        assert code(answer) == (404, "context_cache_not_found")
    assert other.done("GET", "/caching")["data"] == []
    miss = other.chat([SYSTEM, QUESTION], {"X-Msh-Context-Cache": cache["id"]})
    assert (cached(miss), "msh-context-cache-id" in miss.headers) == (0, False)
    other.done("DELETE", "/caching/refs/tags/harbour-1")
    assert acme.done("GET", "/caching/refs/tags/harbour-1")["cache_id"] == cache["id"]


def test_it_survives_a_full_pool(acme: Tenant, cache: Any) -> None:
    fill(acme, 2 * POOL_TOKENS)
    assert cached(acme.ask("tag=harbour-1")) >= 3000


def test_a_gateway_that_dies_has_kept_it(acme: Tenant, cache: Any) -> None:
    acme.mesh.kill("gateway0")
    acme.mesh.start("gateway0")
    acme.mesh.wait_healthy()
    assert acme.done("GET", f"/caching/{cache['id']}")["status"] == "ready"
    assert cached(acme.ask(f"cache_id={cache['id']}")) >= 3000


def test_what_the_messengers_lost_is_computed_again(acme: Tenant, cache: Any) -> None:
    fallen = _times_pending(acme.mesh, cache["id"])
    for name in ("messenger0", "messenger1"):  # decode instances have the prefix on their node too
        acme.mesh.kill(name)
    for name in ("messenger0", "messenger1"):
        acme.mesh.start(name)
    acme.mesh.wait_healthy()
    acme.mesh.wait(lambda: _times_pending(acme.mesh, cache["id"]) > fallen or None, what="the loss to be noticed")
    acme.wait_status(cache["id"], "ready")
    assert cached(acme.ask(f"cache_id={cache['id']}")) >= 3000


def _times_pending(mesh: Mesh, cache_id: str) -> int:
    """How often the gateway, in this life, has begun to compute a cache."""
    told = [event for event in mesh.logs("gateway0") if event["event"] == "context_cache"]
    return sum((event["cache_id"], event["status"]) == (cache_id, "pending") for event in told)


@pytest.mark.parametrize("tier", ["arena alone", "SSD below it"])
def test_a_system_prompt_of_3000_tokens_survives_a_full_pool_and_kills(tier: str, tmp_path: Path) -> None:
    """Whatever happens, the next request finds every whole block of it: at once, or when the cache is ready again."""
    flags = {"gateway": [f"--cache-db={tmp_path / 'caches.sqlite'}"]}
    flags["prefill"] = ["--fake-prefill-s-per-token=0.00005"]  # copying is quicker
    if tier == "SSD below it":
        flags |= {f"messenger{n}": [f"--ssd-dir={tmp_path / f'node{n}'}", "--ssd-bytes=8MiB"] for n in (0, 1)}
    with Mesh(flags=flags, arena_bytes="1MiB") as mesh:
        anybody = Tenant(mesh=mesh, key="")
        cache = anybody.create(SYSTEM["content"], tags=["harbour"])
        whole = int(cache["tokens"]) // BLOCK_TOKENS * BLOCK_TOKENS
        assert whole >= 3000

        def found() -> int:
            answer = anybody.ask("tag=harbour")
            return min(cached(answer), int(answer.headers["msh-context-cache-token-saved"]), whole)

        anybody.wait_status(cache["id"], "ready")
        assert found() == whole
        fill(anybody, 3 * POOL_TOKENS)
        assert found() == whole
        mesh.kill("gateway0")
        mesh.start("gateway0")
        mesh.wait_healthy()
        assert found() == whole
        mesh.kill("messenger0")
        mesh.start("messenger0")
        mesh.wait_healthy()
        assert found() == whole  # copied from the other node
        for name in ("messenger0", "messenger1", "gateway0"):
            mesh.kill(name)
        for name in ("messenger0", "messenger1", "gateway0"):
            mesh.start(name)
        mesh.wait_healthy()
        mesh.wait_log("gateway0", "context_cache", cache_id=cache["id"], status="ready", timeout_s=30)
        fill(anybody, 3 * POOL_TOKENS)
        assert found() == whole


def test_what_killed_messengers_had_pinned_comes_back_from_ssd(tmp_path: Path) -> None:
    """It was saved when it was pinned: nothing of it is computed again."""
    flags = {"gateway": [f"--cache-db={tmp_path / 'caches.sqlite'}"]}
    flags["prefill"] = ["--fake-prefill-s-per-token=0.0005"]  # reading is quicker
    flags["messenger0"] = [f"--ssd-dir={tmp_path / 'node0'}", "--ssd-bytes=8MiB"]
    with Mesh(flags=flags, arena_bytes="1MiB") as mesh:
        anybody = Tenant(mesh=mesh, key="")
        cache = anybody.create(SYSTEM["content"])
        n_blocks = cache["tokens"] // BLOCK_TOKENS
        anybody.wait_status(cache["id"], "ready")

        def on_ssd() -> int:
            return next(
                m.load.ssd_blocks for m in mesh.status().cluster.members if m.member.instance_id == "messenger0"
            )

        mesh.wait(lambda: on_ssd() >= n_blocks or None, what="the cache to be saved")
        for name in ("gateway0", "messenger0", "messenger1"):
            mesh.kill(name)
        for name in ("messenger0", "messenger1"):
            mesh.start(name)
        mesh.wait_log("messenger0", "ssd_adopted")
        mesh.wait(
            lambda: mesh.status().indexed_blocks.get("node0", 0) >= n_blocks or None, what="its blocks to be known"
        )
        mesh.start("gateway0")
        mesh.wait_log("gateway0", "context_cache", cache_id=cache["id"], status="ready", timeout_s=30)
        fills = [event for event in mesh.logs("conductor") if event["event"] == "request_placed"]
        assert fills[-1]["job_id"].startswith(cache["id"])
        assert fills[-1]["prefix_blocks"] == n_blocks
        answer = anybody.ask(f"cache_id={cache['id']}")
        assert cached(answer) == n_blocks * BLOCK_TOKENS


def test_a_pending_one_is_answered_at_full_price(acme: Tenant) -> None:
    created = acme.create("A new harbour. " * 40)
    answer = acme.ask(f"cache_id={created['id']}")
    assert answer.status == 200
    assert answer.headers["msh-context-cache-id"] == created["id"]


def test_a_tag_moves(acme: Tenant) -> None:
    ids = [acme.create(f"{name} " * 100)["id"] for name in ("one", "two")]
    used = []
    for cache_id in ids:
        acme.done("POST", "/caching/refs/tags", {"tag": "moving", "cache_id": cache_id})
        used.append(acme.ask("tag=moving").headers["msh-context-cache-id"])
    assert used == ids
    assert acme.done("GET", "/caching/refs/tags/moving/content")["id"] == ids[1]
    for _ in range(2):
        assert acme.done("DELETE", "/caching/refs/tags/moving")["deleted"]
    assert code(acme.ask("tag=moving")) == (404, "context_cache_not_found")


def test_it_expires_and_comes_back(acme: Tenant) -> None:
    cache_id = acme.create("soon gone " * 50, ttl=1)["id"]
    acme.wait_status(cache_id, "inactive")
    assert code(acme.ask(f"cache_id={cache_id}")) == (400, "context_cache_unusable")
    answer = acme.ask(f"cache_id={cache_id};reset_ttl=600")
    assert (answer.status, int(answer.headers["msh-context-cache-token-ttl"]) > 590) == (200, True)
    acme.wait_status(cache_id, "ready")


def test_deleted_while_in_use_the_running_request_finishes(acme: Tenant) -> None:
    cache_id = acme.create("to be deleted " * 50)["id"]
    messages = [{"role": "cache", "content": f"cache_id={cache_id}"}, QUESTION]
    body = {"model": MODEL, "messages": messages, "max_tokens": 60, "temperature": 0, "stream": True}
    with closing(http.client.HTTPConnection(acme.mesh.http.removeprefix("http://"), timeout=30)) as connection:
        headers = {"authorization": f"Bearer {acme.key}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()  # its first token is there, the others take a while
        deleted = acme.done("DELETE", f"/caching/{cache_id}")
        rest = response.read()
    assert (response.status, rest[-16:], b'"length"' in rest) == (200, b"\n\ndata: [DONE]\n\n", True)
    assert deleted == {"deleted": True, "id": cache_id, "object": "context_cache_object.deleted"}
    for answer in (acme.call("DELETE", f"/caching/{cache_id}"), acme.ask(f"cache_id={cache_id}")):
        assert code(answer) == (404, "context_cache_not_found")


def test_a_cache_larger_than_the_pool_fails(acme: Tenant) -> None:
    cache_id = acme.create("x" * (POOL_TOKENS + 100))["id"]
    failed = acme.wait_status(cache_id, "error")
    assert failed["error"]["type"] == "rejected"
    assert "pool_too_small" in failed["error"]["message"]
    assert code(acme.ask(f"cache_id={cache_id};reset_ttl=60")) == (400, "context_cache_unusable")


def test_a_fuller_list_is_read_page_by_page(acme: Tenant) -> None:
    ids = [cache["id"] for cache in acme.done("GET", "/caching?limit=100")["data"]]
    assert len(ids) == len(set(ids)) > 3
    first = [cache["id"] for cache in acme.done("GET", "/caching?limit=2")["data"]]
    rest = [cache["id"] for cache in acme.done("GET", f"/caching?limit=100&after={first[-1]}")["data"]]
    assert [*first, *rest] == ids
    oldest = [cache["id"] for cache in acme.done("GET", "/caching?limit=1&order=asc")["data"]]
    assert oldest == ids[-1:]
