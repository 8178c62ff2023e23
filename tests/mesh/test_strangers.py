"""Who has no key gets nothing out of a live mesh: over HTTP, over every ZeroMQ socket, over the transport.

One mesh whose every socket is TCP and has keys, with strangers of all kinds around it; and ``mooncake up``, seen from
outside.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import zmq

from mooncake_mesh.client import InvalidApiKey, KeyRefused, SyncMooncakeClient
from mooncake_mesh.gateway import api_keys
from mooncake_mesh.gateway.rate_limits import TenantLimits
from mooncake_mesh.mesh import key_folder
from mooncake_mesh.mesh.curve import Audience, MeshKeys, secure_connected
from mooncake_mesh.messenger.transports import link_auth
from mooncake_mesh.messenger.transports.frames import Hello, Kind
from mooncake_proto import codec
from mooncake_proto.control import Ping, Pong
from mooncake_proto.envelope import Envelope
from mooncake_proto.ids import MessageId
from tests.mesh import clients
from tests.mesh.harness import Mesh
from tests.mesh.ports import held_port

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]

_SILENCE_S: Final = 1.5
"""Longer than a member waits for anything here: an answer takes milliseconds, cluster states come every second."""
_ROLES: Final = ("conductor", "gateway", "messenger", "prefill", "decode")
PROMPT: Final = "All animals are equal, but some animals are more equal than others, says the barn. " * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Everybody's keys: ``api`` by tenant."""

    mesh: MeshKeys
    client: MeshKeys
    api: Mapping[str, str]


class KeyedMesh(Mesh):
    """A mesh that meets over TCP, with keys."""

    def __init__(self, keys: MeshKeys, **options: Any) -> None:
        self.keys = keys
        self._addresses: dict[str, str] = {}
        super().__init__(**options)

    @property
    def sockets(self) -> dict[str, str]:
        """Every ZeroMQ address there is, by name."""
        return dict(self._addresses)

    def restart_gateway(self, *flags: str) -> None:
        self.terminate("gateway0")
        assert self.exit_code("gateway0") == 0
        self._children["gateway0"].flags.extend(flags)
        self.start("gateway0")
        self.wait_healthy()

    def _ipc(self, name: str) -> str:
        if name not in self._addresses:
            holder = held_port()
            self._held_ports.append(holder)
            self._addresses[name] = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        return self._addresses[name]


@pytest.fixture(autouse=True, scope="module")
def _no_socket_is_left() -> Iterator[None]:
    """ZeroMQ's context ends only when every socket is closed, and takes its threads' descriptors with it."""
    yield
    zmq.Context.instance().term()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    mesh = key_folder.create(folder / "mesh", "node0")
    file = folder / "mesh" / api_keys.FILE_NAME
    api = {tenant: api_keys.add(file, f"{tenant}-app", tenant, None) for tenant in ("acme", "umbrella")}
    api["limited"] = api_keys.add(file, "limited-app", "limited", TenantLimits(requests_per_minute=1))
    return Keys(mesh=mesh, client=key_folder.issue(mesh.folder, "app", Audience.CLIENTS, folder / "app"), api=api)


@pytest.fixture(scope="module")
def mesh(keys: Keys) -> Iterator[KeyedMesh]:
    flags = {role: [f"--keys={keys.mesh.folder}"] for role in _ROLES}
    flags["messenger"].append("--transport=tcp")
    with KeyedMesh(keys.mesh, flags=flags) as mesh:
        yield mesh


def complete(mesh: Mesh, key: str, prompt: str = PROMPT, **fields: Any) -> clients.Answer:
    body = json.dumps(clients.completion_fields(prompt, 8, **fields)).encode()
    return clients.request(mesh.http, "POST", "/v1/completions", body, {"authorization": f"Bearer {key}"})


def cached_tokens(answer: clients.Answer) -> int:
    assert answer.status == 200, answer.body
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


# --- ZeroMQ -----------------------------------------------------------------------------------------------------------


def _listen_in(
    stack: ExitStack, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: MeshKeys | None
) -> "list[zmq.Socket[bytes]]":
    """A DEALER that asks, and a SUB that listens."""
    plugs = []
    for kind in (zmq.DEALER, zmq.SUB):
        plug = stack.enter_context(context.socket(kind))
        plug.linger = 0
        secure_connected(plug, endpoint, keys)
        plug.connect(endpoint)
        plugs.append(plug)
    with suppress(zmq.Again):  # refused before it could ask: a send that waits would wait for ever
        ping = codec.encode(Ping(), Envelope(id=MessageId("1"), deadline_s=5.0))
        plugs[0].send_multipart(ping, flags=zmq.DONTWAIT)
    plugs[1].subscribe(b"")
    return plugs


