"""A mesh whose KV crosses the network encrypted: it serves, it comes back, and strangers get nothing out of it."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.mesh import clients
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

TOKENS = 20


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh(flags={"messenger": ["--transport=tcp", "--tcp-tls"]}) as mesh:
        yield mesh


def _serves(mesh: Mesh, about: str) -> None:
    prompt = f"{about}, and enough words behind it for some blocks; " * 8
    known = len(_sent(mesh))
    assert clients.complete(mesh.http, prompt, TOKENS) == clients.expected_text(prompt, TOKENS)
    sent = mesh.wait(lambda: next(iter(_sent(mesh)[known:]), None), what="the end of the transfer")
    assert sent["transport"] == "tcp+tls"
    assert sent["sent_bytes"] > 0


def _sent(mesh: Mesh) -> list[dict[str, Any]]:
    return [event for event in mesh.logs("prefill0") if event["event"] == "prefill_sent"]


def test_requests_are_answered(mesh: Mesh) -> None:
    _serves(mesh, "over TLS")


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"MKV2" + bytes(90)])
def test_a_stranger_without_tls_is_shown_the_door(mesh: Mesh, said: bytes) -> None:
    _serves(mesh, f"before {said[:4]!r}")
    port = int(mesh.wait_log("messenger1", "arena_cut")["data_port"])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        stranger.sendall(said)
        assert len(_read_to_end(stranger)) <= 7, "no more than TLS's alert"
    line = mesh.wait_log("messenger1", "stranger_dismissed")
    assert line["reason"].startswith("no TLS handshake")
    _serves(mesh, f"after {said[:4]!r}")


def test_a_messenger_that_starts_again_has_another_certificate_and_is_believed(mesh: Mesh) -> None:
    _serves(mesh, "in its first life")
    for name in ("messenger1", "decode0"):
        mesh.kill(name)
    for name in ("messenger1", "decode0"):
        mesh.start(name)
    mesh.wait_healthy()
    _serves(mesh, "in its second life")


def _read_to_end(connection: socket.socket) -> bytes:
    data = b""
    try:
        while part := connection.recv(4096):
            data += part
    except ConnectionResetError:  # it had said more than was read
        return data
    return data
