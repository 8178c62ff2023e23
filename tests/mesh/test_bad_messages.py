"""Garbage on every socket: each message gets its clear Failure, and the next good one is answered."""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from mooncake_mesh.messenger.transports.frames import ENTRY, HEAD, HELLO, MAGIC, Carriage, Kind
from mooncake_proto import codec
from mooncake_proto.control import Failure, Ping, Pong
from mooncake_proto.envelope import VERSION_FRAME
from tests.mesh import clients
from tests.mesh.bad_messages import FIELDS, FRAMES, MALFORMED, UNKNOWN_KIND, VERSION, BadField, BadFrames, good, noise
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

SOCKETS = ("sdk", "tokens", "conductor", "messenger0", "prefill0", "decode0")
_ANSWER_S = 30.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """A mesh that must be the same, unhurt one after all that the tests of this module send it."""
    with Mesh() as mesh:
        lives = {name: mesh.incarnation(name) for name in mesh.names}
        yield mesh
        assert clients.complete(mesh.http, "after all that", 30) == clients.expected_text("after all that", 30)
        assert {name: mesh.incarnation(name) for name in mesh.names} == lives
        crashes = [event for name in mesh.names for event in mesh.logs(name) if event["event"] in _CRASHES]
        assert crashes == []
        mesh.wait_idle()


_CRASHES = ("handler_crashed", "crashed", "engine_failed")


def _endpoint(mesh: Mesh, name: str) -> str:
    return {"sdk": mesh.sdk, "tokens": mesh.tokens}.get(name) or mesh.endpoint(name)


def _failure(plug: "zmq.Socket[bytes]", frames: "tuple[bytes, ...] | list[bytes]") -> Failure:
    plug.send_multipart(frames)
    _, answer = clients.receive(plug, timeout_s=_ANSWER_S)
    assert isinstance(answer, Failure), answer
    return answer


def _is_answered(plug: "zmq.Socket[bytes]") -> None:
    plug.send_multipart(good(Ping()))
    envelope, answer = clients.receive(plug, timeout_s=_ANSWER_S)
    assert isinstance(answer, Pong), answer
    assert envelope.re == "7"


@pytest.mark.parametrize("name", SOCKETS)
@pytest.mark.parametrize("row", FRAMES, ids=lambda row: row.name)
def test_frames_that_break_the_contract(mesh: Mesh, name: str, row: BadFrames) -> None:
    with clients.dealer(_endpoint(mesh, name)) as plug:
        failure = _failure(plug, row.frames)
        assert (failure.code, failure.path, failure.retryable) == (row.code, row.path, False)
        assert failure.message
        _is_answered(plug)
    assert not Path("/tmp/mooncake-was-here").exists()


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: f"{row.to} {row.name}")
def test_fields_that_break_their_shape(mesh: Mesh, row: BadField) -> None:
    with clients.dealer(_endpoint(mesh, row.to)) as plug:
        failure = _failure(plug, row.frames())
        assert (failure.code, failure.path) == (MALFORMED, row.path), failure.message
        assert row.path in failure.message
        _is_answered(plug)


def test_a_payload_frame_that_is_named_twice(mesh: Mesh) -> None:
    header = b'{"id": "7", "body": {"job_id": "j", "first_block": 0}, "frames": ["keys", "keys"]}'
    with clients.dealer(mesh.endpoint("messenger0")) as plug:
        failure = _failure(plug, (VERSION_FRAME, b"transfer.seal", header, b"", b""))
        assert (failure.code, failure.path) == (MALFORMED, "frames")
        _is_answered(plug)


@pytest.mark.parametrize("name", SOCKETS)
def test_every_kind_that_a_socket_does_not_take(mesh: Mesh, name: str) -> None:
    """All kinds with an empty body: each is refused for its fields or as a kind that is not taken here."""
    with clients.dealer(_endpoint(mesh, name)) as plug:
        refused = []
        for kind in sorted(codec.kinds()):
            if kind in _NEEDS_NO_FIELD or kind == "control.cancel_call":
                continue
            plug.send_multipart((VERSION_FRAME, kind.encode(), b'{"id": "7", "body": {}}'))
            _, answer = clients.receive(plug, timeout_s=_ANSWER_S)
            assert isinstance(answer, Failure), (kind, answer)
            assert answer.code in (MALFORMED, UNKNOWN_KIND), (kind, answer)
            refused.append(kind)
        _is_answered(plug)
    assert len(refused) > 10


_NEEDS_NO_FIELD = frozenset(
    {
        "control.ping",
        "control.leader_query",
        "control.status_query",
        "decisions.query",
        "control.ok",
        "client.models_query",
        "client.health_query",
    }
)


@pytest.mark.parametrize("name", SOCKETS)
def test_random_frames(mesh: Mesh, name: str) -> None:
    with clients.dealer(_endpoint(mesh, name)) as plug:
        for seed in range(200):
            failure = _failure(plug, noise(seed))
            assert failure.code in (MALFORMED, UNKNOWN_KIND, VERSION), (seed, failure)
        _is_answered(plug)