def test_strangers_hear_nothing_from_any_zeromq_socket(mesh: KeyedMesh, keys: Keys, tmp_path: Path) -> None:
    """Field report P39: no socket off loopback that is open to whoever finds it (vllm-project/vllm#17192)."""
    other = key_folder.create(tmp_path / "other", "stranger")
    strangers = {
        "no key": None,
        "a key that nobody allowed": replace(keys.mesh, own=other.own),
        "the keys of another mesh": other,
        "an SDK client": keys.client,
    }
    asked = {}
    with zmq.Context() as context, ExitStack() as stack:
        for (who, theirs), (name, endpoint) in itertools.product(strangers.items(), mesh.sockets.items()):
            if (who, name) != ("an SDK client", "sdk"):
                asked[who, name] = _listen_in(stack, context, endpoint, theirs)
        assert len(asked) == 4 * len(mesh.sockets) - 1
        assert {"conductor", "cluster", "messenger0", "messenger1", "prefill0", "decode0", "sdk", "tokens"} == set(
            mesh.sockets
        )
        deadline_s = time.monotonic() + _SILENCE_S
        while time.monotonic() < deadline_s:
            answered = [place for place, plugs in asked.items() if any(plug.poll(0) for plug in plugs)]
            assert not answered
            time.sleep(0.05)
        members = {name: _listen_in(stack, context, endpoint, keys.mesh) for name, endpoint in mesh.sockets.items()}
        for name, (dealer, listener) in members.items():
            assert (listener if name == "cluster" else dealer).poll(20_000), f"a member hears nothing from {name}"
    line = mesh.wait_log("conductor", "key_refused", key=other.own.public.decode())
    assert line["address"] == "127.0.0.1"
    assert mesh.find_log("conductor", "handshake_refused") is not None


def test_a_member_is_answered(mesh: KeyedMesh, keys: Keys) -> None:
    assert clients.ask(mesh.endpoint("messenger0"), Ping(), Pong, keys=keys.mesh).instance_id == "messenger0"


def test_the_sdk_needs_both_a_key_of_the_mesh_and_an_api_key(mesh: KeyedMesh, keys: Keys) -> None:
    right = keys.api["acme"]
    with SyncMooncakeClient(mesh.sdk, keys=keys.client.folder, api_key=right) as client:
        assert client.generate(PROMPT, max_tokens=8, temperature=0).text == clients.expected_text(PROMPT, 8)
    with SyncMooncakeClient(mesh.sdk, keys=keys.client.folder, api_key=right[:-1]) as client:
        assert client.health().live
        with pytest.raises(InvalidApiKey):
            client.generate(PROMPT, max_tokens=8)
    with SyncMooncakeClient(mesh.sdk, api_key=right) as client, pytest.raises(KeyRefused, match="uses keys"):
        client.health()


# --- HTTP -------------------------------------------------------------------------------------------------------------


def test_without_an_api_key_only_health_answers(mesh: KeyedMesh, keys: Keys) -> None:
    body = json.dumps(clients.completion_fields(PROMPT, 8)).encode()
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/fake", "/tokenize", "/detokenize")
    others = ("/metrics", "/version", "/page/state", "/docs", "/openapi.json", "/health/", "/v1/../health", "//health")
    for path in (*paths, *others):
        for headers in ({}, {"authorization": f"Bearer {keys.api['acme'][:-1]}"}, {"authorization": "Basic Og=="}):
            for method in ("GET", "POST"):
                answer = clients.request(mesh.http, method, path, body, headers)
                assert answer.status == 401, (method, path, answer.body)
                assert answer.json()["error"]["code"] == "invalid_api_key"
    assert [clients.get(mesh.http, path).status for path in ("/health", "/ping", "/ready")] == [200, 200, 200]


def test_a_tenant_that_asks_too_much_is_told_when_to_come_back(mesh: KeyedMesh, keys: Keys) -> None:
    assert complete(mesh, keys.api["limited"]).status == 200
    refused = complete(mesh, keys.api["limited"])
    assert refused.status == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["type"] == "rate_limit_error"


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_two_tenants_share_no_block_unless_it_is_configured(mesh: KeyedMesh, keys: Keys) -> None:
    """Field report P18: both assertions, for the same prompt (llm-d/llm-d-router#1389)."""
    prompt = "Four legs good, two legs bad. " * 8
    assert cached_tokens(complete(mesh, keys.api["acme"], prompt)) == 0
    assert cached_tokens(complete(mesh, keys.api["acme"], prompt)) > 100
    assert cached_tokens(complete(mesh, keys.api["umbrella"], prompt)) == 0
    assert cached_tokens(complete(mesh, keys.api["umbrella"], prompt)) > 100
    assert cached_tokens(complete(mesh, keys.api["acme"], prompt, cache_salt="another")) == 0

    mesh.restart_gateway("--share-cache-across-tenants")
    shared = "The creatures outside looked from pig to man. " * 6
    assert cached_tokens(complete(mesh, keys.api["acme"], shared)) == 0
    assert cached_tokens(complete(mesh, keys.api["umbrella"], shared)) > 100


# --- the transport ----------------------------------------------------------------------------------------------------


def _read_to_end(connection: socket.socket) -> bytes:
    data = b""
    try:
        while part := connection.recv(4096):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_strangers_get_nothing_out_of_the_transport_and_nothing_in(mesh: KeyedMesh, keys: Keys) -> None:
    assert complete(mesh, keys.api["acme"], "over TCP " * 20).status == 200
    assert mesh.wait_log("prefill0", "prefill_sent")["transport"] == "tcp"
    port = int(mesh.wait_log("messenger1", "arena_cut")["data_port"])
    hello = Hello(kind=Kind.CONTROL, sender=b"s" * 16, epoch=1, lane=0, n_lanes=1)
    for guess in (b"GET / HTTP/1.1\r\n\r\n" * 8, hello.pack() + bytes(64), bytes(4096), None):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            challenge = stranger.recv(link_auth.CHALLENGE_BYTES)
            stranger.sendall(link_auth.answer(bytes(32), challenge, hello).said if guess is None else guess)
            assert _read_to_end(stranger) == b""
    assert mesh.find_log("messenger1", "stranger_dismissed") is not None
    assert complete(mesh, keys.api["acme"], "still over TCP " * 20).status == 200


def test_members_that_start_again_are_let_in_again(mesh: KeyedMesh, keys: Keys) -> None:
    """The decode node's messenger has another secret then, and its workers and peers other connections."""
    for name in ("messenger1", "decode0"):
        mesh.kill(name)
    for name in ("messenger1", "decode0"):
        mesh.start(name)
    mesh.wait_healthy()
    prompt = "once more over TCP " * 20
    answer = complete(mesh, keys.api["acme"], prompt)
    assert answer.status == 200
    assert answer.json()["choices"][0]["text"] == clients.expected_text(prompt, 8)


# --- what it says -----------------------------------------------------------------------------------------------------


def test_no_log_holds_a_prompt_an_answer_or_a_key(mesh: KeyedMesh, keys: Keys) -> None:
    """Runs last, over the logs of all that the tests above did."""
    answer = complete(mesh, keys.api["acme"])
    text = "".join(path.read_text(errors="replace") for path in mesh.folder.glob("*.log"))
    assert "api_keys_required" in text
    assert keys.mesh.server is not None
    secrets = [*keys.api.values(), keys.mesh.own.secret.decode(), keys.mesh.server.secret.decode()]
    for secret in (*secrets, "animals are", "legs good", answer.json()["choices"][0]["text"]):
        assert secret not in text


# --- mooncake up ------------------------------------------------------------------------------------------------------


def _listening(pid: int) -> set[tuple[str, int]]:
    """Where a process and its children take TCP connections."""
    process = psutil.Process(pid)
    return {
        (connection.laddr.ip, connection.laddr.port)
        for member in (process, *process.children(recursive=True))
        for connection in member.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_a_port_scan_of_mooncake_up_finds_loopback_only(keys: Keys) -> None:
    command = [
        sys.executable,
        "-m",
        "mooncake_mesh",
        "up",
        "--engine=fake",
        "--nodes=2",
        "--port=0",
        "--arena-bytes=16MiB",
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")}
    with subprocess.Popen(
        [*command, f"--keys={keys.mesh.folder}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
    ) as up:
        try:
            assert up.stdout is not None
            ready = up.stdout.readline().decode().split()
            base = ready[1]
            found = _listening(up.pid)
            assert int(base.rsplit(":", 1)[1]) in {port for _, port in found}
            assert len(found) == 3, f"HTTP and the transports of two nodes, not {found}"
            assert {host for host, _ in found} == {"127.0.0.1"}
            assert clients.get(base, "/v1/models").status == 401
            models = clients.request(base, "GET", "/v1/models", headers={"authorization": f"Bearer {keys.api['acme']}"})
            assert models.json()["data"][0]["id"] == ready[2].removeprefix("model=")
        finally:
            up.terminate()
            assert up.wait(30) == 0