@pytest.mark.parametrize("name", [*SOCKETS, "cluster"])
def test_bytes_that_are_no_zeromq(mesh: Mesh, name: str) -> None:
    path = f"{mesh.folder}/cluster.ipc" if name == "cluster" else _endpoint(mesh, name).removeprefix("ipc://")
    source = random.Random(name)
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f", source.randbytes(4096)):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(path)
            with contextlib.suppress(BrokenPipeError):
                raw.sendall(data)
    clients.ask(mesh.conductor if name == "cluster" else _endpoint(mesh, name), Ping(), Pong)


@pytest.mark.parametrize("name", ["sdk", "conductor"])
def test_a_client_that_floods_reads_nothing_and_leaves(mesh: Mesh, name: str) -> None:
    """Its answers are dropped when its queue is full; everybody else is served, then and after it has gone."""
    with clients.dealer(_endpoint(mesh, name)) as other:
        with clients.dealer(_endpoint(mesh, name)) as deaf:
            deaf.sndtimeo = 1000
            with contextlib.suppress(zmq.Again):
                for _ in range(20_000):
                    deaf.send_multipart(FRAMES[11].frames)
            _is_answered(other)
        _is_answered(other)


# --- the messenger's own sockets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hello",
    [b"", b"x", b"\0" * 79, os.urandom(80), b"\xff" * 80, b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 100],
    ids=["nothing", "one byte", "one byte short", "random", "not utf-8", "too long"],
)
def test_bad_hellos_at_the_arena_socket(mesh: Mesh, hello: bytes) -> None:
    path = f"{mesh.folder}/messenger0.arena"
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(path)
            raw.sendall(hello)
    prompt = f"after a hello of {len(hello)} bytes {hello[:1]!r}"
    assert clients.complete(mesh.http, prompt, 5) == clients.expected_text(prompt, 5)


def test_silent_connections_at_the_arena_socket_keep_nobody_out(mesh: Mesh) -> None:
    path = f"{mesh.folder}/messenger0.arena"
    with contextlib.ExitStack() as open_ones:
        for _ in range(100):
            raw = open_ones.enter_context(socket.socket(socket.AF_UNIX))
            raw.connect(path)
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(_ANSWER_S)
            raw.connect(path)
            raw.sendall(struct.pack("<64s16s", b"somebody", b"0123456789abcdef"))
            data, descriptors, _, _ = socket.recv_fds(raw, 24, 1)
            for descriptor in descriptors:
                os.close(descriptor)
    assert len(data) == 24
    assert data[:16].decode() == mesh.incarnation("messenger0")


_HELLO = HELLO.pack(MAGIC, Kind.CONTROL, b"s" * 16, 1, 0, 1)
_ABSURD_ENTRY = ENTRY.pack(2**32 - 1, 65535, 65535, 2**32 - 1, 255, 2**64 - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"GET / HTTP/1.1\r\n\r\n" + b" " * 100,
        HELLO.pack(b"MKV9", Kind.CONTROL, b"s" * 16, 1, 0, 1),
        HELLO.pack(MAGIC, 77, b"s" * 16, 1, 0, 1),
        HELLO.pack(MAGIC, Kind.LANE, b"s" * 16, 1, 9, 2),
        HELLO.pack(MAGIC, Kind.CONTROL, b"s" * 16, 1, 0, 255),
        _HELLO + b"x",
        _HELLO + HEAD.pack(1, b"t" * 16, 0, Carriage.INLINE, 0),
        _HELLO + HEAD.pack(1, b"t" * 16, 65535, Carriage.INLINE, 64),
        _HELLO + HEAD.pack(1, b"t" * 16, 1, 99, 64) + ENTRY.pack(0, 0, 1, 64, 0, 0),
        _HELLO + HEAD.pack(1, b"t" * 16, 2, Carriage.INLINE, 64) + ENTRY.pack(0, 0, 1, 64, 0, 0),
        _HELLO + HEAD.pack(1, b"t" * 16, 1, Carriage.INLINE, 64) + ENTRY.pack(0, 0, 1, 64, 1, 7) + b"p" * 64,
        _HELLO + HEAD.pack(1, b"t" * 16, 1, Carriage.LANES, 2**32 - 1) + _ABSURD_ENTRY,
        _HELLO + HEAD.pack(1, b"t" * 16, 1, Carriage.INLINE, 2**32 - 1) + _ABSURD_ENTRY,
        _HELLO + random.Random(8).randbytes(65536),
        random.Random(7).randbytes(65536),
    ],
    ids=[
        "one byte",
        "http",
        "other magic",
        "unknown kind",
        "lane 9 of 2",
        "255 lanes",
        "truncated head",
        "no slices",
        "65535 slices",
        "unknown carriage",
        "truncated entries",
        "unknown token",
        "4 GiB on lanes",
        "4 GiB inline",
        "random after hello",
        "random",
    ],
)
def test_garbage_at_the_data_port_ends_the_connection(mesh: Mesh, data: bytes) -> None:
    port = mesh.wait_log("messenger1", "arena_cut")["data_port"]
    with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as raw:
        with contextlib.suppress(OSError):  # reset meanwhile, or not connected any more: it may have read enough
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while raw.recv(64):  # a welcome, a refusal; then the end
                pass
    clients.ask(mesh.endpoint("messenger1"), Ping(), Pong)
